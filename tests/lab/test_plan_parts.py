"""What the parts of a plan are counted from: parameters, memory of ranks and servers, bytes on the wire."""

from __future__ import annotations

import json

import numpy as np
import pytest

from streamrl.choices import TRANSPORTS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.plan.generators import pools
from streamrl.lab.plan.learner_memory import fullest_rank, is_fused, rank_memory
from streamrl.lab.plan.machines import GIB
from streamrl.lab.plan.parameters import layers_of, of_server_rank, of_stage, whole_adapters, whole_model
from streamrl.moe_routing import OUTPUT, PROMPT, fold
from streamrl.preflight.wire import group_bytes, zero_group
from streamrl.stream.codec import encode_group
from tests.lab.plan_recipes import H100, LORA, MOE, QWEN, SHAPES, UNEVEN, planned, recipe, shape_of

PARAMETERS = {  # as the published safetensors indices count them
    "deepseek-7b": 6_910_365_696,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
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


def test_the_optimizer_of_experts_is_shared_by_the_ranks_with_the_same_experts():
    config, shape = recipe(MOE)  # 16 ranks: tensor 4, expert 8
    counted = of_stage(shape, config.learner.layout, 0, config.learner.lora)
    expected = 12 * (counted.dense / 4 + counted.expert / 2)
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
    hidden, heads, groups, ffn = 3584, 28 * 128, 4 * 128, 18944
    ends = (hidden + heads) + 2 * (hidden + groups) + (heads + hidden) + 3 * (hidden + ffn)
    assert rank.trained == 28 * 64 * ends == whole_adapters(shape, config.learner.lora)
    assert rank.gradients == 4 * rank.trained
    assert rank.host_reference == 0  # the model without its adapters


def test_the_reference_policy_is_in_the_hosts_memory():
    config, shape = recipe("verl/qwen3-8b-gsm8k")
    rank = fullest_rank(config, shape, H100)
    assert rank.host_reference == rank.weights


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
    assert by_name[0]["delta"].pause < by_name[0]["broadcast"].pause
    assert "8 hosts" in by_name[0]["memory"].impossible


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
