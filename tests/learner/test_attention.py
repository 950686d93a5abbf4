"""The core attention of a packed row against the slow and obvious way."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from streamrl.learner.attention import WHOLE, PackedAttention, Slice, block_segments, describe_row, is_varlen

HEADS, GROUPS, DIM = 6, 2, 8


def attention() -> PackedAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM
    )
    return PackedAttention(config, 1, None, "self")


def by_segment(query, key, value, segments):
    """Each segment by itself, with explicit scores in the order of the definition."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    output = []
    for start, length, prefix_start, prefix in segments.tolist():
        seen = [*range(prefix_start, prefix_start + prefix), *range(start, start + length)]
        scores = torch.einsum("qhd,khd->hqk", query[start : start + length], key[seen]) / DIM**0.5
        visible = torch.ones(length, prefix + length).tril(prefix).bool()
        scores = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        output.append(torch.einsum("hqk,khd->qhd", scores, value[seen]))
    return torch.cat(output).flatten(1)


def random_segments(kind: str) -> np.ndarray:
    random = np.random.default_rng(0)
    if kind == "many short":
        lengths = random.integers(1, 9, 300)
    elif kind == "a few uneven":
        lengths = np.array([200, 3, 150, 1, 40, 200])
    else:
        return shared_prompts(random)
    starts = np.cumsum(lengths) - lengths
    return np.stack([starts, lengths, 0 * starts, 0 * starts], 1)


def shared_prompts(random: np.random.Generator) -> np.ndarray:
    segments, end = [], 0
    for _ in range(9):
        prompt, prompt_length = end, int(random.integers(1, 70))
        segments.append([prompt, prompt_length, 0, 0])
        end += prompt_length
        for length in random.integers(1, 60, 7).tolist():
            segments.append([end, length, prompt, prompt_length])
            end += length
    return np.array(segments)


@pytest.mark.parametrize("kind", ["many short", "a few uneven", "shared prompts"])
def test_a_packed_row_equals_its_segments_one_by_one_in_values_and_gradients(kind):
    segments = random_segments(kind)
    torch.manual_seed(0)
    total = int(segments[:, 1].sum())
    tensors = [
        torch.randn(total, heads, DIM, dtype=torch.float64, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)
    ]
    packed = attention()(*tensors, packed_seq_params=describe_row(segments, torch.device("cpu")))
    expected = by_segment(*tensors, segments)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((packed * weight).sum(), tensors)
    theirs = torch.autograd.grad((expected * weight).sum(), tensors)
    torch.testing.assert_close(packed, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["many short", "a few uneven", "shared prompts"])
def test_without_pads_every_block_has_segments_of_one_length_and_the_row_the_same_values(kind):
    segments = random_segments(kind)
    whole = np.concatenate([segments, np.zeros_like(segments[:, :1])], 1)
    blocks = block_segments(whole, padded=False)
    assert sorted(map(tuple, np.concatenate(blocks).tolist())) == sorted(map(tuple, whole.tolist()))
    assert all(len({(length, prefix) for _, length, _, prefix, _ in block.tolist()}) == 1 for block in blocks)
    assert len(blocks) == len({(length, prefix) for _, length, _, prefix in segments.tolist()})
    total = int(segments[:, 1].sum())
    tensors = [torch.randn(total, heads, DIM, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS)]
    rows = [describe_row(segments, torch.device("cpu"), padded=padded) for padded in (True, False)]
    padded, plain = (attention()(*tensors, packed_seq_params=row) for row in rows)
    torch.testing.assert_close(plain, padded, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["many short", "a few uneven", "shared prompts"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_slices_of_a_row_together_give_what_the_whole_row_gives(kind, ranks):
    segments = random_segments(kind)
    end, pads = int(segments[:, 1].sum()), -int(segments[:, 1].sum()) % (2 * ranks)
    if pads:
        segments = np.concatenate([segments, [[end, pads, 0, 0]]])
    torch.manual_seed(0)
    query, key, value = (torch.randn(end + pads, heads, DIM, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS))
    expected = by_segment(query, key, value, segments)
    parts = [Slice(ranks, rank) for rank in range(ranks)]
    gathered = np.concatenate([part.tokens(end + pads) for part in parts])
    for part in parts:
        mine = part.tokens(end + pads)
        row = describe_row(segments, torch.device("cpu"), part)
        ours = attention()(query[mine], key[gathered], value[gathered], packed_seq_params=row)
        torch.testing.assert_close(ours, expected[mine], rtol=1e-10, atol=1e-12)
        assert row.key_ends[-1] == len(row.key_tokens)


@pytest.mark.parametrize("part", [WHOLE, Slice(2, 1)])
def test_a_long_row_for_the_varlen_kernel_takes_nothing_quadratic(part):
    prompt, answers, length = 8192, 8, 1024
    segments = np.array([[0, prompt, 0, 0], *([prompt + n * length, length, 0, prompt] for n in range(answers))])
    quadratic, seen = answers * length * (prompt + length), prompt + answers * (prompt + length)
    peaks = []
    for varlen in (True, False):
        tracemalloc.start()
        row = describe_row(segments, torch.device("cpu"), part, varlen=varlen)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (row.blocks is None) is varlen
    assert peaks[0] < 64 * seen < quadratic / 4 < peaks[1]


def test_a_row_is_described_for_the_attention_that_reads_it():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert is_varlen(gpu, torch.bfloat16)
    assert is_varlen(gpu, torch.float16)
    assert not is_varlen(gpu, torch.float32)
    assert not is_varlen(cpu, torch.bfloat16)
    query, key = torch.zeros(3, HEADS, DIM), torch.zeros(3, GROUPS, DIM)
    packed = describe_row(np.array([[0, 3, 0, 0]]), cpu, varlen=True)
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu has no varlen attention"):
        attention()(query, key, key, packed_seq_params=packed)


def test_a_slice_is_two_mirrored_pieces_of_the_row():
    assert Slice(2, 0).tokens(8).tolist() == [0, 1, 6, 7]
    assert Slice(2, 1).tokens(8).tolist() == [2, 3, 4, 5]
    assert Slice(2, 1).gathered(8).tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    # A sequence of 5 tokens and one of 3: rank 0 has the begin of the first and the end of the second.
    segments = np.array([[0, 5, 0, 0], [5, 3, 0, 0]])
    assert Slice(2, 0).cut(segments).tolist() == [[0, 2, 0, 0, 0], [6, 2, 0, 0, 1]]


def test_a_plain_batch_is_causal():
    torch.manual_seed(0)
    query, key, value = (torch.randn(10, 2, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    whole = attention()(query, key, value)
    alone = by_segment(query[:, 1], key[:, 1], value[:, 1], np.array([[0, 10, 0, 0]]))
    torch.testing.assert_close(whole[:, 1], alone, rtol=1e-5, atol=1e-6)


def test_many_short_segments_take_few_calls_and_uneven_long_ones_do_not_pad_much():
    assert len(block_segments(Slice().cut(random_segments("many short")))) == 1
    blocks = block_segments(Slice().cut(random_segments("a few uneven")))
    padded = sum(len(block) * block[:, 1].max() ** 2 for block in blocks)
    assert padded < 1.5 * sum(int((block[:, 1] ** 2).sum()) for block in blocks) + len(blocks) * 2**16
    assert sorted(np.concatenate(blocks)[:, 0].tolist()) == sorted(random_segments("a few uneven")[:, 0].tolist())
