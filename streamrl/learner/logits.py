"""Log-probs of taken tokens and entropies from logits, of models that do more than one product to make them.

`logprobs.py` does the same from hidden states, and holds no logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamrl.learner.kept import BELOW
from streamrl.learner.logprobs import Targets
from streamrl.learner.shape import CHUNK_BYTES


def logprobs_of_logits(logits: Tensor, targets: Targets, vocabulary: int) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` gives, two float32 [N], from logits [N, rows], of which the first `vocabulary` count.

    Softmaxes are made for a chunk of tokens at a time, again in the backward pass.
    """
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    parts = [
        checkpoint(_of_chunk, logits[begin : begin + size], targets, begin, vocabulary, use_reentrant=False)
        for begin in range(0, len(logits), size)
    ]
    if not parts:  # nothing is asked for, and every rank still has a gradient
        nothing = logits.float().sum(1)
        return nothing, nothing.detach()
    logprobs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, entropies if targets.entropy_gradient else entropies.detach()


def _of_chunk(logits: Tensor, targets: Targets, begin: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    part = slice(begin, begin + len(logits))
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits[:, :vocabulary].to(wide, copy=True).div_(targets.divisor(part))
    dropped = None if targets.kept is None else targets.kept.dropped(part, 0, vocabulary)
    if dropped is not None:
        peaks = scores.detach().masked_fill(dropped, -torch.inf).amax(1, keepdim=True)
        scores = (scores - peaks).masked_fill(dropped, BELOW)
    log_p = scores.log_softmax(1)
    entropies = -(log_p.exp() * log_p).sum(1)
    return log_p.gather(1, targets.tokens[part, None]).squeeze(1), entropies
