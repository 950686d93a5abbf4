"""Masters of a bfloat16 model that begin anywhere within a rounding step."""

from __future__ import annotations

import pytest
import torch
from learner_parts import make_batch, make_config, weights

from streamrl.learner.dither import dither

EVERY = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)  # bit pattern


def dithered(values: torch.Tensor) -> torch.Tensor:
    masters = values.float().clone()
    dither(masters)
    return masters


def test_every_value_rounds_to_what_it_was():
    masters = dithered(EVERY)
    assert torch.equal(masters.bfloat16().view(torch.int16)[~EVERY.isnan()], EVERY.view(torch.int16)[~EVERY.isnan()])
    assert masters[EVERY.isnan()].isnan().all()
    assert torch.equal(masters[EVERY == 0], EVERY[EVERY == 0].float())
    normal = EVERY.isfinite() & (EVERY.abs() >= torch.finfo(torch.bfloat16).tiny)
    largest = EVERY.abs() == torch.finfo(torch.bfloat16).max
    assert (masters != EVERY.float())[normal & ~largest].float().mean() > 0.999


def test_values_that_a_bfloat16_does_not_have_stay():
    known = torch.tensor([0.1, -1 / 3, 1e-3, float("inf"), float("-inf"), 0.0])
    assert torch.equal(dithered(known)[[0, 1, 2]], known[[0, 1, 2]])
    assert torch.equal(dithered(known), known)


def test_a_tensor_of_any_strides_is_dithered_in_its_place():
    saved = (0.02 * torch.randn(64, 48, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    transposed = saved.clone().t()
    dither(transposed)
    assert torch.equal(transposed.t(), dithered(saved))
    assert not torch.equal(transposed.t(), saved)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, -0.1, 0.5])
def test_of_a_change_that_is_a_share_of_a_step_that_share_of_the_weights_moves(share):
    """And none of those that begin in the middle, up to half a step."""
    torch.manual_seed(0)
    saved = (0.02 * torch.randn(200_000)).bfloat16()
    saved = saved[(saved.abs() > 0.001) & (saved.abs() < 0.1)]
    step = (saved.view(torch.int16) + 1).view(torch.bfloat16).float() - saved.float()  # away from zero
    change = share * step
    moved = (dithered(saved) + change).bfloat16() != saved
    assert moved.float().mean().item() == pytest.approx(abs(share), rel=0.1)
    if abs(share) < 0.5:
        assert torch.equal((saved.float() + 0.98 * change).bfloat16(), saved)


@pytest.mark.parametrize("distributed", [False, True])
def test_the_first_small_step_moves_the_weights_of_the_file_as_far_as_their_masters(
    distributed, model_folder, trainer_of
):
    first, way = {}, {}
    for dithers in (False, True):
        optimizer = {"lr": 1e-5, "distributed": distributed, "dither": dithers}
        trainer = trainer_of(make_config(model_folder(), "bfloat16", optimizer))
        before = first[dithers] = weights(trainer)
        trainer.train_step(make_batch())
        after = weights(trainer)
        way[dithers] = sum(float((after[name].float() - tensor.float()).abs().sum()) for name, tensor in before.items())
    assert all(torch.equal(tensor, first[True][name]) for name, tensor in first[False].items())
    whole = 1e-5 * sum(tensor.numel() for tensor in after.values())
    assert way[True] / whole == pytest.approx(1, rel=0.1)
    assert way[False] / whole < 0.1
