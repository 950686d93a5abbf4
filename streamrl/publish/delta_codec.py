"""What changed from one run of bytes to another, as gaps and new values: small where little changed.

    word 0..255   then for every CHUNK words:   codes, values   |   gap codes, a byte each   |   new words

A gap code below 255 says how many unchanged words come before the next changed one; 255 means 255
unchanged words and no changed one. At 3% changed a bf16 weight costs 3 bytes instead of 66. Bytes are compared, not
numbers: -0.0 is not 0.0, and the result is the new run bit for bit.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from streamrl.stream.messages import Buffer

CHUNK = 1 << 20  # words that are compared at once: they and their indices stay in the processor's cache

SKIP = 255  # the code of so many unchanged words

_START = struct.Struct("<B")
_CHUNK = struct.Struct("<II")  # codes, values
_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def encode(base: np.ndarray, new: np.ndarray, word: int) -> bytes | None:
    """What `apply` needs to make `new` of `base`, uint8 [size] both; None where it would not be smaller than `new`.

    `word`: bytes of one number, 1, 2 or 4; it divides the size.
    """
    kind, limit, size = _WORDS[word], len(new), _START.size
    parts: list[bytes] = [_START.pack(word)]
    before, after = base.view(kind), new.view(kind)
    for start in range(0, len(after), CHUNK):
        values = after[start : start + CHUNK]
        changed = np.flatnonzero(before[start : start + CHUNK] != values)
        codes = _codes(changed)
        size += _CHUNK.size + len(codes) + word * len(changed)
        if size >= limit:
            return None
        parts += [_CHUNK.pack(len(codes), len(changed)), codes.tobytes(), values[changed].tobytes()]
    return b"".join(parts)


def apply(target: np.ndarray, delta: Buffer) -> None:
    """Turn `target`, uint8 [size], into what `delta` was made for, in place.

    Raises ValueError for what is no delta of this size; `target` may be changed in part by then.
    """
    try:
        kind = _WORDS[_START.unpack_from(delta)[0]]
        words, at = target.view(kind), _START.size
        for start in range(0, len(words), CHUNK):
            at = _apply_chunk(words[start : start + CHUNK], delta, at)
    except (KeyError, struct.error, ValueError) as error:
        raise ValueError(f"no delta of {len(target)} bytes: {error}") from error
    if at != len(delta):
        raise ValueError(f"{len(delta) - at} bytes behind the delta")


def _codes(changed: np.ndarray) -> np.ndarray:
    """uint8 gap codes that lead to each of the indices `changed`, int64 and ascending."""
    gaps = np.diff(changed, prepend=-1) - 1
    skips = gaps // SKIP
    if not skips.any():
        return gaps.astype(np.uint8)
    last = np.cumsum(skips + 1) - 1  # place of the code that ends each gap
    codes = np.full(len(gaps) + int(skips.sum()), SKIP, np.uint8)
    codes[last] = gaps % SKIP
    return codes


def _apply_chunk(words: np.ndarray, delta: Buffer, at: int) -> int:
    """Where the next chunk begins."""
    codes_size, values_size = _CHUNK.unpack_from(delta, at)
    at += _CHUNK.size
    codes = np.frombuffer(delta, np.uint8, codes_size, at)
    at += codes_size
    values = np.frombuffer(delta, words.dtype, values_size, at)
    ends = codes != SKIP
    steps = codes.astype(np.int64) + ends  # a skip is 255 words, a gap of n and its value n + 1
    places = (np.cumsum(steps) - 1)[ends]
    if len(places) != len(values) or (len(places) and places[-1] >= len(words)):
        raise ValueError(f"{len(places)} places and {len(values)} values in {len(words)} words")
    words[places] = values
    return at + values.nbytes
