"""Log-probs and entropies from hidden states against plain log-softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamrl.learner import logprobs
from streamrl.learner.kept import Kept
from streamrl.learner.logprobs import Targets, over_context, token_logprobs
from streamrl.sampling_columns import KeptSets


def problem(dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(40, 8, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, 37, (23,))


def plainly(hidden, weight, tokens, temperature, vocabulary):
    log_p = (hidden @ weight[:vocabulary].t() / temperature).log_softmax(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 4 * 37, 1 << 30])
def test_values_and_gradients_equal_plain_log_softmax_without_the_pads_in_any_chunking(alone, monkeypatch, chunk_bytes):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, tokens = problem()
    targets = Targets(torch.arange(23), tokens, temperature=0.7, entropy_gradient=True)
    ours = token_logprobs(hidden, weight, targets, 37, alone)
    theirs = plainly(hidden, weight, tokens, 0.7, 37)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    scale = torch.randn(2, 23, dtype=torch.float64)
    loss = [(scale[0] * lp).sum() + (scale[1] * h).sum() for lp, h in (ours, theirs)]
    gradients = [torch.autograd.grad(x, (hidden, weight)) for x in loss]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)
    assert not gradients[0][1][37:].any()


def test_each_token_may_have_been_drawn_at_a_temperature_of_its_own(alone, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 7 * 4 * 37)
    hidden, weight, tokens = problem()
    temperature = torch.linspace(0.5, 1.5, 23, dtype=torch.float64)
    ours = token_logprobs(hidden, weight, Targets(torch.arange(23), tokens, temperature), 37, alone)[0]
    theirs = plainly(hidden, weight, tokens, temperature[:, None], 37)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(values.sum(), (hidden, weight)) for values in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_a_pad_in_the_softmax_would_be_seen(alone):
    hidden, weight, tokens = problem()
    targets = Targets(torch.arange(23), tokens, temperature=0.7)
    assert not torch.allclose(
        token_logprobs(hidden, weight, targets, 40, alone)[0], plainly(hidden, weight, tokens, 0.7, 37)[0]
    )


def test_without_an_entropy_term_the_entropies_carry_no_gradient(alone):
    hidden, weight, tokens = problem(torch.float32)
    values, entropy = token_logprobs(hidden, weight, Targets(torch.arange(23), tokens, 1.0), 37, alone)
    assert values.requires_grad
    assert not entropy.requires_grad


def test_no_target_gives_no_value_and_zero_gradients(alone):
    hidden, weight, tokens = problem(torch.float32)
    values, _ = token_logprobs(hidden[:0], weight, Targets(tokens[:0], tokens[:0], 1.0), 37, alone)
    values.sum().backward()
    assert values.shape == (0,)
    assert not weight.grad.any()


def test_bfloat16_gives_float32_log_probs_near_the_exact_ones(alone):
    hidden, weight, tokens = problem(torch.bfloat16)
    values, _ = token_logprobs(hidden, weight, Targets(torch.arange(23), tokens, 1.0), 37, alone)
    assert values.dtype == torch.float32
    torch.testing.assert_close(
        values, plainly(hidden.float(), weight.float(), tokens, 1.0, 37)[0], rtol=0.02, atol=0.05
    )


def test_values_of_a_slice_go_to_their_places_and_their_gradient_comes_back_from_there(alone):
    values = torch.randn(2, 3, requires_grad=True)
    filled = over_context(values, torch.tensor([4, 0, 2]), 6, alone)
    torch.testing.assert_close(filled[:, [4, 0, 2]], values)
    assert not filled[:, [1, 3, 5]].any()
    scale = torch.randn(2, 6)
    (filled * scale).sum().backward()
    torch.testing.assert_close(values.grad, scale[:, [4, 0, 2]])


def test_a_frozen_output_layer_gets_no_gradient_and_the_hidden_states_the_same(alone):
    hidden, weight, tokens = problem(torch.float32)
    targets = Targets(torch.arange(23), tokens, temperature=0.7)
    token_logprobs(hidden, weight, targets, 37, alone)[0].sum().backward()
    expected = hidden.grad.clone()
    hidden.grad = None
    token_logprobs(hidden, weight.detach(), targets, 37, alone)[0].sum().backward()
    assert torch.equal(hidden.grad, expected)


def kept_problem(temperature):
    """Each of some tokens was drawn from a set of its own, the others from the whole vocabulary of 37."""
    hidden, weight, tokens = problem()
    sets = [sorted({int(token), *range(row % 5, 36, 9 - row % 7)}) for row, token in enumerate(tokens)]
    sets = [[] if row % 4 == 3 else each for row, each in enumerate(sets)]
    counts = np.array([len(each) for each in sets])
    kept = Kept.of(KeptSets(counts, np.array([token for each in sets for token in each])), torch.device("cpu"))
    targets = Targets(torch.arange(23), tokens, temperature, entropy_gradient=True, kept=kept)
    dropped = torch.tensor([[bool(each) and token not in each for token in range(37)] for each in sets])
    return hidden, weight, targets, dropped


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 4 * 37, 1 << 30])
def test_over_kept_sets_values_entropies_and_gradients_are_those_of_a_softmax_over_the_sets_alone(
    alone, monkeypatch, chunk_bytes
):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, targets, dropped = kept_problem(torch.linspace(0.5, 1.5, 23, dtype=torch.float64))
    ours = token_logprobs(hidden, weight, targets, 37, alone)
    logits = (hidden @ weight[:37].t() / targets.temperature[:, None]).masked_fill(dropped, -torch.inf)
    log_p = logits.log_softmax(-1)
    taken = log_p.gather(1, targets.tokens[:, None])[:, 0]
    theirs = taken, -(log_p.exp() * log_p.masked_fill(dropped, 0.0)).sum(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    scale = torch.randn(2, 23, dtype=torch.float64)
    loss = [(scale[0] * lp).sum() + (scale[1] * h).sum() for lp, h in (ours, theirs)]
    gradients = [torch.autograd.grad(x, (hidden, weight)) for x in loss]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)
    assert all(gradient.isfinite().all() for gradient in gradients[0])
