"""The experts that a server routed each token to, as the learner's router replay takes them.

SGLang gives one array for prompt and output, [P + T - 1, layers, top_k]: the last output token is never read.
`Sample.extras` has columns of the output's length alone, so the prompt's part is folded into rows of equal length:

    routed_experts         int16 [T, layers * top_k]          of each output token when it is read; -1 for the last
    prompt_routed_experts  int16 [T, rows, layers * top_k]    the prompt's P rows one after the other, -1 behind
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from streamrl.types import PolicyVersion, Sample

OUTPUT, PROMPT = "routed_experts", "prompt_routed_experts"

UNKNOWN = -1


def routing_columns(encoded: str, prompt: int, output: int) -> dict[str, np.ndarray]:
    """The columns of an answer of `output` tokens to a prompt of `prompt` tokens; none for an empty answer.

    encoded: int32 [P + T - 1, layers, top_k] in base64. Raises ValueError where its size does not fit the tokens.
    """
    if output == 0:
        return {}
    read = prompt + output - 1
    try:
        experts = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32).astype(np.int16)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed experts that are no int32 numbers in base64: {error}") from error
    if experts.size == 0 or experts.size % read:
        raise ValueError(f"{experts.size} routed experts for {read} tokens that were read")
    experts = experts.reshape(read, -1)
    return {OUTPUT: _filled(experts[prompt:], (output,)), PROMPT: _filled(experts[:prompt], _folded(prompt, output))}


def shared_prompt_routing(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples of one group with the routing of a prompt on the first alone of those that share it.

    Those are the samples with the same prompt and the same newest version: an update in between (`retract`) makes
    the server read the prompt again, with other weights.
    """
    seen: set[tuple[bytes, PolicyVersion]] = set()
    return tuple(_without_seen(sample, seen) for sample in samples)


def _without_seen(sample: Sample, seen: set[tuple[bytes, PolicyVersion]]) -> Sample:
    if PROMPT not in sample.extras:
        return sample
    shared = sample.prompt_ids.tobytes(), sample.spans[-1].version
    if shared not in seen:
        seen.add(shared)
        return sample
    return replace(sample, extras={name: column for name, column in sample.extras.items() if name != PROMPT})


def _folded(prompt: int, output: int) -> tuple[int, int]:
    return output, math.ceil(prompt / output)


def _filled(experts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Experts [n, width] in an array of `shape` rows, UNKNOWN behind them."""
    rows = np.full((math.prod(shape), experts.shape[1]), UNKNOWN, np.int16)
    rows[: len(experts)] = experts
    return rows.reshape(*shape, -1)
