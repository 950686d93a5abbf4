"""What a learner can train: it says so in its Hello, the replay service asks for it at its door, and the learner again.

A group that is refused at the door costs its ticket an attempt. One that was accepted, by a service that did not know
the learner yet or before the limits changed, is quarantined by the learner (`learner/quarantine.py`).
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from streamrl import sampling_columns
from streamrl.types import Group, Sample

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one learner.

    Example: `Limits(vocabulary=151936, tokens=4096)`.
    """

    vocabulary: Positive  # token ids are below it
    tokens: Positive  # of a prompt and its answer up to the token before the last trained one: one row of the learner


def untrainable(group: Group, limits: Limits) -> str | None:
    """Why a learner with these limits cannot train a group; None where it can. A sample without a trained token, as
    a placeholder is, needs nothing but known token ids."""
    if not _known_ids(group, limits.vocabulary):
        return f"a token id is not below the vocabulary of {limits.vocabulary}"
    for index, sample in enumerate(group.samples):
        if sample.extras and (problem := sampling_columns.problem(sample, limits.vocabulary)) is not None:
            return f"sample {index}: {problem}"
        answer = answer_length(sample)
        if answer is None:
            continue
        if not len(sample.prompt_ids):
            return f"sample {index} has an empty prompt: nothing predicts its first token"
        if len(sample.prompt_ids) + answer > limits.tokens:
            length = len(sample.prompt_ids) + answer
            return f"sample {index} has {length} tokens, learner.tokens_per_micro_batch={limits.tokens}"
        if not _is_finite(sample):
            return f"sample {index} has a trained token whose log-prob is not finite"
    return None


def answer_length(sample: Sample) -> int | None:
    """Output tokens that a learner reads: those before the last trained one. None without a trained token.

    The log-prob of output token t is read at the token before t, so that nothing later is needed.
    """
    mask = sample.loss_mask
    if len(mask) and mask[-1]:  # the usual case
        return len(mask) - 1
    trained = np.flatnonzero(mask)
    return int(trained[-1]) if len(trained) else None


def _is_finite(sample: Sample) -> bool:
    """Every trained token has a finite log-prob. A loss would leave out one that has not (`tokens/dropped`), but a
    server that says so of a token that it drew does not compute what it should: the group is generated again.
    """
    if math.isfinite(sample.logprobs.sum(dtype=np.float64)):  # the usual case, and much the cheaper one
        return True
    return bool(np.isfinite(sample.logprobs[sample.loss_mask]).all())


def _known_ids(group: Group, vocabulary: int) -> bool:
    """Negative ids are no smaller than the others here: they are read as unsigned."""
    seen: np.ndarray | None = None
    for sample in group.samples:
        for ids in (sample.output_ids, None if sample.prompt_ids is seen else sample.prompt_ids):
            if ids is not None and len(ids) and ids.view(np.uint32).max() >= vocabulary:
                return False
        seen = sample.prompt_ids
    return True
