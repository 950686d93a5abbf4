"""What a worker and a process that hosts a user's task say to each other: msgpack frames over two pipes.

    worker  ─▶ process   Task · Call Cancel Reply Ping End
    process ─▶ worker    Ready | Refused · Done Raised Ask Unask Clock Pong

What travels: texts, numbers and arrays. Nothing of the user's is pickled: the process loads the class by its name
from the configuration, and makes a prompt again from its index, so that whatever `Prompt.metadata` holds stays where
it was made. Of it the worker sees what msgpack can write.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from streamrl.tasks.environment import Completion, Message, Prompt, Rollout
from streamrl.types import PolicyVersion

# In the metadata of a prompt that a hosted task has made: its index, from which the process makes it again.
OWN = "__index__"

HEAD = struct.Struct("<I")  # the bytes of a frame, before it
# In memory that both ends see: the number of the call whose code is running, 0 for none; and how many steps, from one
# `await` to the next, the process has made.
MARK = struct.Struct("<qq")

LARGEST = 256 << 20  # bytes of a frame from the process

Method = Literal["prompt", "score", "score_all", "observation", "score_turns", "rollout_group", "function"]

# Calls whose time is not theirs alone, as they may wait for the policy: the worker ends one that asks it nothing for
# too long, where the process itself ends all others.
PLAYED: frozenset[Method] = frozenset({"rollout_group", "function"})


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One message."""


class Task(Frame, frozen=True, kw_only=True):
    """The first frame: what the process hosts."""

    share: dict[str, Any] | None = None  # `TaskShare`, of an environment
    run: dict[str, Any] = {}  # `parsing.KEYS` of the `TaskConfig` that it plays for
    function: str | None = None  # package.module:function, instead
    seed: int = 0
    split: str = "train"
    timeout: float  # seconds of one call
    limit: str = "task.scoring.timeout"  # the setting that says so


class Call(Frame, frozen=True, kw_only=True):
    """A method to be called; `prompt` is None where the task makes it from its `index`."""

    method: Method
    number: int = 0  # 1, 2, 3, ...
    index: int = 0
    prompt: Prompt | None = None
    completions: list[Completion] = []
    size: int = 0  # of a group
    arguments: list[Any] = []  # of a function


class Cancel(Frame, frozen=True, kw_only=True):
    """Nobody waits for that call any more."""

    number: int


class Reply(Frame, frozen=True, kw_only=True):
    """The answer to an Ask: completions or ids, or why there are none."""

    request: int
    completions: list[Completion] = []
    ids: np.ndarray | None = None
    refused: str | None = None  # the request is wrong: ValueError
    lost: str | None = None  # the policy cannot be reached


class Ping(Frame, frozen=True, kw_only=True):
    """Answered by the event loop, which blocking code holds up."""


class End(Frame, frozen=True, kw_only=True):
    """Close the task and end."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker has to know of a class that it does not load."""

    inline: bool = False  # it says that it never blocks: the worker may load it
    size: int | None = None
    lowest_reward: float = 0.0
    has_turns: bool = False
    max_turns: int = 0  # of a `TurnByTurn`; 0: it is none
    plays: bool = False  # it has a course of its own: `rollout_group` runs in the process
    scores_all: bool = False  # it has a `score_all` of its own: all answers of a group in one call
    judges_groups: bool = False
    asks_itself: bool = False
    masked: list[str] = []  # of ScorerLate, ScorerLost, ScorerUnready, those that say nothing of an answer


class Ready(Frame, frozen=True, kw_only=True):
    about: About


class Refused(Frame, frozen=True, kw_only=True):
    reason: str


class Judgement(msgspec.Struct, frozen=True):
    """A `Rollout` without its completion, which the worker has."""

    reward: float
    parts: dict[str, float] = {}
    failure: str | None = None
    masked: bool = False


class Done(Frame, frozen=True, kw_only=True):
    """What a call gave."""

    number: int
    prompt: Prompt | None = None
    judgements: list[Judgement] = []
    rollouts: list[Rollout] = []
    text: str | None = None  # an observation
    messages: list[Message] | None = None  # an observation
    value: Any = None  # of a function


class Raised(Frame, frozen=True, kw_only=True):
    """A call that raised, described in the process; `masked`: that says nothing of the answer."""

    number: int
    text: str
    masked: bool
    leaves_thread: bool = False  # it was late, and a thread goes on with it, which only the end of the process ends


class Ask(Frame, frozen=True, kw_only=True):
    """What hosted code wants of the policy, or of its tokenizer."""

    number: int  # of the call
    request: int
    method: Literal["generate", "prompt_ids", "added_ids"]
    text: str | None = None
    messages: list[Message] | None = None
    ids: np.ndarray | None = None
    n: int = 1
    images: list[str] = []
    at_least: PolicyVersion | None = None
    sampling: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    history: list[Message] = []
    last: int | None = None


class Unask(Frame, frozen=True, kw_only=True):
    """Nobody waits for the Reply to that Ask any more."""

    number: int  # of the call
    request: int


class Clock(Frame, frozen=True, kw_only=True):
    """Whether the clock of a call of PLAYED runs, from zero, or stands (`call_clock.py`)."""

    number: int  # of the call
    runs: bool


class Pong(Frame, frozen=True, kw_only=True):
    pass


ToProcess = Task | Call | Cancel | Reply | Ping | End
ToWorker = Ready | Refused | Done | Raised | Ask | Unask | Clock | Pong


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decoded(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    raise NotImplementedError(f"{kind} does not travel")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)


def frame(message: Frame) -> bytes:
    """A message with its length before it. Raises TypeError or NotImplementedError for what does not travel."""
    body = _ENCODER.encode(message)
    return HEAD.pack(len(body)) + body


def reader(kind: Any) -> Callable[[bytes], Any]:
    """What reads the body of a frame of `ToProcess` or `ToWorker`. It raises msgspec.MsgspecError."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decoded).decode


def travelling(prompt: Prompt) -> Prompt:
    """A prompt that a hosted task made, for the worker: its index instead of metadata that does not travel."""
    try:
        _ENCODER.encode(prompt.metadata)
    except (TypeError, NotImplementedError, msgspec.MsgspecError):
        return replace(prompt, metadata={OWN: prompt.index})
    return replace(prompt, metadata={**prompt.metadata, OWN: prompt.index})
