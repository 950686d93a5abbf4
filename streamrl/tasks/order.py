"""Which prompt an index means: epochs, their permutations, and the part that is held out.

All functions are pure: the place in an epoch is the index itself, so that a resume at any index neither
skips nor repeats a prompt, and nothing of the size of the data is kept in memory.
"""

from __future__ import annotations

import hashlib

# Rounds of the Feistel network: 4 suffice for a pseudo-random permutation (Luby and Rackoff 1988); two
# more because the halves of small sets have few bits.
_ROUNDS = 6


def item_at(index: int, size: int, seed: int) -> int:
    """The item, 0 <= item < size, at `index` >= 0: epoch `index // size` shows each item once, in its own order.

    >>> sorted(item_at(index, 5, seed=1) for index in range(10))
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """
    epoch, position = divmod(index, size)
    return permute(position, size, key=f"{seed}/{epoch}")


def permute(position: int, size: int, key: str) -> int:
    """A permutation of 0..size-1, chosen by `key`, applied to one `position`.

    A Feistel network over the next even number of bits, walked along its cycle until it is back in
    range (Black and Rogaway 2002): exact for any size, in constant time and memory.
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is not in 0..{size - 1}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (digest(f"{key}/{turn}/{right}") & mask)
        position = left << half | right
        if position < size:
            return position


def episode_seed(seed: int, split: str, index: int) -> int:
    """A seed that every random generator takes, 0 to 2**31 - 1. Odd ones are the probes': no episode is in both."""
    return 2 * (digest(f"episode/{seed}/{split}/{index}") % 2**30) + (split == "probe")


def digest(text: str) -> int:
    """A 64-bit number that depends on nothing but `text`, on any machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a prompt of this text belongs to the probe split: decided by the text alone."""
    return digest(f"held out/{text}") < fraction * 2**64
