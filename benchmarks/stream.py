"""Groups a second through codec and ZeroMQ, against a raw socket that moves the same bytes.

    python -m benchmarks.stream [--quick] [--json PATH]

Both senders are processes of their own that fill one receiver over tcp on this machine, and take turns
within a run, so that a noisy machine slows both. The stream path is what a worker and the replay service
do: encode a group, send two frames, receive, decode, check. The raw path is `sendall` and `recv_into` of as
many bytes from and into memory that is used again. A group has 16 samples.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from streamrl.config import StreamConfig
from streamrl.stream.codec import decode_group, encode_group
from streamrl.stream.sockets import Dealer, Router
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

STREAM = StreamConfig.model_validate({})
SAMPLES, PROMPT = 16, 512
LENGTHS = (1024, 4096, 12288)  # output tokens of a sample
WARM = 5  # groups before the clock starts


def make_group(tokens: int) -> Group:
    """A group whose samples were interrupted once by an update, each at another place."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 150_000, PROMPT, dtype=np.int32)
    cuts = random.integers(1, tokens, SAMPLES).tolist()
    return Group(
        group_id=1,
        task="copy",
        prompt_index=1,
        samples=tuple(
            Sample(
                prompt_ids=prompt,
                output_ids=random.integers(0, 150_000, tokens, dtype=np.int32),
                logprobs=-random.random(tokens, dtype=np.float32),
                loss_mask=np.ones(tokens, np.bool_),
                spans=(VersionSpan(PolicyVersion(7), 0, cut), VersionSpan(PolicyVersion(8), cut, tokens)),
                reward=float(random.random()),
            )
            for cut in cuts
        ),
    )


def send_stream(address: str, tokens: int, count: int, ready: Event) -> None:
    group = make_group(tokens)
    dealer = Dealer(address, STREAM, "benchmark")
    ready.wait()
    for _ in range(count):
        dealer.send_group(group)
    dealer.close()


def send_raw(port: int, size: int, count: int, ready: Event) -> None:
    payload = np.ones(size, np.uint8).data
    with socket.create_connection(("127.0.0.1", port)) as connection:
        ready.wait()
        for _ in range(count):
            connection.sendall(payload)


def run_stream(tokens: int, count: int) -> float:
    """Groups a second, received, decoded and checked."""
    router = Router("tcp://127.0.0.1:0", STREAM)

    def receive() -> None:
        received = router.receive(STREAM.reply_timeout)
        assert received is not None
        decode_group(*(frame.buffer for frame in received[1]))

    try:
        return _timed(send_stream, (router.address, tokens, count), receive, count)
    finally:
        router.close()


def run_raw(size: int, count: int) -> float:
    """Blocks of as many bytes as a group a second."""
    buffer = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection: socket.socket | None = None

        def receive() -> None:
            nonlocal connection
            connection = connection or server.accept()[0]
            got = 0
            while got < size:
                got += connection.recv_into(buffer[got:])

        try:
            return _timed(send_raw, (server.getsockname()[1], size, count), receive, count)
        finally:
            if connection is not None:
                connection.close()


def _timed(sender: Callable[..., None], arguments: tuple, receive: Callable[[], None], count: int) -> float:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=sender, args=(*arguments, ready))
    process.start()
    ready.set()
    for _ in range(WARM):
        receive()
    began = time.perf_counter()
    for _ in range(count - WARM):
        receive()
    seconds = time.perf_counter() - began
    process.join(STREAM.reply_timeout)
    return (count - WARM) / seconds


def measure(tokens: int, repeats: int, seconds: float) -> dict[str, float]:
    """Medians over interleaved repeats of about `seconds` each, with the spread as (max - min) / median."""
    header, arena = encode_group(make_group(tokens), STREAM.max_message)
    size = len(header) + arena.nbytes
    count = max(WARM + 20, int(seconds * 1.5e9 / size))
    runs = [(run_stream(tokens, count), run_raw(size, count)) for _ in range(repeats)]
    stream, raw = (list(column) for column in zip(*runs, strict=True))
    ratio = [a / b for a, b in runs]
    return {
        "tokens": tokens,
        "bytes": size,
        "groups_per_run": count,
        "stream_groups_per_s": statistics.median(stream),
        "stream_spread": _spread(stream),
        "raw_groups_per_s": statistics.median(raw),
        "raw_spread": _spread(raw),
        "ratio": statistics.median(ratio),
        "ratio_spread": _spread(ratio),
    }


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one length, short runs")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    lengths, repeats, seconds = ((4096,), 5, 0.3) if options.quick else (LENGTHS, 7, 1.0)
    print("tokens/sample   MB/group   stream groups/s (spread)   raw groups/s (spread)   ratio (spread)")
    rows = []
    for tokens in lengths:
        row = measure(tokens, repeats, seconds)
        rows.append(row)
        print(
            f"{tokens:13d} {row['bytes'] / 1e6:10.2f} {row['stream_groups_per_s']:17.0f} ({row['stream_spread']:4.0%})"
            f" {row['raw_groups_per_s']:15.0f} ({row['raw_spread']:4.0%})"
            f" {row['ratio']:9.2f} ({row['ratio_spread']:4.0%})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "stream", "repeats": repeats, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
