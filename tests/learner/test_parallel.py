"""Which layouts a model can be cut into, and the gradient of each against that of one process."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import ValidationError

from benchmarks.parity import BAR, Layout, configure
from benchmarks.parity_ranks import Case, Gradient, run_ranks
from benchmarks.random_models import largest_difference, write_model
from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig, LearnerConfig
from streamrl.learner.layout_fit import check_fit, stage_layers
from streamrl.learner.shape import MoeShape, read_shape

DENSE = (
    Layout("tensor parallel", 2, {"tensor": 2, "sequence": False}),
    Layout(
        "two chunks a stage, overlapped",
        2,
        {"pipeline": 2, "virtual": 2},
        {"optimizer": {"distributed": True}, "overlap": True},
    ),
    Layout("context parallel", 2, {"context": 2}, {"recompute": "full"}),
    Layout("stages of one and of three layers", 2, {"pipeline": 2, "first_stage": 1}),
    Layout("fully sharded", 2, {"sharding": "full"}),
)
PRODUCTS = (
    Layout("experts over tensor-parallel ranks", 4, {"tensor": 2, "expert": 2}),
    Layout("experts over stages and slices", 4, {"pipeline": 2, "context": 2, "expert": 2}),
    Layout("whole experts beside cut attention", 4, {"tensor": 2}, {"recompute": "selective"}),
)
SHARDED = (
    Layout("fully sharded beside cut tensors", 4, {"sharding": "full", "tensor": 2}),
    Layout("fully sharded, layers computed again", 4, {"sharding": "full"}, {"recompute": "full"}),
)
SHARDED_EXPERTS = (Layout("fully sharded over slices", 4, {"sharding": "full", "context": 2}, {"recompute": "full"}),)


def gradients(model, layouts) -> tuple[Gradient, dict[str, Gradient]]:
    """Of one process, and of each layout; all of one number of ranks."""
    (alone,) = run_ranks([Case("one", configure(model, "float32", Layout("one", 1)))], 1).values()
    cases = [Case(layout.name, configure(model, "float32", layout)) for layout in layouts]
    return alone, run_ranks(cases, layouts[0].ranks)


@pytest.mark.parametrize(
    ("family", "tied", "layouts"),
    [
        pytest.param("qwen2", True, DENSE, id="dense"),
        pytest.param("qwen3_moe", False, PRODUCTS, id="experts"),
        pytest.param("qwen3", False, SHARDED, id="sharded", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", False, SHARDED_EXPERTS, id="sharded experts", marks=pytest.mark.slow),
    ],
)
def test_every_layout_has_the_gradient_loss_norms_zeros_and_scores_of_one_process(family, tied, layouts, tmp_path):
    alone, given = gradients(write_model(tmp_path / "model", family, tied, layers=4), layouts)
    of_norm = float(alone.tensors["model.norm.weight"].square().sum())
    for name, gradient in given.items():
        assert largest_difference(gradient.tensors, alone.tensors) < BAR, name
        assert gradient.loss == pytest.approx(alone.loss, rel=BAR), name
        assert gradient.norm == pytest.approx(alone.norm, rel=BAR), name
        assert gradient.scores < 1e-5, name
        assert gradient.params_norm == pytest.approx(alone.params_norm, rel=1e-6), name
        assert gradient.of_norm == pytest.approx(of_norm, rel=1e-4), name
        # The batch has the same 8 rows in every layout: what they say of each other hangs on all ranks' sums.
        assert gradient.signal == pytest.approx(alone.signal, abs=1e-4 * of_norm), name
        assert gradient.noise == pytest.approx(alone.noise, abs=1e-4 * of_norm), name
        assert gradient.zeros == pytest.approx(alone.zeros, abs=1e-5), name
    entries = sum(tensor.numel() for tensor in alone.tensors.values())
    zeros = sum(int((tensor == 0).sum()) for tensor in alone.tensors.values())
    assert alone.zeros == pytest.approx(zeros / entries)
    assert (0 < alone.zeros < 1) is not tied  # a softmax over all tokens leaves no row of a tied embedding untouched


@pytest.fixture
def shape(model_folder):
    return read_shape(model_folder("qwen2"))  # 2 layers, 4 heads in 2 groups, MLPs of 96


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"tensor": 4}, "learner.layout.tensor: 4 does not divide 2 key and value heads; allowed: a divisor of 2"),
        ({"pipeline": 2, "virtual": 2}, "learner.layout.pipeline: 2 stages of 2 chunks do not share 2 layers"),
        ({"pipeline": 2, "first_stage": 2}, "2 stages of 1 chunks, first 2 do not share 2 layers"),
        ({"expert": 2}, "learner.layout.expert: 2 ranks cannot share experts, Qwen2ForCausalLM has none"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_by_name(layout, text, shape):
    with pytest.raises(ConfigError, match=text):
        check_fit(shape, LayoutConfig(**layout))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"sharding": "full", "tensor": 2}, r"learner.layout.sharding: full with experts and learner.layout.tensor=2"),
        ({"expert": 3}, "learner.layout.expert: 3 does not divide 8 experts"),
        ({"expert_tensor": 5}, "learner.layout.expert_tensor: 5 does not divide 48 columns of an expert"),
        ({"tensor": 2, "sequence": False}, "learner.layout.sequence: false with experts and tensor above 1"),
    ],
)
def test_a_layout_that_does_not_fit_the_experts_is_refused_by_name(layout, text, shape):
    moe = dataclasses.replace(shape, moe=MoeShape(experts=8, top_k=2, ffn=48, normalised=True))
    check_fit(moe, LayoutConfig(tensor=2, expert=4))
    with pytest.raises(ConfigError, match=text):
        check_fit(moe, LayoutConfig(**layout))


def test_the_ends_of_a_pipeline_may_have_layers_of_their_own():
    assert stage_layers(8, LayoutConfig(pipeline=4)) == (2, 2, 2, 2)
    assert stage_layers(94, LayoutConfig(pipeline=8, first_stage=11, last_stage=11)) == (11, *(12,) * 6, 11)
    assert stage_layers(7, LayoutConfig(pipeline=3, last_stage=1)) == (3, 3, 1)
    assert stage_layers(3, LayoutConfig(pipeline=2, first_stage=1, last_stage=2)) == (1, 2)
    with pytest.raises(ConfigError, match="do not share 4 layers"):
        stage_layers(4, LayoutConfig(pipeline=2, first_stage=1, last_stage=2))
    with pytest.raises(ValidationError, match=r"first_stage: needs learner\.layout\.pipeline above 1 and virtual 1"):
        LayoutConfig(pipeline=2, virtual=2, first_stage=1)


def test_ranks_that_cannot_share_the_experts_are_refused():
    assert LearnerConfig(ranks=4, layout=LayoutConfig(tensor=2, expert=4)).layout.expert == 4
    with pytest.raises(ValidationError, match="ranks: 6 cannot hold experts cut over 4 ranks"):
        LearnerConfig(ranks=6, layout=LayoutConfig(expert=4))
