"""The losses that look beyond a micro batch: the same step whatever the packing, the mini batches and the layout."""

from __future__ import annotations

import pytest
import torch
from learner_parts import make_config
from losses_at_work import two_steps

from streamrl.config.algo import AlgoConfig, DistillationConfig

EVERYTHING = AlgoConfig(
    proximal="recompute",
    mask="second_moment",
    second_moment=0.1,
    covariance="clip_cov",
    covariance_share=0.1,
    covariance_low=0.05,
    kl=0.05,
    kl_estimator="full",
    entropy=0.01,
    weight_normalise=True,
    kl_reward=20.0,
    kl_reward_estimator="k3",
    more_masks=[{"mask": "sequence_mean_k3", "mask_high": 0.8}],
)
PREFIXES = ("reward/kl", "loss/", "offpolicy/", "weights/", "tokens/", "distillation/")


def config_of(folder, algo=EVERYTHING, teacher=None, **learner):
    if teacher is not None:
        algo = algo.model_copy(update={"distillation": DistillationConfig(teacher=teacher)})
    learner = {"passes": 2, "mini_batches": 2, "optimizer": {"lr": 1e-4, "distributed": True}, **learner}
    return make_config(folder, **learner).model_copy(update={"algo": algo})


def assert_same_steps(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        names = [name for name in other if name.startswith(PREFIXES)]
        assert {name: mine[name] for name in names} == pytest.approx({n: other[n] for n in names}, rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def alone(model_folder, tmp_path_factory) -> list[dict[str, float]]:
    """The steps of one rank in one micro batch a mini batch."""
    config = config_of(model_folder(), teacher=model_folder("qwen3"), tokens_per_micro_batch=4096)
    return two_steps(config, tmp_path_factory.mktemp("alone"))


def test_every_rule_acts_a_teacher_is_used_and_the_reference_is_left(alone):
    for row in alone:
        assert 0 < row["weights/masked_second_moment"] < 1
        assert 0 < row["weights/masked_clip_cov"] < 0.5
        assert 0 < row["weights/masked_sequence_mean_k3"] < 1
        assert abs(row["distillation/kl"]) > 0.01
        assert row["loss/kl"] > 0  # also in the first step: its later updates have left the reference
    assert alone[0]["steps/updates"] == 4
    assert alone[0]["reward/kl"] == pytest.approx(0, abs=1e-6)  # the step starts at the reference
    assert alone[1]["reward/kl"] > 0


def test_the_packing_does_not_change_the_step(alone, model_folder, tmp_path):
    config = config_of(model_folder(), teacher=model_folder("qwen3"), tokens_per_micro_batch=30)
    metrics = two_steps(config, tmp_path)
    assert metrics[0]["micro_batches"] > 2 * alone[0]["micro_batches"]
    assert_same_steps(metrics, alone)


@pytest.mark.parametrize(
    "learner",
    [
        pytest.param({"overlap": True, "share_prompts": False}, id="data parallel, overlapped", marks=pytest.mark.slow),
        pytest.param({"layout": {"tensor": 2}}, id="tensor parallel"),
        pytest.param({"layout": {"pipeline": 2}}, id="pipeline parallel", marks=pytest.mark.slow),
        pytest.param({"layout": {"context": 2}}, id="context parallel", marks=pytest.mark.slow),
    ],
)
def test_the_layout_does_not_change_the_step(learner, alone, model_folder, on_ranks, tmp_path):
    config = config_of(model_folder(), teacher=model_folder("qwen3"), ranks=2, tokens_per_micro_batch=30, **learner)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    on_ranks(2, "losses_at_work.py", tmp_path / "config.json", tmp_path / "run", tmp_path / "out.pt")
    assert_same_steps(torch.load(tmp_path / "out.pt"), alone)


def test_recompute_begins_its_first_pass_with_a_ratio_of_one(model_folder, tmp_path):
    algo = AlgoConfig(proximal="recompute", weight="none")
    (first, _) = two_steps(config_of(model_folder(), algo, passes=1, mini_batches=1), tmp_path)
    assert (first["loss/clip_low"], first["loss/clip_high"]) == (0, 0)
    assert first["offpolicy/log_ratio_mean"] > 0.1  # the data itself is off-policy all the same
