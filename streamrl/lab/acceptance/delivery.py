"""One batch of millions of tokens: from a worker through the replay service to the learner's end of the wire.

    a worker's session ──groups──▶ `streamrl replay`, a process of its own ──one message──▶ a learner's session

Both sessions are the real ones of `stream/`, encrypted as a run's are; there is no model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from streamrl.config import Config
from streamrl.lab.acceptance.check import Bench, Failed, Measured
from streamrl.lab.acceptance.trial import Trial, last_lines
from streamrl.lifeline import end_tree
from streamrl.stream.contiguous import answer_arrays, arena_of
from streamrl.stream.identity import run_identity
from streamrl.stream.messages import Accepted, Bye, Credit, Hello, Message, Next, Refused, ServerState, Tickets
from streamrl.stream.peer import Peer
from streamrl.stream.sockets import ReceivedBatch
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan, all_trained

MILLION = 10**6
TOKENS = {"small": (5 * MILLION, MILLION // 2), "large": (40 * MILLION, 2 * MILLION)}  # of a batch; with --quick
SAMPLES, LENGTH, PROMPT = 16, 8192, 256  # of a group, of an answer, of its prompt, in tokens
TICK = 0.05  # seconds that a session waits for a word
VERSION = PolicyVersion(0)
STOP = 10.0  # seconds that the service may take to end


def run(bench: Bench, size: str) -> Measured:
    """Deliver it, compare it, say how long it took from the learner's question on."""
    tokens = TOKENS[size][bench.quick]
    groups = -(-tokens // (SAMPLES * LENGTH))
    settings: dict[str, Any] = {
        "run.steps": 1, "replay.groups_per_step": groups, "replay.max_staleness": 0, "replay.lease": 600.0,
        "generate.group_size": SAMPLES, "generate.attach": ["http://127.0.0.1:1"], "stream.max_message": 1 << 30,
    }  # fmt: skip
    trial = Trial(bench, f"delivery-{size}", settings)
    log = bench.folder / "logs" / f"delivery-{size}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        words = [sys.executable, "-m", "streamrl.cli", "replay", str(trial.file), "--lifeline", str(os.getpid())]
        service = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        _until_identified(service, trial.folder, log)
        batch, seconds = _deliver(trial.config, trial.folder, groups)
    finally:
        end_tree(service.pid, timeout=STOP)
        service.wait(STOP)
    content = made_group()
    check_batch(batch, content, groups)
    delivered = sum(group.tokens for group in batch.groups)
    size_in_bytes = groups * (content.arena.numbers.nbytes if content.arena else 0)
    return Measured(
        f"{delivered / MILLION:.1f} million tokens, {size_in_bytes / 1e6:,.0f} MB in {seconds:.2f} s",
        f"{groups} groups, every number as it was sent",
    )


def _until_identified(service: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
    """Until the service has made its run folder: who asks for the run's id before would make one of its own."""
    while not (folder / "replay.address").exists():
        if service.poll() is not None:
            raise Failed(f"`streamrl replay` ended with {service.returncode}: {last_lines(log)}")
        time.sleep(TICK)


def made_group() -> Group:
    """What every group of the batch holds, but for its id."""
    random = np.random.default_rng(0)
    prompt, arrays = answer_arrays(random.integers(0, 150_000, PROMPT, dtype=np.int32), [LENGTH] * SAMPLES)
    for ids, logprobs in arrays:
        ids[:] = random.integers(0, 150_000, LENGTH, dtype=np.int32)
        logprobs[:] = -random.random(LENGTH, dtype=np.float32)
    samples = tuple(
        Sample(
            prompt_ids=prompt,
            output_ids=ids,
            logprobs=logprobs,
            loss_mask=all_trained(LENGTH),
            spans=(VersionSpan(VERSION, 0, LENGTH),),
            reward=float(index % 2),
        )
        for index, (ids, logprobs) in enumerate(arrays)
    )
    return Group(group_id=0, task="copy", prompt_index=0, samples=samples, arena=arena_of(samples))


def check_batch(batch: Batch, content: Group, groups: int) -> None:
    """Raise Failed unless it is so many times this group, in the order of ids."""
    ids = [group.group_id for group in batch.groups]
    if ids != list(range(groups)):
        raise Failed(f"{len(ids)} groups came, {groups} were sent; the first ids are {ids[:8]}")
    for group in batch.groups:
        for ours, theirs in zip(group.samples, content.samples, strict=True):
            for name in ("prompt_ids", "output_ids", "logprobs", "loss_mask"):
                if not np.array_equal(getattr(ours, name), getattr(theirs, name)):
                    raise Failed(f"{name} of group {group.group_id} are not those that were sent")


def _deliver(config: Config, folder: Path, groups: int) -> tuple[Batch, float]:
    """The batch, and the seconds from the question for it, when all groups are in the service."""
    run = run_identity(folder).id
    greeting = Hello(run=run, role="learner", name="learner-0", version=VERSION)
    learner = Peer(config, folder, "learner", lambda: [greeting])
    worker = _Worker(config, folder, run, groups)
    worker.start()
    try:
        while not worker.done.is_set():
            learner.beat()
            learner.receive(TICK)
            if worker.problem:
                raise Failed(worker.problem)
        began = time.monotonic()
        learner.ask("next", Next(step=0))
        while True:
            learner.beat()
            received = learner.receive(TICK)
            if isinstance(received, ReceivedBatch):
                return received.batch, time.monotonic() - began
    finally:
        worker.over.set()
        worker.join()
        learner.close()


class _Worker(threading.Thread):
    """The worker's end: answers every ticket at once, with the same numbers."""

    def __init__(self, config: Config, folder: Path, run: str, groups: int) -> None:
        super().__init__(name="worker", daemon=True)
        self._config, self._folder, self._run_id, self._groups = config, folder, run, groups
        self.done, self.over = threading.Event(), threading.Event()
        self.problem = ""

    def run(self) -> None:
        peer = Peer(self._config, self._folder, "generator-0", self._opening)
        content, accepted = made_group(), 0
        while not self.over.is_set():
            peer.beat()
            match peer.receive(TICK):
                case Tickets(tickets=tickets):
                    for ticket in tickets:
                        key = {"group_id": ticket.group_id, "attempt": ticket.attempt, "task": ticket.task}
                        group: Any = replace(content, prompt_index=ticket.prompt_index, **key)
                        peer.ask((ticket.group_id, ticket.attempt), group)
                case Accepted(group_id=group_id, attempt=attempt):
                    peer.answered((group_id, attempt))
                    accepted += 1
                case Refused(reason=reason):
                    self.problem = f"the service refused a group: {reason}"
            if accepted >= self._groups:
                self.done.set()
        peer.send(Bye())
        peer.close()

    def _opening(self) -> Iterator[Message]:
        state = ServerState(name="server-0", version=VERSION)
        yield Hello(run=self._run_id, role="generator", name="generator-0", servers=(state,))
        yield Credit(capacity=self._groups)
