"""The learner's role: each rank from start or resume to the end of the run.

Rank 0 opens what the run needs, talks to the replay service and tells the other ranks what to do next
(`learner/lead_loop.py`); those follow.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streamrl import last_words
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.device import UnsupportedAcceleratorError
from streamrl.learner import mismatch, trained_model
from streamrl.learner.batches import BatchSource, RecordedBatches, ServiceBatches
from streamrl.learner.checkpoint_saver import CheckpointError
from streamrl.learner.lead_loop import FOR_GOOD, LeadLoop, StopSignal
from streamrl.learner.row_batches import RowBatches
from streamrl.learner.trainer import Trainer
from streamrl.observe import ending
from streamrl.observe.descriptors import raise_limit
from streamrl.observe.events import EventLog, Events, event_path, role_events
from streamrl.observe.metrics import MetricsWriter
from streamrl.observe.sinks import open_sinks
from streamrl.observe.starting import STARTING, begin_part, loading
from streamrl.publish.publisher import Publisher
from streamrl.stream.session import PeerRefused
from streamrl.types import Batch

log = logging.getLogger(__name__)


def main(config: Config, run_folder: Path) -> int:
    """One rank, from start or resume to the end of the run. Returns 0, also when it was asked to stop.

    Returns 1 when the run cannot go on (`FOR_GOOD`), and raises ConfigError for what is refused: the events `gave_up`
    and `learner.refused` report this to the process that started it, and to ranks that are started again.
    """
    if (former := _former_end(run_folder)) is not None:
        if former["event"] == "learner.refused":
            raise ConfigError(former["reason"])
        return _failed(former["reason"])
    raise_limit()
    stop = StopSignal()
    trainer: Trainer | None = None
    log_file: EventLog | None = None
    events = Events()
    try:
        if os.environ.get("RANK", "0") == "0":
            events = log_file = EventLog(event_path(run_folder, "learner"), "learner-0", starts=False)
        begin_part(events, "builds the model")
        trainer = Trainer(config, run_folder)
        begin_part(events, "loads the weights")
        trainer.restore_or_start(loading(events, "loads the weights"))
        if log_file is None:
            _follow(trainer)
        elif _is_over(config, run_folder, trainer):
            trainer.broadcast("end")
        else:
            _lead(config, run_folder, trainer, stop, log_file)
        return 0
    except (ConfigError, UnsupportedAcceleratorError) as error:
        events.emit("learner.refused", reason=str(error))
        raise ConfigError(str(error)) from error
    except (*FOR_GOOD, CheckpointError, trained_model.ExportError, TimeoutError) as error:
        return _failed(str(error))
    except Exception as error:  # torchrun's frame, which comes next, would say that it failed, and not why
        log.exception("rank %s failed", os.environ.get("RANK", "0"))
        return _failed(f"{type(error).__name__}: {error}")
    finally:
        if trainer is not None:
            trainer.close()
        if log_file is not None:
            log_file.close()


def _failed(reason: str) -> int:
    """Say why, so that the process that started this rank finds it in its log. Returns the exit code."""
    print(last_words.failure(reason), file=sys.stderr, flush=True)
    return 1


def _lead(config: Config, run_folder: Path, trainer: Trainer, stop: StopSignal, events: EventLog) -> None:
    """Rank 0: opens what the run needs, runs the loop, closes it in order."""
    events.start()
    for line in trainer.damage:
        events.emit("checkpoint.damaged", told=line)
    if (peak := trainer.peak) is not None:
        events.emit("learner.peak", tflops=round(peak.tflops, 6), source=peak.source)
    source: BatchSource
    publisher: Publisher | None = None
    if config.trains_rows:
        source = RowBatches(config, run_folder)
    else:
        source = ServiceBatches(config, run_folder, trainer.version, trainer.ledger, trainer.limits)
        publisher = Publisher(config, run_folder, trainer.version, events)
    metrics = MetricsWriter(run_folder, open_sinks(config, run_folder))
    for name, where in metrics.places.items():
        events.emit("sink", name=name, where=where)
    try:
        metrics.truncate_after(trainer.version.step)
        LeadLoop(
            config, run_folder, trainer, source, stop=stop, metrics=metrics, events=events, publisher=publisher
        ).run()
    except FOR_GOOD as error:
        events.emit("gave_up", reason=str(error))
        source.gave_up(str(error))
        raise
    except PeerRefused:
        trainer.broadcast("end")  # the other ranks wait for a command
        raise
    finally:
        if publisher is not None:
            publisher.close()
        metrics.close()
        source.close()


def _was_restarted() -> bool:
    """By torchrun, which does so for whatever reason a rank has ended."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _former_end(run_folder: Path) -> dict[str, Any] | None:
    """The event with which the learner before this one gave the run up or was refused, where it is started again all
    the same."""
    if not _was_restarted():
        return None
    former: dict[str, Any] | None = None
    for event in role_events(run_folder, "learner"):
        if event["event"] in ("gave_up", "learner.refused"):
            former = event
        elif event["event"] in (STARTING, "process.start"):
            former = None
    return former


def _is_over(config: Config, run_folder: Path, trainer: Trainer) -> bool:
    """The learner before this one had ended well, and died on its way out: the service is gone, and rightly so."""
    steps = config.run.steps
    if not _was_restarted():
        return False
    return ending.has_exited(run_folder) or (trainer.version.step >= steps and ending.is_over(run_folder, steps))


def run_recorded(config: Config, run_folder: Path, batches: Iterable[Batch]) -> Trainer:
    """Train on a recorded run's batches, without service and publisher. Returns the trainer, still open.

    Raises SystemExit where SIGTERM has ended that, behind a checkpoint.
    """
    source = RecordedBatches(batches)
    stop = StopSignal()
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    if trainer.rank != 0:
        _follow(trainer)
        return trainer
    events = EventLog(event_path(run_folder, "learner"), "learner-0")
    metrics = MetricsWriter(run_folder)
    try:
        LeadLoop(config, run_folder, trainer, source, stop=stop, metrics=metrics, events=events).run()
    finally:
        metrics.close()
        events.close()
    if stop.given:
        trainer.close()
        raise SystemExit(128 + signal.SIGTERM)
    return trainer


def _follow(trainer: Trainer) -> None:
    """The other ranks do as rank 0 says."""
    while (command := trainer.broadcast(None)) != "end":
        if command == "train":
            trainer.train_step(None)
        elif command == "rehearse":
            trainer.rehearse(None)
        elif command == "export":
            for _ in trainer.export():
                continue
        elif command == "evaluate":
            trainer.evaluate(None)
        elif command == mismatch.COMMAND:
            trainer.score(None)
        elif command == "save":
            trainer.save()
        elif command == "model":
            trainer.export_model()
