"""The divergence over the whole vocabulary from hidden states, against a loop over its entries in float64."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from streamrl.learner.full_kl import ReferenceStates, full_kl
from streamrl.learner.logprobs import Targets

TOKENS, WIDTH, VOCABULARY, PADDED = 12, 5, 19, 24


class Alone:
    """The process group of a process that is alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def full_kl_differences(seed: int) -> tuple[float, float, Counter[str]]:
    """Largest difference of values and of gradients, by hidden states and weights; in how many entries p is above q."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    hidden, weight = normal(TOKENS, WIDTH).requires_grad_(), normal(PADDED, WIDTH).requires_grad_()
    reference = ReferenceStates(normal(TOKENS, WIDTH), normal(PADDED, WIDTH))
    temperature = 0.5 + torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    targets = Targets(torch.arange(TOKENS), torch.zeros(TOKENS, dtype=torch.int64), temperature)
    scale = normal(TOKENS)
    ours = full_kl(hidden, weight, reference, targets, vocabulary=VOCABULARY, group=Alone())
    theirs, counts = [], Counter({"p above q": 0, "p below q": 0})
    for token in range(TOKENS):
        p = _probabilities(hidden[token], weight, temperature[token])
        q = _probabilities(reference.hidden[token], reference.weight, temperature[token])
        theirs.append(sum((a * torch.log(a / b) for a, b in zip(p, q, strict=True)), torch.zeros(())))
        for a, b in zip(p, q, strict=True):
            counts["p above q" if a > b else "p below q"] += 1
    expected = torch.stack(theirs)
    gradients = [torch.autograd.grad((scale * each).sum(), (hidden, weight)) for each in (ours, expected)]
    pairs = list(zip(*gradients, strict=True))
    return _largest(ours.detach(), expected.detach()), max(_largest(*pair) for pair in pairs), counts


def _probabilities(hidden: Tensor, weight: Tensor, temperature: Tensor) -> list[Tensor]:
    logits = [(row * hidden).sum() / temperature for row in weight[:VOCABULARY]]
    total = sum((torch.exp(each) for each in logits), torch.zeros(()))
    return [torch.exp(each) / total for each in logits]


def _largest(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
