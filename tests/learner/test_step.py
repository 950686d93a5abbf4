"""A learner step with everything that it may do before, between and after its updates."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from learner_parts import gradients, make_batch, make_config, weights

from streamrl.device_copy import Copied
from streamrl.learner.safety import BadStepsError, UpdateGuard
from streamrl.observe.metrics import is_known
from streamrl.types import Batch


def with_algo(config, **algo: Any):
    return config.model_copy(update={"algo": type(config.algo).model_validate(config.algo.model_dump() | algo)})


def of_groups(batch: Batch, *indices: int) -> Batch:
    return msgspec.structs.replace(batch, groups=tuple(batch.groups[index] for index in indices))


@pytest.mark.parametrize(
    "algo",
    [
        {"loss": "clip", "dual_clip": 3.0, "mask": "token", "covariance": "clip_cov", "kl": 0.1},
        {"loss": "clip", "proximal": "recompute", "mask": "second_moment", "covariance": "kl_cov"},
        {"loss": "gspo", "mask": "sequence", "aggregation": "sequence_mean"},
        {"loss": "cispo", "mask": "geometric", "proximal": "interpolate"},
        {"loss": "sapo", "weight": "sequence"},
        {"loss": "reinforce", "weight": "none"},
        {"loss": "dppo_kl", "ratio_penalty": 0.01, "advantage": {"baseline": "by_length", "std": "none"}},
        {"loss": "dro", "weight": "none", "kl": 0.1, "kl_estimator": "full", "kl_target": 0.1},
        {"loss": "gpg", "kl_reward": 0.1, "kl_target": 0.1, "advantage": {"baseline": "best_alone"}},
        {"loss": "gmpo", "kl_reward": 0.1, "mask": "sequence_max_k3", "mask_high": 5.0, "aggregation": "sequence_sum"},
        {
            "proximal": "recompute",
            "weight_normalise": True,
            "kl": 0.1,
            "kl_estimator": "k1",
            "kl_straight_through": True,
            "aggregation": "token_sum",
            "more_masks": [{"mask": "token_k2", "mask_high": 2.0}],
        },
    ],
)
def test_every_choice_trains_and_tells_metrics_that_have_a_name(model_folder, trainer_of, algo):
    trainer = trainer_of(with_algo(make_config(model_folder()), **algo))
    before = weights(trainer)
    metrics = trainer.train_step(make_batch())
    assert [name for name in metrics if not is_known(name)] == []
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_a_refused_update_moves_no_adaptive_weight(model_folder, trainer_of, monkeypatch):
    trainer = trainer_of(with_algo(make_config(model_folder()), kl=0.1, kl_target=1e-9, kl_horizon=1))

    def weight(step: int) -> float:
        return trainer.train_step(make_batch(step=step))["loss/kl_weight"]

    told = [weight(0)]
    with monkeypatch.context() as patch:
        patch.setattr(UpdateGuard, "judge", lambda *_, **__: "spike")
        told.append(weight(1))
    told += [weight(2), weight(3)]
    assert told[0] != told[1] == told[2] != told[3]


def test_each_mini_batch_of_each_pass_makes_one_update_on_its_groups(model_folder, trainer_of):
    batch = make_batch(groups=4)
    alone = gradients(trainer_of(make_config(model_folder())), of_groups(batch, 0, 1))
    halves = trainer_of(make_config(model_folder(), mini_batches=2, passes=3))
    first = gradients(halves, batch)
    assert all(torch.equal(first[name], alone[name]) for name in alone)  # counted by itself, as if it were a step
    metrics = halves.train_step(batch)
    assert metrics["steps/updates"] == 6
    assert metrics["tokens/trained"] == sum(group.trained_tokens for group in batch.groups)
    assert halves.version.step == 1


def test_off_policy_metrics_are_of_the_data_and_not_of_what_later_passes_make_of_it(model_folder, trainer_of):
    once = trainer_of(make_config(model_folder())).train_step(make_batch())
    often = trainer_of(make_config(model_folder(), passes=4)).train_step(make_batch())
    for name in ("offpolicy/ess", "offpolicy/kl", "offpolicy/log_ratio_max"):
        assert often[name] == once[name]
    assert often["loss/clip_low"] + often["loss/clip_high"] != once["loss/clip_low"] + once["loss/clip_high"]


def test_the_recomputed_policy_is_the_one_of_the_start_of_the_step(model_folder, trainer_of):
    config = with_algo(make_config(model_folder(), passes=2), proximal="recompute", weight="none")
    first = with_algo(make_config(model_folder()), proximal="recompute", weight="none")
    assert trainer_of(first).train_step(make_batch())["loss/clip_high"] == 0  # every ratio is 1 in the first pass
    assert trainer_of(config).train_step(make_batch())["loss/clip_high"] > 0


def test_the_kl_term_is_0_at_the_start_and_grows_with_the_distance(model_folder, trainer_of):
    trainer = trainer_of(with_algo(make_config(model_folder()), kl=0.1))
    distances = [trainer.train_step(make_batch(step))["loss/kl"] for step in range(3)]
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert 0 < distances[1] < distances[2]


def test_a_learner_that_makes_no_update_gives_up_with_a_line_that_says_why(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(), bad_steps=2))
    with torch.no_grad():
        next(trainer._chunks[0].parameters()).fill_(torch.nan)
    before = weights(trainer)
    assert trainer.train_step(make_batch(0))["steps/skipped"] == 1
    with pytest.raises(BadStepsError, match=r"learner.bad_steps"):
        trainer.train_step(make_batch(1))
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in weights(trainer).items())


class CopyOfWeights(Copied):
    """A copy out of the device that ends when it has been asked for the third time, and sees the weights each time."""

    def __init__(self, trainer: Any, ends: bool = True) -> None:
        self.trainer = trainer
        self.ends = ends
        self.seen: list[dict[str, torch.Tensor]] = []

    def is_done(self) -> bool:
        self.seen.append({name: tensor.clone() for name, tensor in self.trainer.export()})
        return self.ends and len(self.seen) > 2


def test_no_weight_changes_before_the_copy_that_reads_it_has_ended(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder()))
    before, copied = weights(trainer), CopyOfWeights(trainer)
    trainer.lend(copied)
    trainer.train_step(make_batch())
    assert len(copied.seen) == 3
    assert all(torch.equal(seen[name], before[name]) for seen in copied.seen for name in before)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_the_reference_takes_the_place_of_the_weights_when_their_copy_has_ended(model_folder, trainer_of, monkeypatch):
    trainer = trainer_of(with_algo(make_config(model_folder()), kl=0.1))
    copied, swapped = CopyOfWeights(trainer), trainer._step._reference.swapped
    asked: list[int] = []
    monkeypatch.setattr(trainer._step._reference, "swapped", lambda: asked.append(len(copied.seen)) or swapped())
    trainer.lend(copied)
    trainer.train_step(make_batch())
    assert asked == [3]


def test_a_copy_that_does_not_end_ends_the_learner_in_time(model_folder, trainer_of):
    config = make_config(model_folder())
    learner = config.learner.model_copy(update={"collective_timeout": 0.05})
    trainer = trainer_of(config)
    trainer._step._config = config.model_copy(update={"learner": learner})
    trainer.lend(CopyOfWeights(trainer, ends=False))
    with pytest.raises(TimeoutError, match=r"not copied out in learner\.collective_timeout=0\.05 s"):
        trainer.train_step(make_batch())


def test_what_is_exported_without_being_gathered_stays_where_it_is(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder()))
    exported = {name: tensor.untyped_storage().data_ptr() for name, tensor in trainer.export()}
    assert trainer.resident >= {address for name, address in exported.items() if name.endswith("o_proj.weight")}
    assert trainer.resident & set(exported.values())
    assert torch.ones(1).untyped_storage().data_ptr() not in trainer.resident
