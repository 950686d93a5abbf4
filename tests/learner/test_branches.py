"""Rollouts of several branches in the learner: the gradient is that of the equations, and of the batch alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from learner_parts import branched, gradients, largest_difference, make_batch, make_config

from streamrl.learner.reward_penalty import of_groups
from streamrl.observe.metrics import is_known


def with_algo(config, **algo: Any):
    return config.model_copy(update={"algo": type(config.algo).model_validate(config.algo.model_dump() | algo)})


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_no_packing_changes_the_gradient_of_branches_and_it_is_another_than_without(
    model_folder, trainer_of, aggregation
):
    plain = make_batch(groups=2, size=6)
    batch, folder = branched(plain, 1, 3, 2), model_folder()
    keys = {"aggregation": aggregation}
    reference = gradients(trainer_of(with_algo(make_config(folder, share_prompts=False), **keys)), batch)
    trainer = trainer_of(with_algo(make_config(folder, tokens_per_micro_batch=30), **keys))
    assert largest_difference(gradients(trainer, batch), reference) < 2e-5
    assert largest_difference(gradients(trainer, plain), reference) > 1e-3


@pytest.mark.parametrize("algo", [{}, {"aggregation": "sequence_mean", "loss": "gspo"}, {"kl_reward": 0.1}])
def test_rollouts_of_one_branch_have_the_very_gradient_of_samples(model_folder, trainer_of, algo):
    batch = make_batch()
    ones = msgspec.structs.replace(
        batch, groups=tuple(msgspec.structs.replace(group, branches=(1,) * 4) for group in batch.groups)
    )
    trainer = trainer_of(with_algo(make_config(model_folder()), **algo))
    expected = gradients(trainer, batch)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in gradients(trainer, ones).items())


@pytest.mark.parametrize(
    "algo",
    [
        {"kl_reward": 0.1, "kl_target": 0.1, "aggregation": "sequence_sum"},
        {"advantage": {"estimator": "gae"}},
        {"weight": "sequence", "mask": "sequence_max_k3", "mask_high": 5.0, "advantage": {"baseline": "by_length"}},
    ],
    ids=["kl in the reward", "critic", "sequences"],
)
def test_what_reads_rewards_and_sequences_trains_branches(model_folder, trainer_of, algo):
    trainer = trainer_of(with_algo(make_config(model_folder()), **algo))
    batch = branched(make_batch(size=5), 1, 3, 1)
    metrics = trainer.train_step(batch)
    assert [name for name in metrics if not is_known(name)] == []
    assert metrics["grad_norm"] > 0
    if "kl_reward" in algo:
        for _, (alone, *together, last) in of_groups(batch, trainer._step.taken_off):
            assert len(set(together)) == 1
            assert len({alone, together[0], last}) == 3


@pytest.mark.slow
def test_two_ranks_that_share_the_branches_of_a_rollout_have_the_gradient_of_one(
    model_folder, trainer_of, two_ranks, tmp_path
):
    algo = {"kl_reward": 0.1, "aggregation": "sequence_mean"}
    config = with_algo(make_config(model_folder(), share_prompts=False), **algo)
    together, taken_off = two_ranks(
        "branches",
        config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 2})}),
        tmp_path / "run",
    )
    trainer = trainer_of(config)
    assert largest_difference(together, gradients(trainer, branched(make_batch(size=5), 1, 3, 1))) < 2e-5
    assert taken_off == pytest.approx(trainer._step.taken_off, abs=1e-6)
