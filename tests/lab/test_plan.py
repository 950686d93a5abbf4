"""A plan says what a launch will use, and refuses what cannot fit with a line that says what would."""

from __future__ import annotations

import itertools
import json

import pytest

from streamrl import cli
from streamrl.config.file import ConfigError
from streamrl.device_map import device_map
from streamrl.lab.plan import fit
from streamrl.lab.plan.generators import pools
from streamrl.lab.plan.learner_memory import fullest_rank
from streamrl.lab.plan.machines import Machines
from streamrl.lab.plan.placement import place
from streamrl.lab.plan.plan import make_plan
from tests.lab.plan_recipes import H100, LORA, QWEN, RECIPES, SHAPE_OF, SHAPES, UNEVEN, planned, recipe


def refusal(name: str, *overrides: str, machines: Machines = H100) -> str:
    with pytest.raises(ConfigError) as raised:
        planned(name, *overrides, machines=machines)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# -- recipes


def test_every_recipe_has_its_shape():
    folders = [folder for folder in RECIPES.iterdir() if folder.name not in ("parts", "shapes")]
    assert {
        f"{file.parent.name}/{file.stem}" for folder in folders for file in folder.glob("*.yaml")
    } == SHAPE_OF.keys()
    assert {file.stem for file in SHAPES.glob("*.json")} == set(SHAPE_OF.values())
    named = {name: recipe(name)[0].model.shape for name in SHAPE_OF}
    assert named == {name: SHAPES / f"{shape}.json" for name, shape in SHAPE_OF.items()}


@pytest.mark.parametrize("name", SHAPE_OF)
def test_a_recipe_plans_on_gpus_of_80_gib_or_with_what_its_refusal_says(name):
    config, shape = recipe(name)
    changes = [] if fullest_rank(config, shape, H100).peak <= H100.device_bytes else fit.nearest(config, shape, H100)
    if changes:
        assert refusal(name).endswith(f"what would fit: {' '.join(changes)}")
    plan = planned(name, *changes)
    assert plan.rank.peak <= H100.device_bytes
    assert sum(host.learner_ranks for host in plan.hosts) >= config.learner.ranks
    assert sum(len(host.workers) for host in plan.hosts) == config.workers
    assert all(pool.at_once > 0 for pool in plan.pools)
    assert plan.bound == config.replay.max_staleness


def test_the_recipe_of_megatron_rl_fits_its_64_gpus():
    plan = planned(QWEN)
    assert sum(host.gpus for host in plan.hosts) == 64
    assert len(plan.hosts) == 8


def test_a_model_that_the_pipeline_does_not_divide_is_refused_before_anything_is_counted():
    even = ["learner.layout.first_stage=null", "learner.layout.last_stage=null"]
    assert "8 stages of 1 chunks do not share 94 layers" in refusal(UNEVEN, *even)


# -- placement


def test_every_pool_is_planned_with_its_own_settings():
    both = (
        "generate.pools=[{name: wide, workers: 2, tensor_parallel: 8}, {name: narrow, workers: 3, tensor_parallel: 4}]"
    )
    plan = planned(QWEN, both)
    assert [(pool.name, pool.workers, pool.gpus) for pool in plan.pools] == [("wide", 2, 8), ("narrow", 3, 4)]
    assert [host.words for host in plan.hosts[4:]] == [
        "generator 0 (1 server on GPUs 0-7)",
        "generator 1 (1 server on GPUs 0-7)",
        "generators 2-3 (2 servers on GPUs 0-7)",
        "generator 4 (1 server on GPUs 0-3)",
    ]


def test_the_parts_of_a_server_over_two_hosts_are_on_two_hosts():
    wide, narrow = "{name: wide, workers: 1, server_nodes: 2}", "{name: narrow, workers: 1, tensor_parallel: 2}"
    over = f"generate.pools=[{wide}, {narrow}]"
    plan = planned(QWEN, over)
    assert [(pool.name, pool.nodes, pool.gpus, pool.ranks) for pool in plan.pools] == [
        ("wide", 2, 4, 8),
        ("narrow", 1, 2, 2),
    ]
    assert [host.words for host in plan.hosts[4:]] == [
        "generators 0-1 (2 servers on GPUs 0-5)",
        "node 1 of the server of generator 0 on GPUs 0-3",
    ]
    one = planned(QWEN, over.replace(", server_nodes: 2", ""))
    assert plan.pools[0].tokens == one.pools[0].tokens, "the ranks are as many"
    planned(QWEN, "generate.tensor_parallel=8", "generate.server_nodes=2", machines=Machines(gpus_per_host=4))


@pytest.mark.parametrize("name", [LORA, "verl/qwen3-8b-gsm8k", "megatron_rl/qwen2.5-3b-dapo", "gpus/one-gpu"])
def test_one_host_is_shared_out_as_train_does_it(name):
    config, _ = recipe(name)
    (host,) = planned(name, machines=Machines(gpus_per_host=64)).hosts
    placed = device_map(config, 64)
    assert range(host.learner_ranks) == range(len(placed.ranks))
    assert host.worker_gpus == [tuple(itertools.chain(*servers)) for servers in placed.workers]


