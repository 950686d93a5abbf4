"""The kernels that stand in for SGLang's on a CPU: prompt and next tokens give what the learner computes at once."""

from __future__ import annotations

import torch

from streamrl.engine import delta_net
from streamrl.learner.delta_rule import delta_rule

PROMPTS, NEXT = (5, 3), 4  # tokens of two sequences, and of each afterwards
KEYS, HEADS, KEY, VALUE, KERNEL, CHANNELS = 2, 4, 8, 6, 4, 10
SLOTS = torch.tensor([3, 1])


def test_a_prompt_and_the_tokens_behind_it_are_the_rule_over_both():
    torch.manual_seed(0)
    total = [tokens + NEXT for tokens in PROMPTS]
    q, k = ([torch.randn(t, KEYS, KEY) for t in total] for _ in range(2))
    v = [torch.randn(t, HEADS, VALUE) for t in total]
    a, b = ([torch.randn(t, HEADS) for t in total] for _ in range(2))
    decays, bias = torch.randn(HEADS), torch.randn(HEADS)
    pool = torch.randn(5, HEADS, VALUE, KEY)
    pool[SLOTS] = 0
    ends = torch.tensor([0, PROMPTS[0], sum(PROMPTS)])

    def prompts(each):
        return torch.cat([x[:t] for x, t in zip(each, PROMPTS, strict=True)])

    g, beta = delta_net.gates(decays, prompts(a), prompts(b), bias)
    given = {"q": prompts(q)[None], "k": prompts(k)[None], "v": prompts(v)[None], "g": g, "beta": beta}
    first, *_ = delta_net.extend(**given, initial_state=pool, initial_state_indices=SLOTS, cu_seqlens=ends)
    rows = [[part] for part in first[0].split(PROMPTS)]
    for token in range(NEXT):
        now = [torch.stack([x[t + token] for x, t in zip(each, PROMPTS, strict=True)]) for each in (q, k, v, a, b)]
        output = delta_net.decode(
            A_log=decays,
            dt_bias=bias,
            **dict(zip("qkv", (x[None] for x in now[:3]), strict=True)),
            a=now[3],
            b=now[4],
            initial_state_source=pool,
            initial_state_indices=SLOTS,
        )
        for row, one in zip(rows, output[0], strict=True):
            row.append(one[None])
    for index in range(2):
        g, beta = delta_net.gates(decays, a[index], b[index], bias)
        query, key = (delta_net._of_values(delta_net._unit(x[index]), HEADS)[None] for x in (q, k))
        expected, _ = delta_rule(query, key, v[index][None], g, beta)
        torch.testing.assert_close(torch.cat(rows[index]), expected[0], rtol=1e-5, atol=1e-5)


def test_a_convolution_goes_on_with_the_inputs_that_a_slot_keeps():
    torch.manual_seed(0)
    weight, states = torch.randn(CHANNELS, KERNEL), torch.randn(5, CHANNELS, KERNEL - 1)
    x = [torch.randn(CHANNELS, tokens + NEXT) for tokens in PROMPTS]
    prompts = torch.cat([row[:, :tokens] for row, tokens in zip(x, PROMPTS, strict=True)], 1)
    first = delta_net.convolve(
        prompts,
        weight,
        None,
        "silu",
        conv_states=states,
        has_initial_state=torch.tensor([False, False]),
        cache_indices=SLOTS,
        query_start_loc=torch.tensor([0, PROMPTS[0], sum(PROMPTS)]),
    )
    rows = [[part] for part in first.split(PROMPTS, 1)]
    for token in range(NEXT):
        now = torch.stack([row[:, tokens + token] for row, tokens in zip(x, PROMPTS, strict=True)])
        output = delta_net.convolve_next(now, states, weight, None, "silu", conv_state_indices=SLOTS)
        for row, one in zip(rows, output, strict=True):
            row.append(one[:, None])
    for row, whole in zip(rows, x, strict=True):
        padded = torch.nn.functional.pad(whole, (KERNEL - 1, 0))[None]
        expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=CHANNELS))[0]
        torch.testing.assert_close(torch.cat(row, 1), expected)
