"""How a group looks on the wire: a small msgpack header and one contiguous arena of numbers.

    frame 0   {"v": 11, "kind": "group", group_id, attempt, task, ..., prompts, columns, prompt, tokens, spans, ...}
    frame 1   distinct prompts int32 | output ids int32 | log-probs float32 | columns | images
                                                                                          (8 bytes an output token)

What is long and regular stays out of the arena: version spans and loss masks travel as runs in the
header, and a prompt that samples share travels once. What each sample has once is in the header column by
column, a list for each field: to make an object for each sample costs as much as to copy its numbers. The
number of frames is what costs on this path, so there are two. Encoding copies nothing where the group has an arena
already (`Group.arena`). Decoding copies nothing: the arrays of a decoded group are read-only views
of the received frame, which lives as long as any of them. Integers and floats are little-endian.

`Sample.extras` become the columns behind the log-probs: the header tells the name, the dtype and the shape
for one token of each, and which samples have it, so that a new field needs no line here. A column begins at
a multiple of its item's size. Any bool, whole or floating dtype of numpy up to 8 bytes travels; others
(bfloat16, say) travel as the unsigned integers of their size.

A rollout may have several samples, which follow one another: `branches` counts those of each rollout.

The images of a group's prompt end frame 1, as the encoded files that they are: each content once, however many places
of the prompt show it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta

from streamrl.stream.messages import (
    NUMBERED,
    PROTOCOL,
    BatchHeader,
    Buffer,
    Count,
    MalformedMessage,
    Name,
    parse,
    read_kind,
)
from streamrl.types import FAILURES, Arena, Batch, Group, Sample, VersionSpan, all_trained, is_all_trained

_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_DTypeName = Literal["|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8"]
_DTYPES = {name: np.dtype(name) for name in get_args(_DTypeName)}
_MOST = 2**31 - 1  # of a step, and of the tokens of a sample
OLDEST = 4  # protocol version of the oldest groups that can be read: journals keep them as they came
Length = Annotated[int, Meta(ge=0, le=_MOST)]
_Failure = Annotated[str, Meta(pattern=f"^({'|'.join(FAILURES)})$")]


class _Column(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A field of `Sample.extras`. Fields of one name that differ in dtype or shape are different columns."""

    name: Annotated[str, Meta(max_length=256)]
    dtype: _DTypeName
    shape: Annotated[tuple[Length, ...], Meta(max_length=8)]  # for one token


class _GroupHeader(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="group"
):
    v: Annotated[int, Meta(ge=OLDEST, le=PROTOCOL)] = PROTOCOL
    group_id: Count
    attempt: Count
    task: Name
    prompt_index: Count
    started: float
    finished: float
    worker: Annotated[str, Meta(max_length=256)]
    temperature: Annotated[float, Meta(gt=0)]
    prompts: list[Length]  # lengths of the distinct prompts
    columns: list[_Column]
    images: list[Length] = []  # bytes of the distinct images
    image: list[Length] = []  # of each image of the prompt, in order: index into the distinct ones
    failures: dict[Length, _Failure] = {}  # of placeholders, by the place of the sample
    branches: list[Length] = []  # samples of each rollout; none: one each
    # from here on an entry for each sample
    prompt: list[Length]  # index into the distinct prompts
    tokens: list[Length]  # T
    spans: list[tuple[VersionSpan, ...]]
    masks: list[list[Length]]  # run lengths of the loss mask, the first run is of trained tokens
    rewards: list[float]
    parts: list[dict[str, float]]
    finish_reasons: list[Literal["stop", "length", "abort", "placeholder"]]
    extras: list[list[Length]]  # indices of the columns that it has


class _TicketOfHeader(msgspec.Struct, frozen=True):
    """What is needed to answer for a group that cannot be used otherwise."""

    group_id: Count
    attempt: Count


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_GroupHeader)
_TICKET_DECODER = msgspec.msgpack.Decoder(_TicketOfHeader)


def new_arena(size: int) -> np.ndarray:
    """A fresh uint8 [size]."""
    return np.empty(size, np.uint8)


