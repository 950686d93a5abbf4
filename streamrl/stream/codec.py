"""How a group looks on the wire: a small msgpack header and one contiguous arena of numbers.

    frame 0   {"v": 1, "kind": "group", group_id, attempt, task, prompt_index, ..., prompts, samples}
    frame 1   distinct prompts int32 | output ids int32 | log-probs float32     (8 bytes an output token)

What is long and regular stays out of the arena: version spans and loss masks travel as runs in the
header, and a prompt that samples share travels once. The number of frames is what costs on this path,
so there are two. Decoding copies nothing: the arrays of a decoded group are read-only views of the
received frame, which lives as long as any of them. Integers and floats are little-endian.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from streamrl.stream.messages import (
    PROTOCOL,
    BatchHeader,
    Buffer,
    Count,
    MalformedMessage,
    Name,
    parse,
    read_kind,
)
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan

_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_ALIGNMENT = 4  # ZeroMQ hands small frames out of a shared buffer, at any address
Step = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Length = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _SampleHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sample without its numbers. Positional, because there are many of them."""

    prompt: Length  # index into the group's distinct prompts
    tokens: Length  # T
    spans: list[tuple[Step, Step, Length]]  # (step, incarnation, end), each starting where the last ended
    mask: list[Length]  # run lengths of the loss mask, the first run is of trained tokens
    reward: float
    parts: dict[str, float]
    finish_reason: Literal["stop", "length", "abort", "placeholder"]


class _GroupHeader(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="group"
):
    v: int = PROTOCOL
    group_id: Count
    attempt: Count
    task: Name
    prompt_index: Count
    started: float
    finished: float
    worker: Annotated[str, Meta(max_length=256)]
    prompts: list[Length]  # lengths of the distinct prompts
    samples: list[_SampleHeader]


class _TicketOfHeader(msgspec.Struct, frozen=True):
    """What is needed to answer for a group that cannot be used otherwise."""

    group_id: Count
    attempt: Count


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_GroupHeader)
_TICKET_DECODER = msgspec.msgpack.Decoder(_TicketOfHeader)


def encode_group(group: Group, max_message: int) -> tuple[bytes, memoryview]:
    """The two frames of a group; the arena is a fresh buffer that is the caller's.

    Raises ValueError, naming what is wrong, for a group that no service would accept: badly formed
    (`Group.check`) or with a frame of more than `max_message` bytes.
    """
    group.check()
    places, prompts = _distinct_prompts(group)
    header = _GroupHeader(
        group_id=group.group_id,
        attempt=group.attempt,
        task=group.task,
        prompt_index=group.prompt_index,
        started=group.started,
        finished=group.finished,
        worker=group.worker,
        prompts=[len(prompt) for prompt in prompts],
        samples=[_sample_header(sample, place) for sample, place in zip(group.samples, places, strict=True)],
    )
    frame = _ENCODER.encode(header)
    whole_numbers = sum(header.prompts) + group.tokens
    size = 4 * (whole_numbers + group.tokens)
    if max(len(frame), size) > max_message:
        raise ValueError(
            f"group {group.group_id}: header of {len(frame)} and arena of {size} bytes, "
            f"stream.max_message allows {max_message}"
        )
    arena = np.empty(size, np.uint8)
    _gather([*prompts, *(sample.output_ids for sample in group.samples)], arena[: 4 * whole_numbers].view(_INT))
    _gather([sample.logprobs for sample in group.samples], arena[4 * whole_numbers :].view(_FLOAT))
    return frame, arena.data


def decode_group(header: Buffer, arena: Buffer) -> Group:
    """The group of two frames, its arrays read-only views of `arena`.

    Raises MalformedMessage with the reason, and with the ticket where the header still tells it.
    """
    ticket = ticket_of(header)
    try:
        group = _build(parse(_DECODER, header, "group"), arena)
        group.check()
    except ValueError as error:  # MalformedMessage is one of them, and does not know the ticket yet
        raise MalformedMessage(str(error), ticket) from error
    return group


def ticket_of(header: Buffer) -> tuple[int, int]:
    """(group_id, attempt) of a group's header frame, without looking at the rest. Raises MalformedMessage."""
    if (kind := read_kind(header)) != "group":
        raise MalformedMessage(f"kind {kind[:64]!r} with two frames, a group is expected")
    told = parse(_TICKET_DECODER, header, "group")
    return told.group_id, told.attempt


