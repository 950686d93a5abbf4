"""What tests of several packages share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

_NEW = PolicyVersion(0)


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """`make_group(group_id, attempt=0, version=..., samples=2, tokens=5)`: a plain group made from its id."""
    return _make_group


def _make_group(
    group_id: int = 0,
    *,
    attempt: int = 0,
    version: PolicyVersion = _NEW,
    samples: int = 2,
    tokens: int = 5,
    task: str = "copy",
) -> Group:
    """A plain group whose numbers follow from its id."""
    random = np.random.default_rng(group_id)
    prompt = random.integers(0, 1000, 7, dtype=np.int32)
    return Group(
        group_id=group_id,
        attempt=attempt,
        task=task,
        prompt_index=group_id,
        samples=tuple(
            Sample(
                prompt_ids=prompt,
                output_ids=random.integers(0, 1000, tokens, dtype=np.int32),
                logprobs=-random.random(tokens, dtype=np.float32),
                loss_mask=np.ones(tokens, np.bool_),
                spans=(VersionSpan(version, 0, tokens),) if tokens else (),
                reward=float(index),
                reward_parts={"exact": float(index)},
            )
            for index in range(samples)
        ),
        started=1.0,
        finished=2.0,
        worker="generator-0",
    )
