"""The task `copy` over and over, with answers as long as they were drawn: log-normal, the same in every run.

    task.name=benchmarks.drawn_lengths:DrawnLengths

    "caf=" ──▶ "caf=caf=caf=c"       a sample of 13 tokens

A real model ends its answers where it likes, and learns to end them elsewhere. Here no token ends an answer, and each
sample is asked for its own number of tokens, so that runs can be compared.
"""

from __future__ import annotations

import asyncio
import math
import random

import numpy as np

from streamrl.tasks.built_in.copy import Copy
from streamrl.tasks.environment import EXACT, Completion, Inference, Prompt, Rollout, Score

SIGMA = 0.8  # of the logarithm of the length
MEAN = 32  # tokens, before the cut
LONGEST = 224  # tokens: one answer in 430 is cut there


def drawn_length(prompt: int, sample: int) -> int:
    """Tokens of one sample, 1..LONGEST: a draw that depends on the two numbers alone."""
    drawn = random.Random(f"{prompt}/{sample}").lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA)
    return min(LONGEST, max(1, round(drawn)))


class DrawnLengths(Copy):
    """The strings of `copy`, each to be repeated to the drawn length.

    Reward: the share of tokens that are right, which is what all of them together can gain most by.
    """

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        wanted = np.resize(completion.prompt_ids, len(completion.output_ids))  # as often as it fits
        right = float(np.mean(wanted == completion.output_ids))
        return Score(reward=right, parts={EXACT: float(right == 1.0)})

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        lengths = [drawn_length(prompt.index, sample) for sample in range(n)]
        asked = [inference.generate(prompt.content, 1, max_new_tokens=length, stop_token_ids=[]) for length in lengths]
        return await self.score_all(prompt, [answers[0] for answers in await asyncio.gather(*asked)])
