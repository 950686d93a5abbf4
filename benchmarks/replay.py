"""What the replay service costs apart from its sockets: bookkeeping, the journal's bandwidth, a minute under load.

    python -m benchmarks.replay [--quick] [--seconds 60] [--json PATH]

    bookkeeping   everything that the buffer does for a group from its ticket to the acknowledged step, journal off
    journal       groups of 16 samples through the journal, a commit (write and fsync) every `journal.commit_groups`,
                  against plain writes of the same bytes that are never synced, which end in the page cache, and
                  against plain writes that are synced as often
    load          1,000 groups a second from ticket to acknowledged step, journalled, with checkpoints that let the
                  journal compact itself; the process's memory before and after

One process, nothing faked: the buffer, its journal and the disk under `--folder`. Lengths and ways to write take turns
within a run, the bookkeeping with them, and a ratio is formed between neighbours. Figures are medians over the repeats,
spreads (max - min) / median. A target that was missed in the full form makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from benchmarks.repeats import spread
from benchmarks.rollout_path import make_group
from streamrl.config import Config
from streamrl.config.replay import JournalConfig
from streamrl.lab.output import output_file, output_folder
from streamrl.observe.events import EventLog, event_path
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.journal import Journal
from streamrl.replay.records import Completed
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion

LENGTHS = (1024, 4096, 12288)  # output tokens of a sample
LOAD_TOKENS = 512  # of a sample in the minute under load: 70 KB a group
RATE = 1000.0  # groups a second in the minute under load
BOOKED = 6_400  # groups of a repeat of the bookkeeping: a hundred steps
WORKER = "worker"
FLAT = 1.05  # memory at the end over that after a sixth of the minute
TARGETS = {"bookkeeping us": 15.0, "journal / plain write": 0.4, "groups/s": RATE}


LATEST = PolicyVersion(2**30)  # newer than any ticket of a run asks for, so that one group answers all of them


class Circle:
    """The service's calls round one buffer: tickets, groups, batches, acknowledgements, checkpoints."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        sections = {"run": {"steps": 10**6}, "replay": {"groups_per_step": 64}, **sections}
        self.config = Config.model_validate(sections)
        self._events = EventLog(event_path(folder, "replay"), "replay-0")
        self.durable = DurableBuffer(self.config, folder, self._events)
        self.durable.begin(PolicyVersion(0), None)
        self.durable.buffer.acknowledge(PolicyVersion(0))
        self.step = 0

    def group(self, group: Group, frames: Sequence[bytes]) -> None:
        """One group, which must be the next in order, from its ticket to the buffer."""
        now = time.monotonic()
        ticket = self.durable.buffer.issue(WORKER, LATEST, now)
        assert ticket is not None
        assert self.durable.complete(WORKER, group, frames) is not None
        self.durable.tick(now)

    def batch(self) -> None:
        """A step, when its groups are complete: durable, delivered, trained, acknowledged, and saved now and then."""
        groups = self.durable.buffer.pop(self.step)
        if groups is None:
            return
        now = time.monotonic()
        self.durable.commit(now)
        assert self.durable.load(self.step, groups) is not None
        self.durable.buffer.selection_metrics()
        self.durable.buffer.ledger()
        self.durable.buffer.expire(now)
        self.step += 1
        self.durable.buffer.acknowledge(PolicyVersion(self.step))
        if self.step % self.config.checkpoint.every == 0:
            self.durable.saved(self.step - self.config.checkpoint.every, now)

    def close(self) -> None:
        self.durable.close()
        self._events.close()


@contextmanager
def circle(folder: Path, **sections: dict[str, Any]) -> Iterator[Circle]:
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        made = Circle(Path(run_folder), **sections)
        try:
            yield made
        finally:
            made.close()


class Bookkeeping:
    """A buffer without a journal: nothing waits here, and a busy machine does not count."""

    def __init__(self, folder: Path) -> None:
        template = make_group(LOAD_TOKENS, (LATEST, LATEST))
        self._folder = folder
        self._groups = [replace(template, group_id=i, prompt_index=i) for i in range(BOOKED)]
        self._micros: list[float] = []  # of CPU, a group

    def repeat(self) -> None:
        with circle(self._folder, journal={"keep": "none"}) as made:
            began = time.process_time()
            for group in self._groups:
                made.group(group, (b"header", b"arena"))
                made.batch()
            self._micros.append((time.process_time() - began) / BOOKED * 1e6)

    def row(self) -> dict[str, float]:
        return {"us": statistics.median(self._micros), "spread": spread(self._micros)}


