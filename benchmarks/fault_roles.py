"""The processes that `benchmarks/faults.py` kills, beside the real replay service: without model, but for real.

    python -m benchmarks.fault_roles worker RUN 0     the worker's own line to the service; its server answers at once
    python -m benchmarks.fault_roles learner RUN      the learner's own batch source, quarantine and packing; no model

One group in POISONED has a token that no model knows. A learner of an even incarnation says what it can train, and
the service refuses such a group at the door; one of an odd incarnation does not, and has to quarantine it.

The learner writes down every group that it trains, and what its checkpoint contains is its ledger and nothing
else, as with the real one: whatever the record shows behind the last checkpoint did not happen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.generate.link import ServiceLink
from streamrl.learner.batch_metrics import batch_metrics
from streamrl.learner.batches import ServiceBatches
from streamrl.learner.packing import Packing, plan_step
from streamrl.learner.quarantine import Quarantine
from streamrl.lifeline import end_with
from streamrl.observe.events import EventLog, event_path
from streamrl.stream.address import replay_address
from streamrl.stream.identity import run_identity
from streamrl.stream.messages import Announce, Applied, Bye, Hello, Message, Publish, Roster, ServerState, Stop, Tickets
from streamrl.stream.peer import Peer
from streamrl.trainable import Limits
from streamrl.types import Batch, Group, Ledger, PolicyVersion, Sample, Ticket, VersionSpan
from streamrl.whole_files import write_whole

TOKENS = 32  # of an answer: the time goes into the protocol, not into the bytes
SECONDS = 0.01  # that a group takes on average; one in STRAGGLER takes ten times as long
STRAGGLER = 50
STEP_SECONDS = 0.01  # that a learner step takes
CHECKPOINT_EVERY = 10  # learner steps
KEPT = 2  # checkpoints
AGAIN = 1.0  # seconds after which a publish that nobody answered is tried again
VOCABULARY = 1 << 30  # of the model that there is not
POISON = VOCABULARY + 7  # a token id
POISONED = 100
RANKS = 2  # data-parallel ones that the packing plans for
GRACE = 10.0  # seconds to end cleanly after the process that started this has gone


class Start(msgspec.Struct, frozen=True, tag=True):
    """The learner starts, or starts again: what it wrote of steps from `version` on did not happen."""

    version: str
    checkpoint: float  # when the checkpoint was written, seconds since the epoch; 0 without one


class Trained(msgspec.Struct, frozen=True, tag=True):
    """One learner step, in the order of its groups."""

    step: int
    time: float
    group_ids: tuple[int, ...]
    prompts: tuple[tuple[str, int], ...]
    digests: tuple[int, ...]  # of the tokens: tells two generations of one group apart
    oldest: int  # step of the oldest token
    placeholders: int  # samples
    quarantined: tuple[int, ...] = ()  # group ids


class Saved(msgspec.Struct, frozen=True):
    """The learner's checkpoint; only the newest is a file of its own, as nothing reads the others."""

    version: str
    time: float
    ledger: Ledger | None
    kept: tuple[int, ...]  # steps of the checkpoints that a real learner would still have


def record_path(run_folder: Path) -> Path:
    return run_folder / "trained.jsonl"


def read_record(run_folder: Path) -> list[Start | Trained]:
    """What the learner wrote, in the order of writing; a line that a kill has torn is passed over."""
    path, found = record_path(run_folder), []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            found.append(msgspec.json.decode(line, type=Start | Trained))
    return found


def read_checkpoint(run_folder: Path) -> Saved | None:
    path = run_folder / "checkpoint.json"
    return msgspec.json.decode(path.read_bytes(), type=Saved) if path.exists() else None


async def run_worker(config: Config, run_folder: Path, index: int) -> None:
    """A generator worker that answers after a random time."""

    async def answer(ticket: Ticket, version: Callable[[], PolicyVersion]) -> Group:
        await asyncio.sleep(random.expovariate(1 / SECONDS) * (10 if random.randrange(STRAGGLER) == 0 else 1))
        group = make_group(ticket, version(), config.generate.group_size, f"generator-{index}")
        return poisoned(group) if random.randrange(POISONED) == 0 else group

    await serve_tickets(config, run_folder, index, answer)


Answer = Callable[[Ticket, Callable[[], PolicyVersion]], Awaitable[Group]]  # (ticket, its server's version now)


