"""Two ways to compute one recurrence: the same values, states and gradients of all that is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rule = Callable[..., tuple[Tensor, Tensor]]  # what is given, its state last -> outputs, state


def assert_same(rule: Rule, expected: Rule, drawn: Callable[[], Sequence[Tensor]]) -> None:
    results = []
    for each in (rule, expected):
        given = drawn()
        outputs, state = each(*given)
        weights = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view_as(outputs)
        gradients = torch.autograd.grad((outputs * weights).sum() + state.sum(), given)
        results.append((outputs, state, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