def encode_group(
    group: Group, max_message: int, allocate: Callable[[int], np.ndarray] = new_arena
) -> tuple[bytes, memoryview]:
    """The two frames of a group. The arena is the group's own where it has one and no images, and else the uint8
    [size] that `allocate(size)` gave.

    Raises ValueError, naming what is wrong, for a group that no service would accept: badly formed
    (`Group.check`), with a field whose dtype does not travel, or of more than `max_message` bytes.
    """
    samples = group.samples
    arena = None if group.arena is None or group.arena.samples is not samples else group.arena.numbers
    group.check(samples=arena is None)
    if arena is None:
        places, prompts = _distinct_prompts(group)
        columns, owned, pieces = _gather_columns(group)
    else:  # `Arena` says what is known of its samples
        places, prompts = [0] * len(samples), [samples[0].prompt_ids]
        columns, owned, pieces = [], [[]] * len(samples), []
    images = list(dict.fromkeys(group.images))
    header = _GroupHeader(
        group_id=group.group_id,
        attempt=group.attempt,
        task=group.task,
        prompt_index=group.prompt_index,
        started=group.started,
        finished=group.finished,
        worker=group.worker,
        temperature=group.temperature,
        prompts=[len(prompt) for prompt in prompts],
        columns=columns,
        images=[len(image) for image in images],
        image=[images.index(image) for image in group.images],
        failures={place: sample.failure for place, sample in enumerate(samples) if sample.failure},
        branches=list(group.branches),
        prompt=places,
        tokens=[len(sample.output_ids) for sample in samples],
        spans=[sample.spans for sample in samples],
        masks=[_runs(sample.loss_mask) for sample in samples],
        rewards=[float(sample.reward) for sample in samples],
        parts=[{name: float(value) for name, value in sample.reward_parts.items()} for sample in samples],
        finish_reasons=[sample.finish_reason for sample in samples],  # type: ignore[misc]  # the decoder knows them
        extras=owned,
    )
    frame = _ENCODER.encode(header)
    layout = _Layout(header)
    if len(frame) + layout.size > max_message - NUMBERED:
        raise ValueError(
            f"group {group.group_id}: header of {len(frame)} and arena of {layout.size} bytes, "
            f"stream.max_message allows {max_message}"
        )
    if arena is not None and not images:
        return frame, arena.data
    given, arena = arena, allocate(layout.size)
    layout.put_images(arena, images)
    if given is not None:
        arena[: len(given)] = given
        return frame, arena.data
    layout.clear_gaps(arena)
    _concatenate([*prompts, *(sample.output_ids for sample in samples)], layout.ids(arena))
    _concatenate([sample.logprobs for sample in samples], layout.logprobs(arena))
    for index, arrays in enumerate(pieces):
        _concatenate(arrays, layout.column(arena, index))
    return frame, arena.data


def decode_group(header: Buffer, arena: Buffer) -> Group:
    """The group of two frames, its arrays read-only views of `arena`.

    Raises MalformedMessage with the reason, and with the ticket where the header still tells it.
    """
    try:
        return _build(_DECODER.decode(header), arena)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise MalformedMessage(f"group: {error}", ticket_of(header)) from error


def ticket_of(header: Buffer) -> tuple[int, int]:
    """(group_id, attempt) of a group's header frame, without looking at the rest. Raises MalformedMessage."""
    if (kind := read_kind(header)) != "group":
        raise MalformedMessage(f"kind {kind[:64]!r} with two frames, a group is expected")
    ticket = parse(_TICKET_DECODER, header, "group")
    return ticket.group_id, ticket.attempt


def decode_batch(header: BatchHeader, frames: Sequence[Buffer]) -> Batch:
    """The batch of a header and two frames for each of its groups. Raises MalformedMessage."""
    if len(frames) != 2 * header.groups:
        raise MalformedMessage(f"batch of step {header.step}: {len(frames)} frames for {header.groups} groups")
    pairs = zip(frames[::2], frames[1::2], strict=True)
    groups = tuple(decode_group(*pair) for pair in pairs)
    quarantined, reused = frozenset(header.quarantined), frozenset(header.reused)
    return Batch(step=header.step, groups=groups, quarantined=quarantined, reused=reused)


def _distinct_prompts(group: Group) -> tuple[list[int], list[np.ndarray]]:
    """For each sample the index of its prompt, and the distinct prompts in order of appearance."""
    seen: dict[bytes, int] = {}
    prompts: list[np.ndarray] = []
    places = []
    for sample in group.samples:
        if prompts and sample.prompt_ids is group.samples[0].prompt_ids:  # the usual case, without hashing
            places.append(0)
            continue
        place = seen.setdefault(sample.prompt_ids.tobytes(), len(prompts))
        if place == len(prompts):
            prompts.append(sample.prompt_ids)
        places.append(place)
    return places, prompts


def _gather_columns(group: Group) -> tuple[list[_Column], list[list[int]], list[list[np.ndarray]]]:
    """The columns of a group, for each sample the indices of those that it has, and the arrays of each column."""
    columns: dict[_Column, int] = {}
    owned: list[list[int]] = [[] for _ in group.samples]
    pieces: list[list[np.ndarray]] = []
    for sample, indices in zip(group.samples, owned, strict=True):
        for name, array in sample.extras.items():
            index = columns.setdefault(_column(name, array), len(columns))
            if index == len(pieces):
                pieces.append([])
            indices.append(index)
            pieces[index].append(array)
    return list(columns), owned, pieces


