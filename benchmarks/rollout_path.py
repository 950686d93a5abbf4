"""The whole way of a group from a worker into the replay service, against a raw socket and against lists.

    python -m benchmarks.rollout_path [--quick] [--json PATH]

    stream   encode, send, receive, decode, check, acknowledge: streamrl's Dealer and Router, journal off
    apart    the same with a group whose samples have arrays of their own, which have to be copied together
    curve    the same, authenticated and encrypted
    raw      `sendall` and `recv_into` of as many bytes, 1 MiB socket buffers, memory that is used again
    orjson   lists of the ids, log-probs, mask and version of every token in one JSON text, and arrays made of them
    pickle   the same lists pickled

Every path but `raw` begins with the same group of arrays and ends with arrays that a learner can take. The group lies
in memory as a worker makes one from a request's answers (`stream/contiguous.py`), but for `apart`.

A group has 16 samples of one prompt. The sender is a process of its own; both ends are on this machine over tcp,
and at most `WINDOW` groups wait for their acknowledgement. The paths take turns within a run, so that a noisy
machine slows all of them, and a ratio is formed between neighbours; figures are medians over the repeats, the
spread is (max - min) / median. CPU is the time of all threads of both ends.

Bars, of the full form: `stream` reaches at least 0.35 of `raw` at 4k tokens and 0.75 at 12k, with at most a fortieth of
the CPU of `orjson`. Exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import pickle
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zmq
from msgspec.structs import replace

from benchmarks.repeats import spread
from streamrl.config.replay import StreamConfig
from streamrl.lab.output import output_file
from streamrl.stream.codec import decode_group, encode_group
from streamrl.stream.contiguous import answer_arrays, arena_of
from streamrl.stream.messages import Accepted
from streamrl.stream.sockets import Dealer, Router
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan, all_trained

SAMPLES, PROMPT = 16, 512
LENGTHS = (1024, 4096, 12288)  # output tokens of a sample
OF_RAW = {4096: 0.35, 12288: 0.75}  # bars, by length
LESS_CPU = 40.0  # times less than `orjson`: a bar at the lengths of OF_RAW
VERSIONS = (PolicyVersion(7), PolicyVersion(8))  # before and after the update that interrupts a sample
WINDOW = 8  # groups that a worker has finished and not seen acknowledged; more would leave the processor's cache
WARM = 8  # groups before the clock starts
SOCKET_BUFFER = 1 << 20
LOCAL = "tcp://127.0.0.1:0"

# Bytes of groups as the codec sends them, so that every run takes about half a second.
BYTES_PER_RUN = {"raw": 1.0e9, "stream": 1.0e9, "apart": 1.0e9, "curve": 3.0e8, "orjson": 1.5e7, "pickle": 1.5e7}

STREAMS = ("stream", "apart", "curve")
MOST = 10_000  # groups of a run, however small they are


@dataclass(frozen=True)
class Order:
    """What the sending process shall do."""

    path: str
    address: str
    tokens: int
    count: int
    keys: Path


def stream_config(path: str) -> StreamConfig:
    return StreamConfig(curve="on" if path == "curve" else "off")


def make_group(tokens: int, versions: tuple[PolicyVersion, PolicyVersion] = VERSIONS) -> Group:
    """A group of 16 samples of so many tokens, each interrupted once by an update, each at another place.

    It lies in one piece, as a worker makes it.
    """
    random = np.random.default_rng(0)
    prompt = random.integers(0, 150_000, PROMPT, dtype=np.int32)
    cuts = random.integers(1, tokens, SAMPLES).tolist()
    prompt, arrays = answer_arrays(prompt, [tokens] * SAMPLES)
    for ids, logprobs in arrays:
        ids[:] = random.integers(0, 150_000, tokens, dtype=np.int32)
        logprobs[:] = -random.random(tokens, dtype=np.float32)
    samples = tuple(
        Sample(
            prompt_ids=prompt,
            output_ids=ids,
            logprobs=logprobs,
            loss_mask=all_trained(tokens),
            spans=(VersionSpan(versions[0], 0, cut), VersionSpan(versions[1], cut, tokens)),
            reward=float(random.random()),
        )
        for (ids, logprobs), cut in zip(arrays, cuts, strict=True)
    )
    return Group(group_id=1, task="copy", prompt_index=1, samples=samples, arena=arena_of(samples))


def taken_apart(group: Group) -> Group:
    """The same group, each array in memory of its own."""
    samples = (
        replace(
            sample,
            output_ids=sample.output_ids.copy(),
            logprobs=sample.logprobs.copy(),
            loss_mask=sample.loss_mask.copy(),
        )
        for sample in group.samples
    )
    return replace(group, samples=tuple(samples))


def as_lists(group: Group) -> dict[str, Any]:
    """The group as a text of numbers can hold it."""
    return {
        "group_id": group.group_id,
        "task": group.task,
        "prompt": group.samples[0].prompt_ids.tolist(),
        "samples": [
            {
                "ids": sample.output_ids.tolist(),
                "logprobs": sample.logprobs.tolist(),
                "mask": sample.loss_mask.astype(int).tolist(),
                "versions": sample.token_steps().tolist(),
                "reward": sample.reward,
            }
            for sample in group.samples
        ],
    }


def as_arrays(lists: dict[str, Any]) -> list[tuple[np.ndarray, ...]]:
    """What `as_lists` took apart."""
    fields = (("ids", np.int32), ("logprobs", np.float32), ("mask", np.bool_), ("versions", np.int32))
    return [tuple(np.array(sample[name], dtype) for name, dtype in fields) for sample in lists["samples"]]


# -- the sending end


def send_raw(order: Order) -> None:
    payload = np.ones(arena_size(order.tokens), np.uint8).data
    host, port = order.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        for _ in range(order.count):
            connection.sendall(payload)


def send_stream(order: Order) -> None:
    stream = stream_config(order.path)
    group = make_group(order.tokens)  # one for all, as `raw` has one memory
    if order.path == "apart":
        group = taken_apart(group)
    dealer = Dealer(order.address, stream, order.keys, "benchmark")
    for sent in range(order.count + WINDOW):
        if sent >= WINDOW:
            assert isinstance(dealer.receive(stream.reply_timeout), Accepted)
        if sent < order.count:
            dealer.send(group)
    dealer.close()


def send_lists(order: Order) -> None:
    group = make_group(order.tokens)
    encode: Callable[[Any], bytes] = orjson.dumps if order.path == "orjson" else pickle.dumps
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(order.address)
        for sent in range(order.count + WINDOW):
            if sent >= WINDOW:
                dealer.recv()
            if sent < order.count:
                dealer.send(encode(as_lists(group)), copy=False)


def sender(orders: Connection) -> None:
    """The sending process: for each order send, then answer with the CPU seconds that it took."""
    send = dict.fromkeys(STREAMS, send_stream) | {"raw": send_raw, "orjson": send_lists, "pickle": send_lists}
    while (order := orders.recv()) is not None:
        began = time.process_time()
        send[order.path](order)
        orders.send(time.process_time() - began)


# -- the receiving end: each yields an address, and a function that receives one group


@contextlib.contextmanager
def receive_raw(tokens: int) -> Iterator[tuple[str, Callable[[], None]]]:
    size = arena_size(tokens)
    buffer = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as accepted:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        connections: list[socket.socket] = []

        def receive() -> None:
            if not connections:
                connections.append(accepted.enter_context(server.accept()[0]))
            got = 0
            while got < size:
                got += connections[0].recv_into(buffer[got:])

        yield f"tcp://127.0.0.1:{server.getsockname()[1]}", receive


@contextlib.contextmanager
def receive_stream(path: str, keys: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    stream = stream_config(path)
    router = Router(LOCAL, stream, keys)

    def receive() -> None:
        received = router.receive(stream.reply_timeout)
        assert received is not None
        group = decode_group(*received.frames)
        router.send(received.peer, Accepted(group_id=group.group_id, attempt=group.attempt))

    try:
        yield router.address, receive
    finally:
        router.close()


@contextlib.contextmanager
def receive_lists(path: str) -> Iterator[tuple[str, Callable[[], None]]]:
    decode: Callable[[Any], Any] = orjson.loads if path == "orjson" else pickle.loads
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def receive() -> None:
            peer, body = router.recv_multipart(copy=False)
            as_arrays(decode(body.buffer))
            router.send_multipart([peer, b""])

        yield f"tcp://127.0.0.1:{port}", receive


def arena_size(tokens: int) -> int:
    """Bytes of both frames."""
    return sum(len(frame) for frame in encode_group(make_group(tokens), stream_config("stream").max_message))


# -- the measurement


@dataclass(frozen=True)
class Run:
    groups_per_s: float
    cpu: float  # seconds a group, both ends


def run(path: str, tokens: int, count: int, orders: Connection, keys: Path) -> Run:
    """`count` groups on one path."""
    if path == "raw":
        receiving = receive_raw(tokens)
    else:
        receiving = receive_stream(path, keys) if path in STREAMS else receive_lists(path)
    with receiving as (address, receive):
        cpu = time.process_time()
        orders.send(Order(path, address, tokens, count, keys))
        for _ in range(WARM):
            receive()
        began = time.perf_counter()
        for _ in range(count - WARM):
            receive()
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu + orders.recv()
    return Run((count - WARM) / seconds, cpu / count)


def measure(tokens: int, repeats: int, share: float, orders: Connection, keys: Path) -> dict[str, Any]:
    """Medians and spreads of every path for one length."""
    size = arena_size(tokens)
    counts = {path: min(MOST, max(3 * WARM, int(share * amount / size))) for path, amount in BYTES_PER_RUN.items()}
    runs = [{path: run(path, tokens, counts[path], orders, keys) for path in BYTES_PER_RUN} for _ in range(repeats)]
    row: dict[str, Any] = {"tokens": tokens, "bytes": size, "groups_per_run": counts}
    for path in BYTES_PER_RUN:
        rates = [each[path].groups_per_s for each in runs]
        ratios = [each[path].groups_per_s / each["raw"].groups_per_s for each in runs]
        row[path] = {
            "groups_per_s": statistics.median(rates),
            "spread": spread(rates),
            "ratio": statistics.median(ratios),
            "ratio_spread": spread(ratios),
            "cpu_us": 1e6 * statistics.median(each[path].cpu for each in runs),
            "cpu_over_stream": statistics.median(each[path].cpu / each["stream"].cpu for each in runs),
        }
    return row


def show(row: dict[str, Any]) -> None:
    for path in BYTES_PER_RUN:
        figures = row[path]
        print(
            f"{row['tokens']:13d} {row['bytes'] / 1e6:9.2f}   {path:7s}"
            f" {figures['groups_per_s']:9.0f} ({figures['spread']:4.0%}) {figures['ratio']:8.3f}"
            f" ({figures['ratio_spread']:4.0%}) {figures['cpu_us']:12.0f} {figures['cpu_over_stream']:12.1f}x",
            flush=True,
        )


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The bars that these lengths did not reach."""
    broken = []
    for row in rows:
        if (bar := OF_RAW.get(row["tokens"])) is None:
            continue
        of_raw, less = row["stream"]["ratio"], row["orjson"]["cpu_over_stream"]
        if of_raw < bar:
            broken.append(f"{row['tokens']} tokens: {of_raw:.3f} of the raw socket, at least {bar:g} is wanted")
        if less < LESS_CPU:
            broken.append(f"{row['tokens']} tokens: {less:.1f} times less CPU than orjson, {LESS_CPU:g} is wanted")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one length, short runs")
    parser.add_argument("--lengths", type=int, nargs="+", help="output tokens of a sample")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    lengths, repeats, share = ((4096,), 3, 0.3) if options.quick else (LENGTHS, 7, 1.0)
    lengths = options.lengths or lengths
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=sender, args=(theirs,), daemon=True)
    process.start()
    print("tokens/sample  MB/group   path    groups/s (spread)   of raw (spread)   CPU us/group   of stream's")
    rows = []
    with tempfile.TemporaryDirectory() as keys:
        for tokens in lengths:
            rows.append(measure(tokens, repeats, share, orders, Path(keys) / "keys"))
            show(rows[-1])
    orders.send(None)
    process.join(stream_config("stream").reply_timeout)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "rollout_path", "repeats": repeats, "rows": rows}) + "\n")
    broken = missed(rows)
    print(f"bars: {'; '.join(broken) or 'held'}{', not judged in the quick form' if options.quick else ''}")
    return 1 if broken and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
