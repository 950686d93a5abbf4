"""The divergence over the whole vocabulary from hidden states against plain log-softmax, and in a learner's step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_parts import make_batch, make_config

from streamrl.config.algo import AlgoConfig
from streamrl.learner import full_kl
from streamrl.learner.full_kl import ReferenceStates
from streamrl.learner.kept import Kept
from streamrl.learner.logprobs import Targets
from streamrl.sampling_columns import KeptSets


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 7 * 8 * 37, 1 << 30])
def test_values_and_gradients_equal_plain_softmax_without_the_pads_in_any_chunking(
    alone, monkeypatch, chunk_bytes, truncated
):
    monkeypatch.setattr(full_kl, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden, weight, other, other_weight = (torch.randn(n, 8, dtype=torch.float64) for n in (23, 40, 23, 40))
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    temperature = torch.linspace(0.5, 1.5, 23, dtype=torch.float64)
    sets = [sorted({place, 9, 36}) if truncated and place % 2 else [] for place in range(23)]
    ids = np.array([token for each in sets for token in each])
    kept = Kept.of(KeptSets(np.array([len(each) for each in sets]), ids), hidden.device)
    targets = Targets(torch.arange(23), torch.zeros(23, dtype=torch.int64), temperature, kept=kept)
    dropped = torch.tensor([[bool(each) and token not in each for token in range(37)] for each in sets])
    reference = ReferenceStates(other, other_weight)
    ours = full_kl.full_kl(hidden, weight, reference, targets, vocabulary=37, group=alone)
    log_p, log_q = (
        (h @ w[:37].t() / temperature[:, None]).masked_fill(dropped, -torch.inf).log_softmax(-1)
        for h, w in ((hidden, weight), (other, other_weight))
    )
    theirs = (log_p.exp() * (log_p - log_q).masked_fill(dropped, 0.0)).sum(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    scale = torch.randn(23, dtype=torch.float64)
    gradients = [torch.autograd.grad((scale * values).sum(), leaves) for values in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)
    assert not gradients[0][1][37:].any()


def test_ranks_with_fewer_rows_than_others_add_up_the_same_chunks(monkeypatch):
    """Of a padded vocabulary the last rank has fewer."""
    monkeypatch.setattr(full_kl, "CHUNK_BYTES", 8 * 64 * 4)
    weight, other = torch.randn(2, 64, 8, dtype=torch.float64)
    hidden, states = torch.randn(2, 23, 8, dtype=torch.float64)
    targets = Targets(torch.arange(23), torch.zeros(23, dtype=torch.int64), 1.0)
    counts = []
    for rank in range(2):
        added: list[int] = []

        def reduce(shard: object, values: torch.Tensor, _: object, added: list[int] = added) -> torch.Tensor:
            added.append(values.shape[-1])
            return values

        monkeypatch.setattr(full_kl._Shard, "reduce", reduce)
        group = SimpleNamespace(rank=lambda rank=rank: rank)
        full_kl.full_kl(hidden, weight, ReferenceStates(states, other), targets, vocabulary=100, group=group)
        counts.append(added)
    assert counts[0] == counts[1] == [size for size in (4, 4, 4, 4, 4, 3) for _ in range(2)]


def test_a_step_begins_at_the_reference_and_leaves_it(model_folder, trainer_of):
    algo = AlgoConfig(kl=0.1, kl_estimator="full")
    trainer = trainer_of(make_config(model_folder()).model_copy(update={"algo": algo}))
    assert trainer.train_step(make_batch())["loss/kl"] == pytest.approx(0, abs=1e-6)
    assert trainer.train_step(make_batch(1))["loss/kl"] > 0


def test_an_adaptive_weight_goes_on_from_a_checkpoint_bit_for_bit(model_folder, trainer_of, tmp_path):
    algo = AlgoConfig(kl=0.1, kl_target=1e-3, kl_horizon=20)
    config = make_config(model_folder()).model_copy(update={"algo": algo})
    trainer = trainer_of(config, tmp_path / "run")
    assert trainer.train_step(make_batch())["loss/kl_weight"] == 0.1
    trainer.save()
    trainer.saved(wait=True)
    second = trainer.train_step(make_batch(1))
    assert second["loss/kl_weight"] < 0.1  # the first step was at the reference
    resumed = trainer_of(config, tmp_path / "run").train_step(make_batch(1))
    names = ("loss/kl_weight", "loss/kl", "loss/total", "grad_norm")
    assert {name: resumed[name] for name in names} == {name: second[name] for name in names}
