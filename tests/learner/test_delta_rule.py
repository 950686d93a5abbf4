"""The gated delta rule by chunks, and the sequences of a row that carry its state."""

from __future__ import annotations

import numpy as np
import torch
from two_rules import assert_same

from streamrl.learner.attention import describe_row
from streamrl.learner.delta_rule import CHUNK, delta_rule
from streamrl.learner.sequences import sequences_of

COUNT, TOKENS, HEADS, KEY, VALUE = 2, 2 * CHUNK + 5, 3, 8, 6


def drawn() -> list[torch.Tensor]:
    """Query, key, value, decay, beta, state."""
    torch.manual_seed(0)
    query, key = (torch.randn(COUNT, TOKENS, HEADS, KEY, dtype=torch.float64) for _ in range(2))
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    value = torch.randn(COUNT, TOKENS, HEADS, VALUE, dtype=torch.float64)
    decay, beta = (torch.rand(COUNT, TOKENS, HEADS, dtype=torch.float64) for _ in range(2))
    state = torch.randn(COUNT, HEADS, KEY, VALUE, dtype=torch.float64)
    return [x.requires_grad_() for x in (query, key, value, -decay, beta, state)]


def token_by_token(*given):
    query, key, value, decay, beta, state = given
    outputs = []
    for token in range(TOKENS):
        state = decay[:, token].exp()[..., None, None] * state
        recalled = torch.einsum("nhkv,nhk->nhv", state, key[:, token])
        written = beta[:, token].unsqueeze(-1) * (value[:, token] - recalled)
        state = state + torch.einsum("nhk,nhv->nhkv", key[:, token], written)
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, query[:, token]) / KEY**0.5)
    return torch.stack(outputs, 1), state


def test_the_rule_by_chunks_is_the_rule_token_by_token_in_values_and_gradients():
    assert_same(delta_rule, token_by_token, drawn)


def test_a_token_without_decay_and_beta_leaves_the_state_as_it_is():
    query, key, value, decay, beta, state = drawn()
    silent = torch.zeros_like(decay)
    silent[:, :10] = 1
    _, after = delta_rule(query, key, value, decay * silent, beta * silent, state)
    _, short = delta_rule(*(x[:, :10] for x in (query, key, value, decay, beta)), state)
    torch.testing.assert_close(after, short)


def test_answers_begin_with_the_state_of_their_own_prompt():
    # Prompts of 2 and 3 tokens, two answers of the first and one of the second, and a sequence without a prompt.
    segments = np.array([[0, 2, 0, 0], [2, 3, 0, 0], [5, 4, 0, 2], [9, 1, 0, 2], [10, 2, 2, 3], [12, 6, 0, 0]])
    row = describe_row(segments, torch.device("cpu"))
    blocks = sequences_of(row, torch.device("cpu"))
    assert sequences_of(row, torch.device("cpu")) is blocks
    order, behind = [], {}
    for block in blocks:
        for index, (tokens, real) in enumerate(zip(block.tokens.tolist(), block.real.tolist(), strict=True)):
            sequence = [token for token, is_real in zip(tokens, real, strict=True) if is_real]
            if block.parents is None:
                order.append(sequence)
            else:
                behind[sequence[0]] = (sequence, order[int(block.parents[index])])
    assert sorted(order) == [[0, 1], [2, 3, 4], list(range(12, 18))]
    assert behind == {5: ([5, 6, 7, 8], [0, 1]), 9: ([9], [0, 1]), 10: ([10, 11], [2, 3, 4])}