async def serve_tickets(
    config: Config,
    run_folder: Path,
    index: int,
    answer: Answer,
    *,
    busy: Callable[[], float] = time.process_time,
    note: Callable[..., None] = lambda **seen: None,
    beside: Callable[[ServiceLink], Coroutine[None, None, None]] | None = None,
) -> None:
    """The real line of a worker whose server needs no weights: every publish is applied at once.

    `busy` is what its heartbeats tell, in seconds; `note(group_id=...)` records a ticket, `note(step=...)` weights.
    `beside` goes on until the service stops.
    """
    events = EventLog(event_path(run_folder, "generator", index), f"generator-{index}")
    address = await asyncio.to_thread(replay_address, config, run_folder)
    state = ServerState(name=f"server-{index}", version=PolicyVersion(0))
    link = ServiceLink(
        config, run_folder, f"generator-{index}", address=address, servers=lambda: (state,), events=events
    )

    async def beat() -> None:
        while True:
            await link.beat(busy(), 0)
            await asyncio.sleep(config.generate.heartbeat)

    async def finish(ticket: Ticket) -> None:
        link.finish(await answer(ticket, lambda: state.version))

    async with asyncio.TaskGroup() as together:
        await link.greet()
        running = [together.create_task(link.deliver()), together.create_task(beat())]
        if beside is not None:
            running.append(together.create_task(beside(link)))
        while not isinstance(message := await link.receive(), Stop):
            if isinstance(message, Tickets):
                for ticket in filter(link.open, message.tickets):
                    note(group_id=ticket.group_id)
                    running.append(together.create_task(finish(ticket)))
                running = [task for task in running if not task.done()]
            elif isinstance(message, Publish):
                state = ServerState(name=state.name, version=max(state.version, message.version))
                note(step=state.version.step)
                await link.send(Applied(server=state.name, version=state.version))
        for task in running:
            task.cancel()
    await link.bye()
    link.close()
    events.close()


def make_group(ticket: Ticket, version: PolicyVersion, size: int, worker: str, tokens: int = TOKENS) -> Group:
    """Random tokens, `tokens` in each of `size` samples, no two generations alike."""
    generator = np.random.default_rng()
    samples = tuple(
        Sample(
            prompt_ids=np.arange(4, dtype=np.int32),
            output_ids=generator.integers(0, VOCABULARY, tokens, dtype=np.int32),
            logprobs=-generator.random(tokens, dtype=np.float32),
            loss_mask=np.ones(tokens, np.bool_),
            spans=(VersionSpan(version, 0, tokens),),
            reward=float(index % 2),
        )
        for index in range(size)
    )
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        task=ticket.task,
        prompt_index=ticket.prompt_index,
        samples=samples,
        finished=time.time(),
        worker=worker,
    )


def poisoned(group: Group) -> Group:
    """The same group, well formed, with a token in its last sample that no model has an embedding of."""
    *samples, last = group.samples
    ids = last.output_ids.copy()
    ids[-1] = POISON
    return msgspec.structs.replace(group, samples=(*samples, msgspec.structs.replace(last, output_ids=ids)), arena=None)


class PackingPlanner:
    """The learner's own planning and packing of a step, for data-parallel ranks that there are not.

    What makes the packing fail makes the learner here fail too.
    """

    def __init__(self, config: Config) -> None:
        learner = config.learner
        self.limits = Limits(vocabulary=VOCABULARY, tokens=learner.tokens_per_micro_batch)
        self._packing = Packing(ranks=RANKS, budget=self.limits.tokens, share_prompts=learner.share_prompts)
        self._mini_batches = learner.mini_batches

    def plan(self, batch: Batch) -> None:
        """Raises what `plan_step` raises, and RuntimeError where a trained token has no place, or a second one."""
        self._plan(batch, self._packing)

    def rehearse(self, batch: Batch) -> None:
        self._plan(batch, replace(self._packing, apart=True))

    def _plan(self, batch: Batch, packing: Packing) -> None:
        rewards = [sample.reward for sample in batch.samples]  # in the place of advantages, which need torch
        planned = plan_step(batch, rewards, packing, min(self._mini_batches, len(batch.groups)))
        places = [row.place for ranks in planned for rows in ranks for row in rows]
        trained = sum(group.trained_tokens for group in batch.groups)
        if not np.array_equal(np.sort(np.concatenate(places)), np.arange(trained)):
            raise RuntimeError(f"step {batch.step}: the rows do not hold each of the {trained} trained tokens once")


class Publisher(threading.Thread):
    """Tells every server that is behind of the newest version; there are no weights to send."""

    def __init__(self, config: Config, run_folder: Path, version: PolicyVersion) -> None:
        super().__init__(name="publisher", daemon=True)
        self._config = config
        self._run_folder = run_folder
        self._run = run_identity(run_folder, config.run.id).id
        self._start_version = version
        self._servers: dict[str, ServerState] = {}
        self._sent: dict[str, tuple[PolicyVersion, float]] = {}
        self.newest: PolicyVersion | None = None  # set by the learner's thread
        self._announced: PolicyVersion | None = None
        self.ending = threading.Event()

    def run(self) -> None:
        peer = Peer(self._config, self._run_folder, "publisher", self._opening)
        while not self.ending.is_set():
            peer.beat()
            self._handle(peer.receive(0.005))
            peer.insist()
            if self.newest is not None and self.newest != self._announced:
                self._announced = self.newest
                peer.send(Announce(version=self.newest))
            for server in list(self._servers.values()):
                self._publish(peer, server)
        peer.send(Bye())
        peer.close()

    def _opening(self) -> list[Message]:
        version = self.newest or self._start_version
        hello = Hello(run=self._run, role="publisher", name="publisher", version=version)
        return [hello] if self.newest is None else [hello, Announce(version=self.newest)]

    def _handle(self, message: object) -> None:
        if isinstance(message, Roster):
            self._servers = {server.name: server for server in message.servers}
        elif isinstance(message, Applied) and message.server in self._servers:
            self._servers[message.server] = ServerState(name=message.server, version=message.version)

    def _publish(self, peer: Peer, server: ServerState) -> None:
        newest, (sent, at) = self.newest, self._sent.get(server.name, (None, 0.0))
        if newest is None or server.version >= newest or (sent == newest and time.monotonic() - at < AGAIN):
            return
        peer.send(Publish(server=server.name, version=newest, manifest={}))
        self._sent[server.name] = (newest, time.monotonic())


