"""A real worker process with a real SGLang server at a real replay service; the test is the learner."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.observe.events import EventLog, event_path
from streamrl.publish.publisher import Publisher
from streamrl.publish.transport import BroadcastManifest
from streamrl.recorded.weights import kept_versions
from streamrl.stream.address import replay_address
from streamrl.stream.identity import run_identity
from streamrl.stream.keys import key_folder
from streamrl.stream.messages import Announce, Finished, Hello, Progress, Publish
from streamrl.stream.sockets import Dealer
from streamrl.types import PolicyVersion
from tests.operations_table import documented

DEADLINE = 200.0  # seconds; the start of a server on busy cores
STEPS = 6


def _shared_memory(pid: int) -> set[Path]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]) for line in maps if "/dev/shm/" in line}


def test_a_worker_generates_groups_takes_in_versions_and_leaves_nothing_behind(
    start_run: Callable[..., Any], model_folders: tuple[Path, Path], forward_logprobs: Callable[..., torch.Tensor]
) -> None:
    run = start_run(probes=2)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    events = EventLog(event_path(run.folder, "learner"), "learner-0")
    publisher = Publisher(run.config, run.folder, PolicyVersion(0), events)
    batches = []
    try:
        for step in range(STEPS):
            publisher.offer(PolicyVersion(step), weights[step % 2].items())
            batches.append(run.batch(step))
            run.dealer.send(Progress(version=PolicyVersion(step + 1)))
        children = {child.pid for child in psutil.Process(run.worker.pid).children(recursive=True)}
        segments = {path for pid in children for path in _shared_memory(pid)}
        publisher.offer(PolicyVersion(STEPS), weights[STEPS % 2].items())
        assert publisher.wait(DEADLINE)
        run.dealer.send(Finished(version=PolicyVersion(STEPS)))
        assert run.worker.wait(DEADLINE) == 0, run.log("generator")
    finally:
        publisher.close()
        events.close()

    samples = [sample for batch in batches for sample in batch.samples]
    assert len(samples) == STEPS * 4 * 4
    assert not any(sample.is_placeholder for sample in samples)
    for batch in batches:
        for sample in batch.samples:
            assert batch.step - sample.oldest.step <= 1
    for sample in samples:
        for span in sample.spans:
            ids = (*sample.prompt_ids, *sample.output_ids)
            expected = forward_logprobs(weights[span.version.step % 2], ids)[len(sample.prompt_ids) - 1 :]
            difference = expected - torch.from_numpy(sample.logprobs.copy())
            assert difference[span.start : span.end].abs().max() < 1e-4
    assert len({span.version for sample in samples for span in sample.spans}) >= 3
    assert [(event["moment"], event["index"]) for event in run.events("generator", "probe")] == [
        ("start", 0), ("start", 1), ("end", 0), ("end", 1)
    ]  # fmt: skip
    kept = kept_versions(run.folder)
    assert [version.step for version in sorted(kept)] == list(range(STEPS + 1))
    for version, folder in kept.items():
        stored = load_file(folder / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in weights[version.step % 2].items())
    assert children
    assert segments
    assert not any(psutil.pid_exists(pid) for pid in children)
    assert not any(path.exists() for path in segments)


def test_an_attached_server_is_brought_to_the_initial_weights_and_outlives_the_worker(
    start_run: Callable[..., Any], fresh_server: Server
) -> None:
    async def rename_and_ask(version: str | None) -> str:
        client = EngineClient(fresh_server.address, timeout=60)
        try:
            if version is not None:  # what a worker that died in the middle of an update leaves
                await client.update_weight_version(version, 60)
            return (await client.model_info()).weight_version
        finally:
            await client.close()

    asyncio.run(rename_and_ask("7.0-partial"))
    run = start_run(attach=(fresh_server.address,), probes=0)
    batch = run.batch(0)
    assert {span.version for sample in batch.samples for span in sample.spans} == {PolicyVersion(0)}
    run.worker.send_signal(signal.SIGTERM)
    assert run.worker.wait(DEADLINE) == 0
    assert [event["tickets"] for event in run.events("replay", "worker.gone")] == [0]  # what was begun is finished
    assert not run.events("generator", "worker.undrained")
    assert asyncio.run(rename_and_ask(None)) == "0.0"


def test_a_server_left_with_parts_of_a_version_follows_a_learner_that_was_restored_behind_it(
    start_run: Callable[..., Any], fresh_server: Server, model_folders: tuple[Path, Path]
) -> None:
    """Version 3 does not fit, and its learner dies with it; the next one starts at step 1 and has version 1.1."""
    weights = load_file(model_folders[1] / "model.safetensors")
    wrong = {name: tensor[:1] if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    run = start_run(
        attach=(fresh_server.address,),
        probes=0,
        publish={"transport": "memory", "keep_every": 0},
        journal={"keep": "none"},
    )
    events = EventLog(event_path(run.folder, "learner"), "learner-0")
    publisher = Publisher(run.config, run.folder, PolicyVersion(0), events)
    try:
        for step in range(3):
            if step:
                publisher.offer(PolicyVersion(step), weights.items())
            run.batch(step)
        assert publisher.wait(DEADLINE)
        publisher.offer(PolicyVersion(3), wrong.items())
        deadline = time.monotonic() + DEADLINE
        while not run.events("replay", "publish.failed"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        publisher.close()
        publisher = Publisher(run.config, run.folder, PolicyVersion(1, incarnation=1), events)
        run.begin(PolicyVersion(1, incarnation=1))
        publisher.offer(PolicyVersion(1, incarnation=1), weights.items())
        batch = run.batch(1)
    finally:
        publisher.close()
        events.close()
    versions = {span.version for sample in batch.samples for span in sample.spans}
    assert versions == {PolicyVersion(1, incarnation=1)}
    assert not any(sample.is_placeholder for sample in batch.samples)


@pytest.mark.slow
def test_a_worker_whose_last_server_is_given_up_ends_with_the_last_lines_of_its_log(
    start_run: Callable[..., Any],
) -> None:
    run = start_run(probes=0, restarts=0)
    run.batch(0)
    (launch,) = psutil.Process(run.worker.pid).children()
    segments = {path for child in launch.children(recursive=True) for path in _shared_memory(child.pid)}
    assert any(path.name.startswith("sglang_") for path in segments)
    launch.send_signal(signal.SIGKILL)
    code = run.worker.wait(60)
    documented("last lines of ...server-0.log...", run.log("generator"), code)
    assert not [path for path in segments if path.exists()]


@pytest.mark.slow
def test_a_server_that_waits_for_a_source_that_died_is_started_again(
    start_run: Callable[..., Any], model_folders: tuple[Path, Path]
) -> None:
    """Its learner was killed between the server's question and its own answer: the port is open, and nobody speaks."""
    weights = load_file(model_folders[1] / "model.safetensors")
    run = start_run(probes=0, publish={"timeout": 5, "keep_every": 0})
    run.batch(0)
    events = EventLog(event_path(run.folder, "learner"), "learner-0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        manifest = BroadcastManifest(
            group="dead", host="127.0.0.1", port=silent.getsockname()[1], world_size=2, backend="gloo", buckets=()
        )
        keys = key_folder(run.config, run.folder)
        dead = Dealer(replay_address(run.config, run.folder), run.config.stream, keys, "publisher")
        first = PolicyVersion(1)
        dead.send(Hello(run=run_identity(run.folder).id, role="publisher", name="publisher", version=PolicyVersion(0)))
        dead.send(Announce(version=first))
        dead.send(Publish(server="server-0", version=first, manifest=msgspec.to_builtins(manifest)))
        deadline = time.monotonic() + DEADLINE
        while not run.events("generator", "server.lost"):
            assert time.monotonic() < deadline, run.log("generator")
            time.sleep(0.1)
        dead.close()
    (lost,) = run.events("generator", "server.lost")
    assert lost["reason"] == "server-0 waits inside a call for a source of weights that is gone"
    publisher = Publisher(run.config, run.folder, PolicyVersion(0, incarnation=1), events)
    try:
        run.begin(PolicyVersion(0, incarnation=1))
        for step in range(3):
            if step:
                publisher.offer(PolicyVersion(step, incarnation=1), weights.items())
            batch = run.batch(step)
    finally:
        publisher.close()
        events.close()
    assert {span.version.incarnation for sample in batch.samples for span in sample.spans} == {1}