class Writing:
    """About `size` bytes of groups of one length, written in the three ways, in turn."""

    def __init__(self, folder: Path, tokens: int, size: int) -> None:
        self._folder, self._tokens = folder, tokens
        self._config = JournalConfig.model_validate({})
        self._frames = tuple(bytes(frame) for frame in encode_group(make_group(tokens, (LATEST, LATEST)), size))
        self._group_bytes = sum(len(frame) for frame in self._frames)
        commit = self._config.commit_groups
        self._count = max(commit, size // self._group_bytes // commit * commit)
        self._runs: list[tuple[float, float, float]] = []  # seconds: journal, plain, plain and synced

    def repeat(self) -> None:
        folder, frames, count = self._folder, self._frames, self._count
        self._runs.append(
            (
                _journal(folder, self._config, frames, count),
                _plain(folder, frames, count, None),
                _plain(folder, frames, count, self._config.commit_groups),
            )
        )

    def row(self) -> dict[str, float]:
        """MB/s of the three, and what the journal is of the other two."""
        whole = self._count * self._group_bytes / 1e6
        rates = [[whole / seconds for seconds in way] for way in zip(*self._runs, strict=True)]
        ratios = [[journal / other for journal, other in zip(rates[0], way, strict=True)] for way in rates[1:]]
        row: dict[str, float] = {"tokens": self._tokens, "bytes": self._group_bytes}
        for name, values in zip(("journal", "plain", "synced"), rates, strict=True):
            row |= {f"{name}_mb_per_s": statistics.median(values), f"{name}_spread": spread(values)}
        for name, values in zip(("plain", "synced"), ratios, strict=True):
            row |= {f"ratio_{name}": statistics.median(values), f"ratio_{name}_spread": spread(values)}
        return row


def _journal(folder: Path, config: JournalConfig, frames: tuple[bytes, ...], count: int) -> float:
    """Seconds to journal `count` groups, the last commit included."""
    with tempfile.TemporaryDirectory(dir=folder) as journal_folder:
        journal = Journal(Path(journal_folder), config, b"")
        began = time.perf_counter()
        for group_id in range(count):
            journal.append_group(Completed(group_id=group_id, attempt=0, size=1, tokens=1, oldest=0), frames)
            if group_id % config.commit_groups == config.commit_groups - 1:
                journal.commit()
        seconds = time.perf_counter() - began
        journal.close()
    return seconds


def _plain(folder: Path, frames: tuple[bytes, ...], count: int, synced: int | None) -> float:
    """Seconds to write as many bytes, one call a group, with an fsync after every `synced` of them."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for group_id in range(count):
            os.writev(file.fileno(), frames)
            if synced and group_id % synced == synced - 1:
                os.fdatasync(file.fileno())
        return time.perf_counter() - began


def load(folder: Path, seconds: float) -> dict[str, float]:
    """RATE groups a second for so long; memory is read after a sixth of the time, and at the end."""
    template = make_group(LOAD_TOKENS, (LATEST, LATEST))
    header, arena = (bytes(frame) for frame in encode_group(template, 1 << 28))
    process = psutil.Process()
    memory: list[int] = []
    on_disk = 0
    with circle(folder, journal={"segment": 64 << 20}) as made:
        began, busy = time.monotonic(), time.process_time()
        count = int(RATE * seconds)
        for group_id in range(count):
            # A copy each: memory that is not let go of would show.
            made.group(replace(template, group_id=group_id, prompt_index=group_id), (header, bytes(bytearray(arena))))
            made.batch()
            if group_id % int(RATE) == 0:
                memory.append(process.memory_info().rss)
                on_disk = max(on_disk, _size(folder))
            if (ahead := began + (group_id + 1) / RATE - time.monotonic()) > 0:
                time.sleep(ahead)
        elapsed, busy = time.monotonic() - began, time.process_time() - busy
        steps = made.step
    memory.append(process.memory_info().rss)
    return {
        "groups": count,
        "groups_per_s": count / elapsed,
        "steps": steps,
        "group_bytes": len(header) + len(arena),
        "cpu": busy / elapsed,
        "rss_start_mb": memory[len(memory) // 6] / 1e6,
        "rss_end_mb": memory[-1] / 1e6,
        "rss_max_mb": max(memory) / 1e6,
        "disk_max_mb": on_disk / 1e6,
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.journal"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one length, few bytes, 5 s of load")
    parser.add_argument("--seconds", type=float, help="of load (default: 60, quick: 5)")
    parser.add_argument("--folder", type=output_folder, help="where to write (default: the temporary folder)")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        figures = run(Path(name), options.quick, options.seconds)
    broken = missed(figures)
    judged = "not judged in the quick form" if options.quick else ("; ".join(broken) or "all reached")
    print(f"targets: {judged}")
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "replay", "targets": TARGETS, **figures}, indent=1) + "\n")
    return 1 if broken and not options.quick else 0


def run(folder: Path, quick: bool, seconds: float | None) -> dict[str, Any]:
    """All three parts, each printed as it is done."""
    kept = Bookkeeping(folder)
    written = [Writing(folder, tokens, (32 if quick else 128) << 20) for tokens in ((4096,) if quick else LENGTHS)]
    for _ in range(5 if quick else 21):
        kept.repeat()
        for each in written:
            each.repeat()
    figures = {"bookkeeping": kept.row(), "journal": [each.row() for each in written]}
    show(figures)
    figures["load"] = under = load(folder, seconds or (5.0 if quick else 60.0))
    print(
        f"load: {under['groups']} groups of {under['group_bytes'] / 1e3:.0f} KB, {under['groups_per_s']:.0f} a second"
        f" (asked {RATE:g}), {under['steps']} steps, {under['cpu']:.0%} of a core\n"
        f"      memory {under['rss_start_mb']:.0f} MB after a sixth, {under['rss_end_mb']:.0f} MB at the end, "
        f"{under['rss_max_mb']:.0f} MB at most; journal {under['disk_max_mb']:.0f} MB at most"
    )
    return figures


def show(figures: dict[str, Any]) -> None:
    kept, limit = figures["bookkeeping"], TARGETS["bookkeeping us"]
    print(
        f"bookkeeping, journal off: {kept['us']:.1f} us of CPU a group (spread {kept['spread']:.0%}), limit {limit:g}\n"
    )
    print("MB/s (spread)                                                             journal /      journal /")
    print("tokens/sample   MB/group       journal   plain write  synced write   plain write   synced write")
    for row in figures["journal"]:
        print(
            f"{row['tokens']:13.0f} {row['bytes'] / 1e6:10.2f}"
            f" {row['journal_mb_per_s']:7.0f} ({row['journal_spread']:4.0%})"
            f" {row['plain_mb_per_s']:7.0f} ({row['plain_spread']:4.0%})"
            f" {row['synced_mb_per_s']:7.0f} ({row['synced_spread']:4.0%})"
            f" {row['ratio_plain']:7.2f} ({row['ratio_plain_spread']:4.0%})"
            f" {row['ratio_synced']:7.2f} ({row['ratio_synced_spread']:4.0%})"
        )
    print(
        f"journal / plain asked: {TARGETS['journal / plain write']:g}; the journal's fsyncs are counted\n", flush=True
    )


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not reached, by the medians."""
    broken = []
    if figures["bookkeeping"]["us"] > (limit := TARGETS["bookkeeping us"]):
        broken.append(f"{figures['bookkeeping']['us']:.1f} us of bookkeeping, at most {limit:g} are wanted")
    for row in figures["journal"]:
        if row["ratio_plain"] < (bar := TARGETS["journal / plain write"]):
            broken.append(
                f"journal {row['ratio_plain']:.2f} of plain write at {row['tokens']:.0f} tokens, {bar:g} is wanted"
            )
    under = figures["load"]
    if under["groups_per_s"] < 0.99 * RATE:
        broken.append(f"{under['groups_per_s']:.0f} groups/s, {RATE:g} are wanted")
    if under["rss_end_mb"] > FLAT * under["rss_start_mb"]:
        broken.append(f"memory grew from {under['rss_start_mb']:.0f} to {under['rss_end_mb']:.0f} MB")
    return broken


if __name__ == "__main__":
    sys.exit(main())
