"""What the parts of a plan are counted from: parameters, memory of ranks and servers, bytes on the wire."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file

from launch import tiny_model
from streamrl.choices import TRANSPORTS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.plan.generators import pools
from streamrl.lab.plan.learner_memory import fullest_rank, is_fused, rank_memory
from streamrl.lab.plan.machines import GIB, Machines
from streamrl.lab.plan.parameters import (
    layers_of,
    of_server_rank,
    of_stage,
    quantised_of_server_rank,
    whole_adapters,
    whole_model,
)
from streamrl.lab.plan.placement import place
from streamrl.lab.plan.saves import alike, saves
from streamrl.lab.plan.traffic import from_other_hosts
from streamrl.learner.shape import read_shape
from streamrl.moe_routing import OUTPUT, PROMPT, fold
from streamrl.preflight.wire import group_bytes, zero_group
from streamrl.stream.codec import encode_group
from tests.lab.plan_recipes import H100, LORA, MOE, QWEN, SHAPES, UNEVEN, planned, recipe, shape_of

PARAMETERS = {  # as the published safetensors indices count them
    "deepseek-7b": 6_910_365_696,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-v3": 671_026_419_200,  # without the layer that predicts one token more
    "gpt-oss-20b": 20_914_757_184,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "moonlight-16b-a3b": 15_960_110_208,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "nemotron-h-56b": 56_324_350_464,  # of its sizes, as the next two
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-nano-12b-v2": 12_310_001_152,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "seed-oss-36b": 36_151_104_512,
}

# -- parameters


def test_every_shape_has_its_count():
    assert {file.stem for file in SHAPES.glob("*.json")} == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_as_many_parameters_as_the_published_model(name):
    assert whole_model(shape_of(name)) == PARAMETERS[name]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 4}, {"pipeline": 2, "virtual": 2}, {"expert": 8}])
def test_the_parts_of_all_ranks_are_the_model_and_what_is_copied(layout):
    shape = shape_of("qwen3-30b-a3b")
    learner = {"ranks": 8, "layout": layout}
    cut = config_file.load(None, [f"learner={json.dumps(learner)}"]).learner
    tensor, stages = cut.layout.tensor, cut.layout.pipeline
    counted = [of_stage(shape, cut.layout, stage, cut.lora) for stage in range(stages)]
    dense = sum(each.dense for each in counted) * tensor
    experts = sum(each.expert for each in counted) * cut.layout.expert
    copied = (tensor - 1) * (shape.layers * (2 * shape.hidden + 2 * shape.head_dim + 128 * shape.hidden) + shape.hidden)
    padded = 2 * (shape.padded_vocabulary(tensor) - shape.vocabulary) * shape.hidden
    assert dense + experts == whole_model(shape) + copied + padded


def test_a_stage_has_the_layers_that_the_layout_gives_it():
    config, shape = recipe(UNEVEN)
    stages = [layers_of(shape, config.learner.layout, stage) for stage in range(8)]
    assert [len(layers) for layers in stages] == [11, 12, 12, 12, 12, 12, 12, 11]
    assert [layer for layers in stages for layer in layers] == list(range(94))
    turned = config_file.load(None, ["learner.ranks=2", "learner.layout.pipeline=2", "learner.layout.virtual=3"])
    assert layers_of(shape_of("qwen2.5-3b"), turned.learner.layout, 1) == [
        *range(6, 12),
        *range(18, 24),
        *range(30, 36),
    ]


def test_tied_embeddings_are_on_both_ends_of_a_pipeline():
    shape = shape_of("qwen2.5-3b")
    layout = config_file.load(None, ["learner.ranks=2", "learner.layout.pipeline=2"]).learner.layout
    lora = Config().learner.lora
    both = sum(of_stage(shape, layout, stage, lora).all for stage in range(2))
    assert both == whole_model(shape) + shape.vocabulary * shape.hidden


def test_a_server_repeats_key_and_value_heads_where_it_has_more_ranks_than_heads():
    shape = shape_of("qwen3-30b-a3b")  # 4 heads
    matrices = 2 * shape.head_dim * shape.hidden * shape.layers
    assert of_server_rank(shape, 1) == whole_model(shape)
    norms = shape.layers * (2 * shape.hidden + 2 * shape.head_dim + 128 * shape.hidden) + shape.hidden  # and routers
    padding = 2 * (shape.padded_vocabulary(8) - shape.padded_vocabulary(4)) * shape.hidden // 8
    halved = (of_server_rank(shape, 4) - norms) // 2 + norms + padding
    assert of_server_rank(shape, 8) == halved + matrices // 2  # one head of keys and of values, not half a head


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "glm4", "glm4_moe"])
def test_what_servers_quantise_is_counted_as_the_folder_has_it(tmp_path, family):
    tiny_model.make(tmp_path, family=family)
    weights = load_file(tmp_path / "model.safetensors")
    projections = sum(weight.numel() for name, weight in weights.items() if name.endswith("_proj.weight"))
    assert whole_model(read_shape(tmp_path)) == sum(weight.numel() for weight in weights.values())
    assert quantised_of_server_rank(read_shape(tmp_path), 1) == projections
    assert quantised_of_server_rank(read_shape(tmp_path), 2) == projections // 2


# -- the learner's memory


def test_a_rank_holds_weights_gradients_and_its_share_of_the_optimizer():
    config, shape = recipe(QWEN)
    rank = fullest_rank(config, shape, H100)
    assert rank.weights == 2 * rank.parameters
    assert rank.gradients == 4 * rank.parameters
    assert rank.optimizer == pytest.approx(12 * rank.parameters / 4, abs=12)  # 4 data-parallel ranks


def test_without_the_distributed_optimizer_each_rank_has_all_of_its_state():
    config, shape = recipe(QWEN, "learner.optimizer.distributed=false")
    rank = fullest_rank(config, shape, H100)
    assert rank.optimizer == 12 * rank.parameters
    single, _ = recipe(QWEN, "learner.optimizer.distributed=false", "model.dtype=float32")
    rank = fullest_rank(single, shape, H100)
    assert (rank.weights, rank.optimizer) == (4 * rank.parameters, 8 * rank.parameters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fully_sharded_ranks_hold_a_share_of_everything_and_gather_a_layer_for_a_pass(dtype):
    config, shape = recipe(QWEN, f"model.dtype={dtype}", "learner.layout.sharding=full", "algo.kl=0.01")
    rank, item = fullest_rank(config, shape, H100), 2 if dtype == "bfloat16" else 4
    shares = config.learner.ranks // config.learner.layout.tensor
    held = (rank.weights, rank.gradients, rank.optimizer, rank.host_reference)
    assert held == tuple(pytest.approx(each * rank.parameters / shares, abs=8) for each in (4, 4, 8, 4))
    table = shape.padded_vocabulary(config.learner.layout.tensor) // config.learner.layout.tensor * shape.hidden
    ends = (1 if shape.tied else 2) * table + shape.hidden
    layer = (rank.parameters - ends) // shape.layers
    assert rank.gathered == 2 * item * ends + max(4 * ends, (3 * item + 8) * layer)
    assert rank.peak == rank.held + rank.activations + rank.logprobs + rank.gathered
    plain, _ = recipe(QWEN, f"model.dtype={dtype}")
    assert fullest_rank(plain, shape, H100).gathered == 0


def test_the_optimizer_of_experts_is_shared_by_the_ranks_with_the_same_experts():
    config, shape = recipe(MOE)  # 16 ranks: expert 8
    counted = of_stage(shape, config.learner.layout, 0, config.learner.lora)
    expected = 12 * (counted.dense / 16 + counted.expert / 2)
    assert fullest_rank(config, shape, H100).optimizer == pytest.approx(expected, abs=24)


def test_offloading_moves_the_optimizer_to_the_host():
    config, shape = recipe(QWEN, "learner.optimizer.offload=1")
    rank = fullest_rank(config, shape, H100)
    assert rank.optimizer == 0
    assert rank.host_optimizer == pytest.approx(16 * rank.parameters / 4, abs=16)


def test_adapters_alone_have_gradients_and_an_optimizer():
    config, shape = recipe(LORA)
    rank = fullest_rank(config, shape, H100)
    # of a layer: q, k, v and o, gate, up and down, each with A [64, in] and B [out, 64]
    hidden, heads, groups, ffn = 2048, 16 * 128, 2 * 128, 11008
    ends = (hidden + heads) + 2 * (hidden + groups) + (heads + hidden) + 3 * (hidden + ffn)
    assert rank.trained == 36 * 64 * ends == whole_adapters(shape, config.learner.lora)
    assert rank.gradients == 4 * rank.trained
    assert rank.host_reference == 0  # the model without its adapters


def test_a_server_holds_an_adapter_for_each_version_in_use_and_a_rank_its_part_of_each():
    published = ("learner.lora.publish=adapter", "generate.tensor_parallel=2")

    def weights(*overrides: str) -> int:
        config, shape = recipe(LORA, *published, *overrides)
        (pool,) = pools(config, shape, H100)
        return pool.weights

    _, shape = recipe(LORA)
    # of a layer: what is cut in two is B of q, k, v, gate and up, and A of o and down
    hidden, heads, groups, ffn = 2048, 16 * 128, 2 * 128, 11008
    whole = 3 * hidden + 2 * hidden + hidden + hidden
    cut = heads + 2 * groups + 2 * ffn + heads + ffn
    part = 36 * 64 * (whole + cut // 2)
    bounds = {bound: weights(f"replay.max_staleness={bound}") for bound in (0, 1, 2, 30)}
    item = 2  # bfloat16
    assert bounds[0] == item * (of_server_rank(shape, 2) + 2 * part)
    assert [bounds[bound] - bounds[0] for bound in (1, 2, 30)] == [item * part, 2 * item * part, 6 * item * part]
    given = weights("replay.max_staleness=0", "generate.server_args.max_loras_per_batch=5")
    assert given - bounds[0] == 3 * item * part


def test_the_reference_policy_is_in_the_hosts_memory():
    config, shape = recipe("verl/qwen3-8b-gsm8k")
    rank = fullest_rank(config, shape, H100)
    assert rank.host_reference == rank.weights


def test_a_teacher_is_on_the_device_while_it_scores_and_else_in_the_hosts_memory(tmp_path):
    shutil.copyfile(SHAPES / "qwen3-32b.json", tmp_path / "config.json")
    small, shape = recipe("verl/qwen3-8b-gsm8k", "algo.kl=0")
    config, _ = recipe("verl/qwen3-8b-gsm8k", "algo.kl=0", f"algo.distillation.teacher={tmp_path}")
    plain, taught = fullest_rank(small, shape, H100), fullest_rank(config, shape, H100)
    assert (plain.teacher, plain.host_teacher) == (0, 0)
    counted = of_stage(read_shape(tmp_path), config.learner.layout, taught.stage, config.learner.lora)
    assert taught.host_teacher == taught.host == 2 * counted.all
    assert taught.teacher > taught.host_teacher
    assert taught.peak == taught.held + taught.teacher > plain.peak  # four times as large, it is the most
    on_cpus = fullest_rank(config, shape, Machines(gpus_per_host=0))
    assert on_cpus.host_teacher == taught.host_teacher > on_cpus.teacher  # one copy, which stays


def test_activations_shrink_with_recomputation_context_and_tensor_parallel_ranks():
    def kept(*overrides: str) -> int:
        return fullest_rank(*recipe(QWEN, *overrides), H100).activations

    assert kept("learner.recompute=full") < kept() / 5
    assert kept("learner.layout.tensor=4") == pytest.approx(2 * kept(), rel=0.01)
    assert kept("learner.layout.sequence=false") > kept() * 1.5
    local = kept("learner.layout.context=2")  # Transformer Engine's layers are not taken then
    assert kept() / 2 < local < kept()


def test_the_first_stage_has_as_many_micro_batches_under_way_as_there_are_stages():
    config, shape = recipe(QWEN, "learner.layout.pipeline=4", "learner.layout.tensor=2")
    first, last = (rank_memory(config, shape, H100, stage) for stage in (0, 3))
    assert first.activations == 4 * last.activations
    assert first.logprobs == 0 < last.logprobs


def test_logits_are_held_for_one_chunk_of_tokens():
    config, shape = recipe(QWEN, "learner.layout.tensor=1")
    whole_logits = 4 * config.learner.tokens_per_micro_batch * shape.vocabulary
    output_layer = 6 * shape.vocabulary * shape.hidden  # its gradient in float32, and one product in bf16
    assert fullest_rank(config, shape, H100).logprobs - output_layer < whole_logits / 5


# -- checkpoints


def test_every_host_of_the_learner_writes_and_holds_its_ranks_shares():
    plan = planned(QWEN)  # 32 ranks on 4 hosts, 4 of them with the same parameters
    share = 8 * 14 * plan.rank.parameters / 4
    assert [each.written for each in plan.saves] == [pytest.approx(share, abs=8)] * 4 + [0] * 4
    assert all(each.held == each.written for each in plan.saves)
    assert sum(each.written for each in plan.saves) == pytest.approx(
        14 * whole_model(shape_of("qwen2.5-32b")), rel=0.001
    )


def test_the_first_host_has_room_for_its_part_of_a_checkpoint():
    plan = planned(QWEN)
    assert plan.first_host == plan.saves[0].held + plan.weights + plan.slots * plan.group.longest


def test_hosts_of_other_stages_write_other_shares():
    plan = planned(UNEVEN)
    assert [(first, last) for first, last, _ in alike(plan.saves)] == [(0, 1), (2, 13), (14, 15)]
    config, shape = recipe(UNEVEN)
    counted = of_stage(shape, config.learner.layout, 1, config.learner.lora)
    assert plan.saves[2].written == pytest.approx(8 * 14 * (counted.dense / 4 + counted.expert / 4), abs=16)


def test_an_export_is_written_by_the_first_host_and_held_file_by_file():
    plain, exporting = planned(QWEN), planned(QWEN, "checkpoint.export_each=true")
    pairs = list(zip(plain.saves, exporting.saves, strict=True))
    more = [(after.written - before.written, after.held - before.held) for before, after in pairs]
    assert more == [(plain.weights, 4 * GIB)] + [(0, 0)] * 7


def test_frozen_weights_are_in_a_checkpoint_without_a_state():
    plan = planned(LORA)
    total = sum(each.written for each in plan.saves)
    assert total == pytest.approx(2 * plan.rank.parameters + 12 * plan.rank.trained, rel=0.001)


def test_a_float32_model_has_its_weights_twice_with_the_distributed_optimizer_alone():
    def written(distributed: str) -> int:
        overrides = [
            "model.dtype=float32",
            "learner.tokens_per_micro_batch=4096",
            "generate.sampling.max_new_tokens=3000",
        ]
        config, shape = recipe(
            "megatron_rl/qwen2.5-3b-dapo", *overrides, f"learner.optimizer.distributed={distributed}"
        )
        hosts = place(config.learner.ranks, [], H100)
        return sum(each.written for each in saves(config, shape, H100, hosts))

    parameters = whole_model(shape_of("qwen2.5-3b"))
    assert written("true") == pytest.approx(16 * parameters, rel=0.01)
    assert written("false") == pytest.approx(12 * parameters, rel=0.01)


# -- generators


def test_the_cache_holds_what_the_weights_leave():
    config, shape = recipe(QWEN, "generate.server_args.mem_fraction_static=0.8")
    (pool,) = pools(config, shape, H100)
    assert pool.token == 2 * 64 * 1 * 128 * 2  # keys and values, layers, heads of a rank, dimensions, bytes
    assert pool.tokens == (int(80 * GIB * 0.8) - pool.weights) // pool.token
    assert pool.longest == 10975 + 512
    assert pool.at_once == min(256, pool.tokens // pool.longest)
    assert pool.asked == 16 * 16
    small, _ = recipe(QWEN, "generate.server_args.kv_cache_dtype=fp8_e4m3")
    assert pools(small, shape, H100)[0].token == pool.token / 2


@pytest.mark.parametrize(
    ("given", "asked", "groups", "tickets"),
    [("null", 256, 16, 257), ("100", 100, 7, 101), ("auto", None, None, None)],
)
def test_by_sample_a_server_is_asked_for_requests(given, asked, groups, tickets):
    sample = ("generate.submission=sample", f"generate.requests_in_flight={given}")
    config, shape = recipe(QWEN, *sample, "generate.server_args.mem_fraction_static=0.8")
    (pool,) = pools(config, shape, H100)
    if asked is None:  # what its cache holds of the longest
        asked, groups, tickets = pool.at_once, math.ceil(pool.at_once / 16), pool.at_once + 1
    assert (pool.asked, pool.groups, pool.tickets) == (asked, groups, tickets)


def test_quantised_weights_leave_more_to_the_cache():
    config, shape = recipe(QWEN)
    (plain,), (blocks,) = (pools(each, shape, H100) for each in (config, recipe(QWEN, "generate.quantization=fp8")[0]))
    count = quantised_of_server_rank(shape, plain.ranks)
    assert plain.weights - blocks.weights == count - 4 * count // 128**2
    assert 0.5 < blocks.weights / plain.weights < 0.6


# -- traffic


def test_a_group_is_as_large_as_the_codec_makes_it():
    config, shape = recipe(QWEN, "generate.sampling.max_new_tokens=100", "generate.group_size=3")
    frames = encode_group(zero_group(3, 512, 100), 1 << 30)
    assert group_bytes(config, shape, H100.prompt).longest == sum(len(frame) for frame in frames)


def test_the_router_replay_travels_with_its_tokens():
    config, shape = recipe(
        MOE, "generate.sampling.max_new_tokens=100", "generate.group_size=2", "task.overlong.buffer=0"
    )
    bytes_of = group_bytes(config, shape, H100.prompt)
    width = shape.layers * 8
    columns = fold(np.zeros((512 + 100 - 1, width), np.int16), 512, 100)
    without = sum(len(frame) for frame in encode_group(zero_group(2, 512, 100), 1 << 30))
    assert bytes_of.longest == without + columns[PROMPT].nbytes + 2 * columns[OUTPUT].nbytes


def test_broadcasts_take_as_long_as_there_are_servers_and_memory_as_turns():
    four, eight = planned(QWEN), planned(QWEN, "generate.workers=8")
    by_name = [{each.transport: each for each in plan.publishing} for plan in (four, eight)]
    assert by_name[1]["broadcast"].round == pytest.approx(2 * by_name[0]["broadcast"].round)
    assert by_name[0]["broadcast"].copy == pytest.approx(four.weights / 25e9)
    assert "8 hosts" in by_name[0]["memory"].impossible
    slow = planned(QWEN, machines=Machines(network=5.0))
    broadcast, delta = (
        next(each for each in slow.publishing if each.transport == name) for name in ("broadcast", "delta")
    )
    assert delta.pause < broadcast.pause == pytest.approx(slow.weights / 5e9)  # a GPU takes a bucket meanwhile


def test_a_learner_that_gathers_nothing_does_not_wait_for_its_copy():
    one = planned("verl/qwen3-8b-gsm8k", "learner.layout.tensor=1", machines=Machines(gpu_memory=1000))
    assert {each.copy for each in one.publishing} == {0.0}
    cut = planned("verl/qwen3-8b-gsm8k", "learner.layout.tensor=2", machines=Machines(gpu_memory=1000))
    assert [each.copy for each in cut.publishing] == [pytest.approx(cut.weights / 25e9)] * 4
    without = planned("megatron_rl/qwen2.5-3b-dapo", machines=Machines(gpus_per_host=0, host_memory=4096))
    assert [each.copy for each in without.publishing] == [pytest.approx(without.weights / 10e9)] * 4


def test_weights_of_other_hosts_come_over_the_network_to_the_rank_that_sends_them_out():
    config, shape = recipe(UNEVEN)  # 8 stages of 16 ranks
    assert from_other_hosts(config, shape, H100) == pytest.approx(1 - 11 / 94, abs=0.01)
    assert from_other_hosts(config, shape, Machines(gpus_per_host=128)) == 0
    assert from_other_hosts(*recipe(QWEN), H100) == 0
    experts, shape = recipe(MOE, "learner.layout.expert=16", "learner.layout.tensor=4")  # half of them elsewhere
    assert from_other_hosts(experts, shape, H100) == pytest.approx(0.5, abs=0.05)
    far = planned(UNEVEN, machines=Machines(gpu_memory=141, network=5.0))
    share = from_other_hosts(*recipe(UNEVEN), H100)
    assert far.publishing[0].copy == pytest.approx(share * far.weights / 5e9)


def test_a_version_that_is_verified_is_hashed_on_both_sides():
    machines = Machines(gpus_per_host=64, hash=20.0)
    plans = [planned(QWEN, "publish.transport=memory", f"publish.verify_every={n}", machines=machines) for n in (0, 1)]
    plain, verified = (next(each for each in plan.publishing if each.used) for plan in plans)
    seconds = plans[0].weights / 20e9
    assert verified.copy == plain.copy
    assert verified.pause == pytest.approx(plain.pause + seconds)
    assert verified.round == pytest.approx(plain.round + 5 * seconds)  # 4 servers, and the learner once


def test_adapters_alone_are_published_without_a_pause():
    plan = planned(LORA, "learner.tokens_per_micro_batch=8192")
    (each,) = plan.publishing
    assert (each.transport, each.pause) == ("adapter", 0.0)
    assert plan.weights == 2 * plan.rank.trained


def test_every_transport_of_the_configuration_is_planned():
    assert {each.transport for each in planned(QWEN).publishing} == set(TRANSPORTS.names)
    (used,) = [each.transport for each in planned(QWEN).publishing if each.used]
    assert used == recipe(QWEN)[0].publish.transport


@pytest.mark.parametrize(
    ("overrides", "fused"),
    [((), True), (("learner.layout.context=2",), True), (("model.dtype=float32",), False)],
)
def test_layers_are_fused_in_bfloat16_whatever_is_trained_and_cut(overrides, fused):
    assert is_fused(recipe(LORA, *overrides)[0], H100) is fused
