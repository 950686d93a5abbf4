"""Log-probs of taken tokens and entropies, straight from hidden states, without ever holding all logits.

The output layer, the temperature, the softmax and both results are one autograd function: it works in
chunks of tokens, keeps one number a token for the backward pass, and computes the logits there again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.learner.kept import BELOW, Kept
from streamrl.learner.shape import CHUNK_BYTES

if TYPE_CHECKING:
    from streamrl.learner.full_kl import ReferenceStates


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Which tokens of a packed row are asked for: the log-prob of a token is read one position before it.

    Example: the row [5, 6, 7] with prompt [5, 6] and output [7, 2] has `positions=[1, 2], tokens=[7, 2]`. Of a row
    that is cut over context-parallel ranks, each rank has the n targets whose hidden state is in its slice; if the
    slice here has that of token 2 alone, it is `positions=[...], tokens=[2], places=[1], total=2`.
    """

    positions: Tensor  # int64 [n], places in this rank's slice whose hidden state predicts the token
    tokens: Tensor  # int64 [n]
    temperature: float | Tensor  # one for all, or float64 [n]
    entropy_gradient: bool = False  # whether the loss has an entropy term
    places: Tensor | None = None  # int64 [n], which of the row's targets these are; None: all of them, in order
    total: int = 0  # N, targets of the row; not read without places
    kept: Kept | None = None  # the sets from which the n tokens were drawn; None: all from the whole vocabulary
    reference: ReferenceStates | None = None  # where the divergence over the whole vocabulary is asked for, too

    def divisor(self, part: slice) -> float | Tensor:
        """What the logits [n, rows] of some targets are divided by: one number, or [n, 1]."""
        return self.temperature if isinstance(self.temperature, float) else self.temperature[part, None]


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Targets, vocabulary: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`log softmax(hidden weight^T / temperature)` at the targets, and the entropy of each distribution.

    hidden: [N, hidden], a row for each target; weight: this tensor-parallel rank's rows of the output layer,
    pads included: only the first `vocabulary` rows over all ranks of `group` are part of the softmax. Of a target with
    a kept set the softmax and its entropy are over the tokens of that set alone.
    Returns two float32 [N], in nats; the entropies have a gradient only if `targets.entropy_gradient`.
    """
    first = group.rank() * weight.size(0)
    rows = max(0, min(weight.size(0), vocabulary - first))
    chunk = max(1, CHUNK_BYTES // (4 * max(1, weight.size(0))))
    return _TokenLogprobs.apply(hidden, weight, targets, _Shard(first, rows, group, chunk))


def over_context(values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """The values [..., N] of all targets of a row, from those [..., n] at `places` that this rank's slice has.

    Each rank of `group` goes on to compute the same loss of whole samples, so that in the backward pass it keeps
    the gradient of its own places, and nothing is summed.
    """
    return _OverContext.apply(values, places, total, group)


class _OverContext(torch.autograd.Function):
    """Fill in the own places, add up over the ranks; backward: take the own places."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        filled = values.new_zeros(*values.shape[:-1], total).index_copy_(-1, places, values)
        dist.all_reduce(filled, group=group)
        return filled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(-1, places), None, None, None