def test_ranks_and_servers_that_take_turns_are_on_the_same_gpus():
    config, _ = recipe("gpus/one-gpu")
    (host,) = planned("gpus/one-gpu", machines=Machines(gpus_per_host=1)).hosts
    assert (host.gpus, host.learner_ranks, host.worker_gpus) == (1, 1, [(0,)])
    assert device_map(config, 1).ranks == device_map(config, 1).workers[0][0] == (0,)
    (host,) = planned("gpus/two-gpus", machines=Machines(gpus_per_host=2)).hosts
    assert (host.gpus, host.worker_gpus) == (2, [(1,)])


def test_turns_on_a_gpu_that_cannot_hold_what_stays_on_it_are_refused():
    one = Machines(gpus_per_host=1)
    assert "in the learner's turn" in refusal("gpus/one-gpu", "learner.tokens_per_micro_batch=75000", machines=one)
    line = refusal("gpus/one-gpu", "generate.server_args.max_total_tokens=800000", machines=one)
    most = int(line.rpartition("allowed: up to ")[2])
    planned("gpus/one-gpu", f"generate.server_args.max_total_tokens={most}", machines=one)
    refusal("gpus/one-gpu", f"generate.server_args.max_total_tokens={most + 1}", machines=one)


def test_attached_servers_take_no_gpu_of_the_run():
    addresses = [f"http://pool:{port}" for port in range(1, 5)]
    plan = planned(QWEN, f"generate.attach={json.dumps(addresses)}")
    assert sum(host.gpus for host in plan.hosts) == 32
    assert all(pool.attached for pool in plan.pools)


def test_a_machine_without_gpus_has_everything_on_one_host():
    config, shape = recipe("megatron_rl/qwen2.5-3b-dapo", "generate.workers=1")
    machines = Machines(gpus_per_host=0, host_memory=1024)
    (host,) = place(config.learner.ranks, pools(config, shape, machines), machines)
    assert host.words == "replay service, learner ranks 0-3, generator 0 (1 server)"
    rank = fullest_rank(config, shape, machines)
    plan = make_plan(config, shape, machines)
    assert plan.first_host > 4 * rank.peak
    assert "learner" in refusal("megatron_rl/qwen2.5-3b-dapo", machines=Machines(gpus_per_host=0, host_memory=64))


# -- refusals