def _column(name: str, array: np.ndarray) -> _Column:
    """Raises ValueError for a dtype that does not travel."""
    dtype = array.dtype.newbyteorder("<").str
    if dtype not in _DTYPES:
        raise ValueError(f"extras[{name!r}] is {array.dtype}, allowed: bool, and numbers of up to 8 bytes")
    return _Column(name, dtype, array.shape[1:])  # type: ignore[arg-type]  # it is one of the literals


def _concatenate(arrays: list[np.ndarray], out: np.ndarray) -> None:
    if arrays:
        np.concatenate(arrays, out=out)


class _Layout:
    """Where the parts of a group lie in its arena of `size` bytes; the same for both ends."""

    def __init__(self, header: _GroupHeader) -> None:
        self._tokens = tokens = sum(header.tokens)
        self._logprobs = 4 * (sum(header.prompts) + tokens)
        self.size = self._logprobs + 4 * tokens
        self.alignment = _INT.itemsize
        self._columns: list[tuple[int, int, np.dtype, tuple[int, ...]]] = []  # start, end, dtype, shape
        self._gaps: list[tuple[int, int]] = []  # start, end
        if header.columns:
            self._append_columns(header)
        self.numbers = self.size  # bytes before the images
        self._images = header.images
        self.size += sum(header.images)

    def _append_columns(self, header: _GroupHeader) -> None:
        counts = [0] * len(header.columns)
        for owned, length in zip(header.extras, header.tokens, strict=True):
            for index in owned:
                counts[index] += length
        for column, count in zip(header.columns, counts, strict=True):
            self._append(_DTYPES[column.dtype], (count, *column.shape))

    def _append(self, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        start = -(-self.size // dtype.itemsize) * dtype.itemsize
        self._gaps.append((self.size, start))
        self.size = start + dtype.itemsize * math.prod(shape)
        self.alignment = max(self.alignment, dtype.itemsize)
        self._columns.append((start, self.size, dtype, shape))

    def clear_gaps(self, arena: np.ndarray) -> None:
        """One group has one encoding, whatever the memory held before."""
        for start, end in self._gaps:
            arena[start:end] = 0

    def put_images(self, arena: np.ndarray, images: Sequence[bytes]) -> None:
        if images:
            arena[self.numbers :] = np.frombuffer(b"".join(images), np.uint8)

    def images(self, arena: np.ndarray) -> list[bytes]:
        """The distinct ones."""
        return [piece.tobytes() for piece in _cut(arena[self.numbers :], self._images)] if self._images else []

    def ids(self, arena: np.ndarray) -> np.ndarray:
        return arena[: self._logprobs].view(_INT)

    def logprobs(self, arena: np.ndarray) -> np.ndarray:
        return arena[self._logprobs : self._logprobs + 4 * self._tokens].view(_FLOAT)

    def column(self, arena: np.ndarray, index: int) -> np.ndarray:
        start, end, dtype, shape = self._columns[index]
        return arena[start:end].view(dtype).reshape(shape)


def _runs(mask: np.ndarray) -> list[int]:
    """Run lengths of a bool mask [T], the first of True: `[1, 1, 0, 1]` -> `[2, 1, 1]`."""
    if is_all_trained(mask):  # the usual case, and much the cheaper one
        return [len(mask)]
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    runs = np.diff(edges, prepend=0, append=len(mask)).tolist()
    return runs if mask[0] else [0, *runs]


def _mask(runs: list[int], length: int) -> np.ndarray:
    """The read-only bool mask [length] of its run lengths. Raises ValueError unless they add up to it."""
    if sum(runs) != length:
        raise ValueError(f"loss mask covers {sum(runs)} of {length} output tokens")
    if len(runs) == 1:
        return all_trained(length)
    mask = np.repeat(np.arange(len(runs)) % 2 == 0, runs)
    mask.flags.writeable = False
    return mask


def _check_spans(spans: tuple[VersionSpan, ...], tokens: int) -> None:
    """Raise ValueError unless the spans cover T tokens without a gap and their versions never fall."""
    position, step, incarnation = 0, 0, 0
    for span in spans:
        version = span.version
        falls = version.step < step or (version.step == step and version.incarnation < incarnation)
        if falls or not (version.step <= _MOST and 0 <= version.incarnation <= _MOST):
            raise ValueError(f"version {version} follows {step}.{incarnation} in the spans")
        if span.start != position or span.end <= position:
            raise ValueError(f"span {span.start}..{span.end} does not continue at {position}")
        position, step, incarnation = span.end, version.step, version.incarnation
    if position != tokens:
        raise ValueError(f"spans cover {position} of {tokens} output tokens")


def _cut(array: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """Views of consecutive pieces of an array."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return [array[start:end] for start, end in itertools.pairwise(ends)]


def _build(header: _GroupHeader, arena: Buffer) -> Group:
    """Cut the arena by the header. Raises ValueError where the two do not fit together.

    What `Group.check` asks for holds by the way in which the pieces are cut, or is asked here.
    """
    _check_table(header)
    layout = _Layout(header)
    numbers = _aligned(np.frombuffer(arena, np.uint8), layout.alignment)
    if numbers.nbytes != layout.size:
        raise ValueError(f"arena of {numbers.nbytes} bytes, the header asks for {layout.size}")
    ids = _cut(layout.ids(numbers), [*header.prompts, *header.tokens])
    prompts, outputs = ids[: len(header.prompts)], ids[len(header.prompts) :]
    extras = _extras(header, layout, numbers)
    made = []
    for index, logprobs in enumerate(_cut(layout.logprobs(numbers), header.tokens)):
        spans = header.spans[index]
        _check_spans(spans, len(logprobs))
        made.append(
            Sample(
                prompt_ids=prompts[header.prompt[index]],
                output_ids=outputs[index],
                logprobs=logprobs,
                loss_mask=_mask(header.masks[index], len(logprobs)),
                spans=spans,
                reward=header.rewards[index],
                reward_parts=header.parts[index],
                finish_reason=header.finish_reasons[index],
                failure=header.failures.get(index, ""),
                extras=extras[index],
            )
        )
    samples = tuple(made)
    images = layout.images(numbers)
    is_arena = len(header.prompts) == 1 and not header.columns
    group = Group(
        group_id=header.group_id,
        attempt=header.attempt,
        task=header.task,
        prompt_index=header.prompt_index,
        samples=samples,
        branches=tuple(header.branches),
        images=tuple(images[place] for place in header.image),
        arena=Arena(samples, numbers[: layout.numbers]) if is_arena else None,
        started=header.started,
        finished=header.finished,
        worker=header.worker,
        temperature=header.temperature,
    )
    if (problem := group.branch_problem()) is not None:
        raise ValueError(problem.removeprefix("."))
    return group


def _check_table(header: _GroupHeader) -> None:
    """Raise ValueError unless every field has an entry for each sample, and what an entry points to is there."""
    count = len(header.tokens)
    if count == 0:
        raise ValueError("no samples")
    fields = ("prompt", "spans", "masks", "rewards", "parts", "finish_reasons", "extras")
    for name in fields:
        if len(getattr(header, name)) != count:
            raise ValueError(f"{name} has {len(getattr(header, name))} entries for {count} samples")
    for place in header.failures:
        if place >= count or header.finish_reasons[place] != "placeholder":
            raise ValueError(f"a failure of sample {place}, which is no placeholder")
    if max(header.prompt) >= len(header.prompts):
        raise ValueError(f"a sample has prompt {max(header.prompt)} of {len(header.prompts)}")
    if set(header.image) != set(range(len(header.images))) or not all(header.images):
        raise ValueError(f"places {header.image} of {len(header.images)} images: each is in one, and none is empty")
    if max(itertools.chain.from_iterable(header.extras), default=-1) >= len(header.columns):
        raise ValueError(f"a sample has a column beyond the {len(header.columns)} of its group")
    if not all(map(math.isfinite, header.rewards)):
        raise ValueError(f"a reward is not finite: {header.rewards}")
    for parts in header.parts:
        if not all(map(math.isfinite, parts.values())):
            raise ValueError(f"a reward part is not finite: {parts}")
    if not math.isfinite(header.temperature):
        raise ValueError(f"temperature is {header.temperature}")


def _extras(header: _GroupHeader, layout: _Layout, numbers: np.ndarray) -> list[dict[str, np.ndarray]]:
    """`Sample.extras` of each sample. Raises ValueError for a name twice in a sample, and for a bool of 2 or more."""
    extras: list[dict[str, np.ndarray]] = [{} for _ in header.tokens]
    for index, column in enumerate(header.columns):
        owners = [place for place, owned in enumerate(header.extras) if index in owned]
        values = layout.column(numbers, index)
        if column.dtype == "|b1" and values.size and values.view(np.uint8).max() > 1:
            raise ValueError(f"extras[{column.name!r}] holds bytes that are no bool")
        for place, piece in zip(owners, _cut(values, [header.tokens[place] for place in owners]), strict=True):
            if column.name in extras[place]:
                raise ValueError(f"sample {place} has extras[{column.name!r}] twice")
            extras[place][column.name] = piece
    return extras


def _aligned(array: np.ndarray, alignment: int) -> np.ndarray:
    """The bytes [n], read-only, at a multiple of `alignment`; copied only where they are not.

    ZeroMQ hands small frames out of a shared buffer, at any address.
    """
    if array.__array_interface__["data"][0] % alignment:
        array = array.copy()
    array.flags.writeable = False
    return array
