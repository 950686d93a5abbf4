"""The experts that a server routed each token to, from SGLang's answer to the columns of `streamrl.moe_routing`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from streamrl.moe_routing import PROMPT, Alike, fold, routed_alike
from streamrl.types import Sample


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
    return fold(experts.reshape(read, -1), prompt, output)


def shared_prompt_routing(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples of one group with the routing of a prompt on the first alone of those that are routed alike."""
    seen: set[Alike] = set()
    return tuple(_without_seen(sample, seen) for sample in samples)


def _without_seen(sample: Sample, seen: set[Alike]) -> Sample:
    if PROMPT not in sample.extras:
        return sample
    shared = routed_alike(sample)
    if shared not in seen:
        seen.add(shared)
        return sample
    return replace(sample, extras={name: column for name, column in sample.extras.items() if name != PROMPT})
