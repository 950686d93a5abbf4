"""A worker with its server, and the groups that it sends: as many tokens as recorded ones, without their ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.config.generate import GenerateConfig
from streamrl.config.in_flight import most_requests
from streamrl.config.tree import Config
from streamrl.lab.simulate.model import RecordedGroup
from streamrl.lab.simulate.server import Done, GenerationServer, ServerSpeed, Span
from streamrl.types import Group, PolicyVersion, Sample, Ticket, VersionSpan

_NOTHING = np.zeros(1, np.int32)


@dataclass(slots=True)
class Site:
    """A worker and its server, as the worker knows them."""

    name: str
    capacity: int  # tickets
    server: GenerationServer
    longest: int  # tokens at which an answer is cut
    places: int | None = None  # requests at once, where its capacity is counted in them
    version: int = 0  # step of the server's weights
    tickets: dict[int, tuple[Ticket, RecordedGroup, float]] = field(default_factory=dict)  # and when it came
    held_back: list[int] = field(default_factory=list)  # groups that wait for an update's end
    drained: Callable[[], None] | None = None  # what waits until nothing is in flight
    wakes: int = 0  # number of the newest alarm: the former ones are void
    busy: float = 0.0  # seconds, at the last look

    @property
    def identity(self) -> bytes:
        """The identity of its socket."""
        return self.name.encode()


class Frames(bytes):
    """Replaces the frames of a group, which are passed on unread."""

    group: Group

    @classmethod
    def of(cls, group: Group) -> Frames:
        frames = cls()
        frames.group = group
        return frames


def share_of(number: int, own: GenerateConfig, total: int) -> int:
    """What server `number` of a worker has of so many groups or requests: as many as the others, or one more."""
    each, left = divmod(total, own.servers)
    return each + (number < left)


def places_of(config: Config, own: GenerateConfig, max_running: int, number: int = 0) -> int | None:
    """Requests that server `number` of a worker has at once, where its capacity is counted in them; else None.

    `own`: the worker's. Who waits for a place does so in the server here: the time is the same.
    """
    if not own.by_sample:
        return None
    places = max(1, share_of(number, own, most_requests(config, own)))
    return min(places, max_running) if own.requests_in_flight == "auto" else places


def make_server(speed: ServerSpeed, places: int | None, version: int = 0) -> GenerationServer:
    """The server with so many places; None: groups are asked for."""
    if places is not None:
        speed = replace(speed, max_running=min(places, speed.max_running))
    return GenerationServer(speed, version, by_sample=places is not None)


def make_group(ticket: Ticket, drawn: RecordedGroup, done: Done, worker: str, begun: float) -> Group:
    """What the worker would send: as many tokens as were drawn, of the versions that drew them."""
    trained = drawn.trained or drawn.lengths
    samples = zip(drawn.lengths, trained, drawn.rewards, drawn.passed, done.spans, strict=True)
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        task=ticket.task,
        prompt_index=ticket.prompt_index,
        samples=tuple(_sample(*each) for each in samples),
        worker=worker,
        started=begun,
        finished=done.time,
    )


def _sample(length: int, trained: int, reward: float, passed: bool, spans: list[Span]) -> Sample:
    """Its ids and log-probs are views of a single number: nobody reads more of them than their length."""
    nothing = np.broadcast_to(_NOTHING, (length,))
    return Sample(
        prompt_ids=_NOTHING,
        output_ids=nothing,
        logprobs=nothing,
        loss_mask=np.broadcast_to(np.True_, (length,)) if trained == length else _mask(length, trained),
        spans=tuple(VersionSpan(PolicyVersion(step), begin, end) for step, begin, end in spans),
        reward=reward,
        reward_parts={"exact": float(passed)},
    )


def _mask(length: int, trained: int) -> np.ndarray:
    """bool [length], so many True, evenly apart: where the others were is not known.

    >>> _mask(5, 3).tolist()
    [False, True, False, True, True]
    """
    return np.diff(np.arange(length + 1) * trained // max(1, length)).astype(np.bool_)
