"""How a sample carries the experts that a server routed each token to: the generator writes it, the learner reads it.

`Sample.extras` has columns of the output's length alone, so the prompt's part is folded into rows of equal length:

    routed_experts         int16 [T, layers * top_k]          of each output token when it is read; -1 for the last
    prompt_routed_experts  int16 [T, rows, layers * top_k]    the prompt's P rows one after the other, -1 behind

Of the samples of a group that are routed alike, one carries the prompt's part.
"""

from __future__ import annotations

import math

import numpy as np

from streamrl.types import PolicyVersion, Sample

# Names of the two columns in `Sample.extras`.
OUTPUT, PROMPT = "routed_experts", "prompt_routed_experts"

# A prompt, the version that read it, and whether that is known for certain.
Alike = tuple[bytes, PolicyVersion, bool]

# In place of an expert's number: for this token and layer the learner's router decides.
UNKNOWN = -1


def routed_alike(sample: Sample) -> Alike:
    """What samples have in common whose prompt took the same experts: the prompt and the version that read it.

    That is the newest one: an update in between (`retract`) makes the server read the prompt again. What an update
    `in_place` has left in the cache was read by the newest version that the sample has exact tokens of.
    """
    newest = next((span for span in reversed(sample.spans) if span.exact), sample.spans[-1])
    return sample.prompt_ids.tobytes(), newest.version, newest.exact


def fold(experts: np.ndarray, prompt: int, output: int) -> dict[str, np.ndarray]:
    """Both columns of a sample, from experts int16 [P + T - 1, layers * top_k]: the last output token is never read.

    Example: a prompt of 4 tokens and an output of 3 make columns of [3, width] and [3, 2, width].
    """
    folded = (output, math.ceil(prompt / output))
    return {OUTPUT: _filled(experts[prompt:], (output,)), PROMPT: _filled(experts[:prompt], folded)}


def unfold(sample: Sample) -> np.ndarray | None:
    """The prompt's experts, int [P, layers * top_k]; None where the sample does not carry them."""
    rows = sample.extras.get(PROMPT)
    if rows is None or not len(rows):
        return None
    return rows.reshape(-1, rows.shape[-1])[: len(sample.prompt_ids)]


def _filled(experts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Experts [n, width] in an array of `shape` rows, UNKNOWN behind them."""
    rows = np.full((math.prod(shape), experts.shape[1]), UNKNOWN, np.int16)
    rows[: len(experts)] = experts
    return rows.reshape(*shape, -1)
