"""The rules that look at a whole step, over all micro batches of all data-parallel ranks.

scores of this rank ──gather──▶ all tokens of the step ──whole_step.select──▶ this rank's part, by micro batch
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from streamrl.algo import whole_step
from streamrl.algo.whole_step import Selection, StepTokens
from streamrl.config.algo import AlgoConfig
from streamrl.learner.packing import MicroBatch


def select(
    micro_batches: Sequence[MicroBatch],
    scores: Sequence[Tensor],
    taught: Sequence[Tensor | None],
    advantages: Sequence[Tensor] | None,
    *,
    seed: int,
    config: AlgoConfig,
) -> list[Selection]:
    """What the rules of `config` take of each micro batch.

    micro_batches: all of this rank and step, of every mini batch; scores: float32 [N] of each, log-probs under
    the weights that the step starts from; taught: those under the teacher, None without one; advantages:
    float32 [N] of each, in place of the micro batch's own; seed: of this step's draw. Collective over the data-parallel
    group, on the ranks that have the scores: those of the last pipeline stage. Every rank sees all tokens, about 32
    bytes each, and decides alike.
    """
    group = parallel_state.get_data_parallel_group()
    device = scores[0].device

    def joined(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    lengths = [len(score) for score in scores]
    counts = _counts(sum(lengths), device, group)
    fields = {
        "scores": torch.cat(list(scores)),
        "behaviour": joined([micro.behaviour for micro in micro_batches]),
        "advantages": (
            torch.cat(list(advantages)) if advantages else joined([micro.advantages for micro in micro_batches])
        ),
        "staleness": joined([micro.staleness for micro in micro_batches]),
        "place": joined([micro.place for micro in micro_batches]),
    }
    if config.distils:
        fields["teacher"] = torch.cat([word for word in taught if word is not None])
    tokens = StepTokens(**{name: _gathered(field, counts, group) for name, field in fields.items()})
    selection = whole_step.select(tokens, seed, config)
    start = sum(counts[: group.rank()])
    ends = list(accumulate(lengths, initial=start))

    def part(picked: Tensor | None, begin: int, end: int) -> Tensor | None:
        return None if picked is None else picked[begin:end]

    return [
        Selection(outliers=part(selection.outliers, *bounds), covariant=part(selection.covariant, *bounds))
        for bounds in pairwise(ends)
    ]


def _counts(own: int, device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """The number of tokens of every rank of the group."""
    counts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    counts[group.rank()] = own
    dist.all_reduce(counts, group=group)
    return counts.tolist()


def _gathered(field: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """The field of every rank, one behind the other: [sum of counts]. Ranks may have different numbers of tokens."""
    padded = field.new_zeros(max(counts))
    padded[: len(field)] = field
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
