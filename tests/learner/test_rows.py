"""Rows for Transformer Engine's layers under context parallelism: each sequence is padded and cut by itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learner_parts import make_batch

from streamrl.learner.attention import Slice
from streamrl.learner.model import LayerChoice
from streamrl.learner.packing import MicroBatch, Packing, plan_batch
from streamrl.learner.rows import Row, RowMaker, sequence_multiple
from streamrl.sampling_columns import KeptSets

BUDGET = 64
LAYERS, TOP_K, EXPERTS = 2, 2, 5
ENGINE = LayerChoice("transformer_engine", "")
CASES = [(2, 1), (2, 2), (3, 1)]  # context-parallel ranks, tensor-parallel ones with sequence parallelism


def micro_batches(ranks: int) -> list[MicroBatch]:
    """Packed rows of several sequences each, with a routing that differs from token to token."""
    packing = Packing(ranks=1, budget=BUDGET, share_prompts=False, sequence_multiple=sequence_multiple(ranks, ENGINE))
    batch = make_batch(groups=3)
    (made,) = plan_batch(batch, [0.0] * len(batch.samples), packing)
    random = np.random.default_rng(0)
    shape = (LAYERS, TOP_K)
    return [
        replace(
            micro,
            routed_experts=random.integers(0, EXPERTS, (len(micro.ids), *shape)).astype(np.int16),
            kept=KeptSets(counts := random.integers(1, 4, len(micro.tokens)), np.arange(counts.sum())),
        )
        for micro in made
    ]


def maker(ranks: int, rank: int, tensor: int) -> RowMaker:
    moe = SimpleNamespace(top_k=TOP_K, experts=EXPERTS)
    shape: Any = SimpleNamespace(moe=moe, layers=LAYERS)
    return RowMaker(
        shape=shape,
        part=Slice(ranks, rank),
        multiple=2 * ranks * tensor,
        sequence_multiple=sequence_multiple(ranks, ENGINE),
        one_length=False,
        fixed=0,
        engine=True,
        varlen=False,
        padded=True,
        entropy_gradient=False,
        device=torch.device("cpu"),
    )


def sequences(rows: list[Row], of_rank: list[np.ndarray]) -> list[np.ndarray]:
    """What the ranks' slices make together, sequence by sequence, as Transformer Engine's kernel reads them."""
    ranks, found, start = len(rows), [], 0
    for length in rows[0].packed.cu_seqlens_q.diff().tolist():
        own = length // ranks
        first, last = zip(*(np.split(each[start : start + own], 2) for each in of_rank), strict=True)
        found.append(np.concatenate([*first, *last[::-1]]))
        start += own
    assert start == len(of_rank[0])
    return found


@pytest.mark.parametrize(("ranks", "tensor"), CASES)
def test_the_slices_of_all_ranks_are_the_sequences_with_pads_behind_them(ranks, tensor):
    for micro in micro_batches(ranks):
        makers = [maker(ranks, rank, tensor) for rank in range(ranks)]
        rows = [each.make(micro, each.length([micro])) for each in makers]
        assert all(row.ids.size(1) % (2 * tensor) == 0 for row in rows)
        ids = sequences(rows, [row.ids[0].numpy() for row in rows])
        experts = sequences(rows, [row.packed.routed_experts.numpy() for row in rows])
        for (start, length, *_), found, routed in zip(micro.segments, ids, experts, strict=False):
            own = slice(start, start + length)
            assert found[:length].tolist() == micro.ids[own].tolist()
            assert len(found) < length + 2 * ranks
            assert (routed[:length] == micro.routed_experts[own]).all()
            assert (routed[length:] == -1).all()
        assert len(ids) - len(micro.segments) in (0, 1)  # what fills the row


@pytest.mark.parametrize(("ranks", "tensor"), CASES)
def test_each_target_is_read_once_at_its_own_token(ranks, tensor):
    for micro in micro_batches(ranks):
        read = np.zeros(len(micro.targets), np.int64)
        for rank in range(ranks):
            made = maker(ranks, rank, tensor)
            row = made.make(micro, made.length([micro]))
            mine = row.targets.places.numpy()
            read[mine] += 1
            # A token is known by its routing as well as by its number.
            at = row.targets.positions.numpy()
            assert row.ids[0].numpy()[at].tolist() == micro.ids[micro.targets[mine]].tolist()
            assert (row.packed.routed_experts.numpy()[at] == micro.routed_experts[micro.targets[mine]]).all()
            assert row.targets.tokens.tolist() == micro.tokens[mine].tolist()
            kept = row.targets.kept
            ends = np.cumsum(micro.kept.counts)
            sets = [list(range(end - count, end)) for end, count in zip(ends, micro.kept.counts, strict=True)]
            bounds = [] if kept is None else zip(kept.ends, kept.ends[1:], strict=False)  # None: no target is here
            assert [kept.ids[start:end].tolist() for start, end in bounds] == [sets[place] for place in mine]
        assert (read == 1).all()


def test_rows_are_planned_with_the_pads_of_their_sequences():
    padded = [int((-(-micro.segments[:, 1] // 8) * 8).sum()) for micro in micro_batches(4)]
    assert max(padded) <= BUDGET
    unaware = Packing(ranks=1, budget=BUDGET, share_prompts=False)
    batch = make_batch(groups=3)
    (made,) = plan_batch(batch, [0.0] * len(batch.samples), unaware)
    assert max(int((-(-micro.segments[:, 1] // 8) * 8).sum()) for micro in made) > BUDGET


def test_local_layers_and_one_rank_need_no_pads():
    assert sequence_multiple(4, LayerChoice("local", "")) == 1
    assert sequence_multiple(1, ENGINE) == 1
