"""KL(pi || pi_ref) over the whole vocabulary, straight from hidden states, without ever holding all logits.

    reference scores ──last hidden states, on the host──▶ the policy's pass: both products, chunk by chunk ──▶ KL [N]

Of the reference no logits are kept: its hidden states at the targets, and this rank's rows of its output layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.learner.kept import BELOW
from streamrl.learner.logprobs import _add_product, _logits, _row_peak, _Shard
from streamrl.learner.shape import CHUNK_BYTES

if TYPE_CHECKING:
    from streamrl.learner.logprobs import Targets


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceStates:
    """What the reference policy says of the whole vocabulary at the n targets of a micro batch in this rank's slice."""

    hidden: Tensor  # [n, hidden], on the host
    weight: Tensor  # [rows, hidden], this tensor-parallel rank's rows of its output layer, pads included


def full_kl(
    hidden: Tensor, weight: Tensor, reference: ReferenceStates, targets: Targets, *, vocabulary: int, group: Any
) -> Tensor:
    """The divergence at the targets, nats: float32 or float64 [n], with the gradient of the policy.

    hidden, weight, targets, vocabulary, group: as `token_logprobs` has them. Logits of both policies are divided by the
    temperature, and both are over a target's kept set where it has one.
    """
    first = group.rank() * weight.size(0)
    rows = max(0, min(weight.size(0), vocabulary - first))
    chunk = max(1, CHUNK_BYTES // (8 * max(1, weight.size(0))))  # of all ranks: they add up chunk by chunk
    theirs = ReferenceStates(reference.hidden.to(hidden.device, non_blocking=True), reference.weight[:rows])
    return _FullKl.apply(hidden, weight[:rows], theirs, _Asked(targets, _Shard(first, rows, group, chunk)))


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    targets: Targets
    shard: _Shard

    def logits(self, hidden: Tensor, weight: Tensor, part: slice) -> Tensor:
        return _logits(hidden[part], weight, self.targets.divisor(part))


class _FullKl(torch.autograd.Function):
    """With p = softmax(z), q that of the reference: d KL / dz = p (log p - log q - KL)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, reference: ReferenceStates, asked: _Asked) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        kl, ours, theirs = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for begin in range(0, len(hidden), asked.shard.chunk):
            part = slice(begin, begin + asked.shard.chunk)
            z = asked.logits(hidden, weight, part)
            y = asked.logits(reference.hidden, reference.weight, part)
            dropped = asked.shard.dropped(asked.targets, part)
            if dropped is not None:
                z.masked_fill_(dropped, -torch.inf)
                y.masked_fill_(dropped, -torch.inf)
            peaks = asked.shard.reduce(torch.stack([_row_peak(z), _row_peak(y)]), dist.ReduceOp.MAX)
            z -= peaks[0, :, None]
            y -= peaks[1, :, None]
            if dropped is not None:
                z.masked_fill_(dropped, BELOW)
                y.masked_fill_(dropped, BELOW)
            exponents = z.exp()
            difference = z.sub_(y)
            sums = torch.stack([exponents.sum(1), y.exp_().sum(1), exponents.mul_(difference).sum(1)])
            total, other_total, weighted = asked.shard.reduce(sums, dist.ReduceOp.SUM)
            kl[part] = weighted / total - total.log() + other_total.log()
            ours[part], theirs[part] = total.log() + peaks[0], other_total.log() + peaks[1]
        ctx.save_for_backward(hidden, weight, ours, theirs, kl)
        ctx.reference, ctx.asked = reference, asked
        return kl

    @staticmethod
    def backward(ctx: Any, kl_grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, ours, theirs, kl = ctx.saved_tensors
        reference, asked = ctx.reference, ctx.asked
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=kl_grad.dtype) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden), asked.shard.chunk):
            part = slice(begin, begin + asked.shard.chunk)
            log_p = asked.logits(hidden, weight, part).sub_(ours[part, None])
            log_q = asked.logits(reference.hidden, reference.weight, part).sub_(theirs[part, None])
            if (dropped := asked.shard.dropped(asked.targets, part)) is not None:
                log_p.masked_fill_(dropped, BELOW)
                log_q.masked_fill_(dropped, BELOW)
            slope = (log_p - log_q).sub_(kl[part, None])
            grad = log_p.exp_().mul_(slope).mul_(kl_grad[part, None])
            grad = grad.div_(asked.targets.divisor(part)).to(hidden.dtype)
            hidden_grad[part] = grad @ weight
            if weight_grad is not None:
                _add_product(weight_grad, grad, hidden[part])
        asked.shard.reduce(hidden_grad, dist.ReduceOp.SUM)  # each rank saw its share of the vocabulary
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None