def progressing(run: Any) -> None:
    """A step, and the workers have been told of it."""
    run.dealer.send(Progress(version=PolicyVersion(1)))
    deadline = time.monotonic() + DEADLINE
    while not run.events("replay", "learner.progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


IMPATIENT = {"progress_timeout": 4.0}


def test_a_worker_whose_learner_never_comes_back_ends_with_the_services_reason(
    start_run: Callable[..., Any], fresh_server: Server
) -> None:
    run = start_run(attach=(fresh_server.address,), probes=0, run=IMPATIENT, replay={"group_timeout": 3.0})
    run.batch(0)
    progressing(run)
    run.dealer.close()
    assert (run.worker.wait(DEADLINE), run.service.wait(DEADLINE)) == (1, 1)
    line = run.log("generator").splitlines()[-1]
    assert line.startswith("generator-0: no learner step in run.progress_timeout=4 s: ")
    assert [event["reason"] for event in run.events("replay", "gave_up")] == [line.removeprefix("generator-0: ")]


@pytest.mark.slow
def test_a_worker_that_is_told_of_no_step_for_too_long_ends_with_one_line(
    start_run: Callable[..., Any], fresh_server: Server
) -> None:
    """The service is killed and nobody starts it again."""
    run = start_run(
        attach=(fresh_server.address,),
        probes=0,
        run=IMPATIENT,
        replay={"group_timeout": 3.0},
        stream={"reply_timeout": 2.0},
    )
    run.batch(0)
    until = time.monotonic() + 8.0  # more than both times together
    while time.monotonic() < until:
        progressing(run)
        time.sleep(0.5)
    assert run.worker.poll() is None, run.log("generator")
    run.service.kill()
    code = run.worker.wait(DEADLINE)
    documented(
        "no learner step in run.progress_timeout=... s: the replay service last answered ... s ago",
        run.log("generator").splitlines()[-1],
        code,
    )
