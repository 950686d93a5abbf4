"""What a configuration may say and hardly means is told in a line, recorded, and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import tiny_model
from streamrl import cli, run_folder
from streamrl.config.file import load
from streamrl.config.senseless import warnings
from streamrl.preflight import machine
from streamrl.preflight.model import attached_towers
from tests.operations_table import GOES_ON, documented


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["replay.window=16"], "replay.window: 16 has no effect without replay.order=windowed"),
        (["replay.over_age=pass"], "replay.over_age: pass has no effect without replay.order=ready"),
        (
            ["algo.weight=none", "algo.weight_cap=5"],
            "algo.weight_cap: 5.0 has no effect without algo.weight=sequence",
        ),
        (["algo.loss=gspo", "algo.weight=sequence"], "algo.weight: sequence has no effect without algo.loss=clip"),
        (["algo.loss=cispo", "algo.weight_cap=4"], "algo.weight_cap: 4.0 has no effect without algo.loss=clip"),
        (["algo.mask_high=3"], "algo.mask_high: 3.0 has no effect without algo.mask=geometric"),
        (["algo.norm_length=9"], "algo.norm_length: 9 has no effect without algo.aggregation=sequence_sum_norm"),
        (
            ["algo.distillation={teacher: model, rewards: false}", "algo.advantage.std=none"],
            "algo.advantage.std: none has no effect without algo.distillation.rewards=true",
        ),
        (["algo.proximal=recompute", "algo.covariance=kl_cov"], "algo.covariance: kl_cov has no effect without"),
        (
            ["algo.proximal=recompute", "algo.ratio_penalty=1"],
            "algo.ratio_penalty: 1.0 has no effect without learner.passes or learner.mini_batches above 1",
        ),
        (["learner.lora.alpha=8"], "learner.lora.alpha: 8.0 has no effect without learner.lora.rank"),
        (["critic.warmup_steps=8"], "critic.warmup_steps: 8 has no effect without algo.advantage.estimator=gae"),
        (
            ["algo.advantage.estimator=gae", "critic.warmup_steps=100"],
            "critic.warmup_steps: 100 is not over when the run is",
        ),
        (
            ["algo.loss=streamrl.algo.cross_entropy:CrossEntropy", "algo.weight=none", "run.exit_interval=5"],
            "run.exit_interval: 5 has no effect without `streamrl train`",
        ),
        (["learner.optimizer.lr=0.1"], "each update moves every weight by about 0.1"),
        (["learner.optimizer.warmup_steps=200"], "learner.optimizer.warmup_steps: 200 is not over when the run is"),
        (["replay.lease=1"], "replay.lease: 1 s outlasts fewer than 3 heartbeats"),
        (["replay.groups_per_step=60000"], "replay.groups_per_step: 60000 groups are 1875 rounds of the 32"),
        (
            ["generate.request_timeout=600", "generate.stream_every=0"],
            "generate.request_timeout: 600 s, and with generate.stream_every=0 an answer of up to",
        ),
        (
            ["generate.request_timeout=600", "generate.stream_every=64", "generate.sampling.max_new_tokens=64"],
            "generate.request_timeout: 600 s, and with generate.stream_every=64 an answer of up to 64 tokens",
        ),
        (
            ["generate.request_timeout=60", "generate.stream_every=8", "evaluate.every=1"],
            "generate.request_timeout: 60 s, and an answer of an evaluation that takes longer is lost, before evaluate",
        ),
        (
            ["learner.as_served=true"],
            "learner.as_served: log-probs are the servers' to the bit with generate.score=full_",
        ),
        (
            ["learner.as_served=true", "generate.score=full_prefill", "model.dtype=bfloat16"],
            "model.dtype=float32 and ranks that have the whole model; otherwise it only costs shared prompts",
        ),
        (["generate.score=full_prefill"], "generate.score: full_prefill computes each prompt once more, for a learner"),
        (["learner.ranks=128"], "learner.ranks: 128 hold 128 copies of the model, and an update has 64 samples"),
    ],
)
def test_each_of_them_is_one_line_that_names_key_and_value(overrides, said):
    (line,) = warnings(load(None, overrides))
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "keys",
    [
        ["generate.stream_every=64", "generate.sampling.max_new_tokens=64", "evaluate.every=1"],
        ["generate.request_timeout=60", "generate.stream_every=8"],
        ["generate.request_timeout=240", "generate.stream_every=8", "evaluate.every=1"],
    ],
    ids=["no limit", "no evaluation", "as long as the evaluation"],
)
def test_a_limit_of_requests_that_costs_no_answer_is_not_warned_of(keys):
    assert warnings(load(None, keys)) == []


def test_what_acts_behind_the_first_update_alone_is_told_of_where_there_is_no_second():
    keys = ["algo.proximal=recompute", "algo.ratio_penalty=1", "algo.covariance=kl_cov"]
    assert len(warnings(load(None, keys))) == 2
    for more in ("learner.passes=2", "learner.mini_batches=2", "algo.proximal=interpolate"):
        assert warnings(load(None, [*keys, more])) == []
    assert warnings(load(None, ["algo.proximal=recompute", "algo.covariance=clip_cov"])) == []


def test_a_loss_that_bounds_itself_is_warned_of_no_weight_that_acts_or_that_is_left_out():
    for words in (
        ["algo.loss=gspo"],
        ["algo.loss=gspo", "algo.weight=none"],
        ["algo.loss=gspo", "algo.proximal=recompute", "algo.weight=sequence"],
        ["algo.loss=reinforce", "algo.weight_cap=4"],
    ):
        assert warnings(load(None, words)) == [], words


def test_a_setting_without_an_effect_is_warned_of_as_the_page_of_operations_says():
    (line,) = warnings(load(None, ["replay.window=16"]))
    documented("replay.window: ... has no effect without replay.order=windowed", line, GOES_ON)


def test_the_shipped_configurations_mean_what_they_say():
    others = ("experiments", "parts")
    for file in (file for file in Path("configs").rglob("*.yaml") if file.parent.name not in others):
        assert warnings(load(file)) == [], file


def test_more_processes_than_the_cores_can_turn_to_are_told(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    assert list(machine.crowding(load(None, ["learner.ranks=2"]))) == []
    (line,) = machine.crowding(load(None, ["learner.ranks=64"]))
    assert "64 ranks and 1 servers share the 2 cores of this machine" in line


def test_servers_that_may_keep_features_of_an_older_tower_are_told(tmp_path):
    words = [f"model.path={tmp_path}", "generate.attach=[http://a:1]"]
    for config, told in (({}, 0), ({"vision_config": {}}, 1)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        lines = list(attached_towers(load(None, words)))
        assert len(lines) == told
        assert all("SGLANG_VLM_CACHE_SIZE_MB=0" in line for line in lines)
        assert not list(attached_towers(load(None, [*words, "learner.freeze_vision=true"])))
        assert not list(attached_towers(load(None, words[:1])))


def test_each_rank_needs_a_gpu_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    monkeypatch.setattr(machine, "visible_gpus", lambda: ("0", "1", "2"))
    sixteen = "model.dtype=bfloat16"
    machine.check_machine(load(None, [sixteen, "learner.ranks=2"]))
    with pytest.raises(ValueError, match=r"generate\.workers: servers need 2 GPUs beside the 2 .* has 3; allowed"):
        machine.check_machine(load(None, [sixteen, "learner.ranks=2", "generate.workers=2"]))
    with pytest.raises(ValueError, match=r"learner\.ranks: 4 need a GPU each.* has 3; allowed: up to 3"):
        machine.check_machine(load(None, [sixteen, "learner.ranks=4"]))


def test_servers_of_the_runs_own_that_would_cut_prefills_are_refused_where_they_are_to_be_the_learners(monkeypatch):
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    whole, cut = "generate.score=full_prefill", "generate.server_args={chunked-prefill-size: 64}"
    with pytest.raises(
        ValueError, match=r"server_args: chunked_prefill_size=64 cuts prefills.*; allowed: -1, or leave"
    ):
        machine.check_machine(load(None, [whole, cut]))
    for words in ([cut], [whole], [whole, "generate.server_args={chunked_prefill_size: -1}"]):
        machine.check_machine(load(None, words))


def test_a_role_without_its_packages_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    missing: set[str] = set()
    monkeypatch.setattr(machine, "_is_installed", lambda package: package not in missing)
    tiny_model.make(tmp_path / "model", 1)
    capsys.readouterr()  # the library's bar
    file = tmp_path / "config.yaml"
    file.write_text(f"run: {{folder: {tmp_path}/runs}}\nmodel: {{path: {tmp_path}/model}}\n")
    for package, command in (("sglang", "train"), ("megatron", "train"), ("megatron", "learner")):
        missing |= {package}
        code = cli.main([command, str(file)])
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        documented("... is not installed here; allowed: an installation...", err, code)
        missing.clear()
    machine.check_generator(load(None, ["generate.attach=[http://a:1]"]).generate.each_pool)


def test_what_a_run_was_warned_of_is_recorded_with_it(tmp_path):
    tiny_model.make(tmp_path / "model", 1)
    keys = [f"run.folder={tmp_path}", f"model.path={tmp_path / 'model'}", "replay.window=16"]
    folder = run_folder.prepare(load(None, keys), fresh=False)
    (line,) = json.loads((folder / "environment.json").read_text())["warnings"]
    assert line.startswith("replay.window: 16 has no effect")
