"""What a group takes on the wire, and whether a message holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.learner.shape import ModelShape
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

# Bytes of an output token on the wire: its id and its log-prob (`stream/codec.py`).
TOKEN = 8


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """What a group takes on the wire. Example: 16 answers of 1,000 tokens take 16,000 x 8 bytes and a header."""

    header: int  # frame 0, as the codec writes it
    prompt: int  # the prompt's ids, and what the router replay says of them
    token: int  # of one output token
    longest: int  # the whole group when every answer is cut
    images: int = 0  # of the prompt

    @property
    def fixed(self) -> int:
        """Bytes of a group besides its output tokens."""
        return self.header + self.prompt + self.images


def group_bytes(config: Config, shape: ModelShape, prompt: int, images: int = 0) -> GroupBytes:
    """Bytes of a group whose answers are all cut, to a prompt of so many tokens; its header is what the codec makes.

    `images`: bytes of the prompt's.
    """
    answer = max(pool.sampling.max_new_tokens for pool in config.generate.each_pool)
    size = config.generate.group_size
    header, _ = encode_group(zero_group(size, prompt, answer), max_message=1 << 62)
    routing = 0
    if config.learner.router_replay and shape.moe:
        routing = 2 * shape.layers * shape.moe.top_k  # int16 of each layer's experts (streamrl/moe_routing.py)
    folded = answer * math.ceil(prompt / answer) * routing  # of one sample of the group
    fixed = 4 * prompt + folded
    # With top_k the kept sets are no larger (streamrl/sampling_columns.py); by top_p alone they may be of any size.
    kept = max(min(pool.sampling.top_k, shape.vocabulary) for pool in config.generate.each_pool)
    token = TOKEN + routing + (2 + 4 * kept if kept > 0 else 0)
    return GroupBytes(len(header), fixed, token, len(header) + fixed + images + size * answer * token, images)


def check_wire(config: Config, group: GroupBytes) -> None:
    """Refuse groups that no message holds. Raises ConfigError."""
    if group.longest > config.stream.max_message:
        images = f", {group.images} of them images," if group.images else ","
        raise ConfigError(
            f"stream.max_message: a group of {config.generate.group_size} answers that are cut has {group.longest} "
            f"bytes{images} allowed are {config.stream.max_message}; allowed: at least {group.longest}, or fewer "
            "samples"
        )


def zero_group(samples: int, prompt: int, answer: int) -> Group:
    """A group of the usual form whose numbers are all zero."""
    version = PolicyVersion(1000)
    prompt_ids, output_ids = np.zeros(prompt, np.int32), np.zeros(answer, np.int32)
    sample = Sample(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=np.zeros(answer, np.float32),
        loss_mask=np.ones(answer, np.bool_),
        spans=(VersionSpan(version, 0, answer),),
        reward=1.0,
        reward_parts={"exact": 1.0},
    )
    return Group(
        group_id=1 << 20,
        attempt=0,
        task="task",
        prompt_index=1 << 20,
        samples=(sample,) * samples,
        started=1.0,
        finished=2.0,
        worker="generator-0",
        temperature=1.0,
    )
