"""The scan of Mamba-2 by chunks, against one token after another; rows of weights by groups of heads."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from two_rules import assert_same

from streamrl.learner import mamba_scan
from streamrl.learner.mamba_shape import CHUNK
from streamrl.learner.mapping import by_group

COUNT, TOKENS, HEADS, GROUPS, WIDTH, STATE = 2, 2 * CHUNK + 5, 6, 2, 5, 7


def drawn() -> list[torch.Tensor]:
    """Value, step, rate, write, read, state."""
    torch.manual_seed(0)
    value = torch.randn(COUNT, TOKENS, HEADS, WIDTH, dtype=torch.float64)
    step = torch.rand(COUNT, TOKENS, HEADS, dtype=torch.float64)
    rate = -torch.rand(HEADS, dtype=torch.float64)
    write, read = (torch.randn(COUNT, TOKENS, GROUPS, STATE, dtype=torch.float64) for _ in range(2))
    state = torch.randn(COUNT, HEADS, WIDTH, STATE, dtype=torch.float64)
    return [x.requires_grad_() for x in (value, step, rate, write, read, state)]


def token_by_token(*given):
    value, step, rate, write, read, state = given
    write, read = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (write, read))
    outputs = []
    for token in range(value.size(1)):
        kept = (rate * step[:, token]).exp()[..., None, None] * state
        state = kept + torch.einsum("nh,nhp,nhs->nhps", step[:, token], value[:, token], write[:, token])
        outputs.append(torch.einsum("nhps,nhs->nhp", state, read[:, token]))
    return torch.stack(outputs, 1), state


def test_the_scan_by_chunks_is_the_scan_token_by_token_in_values_and_gradients():
    assert_same(mamba_scan.scan, token_by_token, drawn)


def test_a_token_of_step_0_leaves_the_state_as_it_is():
    value, step, rate, write, read, state = drawn()
    silent = torch.zeros_like(step)
    silent[:, :10] = 1
    _, after = mamba_scan.scan(value, step * silent, rate, write, read, state)
    _, short = mamba_scan.scan(*(x[:, :10] for x in (value, step)), rate, *(x[:, :10] for x in (write, read)), state)
    torch.testing.assert_close(after, short)


def test_decays_that_no_float32_holds_leave_what_is_near():
    """A token sees itself and the one before whatever was forgotten earlier in its chunk."""
    value, step, rate, write, read, _ = (x.detach().float() for x in drawn())
    step[:, : CHUNK // 2], rate[:] = 100.0, -10.0
    outputs, _ = mamba_scan.scan(value, step, rate, write, read)
    exact, _ = token_by_token(*(x.double() for x in (value, step, rate, write, read)), torch.zeros(1).double())
    torch.testing.assert_close(outputs.double(), exact, rtol=1e-4, atol=1e-4)


def test_the_kernel_is_asked_for_the_same(monkeypatch):
    """By its signature: the kernel itself needs a GPU."""

    def kernel(*given, chunk_size, D=None, initial_states=None, return_final_states=False, dt_softplus=False):
        assert return_final_states
        assert D is None
        assert not dt_softplus
        return token_by_token(*given, initial_states)

    module = ModuleType("mamba_ssm.ops.triton.ssd_combined")
    module.mamba_chunk_scan_combined = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    mamba_scan._kernel.cache_clear()
    given = drawn()
    for ours, theirs in zip(mamba_scan.by_kernel(mamba_scan._kernel(), *given), mamba_scan.scan(*given), strict=True):
        torch.testing.assert_close(ours, theirs)
    mamba_scan._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, module.__name__, None)
    assert mamba_scan._kernel() is None
    mamba_scan._kernel.cache_clear()


def test_rows_of_a_group_are_together_and_every_rank_has_a_slice_of_the_whole():
    cut = by_group(lambda _: (4, 2), lambda _: 2).of(None)
    (whole,) = [torch.arange(6)]
    joined = cut.join(None, [whole])
    assert joined.tolist() == [0, 1, 4, 2, 3, 5]
    assert torch.equal(cut.split(None, joined)[0], whole)
    parts = [cut.join(None, [cut.piece(whole, rank, 2)]) for rank in range(2)]
    assert torch.equal(torch.cat(parts), joined)
    assert torch.equal(cut.whole(None, parts)[0], whole)
