"""A generator worker as a process: signals, servers, tasks, then `Worker`; its exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.engine.client import EngineError
from streamrl.engine.server import ServerFailed
from streamrl.generate.fleet import Fleet
from streamrl.generate.pinning import MakeEvaluator
from streamrl.generate.stopping import unless
from streamrl.generate.worker import Worker
from streamrl.observe.descriptors import raise_limit
from streamrl.observe.events import EventLog, event_path
from streamrl.observe.starting import begin_part
from streamrl.progress import RunFailedError
from streamrl.reward_model.client import RewardModels
from streamrl.stream.address import replay_address
from streamrl.stream.keys import KeysUnusable
from streamrl.stream.session import PeerRefused
from streamrl.tasks import left_out, weighted
from streamrl.tasks.environment import Environment
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.hosted import close_tasks, host_tasks

REFUSED = 2  # exit code of a configuration that is not the run's


def main(config: Config, run_folder: Path, index: int, evaluator: MakeEvaluator | None = None) -> int:
    """Run the role until the run is over or a signal comes. Returns the exit code.

    `evaluator` makes what evaluates a server while the run goes on, in the worker that `evaluate.worker` names.
    Raises ConfigError for a worker without an address where its pool attaches to servers.
    """
    try:
        own = config.of_worker(index)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    raise_limit()
    return uvloop.run(run_worker(own, run_folder, index, evaluator if index == own.evaluate.worker else None))


async def run_worker(config: Config, run_folder: Path, index: int, evaluator: MakeEvaluator | None = None) -> int:
    """Worker `index` of the run, whose own `config` this is, from its server's start to its end.

    Returns 0, or 1 when the server failed, or the run. Raises PeerRefused where the run is not this worker's.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    events = EventLog(event_path(run_folder, "generator", index), f"generator-{index}")
    fleet: Fleet | None = None
    code: int | None = 0  # None: it failed, and may be started again
    try:
        over_nodes = config.generate.server_nodes > 1  # which meet at this host's address on the way to the service
        if over_nodes and await unless(stop, _address(config, run_folder, stop)):
            return 0
        fleet = Fleet(config, run_folder, index, events)
        await _run_worker(config, run_folder, index, fleet, stop=stop, events=events, evaluator=evaluator)
    except PeerRefused as refusal:
        code = REFUSED
        events.emit("worker.failed", reason=str(refusal))
        raise
    except (ServerFailed, EngineError, KeysUnusable, RunFailedError, ScorerUnready, TimeoutError) as failure:
        if not stop.is_set():  # else it was asked to end while it waited
            code = 1 if isinstance(failure, RunFailedError) else None
            events.emit("worker.failed" if code is None else "gave_up", reason=str(failure))
            print(f"generator-{index}: {failure}", file=sys.stderr)
            return 1
    except BaseException:
        code = None
        raise
    finally:
        if fleet is not None:
            if code is not None:
                fleet.leave_nodes(code)
            await fleet.close()
        events.close()
    return 0


async def _run_worker(
    config: Config,
    run_folder: Path,
    index: int,
    fleet: Fleet,
    *,
    stop: asyncio.Event,
    events: EventLog,
    evaluator: MakeEvaluator | None,
) -> None:
    """From the start of the servers until the run is over, or `stop` is set."""
    begin_part(events, "servers load the model")
    if await unless(stop, fleet.start()):
        return
    address = await _address(config, run_folder, stop)
    tasks: dict[str, Environment] = {}
    models: RewardModels | None = None
    worker: Worker | None = None
    begin_part(events, "loads the tasks")
    try:
        if await unless(stop, _load(tasks, config, run_folder)):
            return
        weighted.check_turns(config, tasks)
        if config.reward_model.path is not None:
            models = RewardModels(config, run_folder, events)
            begin_part(events, "waits for the reward model")
            if await unless(stop, models.ready()):
                return
        rewards = weighted.Weighted.of(config, models)
        worker = Worker(
            config, run_folder, index, fleet,
            address=address, events=events, tasks=tasks, rewards=rewards, evaluator=evaluator,
        )  # fmt: skip
        await worker.run(stop)
    finally:
        await (close_tasks(tasks) if worker is None else worker.close())
        if models is not None:
            await models.close()


async def _address(config: Config, run_folder: Path, stop: asyncio.Event) -> str:
    """The address of the replay service."""
    return await asyncio.to_thread(replay_address, config, run_folder, stop.is_set)


async def _load(tasks: dict[str, Environment], config: Config, run_folder: Path) -> None:
    """Load the run's tasks. Raises ScorerUnready, and ValueError for arguments that do not fit."""
    tasks |= await host_tasks(config.task.trained, config.run.seed, "train", config.task)
    left_out.apply(tasks, left_out.load(run_folder).trained, config.run.seed)