@dataclass(frozen=True, slots=True)
class _Shard:
    first: int  # first token id of this rank's rows
    rows: int  # without pads
    group: dist.ProcessGroup  # tensor-parallel
    chunk: int  # tokens

    def reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def logits(self, hidden: Tensor, weight: Tensor, temperature: float | Tensor) -> Tensor:
        """The logits of this rank's rows, [n, rows]. Their pads are multiplied as well, as servers do: where there are
        fewer than 16 rows, the product takes its sums in another order on a CPU."""
        return _logits(hidden, weight, temperature)[:, : self.rows]

    def dropped(self, targets: Targets, part: slice) -> Tensor | None:
        """Which of this rank's rows no draw of these targets could give, bool [n, rows]; None: each could."""
        return None if targets.kept is None else targets.kept.dropped(part, self.first, self.rows)

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens have their row on this rank (bool [n]), and where (int64 [n], 0 for the others)."""
        local = tokens - self.first
        here = (local >= 0) & (local < self.rows)
        return here, local.where(here, 0)


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps hidden states, weight and two numbers a token: log-sum-exp and entropy.

    With p = softmax(z), z = hidden weight^T / T: d logprob / dz = onehot - p, and
    d entropy / dz = -p (log p + entropy).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Targets, shard: _Shard) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, log_sums = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for begin in range(0, len(hidden), shard.chunk):
            part = slice(begin, begin + shard.chunk)
            logits = shard.logits(hidden[part], weight, targets.divisor(part))
            dropped = shard.dropped(targets, part)
            if dropped is not None:
                logits.masked_fill_(dropped, -torch.inf)
            peak = shard.reduce(_row_peak(logits), dist.ReduceOp.MAX)
            logits -= peak[:, None]
            if dropped is not None:
                logits.masked_fill_(dropped, BELOW)
            here, local = shard.locate(targets.tokens[part])
            taken = _pick(logits, local).where(here, 0)
            exponents = logits.exp()
            sums = torch.stack([exponents.sum(1), exponents.mul_(logits).sum(1), taken])
            total, weighted, taken = shard.reduce(sums, dist.ReduceOp.SUM)
            log_total = total.log()
            logprobs[part] = taken - log_total
            entropy[part] = log_total - weighted / total
            log_sums[part] = log_total + peak
        ctx.save_for_backward(hidden, weight, log_sums, entropy)
        ctx.targets, ctx.shard = targets, shard
        if not targets.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, logprobs_grad: Tensor, entropy_grad: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, log_sums, entropy = ctx.saved_tensors
        targets, shard = ctx.targets, ctx.shard
        hidden_grad = torch.empty_like(hidden)
        # Under LoRA the output layer is frozen.
        weight_grad = torch.zeros_like(weight, dtype=logprobs_grad.dtype) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden), shard.chunk):
            part = slice(begin, begin + shard.chunk)
            log_p = shard.logits(hidden[part], weight, targets.divisor(part)).sub_(log_sums[part, None])
            if (dropped := shard.dropped(targets, part)) is not None:
                log_p.masked_fill_(dropped, BELOW)
            scale = logprobs_grad[part, None]
            if targets.entropy_gradient and entropy_grad is not None:
                scale = scale + entropy_grad[part, None] * (log_p + entropy[part, None])
            grad = log_p.exp_().mul_(scale).neg_()
            here, local = shard.locate(targets.tokens[part])
            if shard.rows:
                grad.scatter_add_(1, local[:, None], logprobs_grad[part].where(here, 0)[:, None])
            grad = grad.div_(targets.divisor(part)).to(hidden.dtype)
            hidden_grad[part] = grad @ weight[: shard.rows]
            if weight_grad is not None:
                _add_product(weight_grad[: shard.rows], grad, hidden[part])
        # Each rank saw its share of the vocabulary; the hidden states are the same on all.
        shard.reduce(hidden_grad, dist.ReduceOp.SUM)
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None


def _add_product(weight_grad: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """weight_grad [rows, hidden] += grad^T hidden, in the dtype of the sum."""
    if weight_grad.dtype == grad.dtype:
        weight_grad.addmm_(grad.t(), hidden)
    else:
        weight_grad += grad.t() @ hidden


def _logits(hidden: Tensor, weight: Tensor, temperature: float | Tensor) -> Tensor:
    """At least float32 [n, rows], a fresh tensor: the product in the model's dtype, as the generator computes it."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden @ weight.t()).to(wide).div_(temperature)


def _row_peak(logits: Tensor) -> Tensor:
    if logits.size(1) == 0:  # a rank whose rows are pads alone
        return logits.new_full((len(logits),), -torch.inf)
    return logits.amax(1)


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    """logits[i, columns[i]]; zeros on a rank whose rows are pads alone."""
    if logits.size(1) == 0:
        return logits.new_zeros(len(logits))
    return logits.gather(1, columns[:, None]).squeeze(1)