def decode_batch(header: BatchHeader, frames: Sequence[Buffer]) -> Batch:
    """The batch of a header and two frames for each of its groups. Raises MalformedMessage."""
    if len(frames) != 2 * header.groups:
        raise MalformedMessage(f"batch of step {header.step}: {len(frames)} frames for {header.groups} groups")
    pairs = zip(frames[::2], frames[1::2], strict=True)
    return Batch(step=header.step, groups=tuple(decode_group(*pair) for pair in pairs))


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


def _sample_header(sample: Sample, prompt: int) -> _SampleHeader:
    return _SampleHeader(
        prompt,
        len(sample.output_ids),
        [(span.version.step, span.version.incarnation, span.end) for span in sample.spans],
        _runs(sample.loss_mask),
        float(sample.reward),
        {name: float(value) for name, value in sample.reward_parts.items()},
        sample.finish_reason,  # type: ignore[arg-type]  # the decoder knows the allowed ones
    )


def _gather(arrays: list[np.ndarray], out: np.ndarray) -> None:
    if arrays:
        np.concatenate(arrays, out=out)


def _runs(mask: np.ndarray) -> list[int]:
    """Run lengths of a bool mask [T], the first of True: `[1, 1, 0, 1]` -> `[2, 1, 1]`."""
    if mask.all():
        return [len(mask)]
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    runs = np.diff(edges, prepend=0, append=len(mask)).tolist()
    return runs if mask[0] else [0, *runs]


def _mask(runs: list[int], tokens: int) -> np.ndarray:
    """The bool mask [T] of its run lengths. Raises ValueError unless they add up to T."""
    if sum(runs) != tokens:
        raise ValueError(f"loss mask covers {sum(runs)} of {tokens} output tokens")
    plain = len(runs) == 1  # the usual case, and much the cheaper one
    mask = np.ones(tokens, np.bool_) if plain else np.repeat(np.arange(len(runs)) % 2 == 0, runs)
    mask.flags.writeable = False
    return mask


class _Versions(dict[tuple[int, int], PolicyVersion]):
    """The few versions of a group, each made once: (step, incarnation) -> PolicyVersion."""

    def __missing__(self, key: tuple[int, int]) -> PolicyVersion:
        return self.setdefault(key, PolicyVersion(*key))


def _spans(runs: list[tuple[int, int, int]], versions: _Versions) -> tuple[VersionSpan, ...]:
    spans, start = [], 0
    for step, incarnation, end in runs:
        spans.append(VersionSpan(versions[step, incarnation], start, end))
        start = end
    return tuple(spans)


def _cut(array: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """Views of consecutive pieces of an array."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return [array[start:end] for start, end in itertools.pairwise(ends)]


def _build(header: _GroupHeader, arena: Buffer) -> Group:
    """Cut the arena by the header. Raises ValueError where the two do not fit together."""
    tokens = sum(sample.tokens for sample in header.samples)
    whole_numbers = sum(header.prompts) + tokens
    numbers = _aligned(np.frombuffer(arena, np.uint8))
    if numbers.nbytes != 4 * (whole_numbers + tokens):
        raise ValueError(f"arena of {numbers.nbytes} bytes, the header asks for {4 * (whole_numbers + tokens)}")
    ids, logprobs = numbers[: 4 * whole_numbers].view(_INT), numbers[4 * whole_numbers :].view(_FLOAT)
    lengths = [sample.tokens for sample in header.samples]
    pieces = _cut(ids, [*header.prompts, *lengths])
    prompts, outputs = pieces[: len(header.prompts)], pieces[len(header.prompts) :]
    versions, samples = _Versions(), []
    for sample, output_ids, sample_logprobs in zip(header.samples, outputs, _cut(logprobs, lengths), strict=True):
        if sample.prompt >= len(prompts):
            raise ValueError(f"prompt {sample.prompt} of {len(prompts)}")
        samples.append(
            Sample(
                prompt_ids=prompts[sample.prompt],
                output_ids=output_ids,
                logprobs=sample_logprobs,
                loss_mask=_mask(sample.mask, sample.tokens),
                spans=_spans(sample.spans, versions),
                reward=sample.reward,
                reward_parts=sample.parts,
                finish_reason=sample.finish_reason,
            )
        )
    return Group(
        group_id=header.group_id,
        attempt=header.attempt,
        task=header.task,
        prompt_index=header.prompt_index,
        samples=tuple(samples),
        started=header.started,
        finished=header.finished,
        worker=header.worker,
    )


def _aligned(array: np.ndarray) -> np.ndarray:
    """The bytes [n], read-only, at an address that suits a 4-byte number; copied only where it does not."""
    if array.ctypes.data % _ALIGNMENT != 0:
        array = array.copy()
    array.flags.writeable = False
    return array
