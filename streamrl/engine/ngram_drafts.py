"""Drafts that SGLang looks up (`generate.speculation.algorithm: ngram`), made such that they leave the policy as it is.

SGLang 0.5.23 fills a tree of drafts that it has too few for with token 0, as further children of the root
(`ngram_corpus/result.cpp`), and its verification adds up the probability of the children that it has passed
(`sampling.cuh`): with k equal ones, token 0 is drawn with up to k times the policy's probability of it, and the
log-prob that is returned is the policy's. Here each of them becomes the only child of the one before:

    last ┬ 17 ─ 4            last ┬ 17 ─ 4
         ├ 0                      └ 0 ─ 0 ─ 0
         ├ 0
         └ 0
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

ALGORITHM = "NGRAM"


def drafts(arguments: Sequence[str]) -> bool:
    """Whether a server with these arguments looks its drafts up.

    >>> drafts(["--port", "1", "--speculative-algorithm", "NGRAM"])
    True
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--speculative-algorithm", "--speculative-algo", dest="algorithm", default="")
    return str(parser.parse_known_args(list(arguments))[0].algorithm).upper() == ALGORITHM


def install() -> None:
    """In each of SGLang's processes, before its drafts are made."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    looked_up = NgramCorpus.batch_get

    @functools.wraps(looked_up)
    def batch_get(self: Any, *args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = looked_up(self, *args, **kwargs)
        return tokens, without_twins(tokens, mask, self.draft_token_num)

    NgramCorpus.batch_get = batch_get


def without_twins(tokens: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    """The trees of drafts without equal children of one node: one that has an elder twin goes below it.

    `tokens` [B * size]; `mask` [B * size * size], where 1 at (i, j) of a tree says that j is i or above it.
    """
    trees = mask.reshape(-1, size, size).copy()
    for tree, drafted in zip(trees, tokens.reshape(-1, size), strict=True):
        places: dict[tuple[int, int], int] = {}  # of each token below each node
        for node in range(1, size):
            parent, token = int(np.flatnonzero(tree[node, :node])[-1]), int(drafted[node])
            while (elder := places.get((parent, token))) is not None:
                parent = elder
            tree[node] = tree[parent]
            tree[node, node] = 1
            places[parent, token] = node
    return trees.reshape(mask.shape)
