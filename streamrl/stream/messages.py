"""What the processes of a run send to the replay service and receive from it: typed, versioned, checked.

A message is one frame: a msgpack map `{"v": 11, "kind": "credit", ...fields}`, behind the 8 bytes of its
number (`stream/sockets.py`). Groups and batches carry further frames (`stream/codec.py`). `decode` checks the
type of every field, so that whatever it returns can be used without a second look.

    worker    ─▶ service   Hello Credit (group) Heartbeat Applied PublishFailed Mismatch Evaluated Asleep GaveUp Bye
    service   ─▶ worker    Tickets Accepted Refused Publish Progress Sleep Wake Introduce Stop
    learner   ─▶ service   Hello Heartbeat Next Quarantined Measured Progress Saved Finished Exited GaveUp Bye
    service   ─▶ learner   Welcome Lost BatchHeader (+ groups) Evaluated Introduce Stop
    publisher ─▶ service   Hello Heartbeat Announce Publish Bye
    service   ─▶ publisher Roster Applied PublishFailed Introduce Stop

A service that was started again knows nobody: it answers a peer that it does not know by Introduce, and the
peer says Hello again, with what it holds. The same answer follows a gap in a peer's sequence numbers.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streamrl.trainable import Limits
from streamrl.types import Ledger, PolicyVersion, Ticket

PROTOCOL = 11  # raised by every change that an older peer would misread

NUMBERED = 8  # bytes of its number before every header frame (`stream/sockets.py`)

Count = Annotated[int, Meta(ge=0, le=2**53)]  # whole numbers that also survive a trip through JSON
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_REASON = 4096  # characters
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
MAX_SIGNALS = 64
Seconds = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]

Buffer = bytes | bytearray | memoryview
Role = Literal["generator", "learner", "publisher"]
TicketKey = tuple[Count, Count]  # (group_id, attempt)
RunId = Annotated[str, Meta(min_length=1, max_length=64)]  # of stream/identity.py


class MalformedMessage(ValueError):
    """A message that cannot be used. `ticket` is its (group_id, attempt) where that could be read."""

    def __init__(self, reason: str, ticket: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.ticket = ticket


def _kind(class_name: str) -> str:
    """`PublishFailed` -> `publish_failed`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=_kind):
    """One header frame. Immutable; fields are given by keyword."""

    v: int = PROTOCOL


class Versioned(Message, frozen=True, kw_only=True):
    """A message about one set of weights."""

    version: PolicyVersion

    def __post_init__(self) -> None:
        _check_version(self.version)


class ServerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One SGLang server as its worker knows it."""

    name: Name  # unique in the run
    version: PolicyVersion  # of the weights that it generates with now
    world_size: Positive = 1  # ranks of the server, all of which join a weight transfer
    pinned: bool = False  # to its version, while that is evaluated: it is left out of publishing

    def __post_init__(self) -> None:
        _check_version(self.version)


class Hello(Message, frozen=True, kw_only=True):
    """The first word of every peer; a worker repeats it when its set of servers changes.

    A learner's `version` is the step that it trains next and its incarnation; its `ledger` comes from the
    checkpoint that it starts from; its `limits` say what it can train. A worker that says Hello again tells which
    `tickets` it still has, finished groups that nobody has acknowledged included. A peer of another run is refused.
    """

    run: RunId  # that the peer belongs to
    role: Role
    name: Name  # unique among the live workers; learner and publisher replace a former one of the same role
    servers: tuple[ServerState, ...] = ()
    version: PolicyVersion | None = None  # needed from learner and publisher
    ledger: Ledger | None = None  # of a learner that starts from a checkpoint
    limits: Limits | None = None  # of a learner; None: unknown, the service checks no lengths and no token ids
    tickets: tuple[TicketKey, ...] = ()  # of a worker

    def __post_init__(self) -> None:
        if self.version is not None:
            _check_version(self.version)
        elif self.role != "generator":
            raise ValueError(f"hello of a {self.role} without its version")


class Introduce(Message, frozen=True, kw_only=True):
    """The service does not know this peer, or has missed words of it: say Hello again, then everything open."""


class Welcome(Message, frozen=True, kw_only=True):
    """The service's answer to a learner's Hello: `published` is the newest version that any server ever had.

    A learner publishes nothing below that step: it trains the redelivered batches first, unless one is Lost.
    """

    published: PolicyVersion | None = None


class Bye(Message, frozen=True, kw_only=True):
    """The last word of every peer. A worker's open tickets are issued again at once."""


class Stop(Message, frozen=True, kw_only=True):
    """The run is over: end, after a Bye; with an error where the run has `failed`.

    `refused`: it goes on, and this peer cannot take part: end with an error.
    """

    reason: Reason
    refused: bool = False
    failed: bool = False