@pytest.mark.parametrize(
    ("name", "overrides", "machines", "text"),
    [
        (QWEN, ["learner.layout.tensor=2"], H100, "what would fit: learner."),
        (QWEN, ["learner.layout.tensor=2", "run.steps=null", "run.epochs=2"], H100, "what would fit: learner."),
        (QWEN, ["learner.tokens_per_micro_batch=8192"], H100, "allowed: at least 11486"),
        (QWEN, ["generate.sampling.max_new_tokens=11999"], H100, "in a context of 11999 tokens; allowed: up to 11485"),
        (QWEN, ["generate.server_args.context_length=200000"], H100, "max_position_embeddings=131072"),
        (QWEN, ["stream.max_message=1000000"], H100, "stream.max_message: a group of 16 answers"),
        (QWEN, ["generate.tensor_parallel=3"], H100, "does not divide 40 attention heads"),
        (QWEN, ["generate.tensor_parallel=1"], Machines(gpu_memory=60), "allowed: at least 2"),
        (QWEN, ["generate.tensor_parallel=8"], Machines(gpus_per_host=4), "do not fit on a host of 4"),
        (QWEN, [], Machines(hosts=7), "7 hosts of 8 GPUs are fewer than the 8"),
        (QWEN, [], Machines(host_memory=50), "the first host needs"),
        (QWEN, [], Machines(host_memory=100), "107 GiB of a checkpoint and 128 groups"),
        (
            QWEN,
            ["publish.transport=delta", "generate.tensor_parallel=2"],
            Machines(host_memory=240),
            "host 4 needs 244 GiB for its processes and 0 GiB of a checkpoint",
        ),
        (QWEN, ["publish.transport=memory"], H100, "are on 8 hosts; allowed: broadcast, delta, disk"),
        (
            "verl/qwen3-30b-a3b-gsm8k-lora",
            ["learner.lora.targets=[linear_fc1]"],
            H100,
            "allowed: linear_qkv, linear_proj",
        ),
        (QWEN, [], Machines(gpu_memory=8), "larger GPUs"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_that_says_what_would(name, overrides, machines, text):
    assert text in refusal(name, *overrides, machines=machines)


def test_a_learner_that_no_neighbour_fits_is_told_how_large_gpus_must_be():
    config, shape = recipe(QWEN)
    small = Machines(gpu_memory=2)
    with pytest.raises(ConfigError, match=r"no layout near this one; GPUs of \d+ GiB"):
        fit.check_learner(config, fullest_rank(config, shape, small), shape, small)


def test_what_is_proposed_is_the_smallest_change_that_fits():
    wide = recipe("verl/llama3.1-8b-gsm8k", "learner.tokens_per_micro_batch=16384")
    assert fit.nearest(*wide, H100) == ["learner.tokens_per_micro_batch=8192"]
    few = recipe("megatron_rl/qwen3-30b-a3b-dapo", "learner.layout.expert_tensor=1", "learner.recompute=selective")
    assert fit.nearest(*few, H100) == ["learner.layout.expert=8"]


@pytest.mark.parametrize("name", SHAPE_OF)
def test_every_recipe_fits_on_gpus_of_80_gib(name):
    assert planned(name).limits  # else it is refused


@pytest.mark.parametrize("given", [{"headroom": 1.5}, {"gpu_memory": 0.0}, {"network": -1.0}])
def test_machines_that_cannot_be_are_refused_by_their_flag(given):
    (name,) = given
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        Machines(**given)


# -- speed, limits, the command

FIGURES = """
server: {gpus: 8, step: 0.01, sample: 0.00001, prefill: 1000000, max_running: 1000}
learner: {tokens: 100, gpus: 32, fixed: 0.0}
answers: {prompt: 100, median: 300, sigma: 0.1, longest: 20000}
publish: {pause: 0.1}
"""


def test_a_slow_learner_is_what_limits_and_trains_at_its_own_speed(tmp_path):
    (tmp_path / "figures.yaml").write_text(FIGURES)
    config, shape = recipe(QWEN)
    plan = make_plan(config, shape, H100, tmp_path / "figures.yaml")
    assert plan.expected is not None
    assert plan.expected.figures.trained == pytest.approx(100 * 32, rel=0.02)
    assert plan.limits[-1].startswith("the learner: generators idle")
    assert all(link.rate is not None for link in plan.links)


def test_figures_of_other_servers_are_refused(tmp_path):
    (tmp_path / "figures.yaml").write_text(FIGURES.replace("gpus: 8", "gpus: 4"))
    with pytest.raises(ConfigError, match=r"server.gpus: 4 is not generate.tensor_parallel=8"):
        make_plan(*recipe(QWEN), H100, tmp_path / "figures.yaml")


def test_without_figures_no_speed_is_said():
    plan = planned(QWEN)
    assert plan.expected is None
    assert all(link.rate is None for link in plan.links)
    assert "not known" in plan.limits[-1]


def test_a_checkpoint_that_takes_longer_than_it_may_is_told():
    (line,) = (line for line in planned(QWEN, "checkpoint.timeout=200").limits if "checkpoint" in line)
    assert line == "checkpoint.timeout: a checkpoint takes 229 s at the file system's 2 GB/s, and may take 200"
    assert not any("checkpoint" in line for line in planned(QWEN).limits)


def test_what_generators_ask_for_beyond_the_slots_is_told():
    assert any(
        "slots: the generators take 400" in line for line in planned(QWEN, "generate.groups_in_flight=100").limits
    )
    assert not any("slots" in line for line in planned(QWEN).limits)


def test_a_full_cache_and_a_cap_on_requests_are_told_apart():
    capped = planned(QWEN, "generate.server_args.max_running_requests=32").limits
    assert any(line.startswith("max_running_requests: 32, and") for line in capped)
    assert any(line.startswith("KV cache: a server is asked for 256") for line in planned(QWEN).limits)


def test_the_command_prints_the_plan_writes_it_and_starts_nothing(tmp_path, monkeypatch, capsys):
    words = ["plan", str(RECIPES / f"{QWEN}.yaml"), f"run.folder={tmp_path / 'runs'}"]
    words += ["learner.megatron={moe_router_dtype: fp32, fp8: hybrid}"]
    words += ["--json", str(tmp_path / "plan.json"), "--hosts", "8"]  # its model is not there, its shape is
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "learner ranks 24-31" in printed
    assert "further fields of Megatron-Core: moe_router_dtype=fp32, fp8=hybrid" in printed
    assert "│ 0-3   │  106.81 GiB │            106.81 GiB │" in printed
    assert "a checkpoint: 458.8 GB, 229.4 s at the file system's speed" in printed
    assert "the model at the end: 65.5 GB; on disk, with checkpoint.keep=2: up to 1.4 TB" in printed
    assert "at most 1 learner steps old; 128 slots" in printed
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["learner_rank"]["peak"] == planned(QWEN).rank.peak
    assert plan["model_bytes"] == planned(QWEN).weights
    assert [each["written"] for each in plan["checkpoint"]] == [each.written for each in planned(QWEN).saves]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_command_refuses_with_exit_code_2(tmp_path, capsys):
    source = str(RECIPES / f"{QWEN}.yaml")
    assert cli.main(["plan", source, "model.shape=null"]) == 2
    assert "by --shape FILE" in capsys.readouterr().err
    assert cli.main(["plan", source, "model.shape=none.json"]) == 2
    assert "model.shape: none.json is no file" in capsys.readouterr().err
    assert cli.main(["plan", source, "--shape", str(SHAPES / "qwen2.5-32b.json"), "--hosts", "2"]) == 2
    broken = tmp_path / "broken.json"
    broken.write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert cli.main(["plan", source, "--shape", str(broken)]) == 2
    assert f"{broken}: architecture GPT2LMHeadModel" in capsys.readouterr().err
