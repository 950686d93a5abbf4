"""A group's numbers in one piece of memory from the start, in the order in which they travel: encoding copies nothing.

    prompt int32 | output ids of one sample after the other, int32 | their log-probs, float32

The worker makes a request's answers in such a piece as they become arrays, and says so in `Group.arena`; a group that
was decoded lies in the frame that it came in. `encode_group` copies what does not lie so: conversations, placeholders
in the place of answers, samples of several prompts or with extras.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from streamrl.types import Arena, Sample


def answer_arrays(
    prompt_ids: np.ndarray, lengths: Sequence[int]
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The prompt int32 [P], and for each answer of T tokens its ids int32 [T] and log-probs float32 [T], to be filled.

    >>> prompt, [(ids, logprobs), _] = answer_arrays(np.array([5, 6], np.int32), [3, 1])
    >>> ids[:], logprobs[:] = [7, 8, 2], [-0.1, -0.2, -0.3]
    """
    first, tokens = len(prompt_ids), sum(lengths)
    whole = np.empty(first + 2 * tokens, np.int32)
    whole[:first] = prompt_ids
    ids, logprobs = whole[first : first + tokens], whole[first + tokens :].view(np.float32)
    ends = np.cumsum([0, *lengths]).tolist()
    pieces = itertools.pairwise(ends)
    return whole[:first], [(ids[start:end], logprobs[start:end]) for start, end in pieces]


def arena_of(samples: tuple[Sample, ...]) -> Arena | None:
    """The arena in which the numbers of these samples lie; None where they do not lie in one, or are badly formed."""
    prompt = samples[0].prompt_ids
    if any(sample.extras or sample.prompt_ids is not prompt or sample.problem() for sample in samples):
        return None
    ids, logprobs = [sample.output_ids for sample in samples], [sample.logprobs for sample in samples]
    numbers = _joined([prompt, *ids, *logprobs])
    return None if numbers is None else Arena(samples, numbers)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """The uint8 [size] that these arrays [T] fill one behind the other; None where they do not lie so."""
    arrays = [array for array in arrays if len(array)]
    whole = arrays[0].base if arrays else None
    if not isinstance(whole, np.ndarray) or not whole.flags.c_contiguous:
        return None
    if any(array.base is not whole or array.strides != (array.itemsize,) for array in arrays):
        return None
    start = end = _address(arrays[0])
    for array in arrays:
        if _address(array) != end:
            return None
        end += array.nbytes
    offset = start - _address(whole)
    return whole.reshape(-1).view(np.uint8)[offset : offset + end - start]


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