class Credit(Message, frozen=True, kw_only=True):
    """How many tickets a worker holds at most, those that it has now included; 0 drains it.

    It is a level, not a grant: said once after Hello, and again only when it changes. The service
    counts every ticket that it sent against it until the group is back (or the ticket is lost).
    """

    capacity: Count


class Heartbeat(Message, frozen=True, kw_only=True):
    """A peer lives: sent every `generate.heartbeat` seconds by a worker, at every tick of waiting by the others."""

    tickets: tuple[TicketKey, ...] = ()  # what it is generating, or has finished: their leases are extended
    busy: Seconds = 0.0  # seconds with at least one server request running, since the worker's start
    generated: Count = 0  # tokens, since the worker's start
    verified: Count = 0  # passes of the policy over drafts (`generate.speculation`), since then
    accepted: Count = 0  # drafts that were kept in them


class Applied(Versioned, frozen=True, kw_only=True):
    """`server` generates with `version` from now on, and keeps it, while it is `pinned`, until the next Applied."""

    server: Name
    pinned: bool = False


class PublishFailed(Versioned, frozen=True, kw_only=True):
    """`server` did not get `version`, and gets no tickets until it reports that version applied."""

    server: Name
    reason: Reason
    attempt: Count = 0  # of the Publish


class Mismatch(Versioned, frozen=True, kw_only=True):
    """How far the scores of `server` are from the learner's, both with `version`: metrics `mismatch/...`."""

    server: Name
    metrics: dict[str, float]


class Evaluated(Versioned, frozen=True, kw_only=True):
    """An evaluation of `version` is complete: its metrics `eval/...`.

    The service puts them into the next batch's stats; those of the end, after the last batch, it passes on.
    """

    metrics: dict[str, float]


class Tickets(Message, frozen=True, kw_only=True):
    """The right to generate these groups."""

    tickets: tuple[Ticket, ...]


class Accepted(Message, frozen=True, kw_only=True):
    """The group is in the buffer: the worker may forget it."""

    group_id: Count
    attempt: Count


class Refused(Message, frozen=True, kw_only=True):
    """The group is not in the buffer and never will be under this attempt: the worker drops it."""

    group_id: Count
    attempt: Count
    reason: Reason


class Sleep(Message, frozen=True, kw_only=True):
    """The learner is to have the devices (`run.placement: shared`): the servers draw nothing until the next Wake."""

    number: Count  # of the order; the answer names it


class Asleep(Message, frozen=True, kw_only=True):
    """All servers of a worker sleep, as Sleep `number` asks; one that cannot is ended."""

    number: Count


class Wake(Message, frozen=True, kw_only=True):
    """The servers have the devices."""

    number: Count


class ScoredAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer with the learner's log-probs of its n trained tokens, at temperature 1 (`publish.mismatch`)."""

    ids: list[Count]  # prompt and output
    prompt: Positive  # tokens of the prompt
    trained: list[Count]  # [n], which output tokens those are
    logprobs: list[float]  # [n], by the weights of the version
    former: list[float]  # [n], by those of the version published before it

    def __post_init__(self) -> None:
        if not 0 < len(self.trained) == len(self.logprobs) == len(self.former):
            raise ValueError("a scored answer needs as many log-probs as trained tokens, and one at least")
        if not max(self.trained) < len(self.ids) - self.prompt:
            raise ValueError("a scored answer has a trained token behind its last one")


class Publish(Versioned, frozen=True, kw_only=True):
    """Update `server` to `version`; the manifest belongs to the transport and is passed on untouched."""

    server: Name
    manifest: dict[str, Any]
    attempt: Count = 0  # the publisher's own number: a failure of a former attempt is none of this one
    scored: tuple[ScoredAnswer, ...] = ()  # that the server scores as well, once it has the version


class Announce(Versioned, frozen=True, kw_only=True):
    """`version` exists: it is the newest that servers can be updated to."""


class Roster(Message, frozen=True, kw_only=True):
    """Every live server; sent to the publisher at its Hello and at every change."""

    servers: tuple[ServerState, ...]


class Next(Message, frozen=True, kw_only=True):
    """The learner asks for the groups of `step`. The answer comes when they are complete."""

    step: Count


class Lost(Message, frozen=True, kw_only=True):
    """Groups of `step`, which the learner asked for, are generated again, though servers have had weights beyond it.

    The servers that generate them may need weights of that step.
    """

    step: Count


class BatchStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the learner cannot know by itself, for its metrics."""

    tokens_generated: Count  # in the groups that were accepted since the last batch
    generator_busy: Fraction  # mean over the workers of the time with a request running, since the last batch
    groups: Count  # accepted and not yet delivered
    verified: Count = 0  # passes of the policy over drafts, since the last batch
    drafts: Count = 0  # that were kept in them
    bytes: Count  # of their frames
    selection: dict[str, float] = {}  # metrics `selection/...` of the groups that were generated and dropped
    evaluation: dict[str, float] = {}  # metrics `eval/...` that came since the last batch
    mismatch: dict[str, float] = {}  # metrics `mismatch/...` that came since the last batch
    bound: Reason = ""  # moves of the adaptive bound since the last batch, each with its reason


class BatchHeader(Message, frozen=True, kw_only=True):
    """Frame 0 of a batch; two frames for each of its groups follow."""

    step: Count
    groups: Positive
    stats: BatchStats
    ledger: Ledger | None = None  # as it is when this batch is trained: for the checkpoint
    quarantined: tuple[Count, ...] = ()  # group ids: sent as placeholders, since the learner could not train them
    reused: tuple[Count, ...] = ()  # group ids: an earlier step had them


class Quarantined(Message, frozen=True, kw_only=True):
    """The learner cannot train a group of `step`: placeholders take its place, now and at every repetition."""

    step: Count
    group_id: Count
    attempt: Count
    reason: Reason


class Measured(Message, frozen=True, kw_only=True):
    """The effective sample size of each group of `step`, in the batch's order, as the learner trained it.

    None: nothing was learned from the group. Sent before the step's Progress, where groups may be trained again.
    """

    step: Count
    ess: tuple[Fraction | None, ...]


class Progress(Versioned, frozen=True, kw_only=True):
    """The learner has made `version`: its step is trained.

    `signals` are metrics of the step, by their names: those that `replay.adaptive.controller` asks for. The service
    passes the message on to the workers without them: they know by it that the run goes on.
    """

    signals: Annotated[dict[Name, float], Meta(max_length=MAX_SIGNALS)] = {}  # finite

    def __post_init__(self) -> None:
        _check_version(self.version)
        if lost := [name for name, value in self.signals.items() if not math.isfinite(value)]:
            raise ValueError(f"signals that are not finite: {', '.join(lost)}")


class Saved(Versioned, frozen=True, kw_only=True):
    """A checkpoint of `version` is complete; no step before that of the `oldest` kept one comes again."""

    oldest: Count


class Finished(Versioned, frozen=True, kw_only=True):
    """The run is complete with `version`: the last step is trained."""


class Exited(Versioned, frozen=True, kw_only=True):
    """The run ends here in good order, its checkpoint of `version` saved, and not complete: it may be resumed."""

    reason: Reason


class GaveUp(Message, frozen=True, kw_only=True):
    """The learner, or a worker, ends the run for a reason that a restart would not mend."""

    reason: Reason


_EVERYONE = (Hello, Introduce, Heartbeat, Bye, Stop)
_WORKER = (Credit, Tickets, Accepted, Refused, Applied, PublishFailed, Mismatch, Evaluated, Sleep, Asleep, Wake)
_LEARNER = (Welcome, Next, Lost, Quarantined, Measured, Progress, Saved, Finished, Exited, GaveUp, BatchHeader)
_PUBLISHER = (Announce, Publish, Roster)
_DECODERS = {
    _kind(message.__name__): msgspec.msgpack.Decoder(message)
    for message in (*_EVERYONE, *_WORKER, *_LEARNER, *_PUBLISHER)
}
_ENCODER = msgspec.msgpack.Encoder()


class _Envelope(msgspec.Struct, frozen=True):
    """The two fields that every header has, read before anything else is believed."""

    v: int
    kind: str


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Message) -> bytes:
    """The header frame. Raises TypeError where a manifest holds something that msgpack cannot say."""
    return _ENCODER.encode(message)


def decode(frame: Buffer) -> Message:
    """Read a header frame. Raises MalformedMessage with the reason on anything that is not a known message."""
    kind = read_kind(frame)
    if kind not in _DECODERS:
        raise MalformedMessage(f"unknown kind {kind[:64]!r}")
    return parse(_DECODERS[kind], frame, kind)


def read_kind(frame: Buffer) -> str:
    """The kind of a header frame of this protocol version. Raises MalformedMessage."""
    envelope = parse(_ENVELOPE, frame, "header")
    if envelope.v != PROTOCOL:
        raise MalformedMessage(f"protocol version {envelope.v}, this process speaks {PROTOCOL}")
    return envelope.kind


def parse(decoder: msgspec.msgpack.Decoder, frame: Buffer, what: str) -> Any:
    """Decode by a typed decoder; every way in which a frame can be wrong becomes MalformedMessage."""
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{what}: {error}") from error


def _check_version(version: PolicyVersion) -> None:
    if not (0 <= version.step < 2**31 and 0 <= version.incarnation < 2**31):
        raise ValueError(f"policy version {version} is out of range")
