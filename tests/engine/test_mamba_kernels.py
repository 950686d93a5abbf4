"""What replaces SGLang's kernels of Mamba-2 and of ungated experts on CPUs, against what the learner computes."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu, softplus

from streamrl.engine import mamba_kernels
from streamrl.learner.mamba_scan import scan as scan_by_chunks

HEADS, GROUPS, WIDTH, STATE, CHANNELS, KERNEL = 4, 2, 3, 5, 6, 4
LENGTHS, SLOTS = (7, 1, 4), [3, 0, 2]  # of sequences behind one another, and their places among states
ENDS = torch.tensor([0, 7, 8, 12])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("known", [None, [True, False, True]])
def test_a_convolution_goes_on_where_its_sequence_ended(known):
    x, weight, bias = torch.randn(CHANNELS, 12), torch.randn(CHANNELS, KERNEL), torch.randn(CHANNELS)
    following, states = torch.randn(3, CHANNELS), torch.randn(4, CHANNELS, KERNEL - 1)
    before = [states[slot].clone() * bool(known and known[index]) for index, slot in enumerate(SLOTS)]
    given = mamba_kernels.convolve(
        x,
        weight,
        bias,
        activation="silu",
        conv_states=states,
        has_initial_state=None if known is None else torch.tensor(known),
        cache_indices=torch.tensor(SLOTS),
        query_start_loc=ENDS,
    )
    after = mamba_kernels.convolve_next(following, states, weight, bias, "silu", conv_state_indices=torch.tensor(SLOTS))
    pieces = zip(before, x.split(LENGTHS, 1), following, strict=True)
    whole = [torch.cat([tail, piece, last[:, None]], 1) for tail, piece, last in pieces]
    expected = [silu(conv1d(row[None], weight[:, None], bias, groups=CHANNELS))[0] for row in whole]
    torch.testing.assert_close(given, torch.cat([each[:, :-1] for each in expected], 1))
    torch.testing.assert_close(after, torch.stack([each[:, -1] for each in expected]))


@pytest.mark.parametrize("known", [False, True])
def test_a_state_goes_on_where_its_sequence_ended(known):
    x, dt = torch.randn(1, 12, HEADS, WIDTH), torch.randn(1, 12, HEADS)
    write, read = torch.randn(1, 12, GROUPS, STATE), torch.randn(1, 12, GROUPS, STATE)
    rate, skip, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)
    states, output = torch.randn(4, HEADS, WIDTH, STATE), torch.empty(1, 12, HEADS, WIDTH)
    initial = states[SLOTS].clone() if known else None
    _, ends, _ = mamba_kernels.scan(
        x,
        dt,
        rate,
        write,
        read,
        chunk_size=4,
        D=skip,
        dt_bias=bias,
        cu_seqlens=ENDS,
        initial_states=initial,
        out=output,
        state_dtype=torch.float32,
    )
    states[SLOTS] = ends
    for index, (start, end) in enumerate(zip(ENDS[:-1].tolist(), ENDS[1:].tolist(), strict=True)):
        part = slice(start, end)
        step = softplus(dt[:, part] + bias)
        state = None if initial is None else initial[index : index + 1]
        own, behind = scan_by_chunks(x[:, part], step, rate, write[:, part], read[:, part], state)
        torch.testing.assert_close(output[:, part], own + skip[:, None] * x[:, part])
        torch.testing.assert_close(ends[index : index + 1], behind)

    next_x, next_dt = torch.randn(3, HEADS, WIDTH), torch.randn(3, HEADS)
    next_write, next_read = torch.randn(3, GROUPS, STATE), torch.randn(3, GROUPS, STATE)
    given = torch.empty(3, HEADS * WIDTH)
    mamba_kernels.scan_next(
        states,
        next_x,
        next_dt[..., None].expand(-1, -1, WIDTH),
        rate[:, None, None].expand(-1, WIDTH, STATE),
        next_write,
        next_read,
        skip[:, None].expand(-1, WIDTH),
        z=None,
        dt_bias=bias[:, None].expand(-1, WIDTH),
        dt_softplus=True,
        state_batch_indices=torch.tensor(SLOTS),
        out=given,
    )
    one = (next_x[:, None], softplus(next_dt + bias)[:, None], rate, next_write[:, None], next_read[:, None])
    own, behind = scan_by_chunks(*one, ends)
    torch.testing.assert_close(given.view(3, HEADS, WIDTH), own[:, 0] + skip[:, None] * next_x)
    torch.testing.assert_close(states[SLOTS], behind)


def test_a_token_meets_its_experts_and_a_pad_none():
    x, up, down = torch.randn(5, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    weights, chosen = torch.rand(5, 2), torch.tensor([[0, 3], [3, 1], [0, 1], [1, 0], [-1, -1]])
    given = mamba_kernels.squared_relu_experts(x, weights, chosen, up, down)
    for token in range(5):
        pairs = [pair for pair in zip(weights[token], chosen[token].tolist(), strict=True) if pair[1] >= 0]
        expected = sum(weight * (down[one] @ torch.relu(up[one] @ x[token]) ** 2) for weight, one in pairs)
        torch.testing.assert_close(given[token], expected if pairs else pad(torch.zeros(0), (0, 8)))


def test_models_with_mamba_are_known_by_their_configuration(tmp_path):
    assert not mamba_kernels.has_mamba(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"mamba_num_heads": 8}))
    assert mamba_kernels.has_mamba(tmp_path)
