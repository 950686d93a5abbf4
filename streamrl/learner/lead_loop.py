"""Rank 0's loop over the steps of a run.

    wait for a batch ──▶ train ──▶ every k steps: offer to the publisher ──▶ checkpoint when due ──▶ again
                                                                                behind the last step: RUN/model

A run of `streamrl sft` is the same loop over rows, with no service and no publisher. After a restart the steps behind
the checkpoint come again, with the same groups; the weights are offered again from the step on that some server had
before. While it waits it says so once a `learner.tick`, so that no collective of the other ranks runs into its timeout.
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from streamrl.config import Config
from streamrl.learner import bad_batch, trained_model
from streamrl.learner.batch_metrics import BatchMetrics
from streamrl.learner.batches import BatchSource, Delivery
from streamrl.learner.empty_steps import EmptySteps
from streamrl.learner.exits import Exits
from streamrl.learner.mismatch import MismatchAnswers
from streamrl.learner.quarantine import BadGroupsError, Quarantine
from streamrl.learner.reward_penalty import of_groups
from streamrl.learner.room import RoomWait
from streamrl.learner.row_batches import held_out
from streamrl.learner.safety import BadStepsError
from streamrl.learner.trainer import Trainer
from streamrl.observe.events import EventLog, now
from streamrl.observe.hints import Hints
from streamrl.observe.metrics import MetricsWriter, read_metrics
from streamrl.observe.starting import begin_part
from streamrl.observe.taken_off import TAKEN_OFF
from streamrl.progress import ProgressWatch, RunFailedError
from streamrl.publish.publisher import Publisher
from streamrl.types import Batch, PolicyVersion

log = logging.getLogger(__name__)

# A learner that is started again would end the same way: the run ends with the reason.
FOR_GOOD = (BadStepsError, BadGroupsError, RunFailedError)


class StopSignal:
    """SIGTERM as a flag: the learner ends after the step that it is in, with a checkpoint."""

    def __init__(self) -> None:
        self.given = False
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.given = True


class LeadLoop:
    """Rank 0's loop over the steps of a run."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        trainer: Trainer,
        source: BatchSource,
        *,
        stop: StopSignal,
        metrics: MetricsWriter,
        events: EventLog,
        publisher: Publisher | None = None,
    ) -> None:
        self.config = config
        self.run_folder = run_folder
        self.trainer = trainer
        self.source = source
        self.publisher = publisher
        self.metrics = metrics
        self.events = events
        self.stop = stop
        self._offered: PolicyVersion | None = None  # the version that was published last
        self._quarantine = Quarantine(trainer, source, run_folder, events, config.learner.bad_groups)
        # A record is trained again to its end.
        self._exits = Exits(config.run if publisher is not None else None, time.monotonic())
        self._is_run = publisher is not None or config.trains_rows  # and no training again from a record
        self._empty = EmptySteps(config.learner.empty_steps if self._is_run else 0, _trained_before(run_folder))
        self._batch_metrics = BatchMetrics(config, read_metrics(run_folder))
        self._hints = Hints(read_metrics(run_folder))
        self._mismatch = MismatchAnswers.of(config, trainer) if publisher is not None else None
        self._watch = ProgressWatch(config, time.monotonic(), patience=config.stream.reply_timeout)
        self._held_out = held_out(run_folder) if config.trains_rows else None
        self._room = RoomWait(config, trainer.broadcast)

    def run(self) -> None:
        """Train until `run.steps`, a stop signal, the source's wish to stop, or a configured exit; then publish, save,
        write RUN/model.

        Raises one of FOR_GOOD where the run is given up.
        """
        failure: str | None = None
        exits: str | None = None
        if not self.config.trains_rows:
            begin_part(self.events, "greets the replay service")
        self._begin()
        if self.publisher is not None and self._publish_is_due():
            begin_part(self.events, "publishes its weights")
            self._publish()
        self.events.emit("ready", version=str(self.trainer.version))
        self._watch = ProgressWatch(self.config, time.monotonic(), patience=self.config.stream.reply_timeout)
        saved = self.trainer.version.step
        while self.trainer.version.step < self.config.run.steps:
            began = time.monotonic()
            delivery = self._wait()
            if delivery.kind == "stop":
                failure = delivery.failure
                break
            row = self._train(delivery, began)
            if self._publish_is_due():
                row["time/publish"] = self._publish()
            if self._held_out is not None and (self._due(self.config.sft.evaluate_every) or self._is_last()):
                row["loss/held_out"] = self._evaluate(self._held_out)
            row |= {"time": now(), "time/step": time.monotonic() - began}
            self._write(_with_rates(row))  # before the checkpoint, which may not contain a step without its row
            self._report_saved()
            self._watch.step(time.monotonic())
            if (failure := self._empty.verdict(complete=False)) is not None:
                break
            if self.config.checkpoint.every and self._due(self.config.checkpoint.every):
                self._save()
                saved = self.trainer.version.step
            if (exits := self._exits.reason(self.trainer.version.step, time.monotonic())) is not None:
                break
        if self.trainer.version.step > saved:
            self._save()
        failure = failure or self._empty.verdict(complete=self._is_last() and self._is_run)
        if failure is None and self._is_last() and self._is_run and self.config.checkpoint.export:
            with self.events.span("learner.export", step=self.trainer.version.step):
                trained_model.write(self.trainer, self.run_folder, self.config.learner.tick, self._report_saved)
        self._end(failed=failure is not None, exits=exits)
        if failure is not None:
            raise RunFailedError(failure)

    def _begin(self) -> None:
        """Wait until the source knows this learner, and this learner what has been published."""
        while not self.source.begun(self.config.learner.tick) and not self.stop.given:
            self.trainer.broadcast("wait")

    def _wait(self) -> Delivery:
        """The next batch, or the wish to stop.

        Once a tick the other ranks are told that nothing is there yet, and the source of complete checkpoints. Raises
        CheckpointError where one was not written.
        """
        step = self.trainer.version.step
        with self.events.span("learner.wait", step=step):
            while True:
                delivery = self.source.next(step, self.config.learner.tick)
                if self.stop.given:
                    delivery = Delivery("stop")
                if delivery.kind in ("nothing", "lost") and self._watch.is_over(time.monotonic()):
                    delivery = Delivery("stop", failure=self._watch.line(f"step {step} has no batch"))
                if delivery.kind in ("batch", "stop"):
                    return delivery
                self.trainer.broadcast("wait")
                self._report_saved()
                if delivery.kind == "lost" and self._offered != self.trainer.version:
                    self._publish()  # the servers that generate the step again may need weights for it

    def _train(self, delivery: Delivery, began: float) -> dict[str, Any]:
        """One learner step on a delivered batch; returns its metrics row without the totals."""
        assert delivery.batch is not None
        waited = time.monotonic() - began
        batch = self._quarantine.sift(delivery.batch, self.trainer.broadcast)
        if self._mismatch is not None and self._offered == self.trainer.version:
            self._mismatch.begin(batch)
        self.trainer.broadcast("train")
        with self.events.span("learner.step", step=batch.step):
            trained = self._train_step(batch)
        self._quarantine.trained(batch.step)
        self._empty.add(batch)
        if ess := self.trainer.group_ess:
            self.source.measured(batch.step, ess)
        if not self.config.trains_rows:  # rows have no rewards, no lengths that say anything
            trained |= self._batch_metrics.of(batch)
        self.source.trained(self.trainer.version, trained)
        if not self.config.trains_rows:
            self.metrics.write_batch(self.trainer.version.step, batch)
        return {
            "step": self.trainer.version.step,
            "version": str(self.trainer.version),
            "time/wait": waited,
            "time/publish": 0.0,
            **trained,
            **delivery.stats,
        }

    def _write(self, row: dict[str, Any]) -> None:
        """Write the metrics of a step, and log what they say is wrong."""
        self.metrics.write(row, self._room)
        for hint in self._hints.feed(row):
            log.warning("%s", hint.line)

    def _train_step(self, batch: Batch) -> dict[str, float]:
        """Train; keep the batch of a step after which the run gives up."""
        try:
            trained = self.trainer.train_step(batch)
            self.events.emit("learner.ranks", step=batch.step, seconds=self.trainer.rank_seconds)
            self.events.emit("learner.phases", step=batch.step, phases=self.trainer.phases)
            if taken_off := self.trainer.taken_off:
                self.events.emit(TAKEN_OFF, step=batch.step, groups=of_groups(batch, taken_off))
            return trained
        except BadStepsError as error:
            try:
                kept = f"is in {bad_batch.save(batch, self.run_folder / f'bad_batch_{batch.step}.bin')}"
            except OSError as lost:  # the disk is full, and the run ends as it would
                kept = f"could not be kept: {lost}"
            raise BadStepsError(f"{error}; the batch {kept}") from error

    def _evaluate(self, held_out: Batch) -> float:
        """The loss of the held-out rows."""
        self.trainer.broadcast("evaluate")
        with self.events.span("learner.evaluate", step=self.trainer.version.step):
            return self.trainer.evaluate(held_out)

    def _publish(self) -> float:
        """Hand the weights to the publisher. Returns the seconds that training waited for it."""
        if self.publisher is None:
            return 0.0
        began = time.monotonic()
        scored = () if self._mismatch is None else self._mismatch.finish()
        with self.events.span("learner.offer", version=str(self.trainer.version)):
            self._await_publisher(self.publisher)
            self.trainer.broadcast("export")
            trainer = self.trainer
            trainer.lend(self.publisher.offer(trainer.version, trainer.export(), trainer.resident, scored))
            if self.config.run.shares_devices:
                self._await_servers(self.publisher)
        self._offered = self.trainer.version
        return time.monotonic() - began

    def _await_publisher(self, publisher: Publisher) -> None:
        """Before the other ranks begin an export, wait until the publisher takes it.

        Raises RuntimeError where one server takes `run.silence_timeout` seconds, or the publisher
        `run.progress_timeout`, and RunFailedError where its disk has no room for so long.
        """
        began = since = time.monotonic()
        silence, progress = self.config.run.silence_timeout, self.config.progress_timeout
        while not publisher.ready(self.config.learner.tick):
            now = time.monotonic()
            if not publisher.waits_for_servers:
                since = now
            if now - since > silence:
                raise RuntimeError(f"the publisher did not finish in run.silence_timeout={silence:g} s")
            if publisher.lacks_room:
                self._room(now - began)
            elif now - began > progress:
                raise RuntimeError(f"the publisher did not finish in run.progress_timeout={progress:g} s")
            else:
                self.trainer.broadcast("wait")

    def _await_servers(self, publisher: Publisher) -> None:
        """The servers' turn begins once they have the version: they generate with it from the first token on."""
        deadline = time.monotonic() + self.config.publish.timeout
        while not publisher.wait(self.config.learner.tick) and time.monotonic() < deadline:
            self.trainer.broadcast("wait")

    def _save(self) -> None:
        self.trainer.broadcast("save")
        with self.events.span("learner.save", step=self.trainer.version.step):
            self.trainer.save(self.source.ledger)

    def _report_saved(self, *, wait: bool = False) -> None:
        """Tell the source of the checkpoints that are complete on disk: what it may forget hangs on that."""
        for saved in self.trainer.saved(wait=wait):
            oldest = self.trainer.oldest_checkpoint
            assert oldest is not None  # the one that was just saved, at the latest
            self.source.saved(saved.version, oldest)

    def _end(self, *, failed: bool, exits: str | None) -> None:
        """Tell the ranks, let the last version arrive, tell the service whether the run is complete, or why it `exits`.

        What evaluations tell after the last step is added to the rows of their versions. That the run has `failed`
        is reported by who opened the source.
        """
        self.trainer.broadcast("end")
        self._report_saved(wait=True)  # after "end": the other ranks wait for nothing but their part of it
        if failed:
            return
        if exits is not None and not self.config.trains_rows:
            self.source.exit(self.trainer.version, exits)
            return
        complete = self._is_last()
        if self.config.trains_rows:  # there is no service to say so
            step, event = self.trainer.version.step, "learner.finished" if complete else "learner.stopped"
            reason = "all steps are done" if complete else exits or f"stopped at step {step}"
            self.events.emit(event, version=str(self.trainer.version), code=0, reason=reason)
        if complete and self.publisher is not None:
            self._await_arrival(self.publisher)
        for late in self.source.end(self.trainer.version if complete else None):
            self.metrics.amend(late.version.step, late.metrics, RoomWait(self.config))

    def _await_arrival(self, publisher: Publisher) -> None:
        """Give the last version its time to reach every server, and room where it is to be kept."""
        began, limit = time.monotonic(), self.config.publish.timeout + self.config.evaluate.longest
        room = RoomWait(self.config)
        while not publisher.wait(limit):
            if not publisher.lacks_room:
                log.warning("version %s, the last one, is not at every server after %g s", self.trainer.version, limit)
                return
            room(time.monotonic() - began)

    def _publish_is_due(self) -> bool:
        """Every `publish.every` steps, at the end, and when a resumed learner has caught up with what was published."""
        if self._is_catching_up():
            return False
        published = self.source.published
        has_caught_up = self._offered is None or (published is not None and self._offered.step < published.step)
        return has_caught_up or self._due(self.config.publish.every) or self._is_last()

    def _is_catching_up(self) -> bool:
        """Some server has had newer weights than these: a generator's version never goes back."""
        published = self.source.published
        return published is not None and self.trainer.version.step < published.step

    def _due(self, every: int) -> bool:
        return self.trainer.version.step % every == 0

    def _is_last(self) -> bool:
        return self.trainer.version.step >= self.config.run.steps


def _trained_before(run_folder: Path) -> int:
    """Tokens that the steps of former starts have trained."""
    return sum(row.get("tokens/trained") or 0 for row in read_metrics(run_folder))


def _with_rates(row: dict[str, Any]) -> dict[str, Any]:
    """Add what follows from the totals of a step: tokens a second and the idle fractions."""
    seconds = max(row["time/step"], 1e-9)
    counted = [name for name in ("tokens/generated", "tokens/trained") if name in row]  # rows were not generated
    rates = {f"{name}_per_s": row[name] / seconds for name in counted}
    return {**row, **rates, "idle/learner": row["time/wait"] / seconds}
