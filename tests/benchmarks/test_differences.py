"""A difference that is not finite is above every bar."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks.parity_ranks import Step
from benchmarks.random_models import largest_difference
from streamrl.algo.aggregations.base import Denominators
from streamrl.config import Config

ONE, NAN, INF = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The process group of a process that is alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_tensor_that_is_not_finite_on_either_side_differs_infinitely(broken):
    whole, names = {"a": ONE, "b": ONE, "c": ONE}, ("a", "b", "c")
    assert largest_difference(whole, whole) == 0
    for name in names:
        assert largest_difference(whole | {name: broken}, whole) == math.inf
        assert largest_difference(whole, whole | {name: broken}) == math.inf
        assert largest_difference(whole | {name: broken}, whole | {name: broken}) == math.inf


def test_a_score_that_is_not_a_number_differs_infinitely(alone):
    step = Step([], Denominators(tokens=1, rollouts=1), Config())
    step._seen = {0: ONE, 1: ONE, 2: torch.empty(0)}
    ranks = SimpleNamespace(control=alone)
    assert step.difference([ONE, ONE + 0.5, torch.empty(0)], ranks) == 0.5
    assert step.difference([ONE, NAN, torch.empty(0)], ranks) == math.inf
    assert step.difference([NAN, ONE, torch.empty(0)], ranks) == math.inf
