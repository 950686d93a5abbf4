"""Damaged and random frames through every decoder of the wire: each is read or refused, and memory stays flat.

    python -m benchmarks.fuzz_decoder [--messages 2000000] [--seed 0] [--quick] [--json PATH]

A message is a valid one (each kind of header, groups with and without further columns, batches) that was
changed in a few bytes, cut, lengthened, spliced with another one or given another's arena; or random bytes; now and
then it is left whole. `MalformedMessage` is the only answer besides a value; anything else ends the run with
the message itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import psutil

from streamrl.lab.output import output_file
from streamrl.stream.codec import decode_batch, decode_group, encode_group
from streamrl.stream.messages import (
    Accepted,
    BatchHeader,
    BatchStats,
    Buffer,
    Credit,
    Heartbeat,
    Hello,
    MalformedMessage,
    Publish,
    ServerState,
    Tickets,
    decode,
    encode,
)
from streamrl.types import Group, Ledger, PolicyVersion, Sample, Ticket, VersionSpan

MAX_MESSAGE = 1 << 20
GROWTH = 16 << 20  # bytes by which the process may grow between the end of the warm-up and the end
LOOKS = 10  # times that memory is looked at
WHOLE = 0.05  # share of messages that are left whole, so that the way of a good one is walked too
V = PolicyVersion(3, incarnation=1)

Frames = tuple[bytes, ...]


def corpus() -> list[Frames]:
    """Valid messages: headers of one frame, groups of two, batches of more."""
    stats = BatchStats(tokens_generated=9, generator_busy=0.5, groups=2, bytes=77, selection={"selection/dropped": 1.0})
    ledger = Ledger(below=3, above=(5,), pending={3: ("copy", 3)}, cursors={"copy": 6})
    ticket = Ticket(group_id=7, task="copy", prompt_index=7, seed=3, issued_version=V, deadline=12.5)
    servers = (ServerState(name="server-0", version=V),)
    headers = [
        Hello(run="r", role="generator", name="generator-0", servers=servers, tickets=((7, 0), (8, 1))),
        Hello(run="r", role="learner", name="learner-0", version=V, ledger=ledger),
        Heartbeat(tickets=((7, 1),), busy=1.5, generated=1000),
        Tickets(tickets=(ticket, ticket)),
        Accepted(group_id=7, attempt=1),
        Credit(capacity=4),
        Publish(server="server-0", version=V, manifest={"buckets": [1, 2], "dtype": {"name": "float32"}}),
    ]
    groups = [_frames(_group(tokens)) for tokens in (0, 4, 40)]
    batch = encode(BatchHeader(step=3, groups=2, stats=stats, ledger=ledger))
    return [*((encode(header),) for header in headers), *groups, (batch, *groups[1], *groups[2])]


def _group(tokens: int) -> Group:
    cut = tokens // 2
    spans = (VersionSpan(V, 0, cut), VersionSpan(PolicyVersion(4, 1), cut, tokens)) if cut else ()
    samples = tuple(
        Sample(
            prompt_ids=np.arange(5, dtype=np.int32),
            output_ids=np.arange(tokens, dtype=np.int32),
            logprobs=-np.ones(tokens, np.float32),
            loss_mask=np.arange(tokens) % 3 != index,
            spans=spans,
            reward=float(index),
            reward_parts={"exact": 1.0},
            extras={"experts": np.ones((tokens, 2, 2), np.int16), "kept": np.ones(tokens, np.bool_)},
        )
        for index in range(3)
    )
    return Group(group_id=tokens, task="copy", prompt_index=1, samples=samples)


def _frames(group: Group) -> Frames:
    header, arena = encode_group(group, MAX_MESSAGE)
    return header, bytes(arena)


def damaged(frame: bytes, other: bytes, chance: random.Random) -> bytes:
    """The frame with a few bytes changed, cut, lengthened or spliced with another, or random bytes of its length."""
    changed = bytearray(frame)
    match chance.randrange(6):
        case 0:
            return chance.randbytes(chance.randrange(2 * len(frame) + 1))
        case 1:
            return frame[: chance.randrange(len(frame) + 1)]
        case 2:
            return frame + chance.randbytes(chance.randrange(9))
        case 3:
            return frame[: chance.randrange(len(frame) + 1)] + other[chance.randrange(len(other) + 1) :]
        case _:
            for _ in range(chance.randrange(1, 5) if changed else 0):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            return bytes(changed)


def feed(frames: Sequence[Buffer]) -> str:
    """What the service and its peers do with what came. Returns the outcome; MalformedMessage is one."""
    try:
        if len(frames) == 2:
            decode_group(*frames).check()
            return "group"
        message = decode(frames[0])
        if isinstance(message, BatchHeader):
            decode_batch(message, frames[1:])
            return "batch"
    except MalformedMessage:
        return "refused"
    return "message"


def fuzz(messages: int, seed: int) -> tuple[Counter[str], list[int]]:
    """Outcomes, and resident bytes at `LOOKS` moments. Raises RuntimeError, which names the message, on any crash."""
    chance = random.Random(seed)
    valid = corpus()
    outcomes: Counter[str] = Counter()
    resident: list[int] = []
    for number in range(messages):
        frames, others = list(chance.choice(valid)), chance.choice(valid)
        if chance.random() > WHOLE:
            place = chance.randrange(len(frames))
            frames[place] = damaged(frames[place], others[place % len(others)], chance)
        try:
            outcomes[feed(frames)] += 1
        except Exception as error:
            raise RuntimeError(f"message {number} of --seed {seed}: {[bytes(frame) for frame in frames]}") from error
        if (number + 1) % max(1, messages // LOOKS) == 0:
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
    return outcomes, resident


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="50,000 messages")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    messages = 50_000 if options.quick else options.messages
    began = time.perf_counter()
    outcomes, resident = fuzz(messages, options.seed)
    seconds = time.perf_counter() - began
    growth = resident[-1] - resident[0]
    shares = ", ".join(f"{kind} {count}" for kind, count in sorted(outcomes.items()))
    print(f"{messages} messages in {seconds:.0f} s, no crash: {shares}")
    print(
        f"resident memory: {' '.join(f'{size / 2**20:.1f}' for size in resident)} MiB, growth {growth / 2**20:.1f} MiB"
    )
    if options.json:
        figures = {"benchmark": "fuzz_decoder", "messages": messages, "outcomes": outcomes, "resident": resident}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(growth > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