def run_learner(config: Config, run_folder: Path) -> None:
    """Take batches and write them down; a checkpoint every few steps and at SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    saved = read_checkpoint(run_folder)
    starts = sum(isinstance(line, Start) for line in read_record(run_folder))
    version = PolicyVersion(PolicyVersion.parse(saved.version).step if saved else 0, starts)
    record = open_record(record_path(run_folder))
    write_line(record, Start(version=str(version), checkpoint=saved.time if saved else 0.0))
    planner = PackingPlanner(config)
    limits = planner.limits if version.incarnation % 2 == 0 else None
    source = ServiceBatches(config, run_folder, version, saved.ledger if saved else None, limits)
    events = EventLog(event_path(run_folder, "learner"), "learner-0")
    quarantine = Quarantine(planner, source, run_folder, events, config.learner.bad_groups)
    publisher = Publisher(config, run_folder, version)
    publisher.start()
    kept = saved.kept if saved else ()
    while not stop.is_set():
        if not source.begun(config.learner.tick):
            continue
        caught_up = source.published is None or version.step >= source.published.step
        if caught_up:
            publisher.newest = version
        delivery = source.next(version.step, config.learner.tick)
        if delivery.kind == "stop":
            break
        if delivery.batch is None:
            publisher.newest = version  # groups that were lost are generated again, by servers that need weights
            continue
        batch = quarantine.sift(delivery.batch, lambda command: None)
        time.sleep(random.expovariate(1 / STEP_SECONDS))
        batch_metrics(batch)
        write_line(record, _trained(batch))
        quarantine.trained(batch.step)
        version = PolicyVersion(version.step + 1, version.incarnation)
        source.trained(version, {})
        if version.step % CHECKPOINT_EVERY == 0:
            kept = _save(run_folder, source, version, kept)
    _save(run_folder, source, version, kept)
    source.end(None)
    publisher.ending.set()
    publisher.join()
    source.close()
    events.close()


def _trained(batch: Batch) -> Trained:
    return Trained(
        step=batch.step,
        time=time.time(),
        group_ids=tuple(group.group_id for group in batch.groups),
        prompts=tuple((group.task, group.prompt_index) for group in batch.groups),
        digests=tuple(_digest(group) for group in batch.groups),
        oldest=min((group.oldest.step for group in batch.groups if group.oldest is not None), default=batch.step),
        placeholders=sum(sample.is_placeholder for sample in batch.samples),
        quarantined=tuple(sorted(batch.quarantined)),
    )


def _digest(group: Group) -> int:
    digest = 0
    for sample in group.samples:
        digest = zlib.crc32(sample.output_ids.tobytes(), digest)
    return digest


def _save(run_folder: Path, source: ServiceBatches, version: PolicyVersion, kept: tuple[int, ...]) -> tuple[int, ...]:
    """Write the checkpoint, whole or not at all, and tell the service. Returns the steps that are kept."""
    kept = (*(step for step in kept if step < version.step), version.step)[-KEPT:]
    saved = Saved(str(version), time.time(), source.ledger, kept)
    write_whole(run_folder / "checkpoint.json", msgspec.json.encode(saved), durable=True)
    source.saved(version, oldest=kept[0])
    return kept


def open_record(path: Path) -> int:
    """A file to which `write_line` appends."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def write_line(record: int, line: msgspec.Struct) -> None:
    """One call to the operating system, so that a kill tears the last line at most."""
    os.write(record, msgspec.json.encode(line) + b"\n")


def run_role(
    description: str | None,
    worker: Callable[[Config, Path, int], Coroutine[None, None, None]],
    learner: Callable[[Config, Path], None],
) -> int:
    """The command line of scripted roles: `worker RUN INDEX` or `learner RUN`.

    They end with the process that started them.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["worker", "learner"])
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("index", type=int, nargs="?", default=0)
    options = parser.parse_args()
    end_with([os.getppid()], GRACE)
    config = config_file.load(options.run_folder / "config.yaml")
    if options.role == "worker":
        asyncio.run(worker(config, options.run_folder, options.index))
    else:
        learner(config, options.run_folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_role(__doc__, run_worker, run_learner))
