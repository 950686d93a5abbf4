"""When the learner publishes and what it saves: the loop itself, with a trainer that only counts."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_parts import make_batch

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.device import UnsupportedAcceleratorError
from streamrl.learner import role
from streamrl.learner.batches import Delivery
from streamrl.learner.checkpoint import Checkpoint
from streamrl.learner.checkpoint_saver import CheckpointError
from streamrl.learner.lead_loop import LeadLoop
from streamrl.observe.disk import append
from streamrl.observe.events import EventLog, event_path, read_events
from streamrl.observe.metrics import MetricsWriter, read_metrics
from streamrl.progress import RunFailedError
from streamrl.stream.messages import Evaluated
from streamrl.trainable import Limits
from streamrl.types import Ledger, PolicyVersion
from tests.operations_table import documented

STATS = {"tokens/generated": 0, "idle/generator": 0.0, "buffer/groups": 0, "buffer/bytes": 0}


class Trainer:
    """Counts steps and notes what was asked of it."""

    rank = 0
    scored: tuple[int, ...] = ()  # answers with each version that was published
    damage = ()
    ledger = None
    rank_seconds = (0.1,)
    phases = (("scores", 1.0, 2.0),)
    peak = None
    taken_off = ()
    group_ess = ()

    def __init__(self, version: PolicyVersion) -> None:
        self.version = version
        self.begun: list[tuple[int, Ledger | None]] = []  # saves
        self.told = 0  # of them
        self.asked = 0  # whether all saves are complete
        self.commands: list[Any] = []
        self.exported: list[tuple[int, int]] = []  # step of each model, and checkpoints that were complete before it

    def broadcast(self, value: Any) -> Any:
        self.commands.append(value)
        return value

    limits = Limits(vocabulary=1 << 20, tokens=1 << 20)

    def plan(self, batch) -> None: ...

    def rehearse(self, batch) -> None: ...

    def score(self, batch) -> np.ndarray:
        return np.zeros(sum(group.trained_tokens for group in batch.groups), np.float32)

    def train_step(self, batch) -> dict[str, float]:
        assert batch.step == self.version.step
        self.version = PolicyVersion(batch.step + 1, self.version.incarnation)
        return {"offpolicy/ess": 0.9}

    resident = frozenset({1, 2})
    lent: tuple[Any, ...] = ()

    def export(self) -> Iterator[Any]:
        return iter(())

    def lend(self, copied: Any) -> None:
        self.lent = (*self.lent, copied)

    def save(self, ledger: Ledger | None) -> None:
        self.begun.append((self.version.step, ledger))

    def saved(self, *, wait: bool = False) -> list[Any]:
        """A save is complete when the next step is."""
        complete = [checkpoint(step) for step, _ in self.begun[self.told :]]
        self.told = len(self.begun)
        return complete

    def settled(self, seconds: float) -> bool:
        """A save that is under way is complete when it has been asked for twice."""
        self.asked += 1
        return self.asked > 2

    def export_model(self) -> None:
        self.exported.append((self.version.step, self.told))

    @property
    def oldest_checkpoint(self) -> int:
        return self.begun[0][0]


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(Path(f"step_{step}"), PolicyVersion(step), fixed={}, layout={}, ledger=None)


class Source:
    """Gives every batch at once, save those of `late` steps, for which it has nothing twice.

    Those of `lost` steps are late because they are generated again.
    """

    def __init__(self, published: PolicyVersion | None, late: tuple[int, ...] = (), lost: tuple[int, ...] = ()) -> None:
        self.published = published
        self.ledger: Ledger | None = None
        self.late = dict.fromkeys((*late, *lost), 2)
        self.lost = lost
        self.told: list[Any] = []
        self.evaluated: list[Evaluated] = []  # behind the last batch
        self.asked_to_begin = 0

    def begun(self, timeout: float) -> bool:
        self.asked_to_begin += 1
        return self.asked_to_begin > 1

    def next(self, step: int, timeout: float) -> Delivery:
        if self.late.get(step, 0):
            self.late[step] -= 1
            return Delivery("lost" if step in self.lost else "nothing")
        return Delivery("batch", make_batch(step), STATS)

    def quarantined(self, step: int, group: tuple[int, int], reason: str) -> None:
        self.told.append(("quarantined", step, group))

    def trained(self, version: PolicyVersion, measured: Mapping[str, float]) -> None:
        self.ledger = Ledger(below=8 * version.step)
        self.told.append((str(version), measured.get("offpolicy/ess")))

    def saved(self, version: PolicyVersion, oldest: int) -> None:
        self.told.append(("saved", version.step, oldest))

    def end(self, complete: PolicyVersion | None) -> Sequence[Evaluated]:
        self.told.append(("end", complete))
        return self.evaluated

    def exit(self, version: PolicyVersion, reason: str) -> None:
        self.told.append(("exit", version, reason))

    def close(self) -> None: ...


class Publisher:
    def __init__(self) -> None:
        self.offered: list[str] = []
        self.scored: tuple[int, ...] = ()  # answers with each of them

    lacks_room = waits_for_servers = False

    def ready(self, timeout: float) -> bool:
        return True

    def offer(self, version: PolicyVersion, tensors: Iterator[Any], resident: frozenset[int], scored: Any) -> str:
        assert resident == Trainer.resident
        self.offered.append(str(version))
        self.scored = (*self.scored, len(scored))
        return f"the copy of {version}"

    def wait(self, timeout: float) -> bool:
        return True

    def close(self) -> None: ...


class Stop:
    given = False


def run(
    folder: Path,
    source: Source,
    start: PolicyVersion,
    steps: int,
    every: int = 1,
    *,
    exits: dict[str, float] | None = None,
    mismatch: int = 0,
    publisher: Publisher | None = None,
    is_record: bool = False,
    **checkpoint: Any,
) -> tuple[Trainer, list[str]]:
    config = Config.model_validate(
        {
            "run": {"steps": steps, **(exits or {})},
            "replay": {"max_staleness": every},
            "publish": {"every": every, "mismatch": mismatch},
            "checkpoint": {"every": 2, **checkpoint},
        }
    )
    trainer, publisher = Trainer(start), publisher or Publisher()
    events, metrics = EventLog(event_path(folder, "learner"), "learner-0"), MetricsWriter(folder)
    given = None if is_record else publisher
    loop = LeadLoop(config, folder, trainer, source, stop=Stop(), metrics=metrics, events=events, publisher=given)
    loop.run()
    assert trainer.lent == tuple(f"the copy of {version}" for version in publisher.offered)
    metrics.close(), events.close()
    trainer.scored = publisher.scored
    return trainer, publisher.offered


def test_a_new_run_publishes_what_it_begins_with_and_every_kth_version(tmp_path):
    _, offered = run(tmp_path, Source(None), PolicyVersion(0), steps=7, every=3)
    assert offered == ["0.0", "3.0", "6.0", "7.0"]


def test_a_row_has_the_end_of_its_step_on_the_clock_of_the_events_which_nobody_sets(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 0.0)
    run(tmp_path, Source(None), PolicyVersion(0), steps=3)
    offers = [event for event in read_events(event_path(tmp_path, "learner")) if event["event"] == "learner.offer"]
    published = [event["time"] for event in offers if event["phase"] == "end"][1:]  # of the versions 1, 2, 3
    times = [row["time"] for row in read_metrics(tmp_path)]
    behind = [*published[1:], math.inf]
    assert all(offer <= time <= other for offer, time, other in zip(published, times, behind, strict=True))


def test_versions_that_a_step_has_made_are_published_with_scored_answers(tmp_path):
    trainer, offered = run(tmp_path, Source(None), PolicyVersion(0), steps=7, every=3, mismatch=4)
    assert offered == ["0.0", "3.0", "6.0", "7.0"]
    assert trainer.scored == (0, 4, 4, 4)
    assert trainer.commands.count("score") == 2 * 3  # with each version, and with the one before


def test_a_resumed_learner_publishes_nothing_that_is_older_than_what_servers_had(tmp_path):
    _, offered = run(tmp_path, Source(PolicyVersion(5)), PolicyVersion(2, 1), steps=8, every=3)
    assert offered == ["5.1", "6.1", "8.1"]  # at once when it has caught up, then every third


def test_a_redelivered_step_that_has_to_be_generated_again_gets_weights_for_it(tmp_path):
    _, offered = run(tmp_path, Source(PolicyVersion(5), lost=(3,)), PolicyVersion(2, 1), steps=8, every=3)
    assert offered == ["3.1", "5.1", "6.1", "8.1"]
    _, offered = run(tmp_path, Source(None, lost=(4,)), PolicyVersion(2, 1), steps=5, every=3)
    assert offered == ["2.1", "3.1", "4.1", "5.1"]  # also where the service, started again, does not know what they had


def test_a_redelivered_step_that_takes_its_time_is_waited_for(tmp_path):
    _, offered = run(tmp_path, Source(PolicyVersion(5), late=(3,)), PolicyVersion(2, 1), steps=8, every=3)
    assert offered == ["5.1", "6.1", "8.1"]


def test_the_checkpoint_holds_the_ledger_of_its_step_and_the_service_is_told_of_it(tmp_path):
    source = Source(None)
    trainer, _ = run(tmp_path, source, PolicyVersion(0), steps=4)
    assert trainer.begun == [(2, Ledger(below=16)), (4, Ledger(below=32))]
    assert source.told == [
        ("1.0", 0.9),
        ("2.0", 0.9),
        ("3.0", 0.9),
        ("saved", 2, 2),
        ("4.0", 0.9),
        ("saved", 4, 2),
        ("end", PolicyVersion(4)),
    ]
    assert source.asked_to_begin == 2


def test_a_checkpoint_that_is_complete_while_the_learner_waits_for_a_batch_is_told_before_the_batch(tmp_path):
    source = Source(None, late=(2,))
    run(tmp_path, source, PolicyVersion(0), steps=3)
    assert source.told[1:4] == [("2.0", 0.9), ("saved", 2, 2), ("3.0", 0.9)]


def test_the_model_is_written_behind_the_last_checkpoint_and_before_anybody_is_told_of_the_end(tmp_path):
    source = Source(None)
    trainer, _ = run(tmp_path, source, PolicyVersion(0), steps=3)
    assert trainer.exported == [(3, 2)]
    assert trainer.commands[-4:] == ["wait", "wait", "model", "end"]  # nobody waits without a word
    resumed, _ = run(tmp_path, source, PolicyVersion(3, 1), steps=3)  # killed in between
    assert (resumed.begun, resumed.exported) == ([], [(3, 0)])


class Halted(Source):
    """The run is interrupted."""

    def next(self, step: int, timeout: float) -> Delivery:
        return super().next(step, timeout) if step < 1 else Delivery("stop")


@pytest.mark.parametrize(
    ("source", "keys"), [(Halted(None), {}), (Source(None), {"export": False})], ids=["interrupted", "not wanted"]
)
def test_a_run_that_is_interrupted_or_wants_none_writes_no_model(source, keys, tmp_path):
    trainer, _ = run(tmp_path, source, PolicyVersion(0), steps=3, **keys)
    assert (trainer.exported, "model" in trainer.commands) == ([], False)
    assert trainer.begun


@pytest.mark.parametrize("name", ["selection/dropped/length", "staleness/admitted"])
def test_what_the_service_tells_of_the_selection_becomes_metrics(name, tmp_path, monkeypatch):
    monkeypatch.setitem(STATS, name, 4.0)
    run(tmp_path, Source(None), PolicyVersion(0), steps=1)
    assert next(read_metrics(tmp_path))[name] == 4.0


def test_an_evaluation_that_ends_behind_the_last_step_is_added_to_the_row_of_its_version(tmp_path):
    source = Source(None)
    source.evaluated = [Evaluated(version=PolicyVersion(step), metrics={"eval/step": step}) for step in (2, 3)]
    run(tmp_path, source, PolicyVersion(0), steps=3)
    assert [row.get("eval/step") for row in read_metrics(tmp_path)] == [None, 2.0, 3.0]


class FullDisk:
    """A disk without room for so many seconds, by a clock that is told the time, and its `time` module."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.room_at = seconds
        self.said: list[float] = []  # when the other ranks had a word

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def append(self, file: int, record: bytes) -> None:
        if self.now < self.room_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(file, record)


@pytest.fixture
def full_disk(request, monkeypatch) -> FullDisk:
    disk = FullDisk(request.param)
    monkeypatch.setattr("streamrl.observe.disk.time", disk)
    monkeypatch.setattr("streamrl.observe.metrics.append", disk.append)
    broadcast = Trainer.broadcast

    def heard(trainer: Trainer, value: Any) -> Any:
        disk.said.append(disk.now)
        return broadcast(trainer, value)

    monkeypatch.setattr(Trainer, "broadcast", heard)
    return disk


@pytest.mark.parametrize("full_disk", [1000.0], indirect=True)  # above learner.collective_timeout
def test_a_row_waits_for_room_and_the_other_ranks_with_it(full_disk, tmp_path):
    run(tmp_path, Source(None), PolicyVersion(0), steps=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert max(later - said for said, later in itertools.pairwise(full_disk.said)) < 10


@pytest.mark.parametrize("full_disk", [math.inf], indirect=True)
def test_a_disk_that_stays_full_ends_the_run_after_progress_timeout(full_disk, tmp_path):
    with pytest.raises(RunFailedError) as failed:
        run(tmp_path, Source(None), PolicyVersion(0), steps=2)
    documented(
        "no learner step in run.progress_timeout=... s: the disk of the run folder is full", str(failed.value), 1
    )
    assert full_disk.now > Config().progress_timeout


class WithoutRoom(Publisher):
    """It keeps a version, and finds room for it after so many asks, each a `learner.tick`."""

    def __init__(self, clock: FullDisk, asks: int) -> None:
        super().__init__()
        self._clock, self._asks = clock, asks

    @property
    def lacks_room(self) -> bool:
        return self._asks > 0

    def ready(self, timeout: float) -> bool:
        self._clock.now += timeout
        self._asks -= 1
        return self._asks <= 0


@pytest.mark.parametrize("full_disk", [0.0], indirect=True)
def test_a_version_that_is_kept_waits_for_room_longer_than_a_publisher_may_be_silent(full_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("streamrl.learner.lead_loop.time", full_disk)
    config = Config()
    asks = math.ceil(2 * config.run.silence_timeout / config.learner.tick)
    _, offered = run(tmp_path, Source(None), PolicyVersion(0), 1, publisher=WithoutRoom(full_disk, asks))
    assert offered == ["0.0", "1.0"]
    assert max(later - said for said, later in itertools.pairwise(full_disk.said)) < 10


class Slow(WithoutRoom):
    """It prepares a version, or waits for a server that hangs."""

    lacks_room = False

    def __init__(self, clock: FullDisk, seconds: float, *, waits_for_servers: bool) -> None:
        super().__init__(clock, math.ceil(seconds / Config().learner.tick))
        self.waits_for_servers = waits_for_servers


@pytest.mark.parametrize("full_disk", [0.0], indirect=True)
def test_a_source_may_take_longer_than_a_server_may_hang(full_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("streamrl.learner.lead_loop.time", full_disk)
    config = Config()
    silence, progress = config.run.silence_timeout, config.progress_timeout
    assert silence < progress
    source = Slow(full_disk, (silence + progress) / 2, waits_for_servers=False)
    _, offered = run(tmp_path, Source(None), PolicyVersion(0), 1, publisher=source)
    assert offered == ["0.0", "1.0"]
    for hanging, seconds, key in ((False, progress + 9, "run.progress_timeout"), (True, silence + 9, "run.silence_")):
        slow = Slow(full_disk, seconds, waits_for_servers=hanging)
        with pytest.raises(RuntimeError, match=f"the publisher did not finish in {key}"):
            run(tmp_path, Source(None), PolicyVersion(0), 1, publisher=slow)


@pytest.mark.parametrize("full_disk", [0.0], indirect=True)
def test_the_last_version_waits_for_room_too(full_disk, tmp_path, monkeypatch):
    class Last(WithoutRoom):
        def ready(self, timeout: float) -> bool:
            return True

        def wait(self, timeout: float) -> bool:
            return super().ready(timeout)

    monkeypatch.setattr("streamrl.learner.lead_loop.time", full_disk)
    last = Last(full_disk, 3)
    run(tmp_path, Source(None), PolicyVersion(0), 1, publisher=last)
    assert not last.lacks_room
    with pytest.raises(RunFailedError, match="the disk of the run folder is full"):
        run(tmp_path, Source(None), PolicyVersion(0), 1, publisher=Last(full_disk, 1000))


class Starved(Source):
    """Gives the first batches, then nothing, for ever."""

    def next(self, step: int, timeout: float) -> Delivery:
        return super().next(step, timeout) if step < 3 else Delivery("nothing")


def test_a_learner_that_gets_no_batch_for_too_long_saves_what_it_has_and_gives_up(tmp_path, monkeypatch):
    times = iter(range(0, 1_000_000, 100))
    monkeypatch.setattr("streamrl.learner.lead_loop.time.monotonic", lambda: float(next(times)))
    source = Starved(None)
    with pytest.raises(RunFailedError) as failed:
        run(tmp_path, source, PolicyVersion(0), steps=9)
    documented("no learner step in run.progress_timeout=... s: step ... has no batch", str(failed.value), 1)
    assert ("saved", 3, 2) in source.told
    assert "end" not in [word[0] for word in source.told]


class Stopped(Source):
    def next(self, step: int, timeout: float) -> Delivery:
        return super().next(step, timeout) if step < 1 else Delivery("stop", failure="no generator worker is there")


def test_a_learner_whose_run_is_given_up_saves_what_it_has_and_fails_with_the_same_reason(tmp_path):
    source = Stopped(None)
    with pytest.raises(RunFailedError, match=r"^no generator worker is there$"):
        run(tmp_path, source, PolicyVersion(0), steps=9)
    assert ("saved", 1, 1) in source.told


def test_a_learner_that_gives_up_reports_it_to_the_service_and_in_its_events(tmp_path, monkeypatch):
    class Service(Starved):
        def gave_up(self, reason: str) -> None:
            self.told.append(("gave up", reason))

    source = Service(None)
    monkeypatch.setattr(role, "ServiceBatches", lambda *_: source)
    monkeypatch.setattr(role, "Publisher", lambda *_: Publisher())
    times = iter(range(0, 1_000_000, 100))
    monkeypatch.setattr("streamrl.learner.lead_loop.time.monotonic", lambda: float(next(times)))
    events = EventLog(event_path(tmp_path, "learner"), "learner-0", starts=False)
    config = Config.model_validate({"run": {"steps": 9}})
    with pytest.raises(RunFailedError) as failed:
        role._lead(config, tmp_path, Trainer(PolicyVersion(0)), Stop(), events)
    assert source.told[-1] == ("gave up", str(failed.value))
    gave_up = [event for event in read_events(event_path(tmp_path, "learner")) if event["event"] == "gave_up"]
    assert [event["reason"] for event in gave_up] == [str(failed.value)]


def test_a_learner_that_torchrun_starts_again_though_it_gave_up_ends_at_once_with_the_same_reason(
    tmp_path, monkeypatch, capsys
):
    events = EventLog(event_path(tmp_path, "learner"), "learner-0")
    events.emit("gave_up", reason="8 steps in a row made no update")
    events.close()
    monkeypatch.setattr(role, "Trainer", None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert role.main(Config(), tmp_path) == 1
    assert capsys.readouterr().err == "streamrl failed: 8 steps in a row made no update\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # a start by hand: what led to it may have been mended
    assert role.main(Config(), tmp_path) == 1
    assert "TypeError" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # of that start, which has not come to its first step
    assert role.main(Config(), tmp_path) == 1
    assert "TypeError" in capsys.readouterr().err


def test_a_learner_that_torchrun_starts_again_though_it_was_refused_is_refused_at_once(tmp_path, monkeypatch):
    Broken.error = ConfigError("no checkpoint is left")
    monkeypatch.setattr(role, "Trainer", Broken)
    with pytest.raises(ConfigError, match="no checkpoint is left"):
        role.main(Config(), tmp_path)
    monkeypatch.setattr(role, "Trainer", None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ConfigError, match=r"^no checkpoint is left$"):
            role.main(Config(), tmp_path)
    refused = [event for event in read_events(event_path(tmp_path, "learner")) if event["event"] == "learner.refused"]
    assert [event["reason"] for event in refused] == ["no checkpoint is left"]


class Broken(Trainer):
    """Fails on its way to its first step."""

    error: Exception = RuntimeError("")
    closed = False

    def __init__(self, config, run_folder) -> None:
        super().__init__(PolicyVersion(0))

    def restore_or_start(self, report) -> None:
        raise self.error

    def close(self) -> None:
        type(self).closed = True


def test_whatever_ends_a_rank_its_last_line_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(role, "Trainer", Broken)
    for error, line in (
        (IndexError("7 is\nout of range"), "streamrl failed: IndexError: 7 is out of range"),
        (CheckpointError("step_3 was not written"), "streamrl failed: step_3 was not written"),
    ):
        Broken.error, Broken.closed = error, False
        assert role.main(Config(), tmp_path) == 1
        assert capsys.readouterr().err.splitlines()[-1] == line
        assert Broken.closed


def test_what_is_a_matter_of_configuration_is_refused_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(role, "Trainer", Broken)
    for error in (ConfigError("model.path: none"), UnsupportedAcceleratorError("ROCm 6.4")):
        Broken.error = error
        with pytest.raises(ConfigError, match=str(error)):
            role.main(Config(), tmp_path)


def test_a_learner_that_was_killed_when_everything_was_done_has_nothing_to_do(tmp_path, monkeypatch):
    """The service has recorded the end and is gone: to wait for it would turn a finished run into a failed one."""
    for step, code in ((3, 0), (2, 1)):
        events = EventLog(event_path(tmp_path, "replay"), "replay-0")
        events.emit("learner.finished", version=PolicyVersion(step))
        events.emit("replay.stop", reason="the run is complete", code=0)
        events.close()

        class Done(Broken):
            def restore_or_start(self, report) -> None:
                self.version = PolicyVersion(3, 1)

        monkeypatch.setattr(role, "Trainer", Done)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        config = Config.model_validate({"run": {"steps": 3, "start_timeout": 0.1}})
        assert role.main(config, tmp_path) == code


def test_a_configured_exit_saves_tells_everyone_and_leaves_the_rest_to_the_next_start(tmp_path):
    source = Source(None)
    trainer, offered = run(tmp_path, source, PolicyVersion(0), steps=10, exits={"exit_interval": 5})
    assert [step for step, _ in trainer.begun] == [2, 4, 5]
    assert source.told[-2:] == [("saved", 5, 2), ("exit", PolicyVersion(5), "run.exit_interval=5 divides step 5")]
    assert (trainer.exported, offered[-1]) == ([], "5.0")
    source = Source(PolicyVersion(5))
    trainer, _ = run(tmp_path, source, PolicyVersion(5, 1), steps=10, exits={"exit_interval": 5})
    assert source.told[-1] == ("end", PolicyVersion(10, 1))  # its last step is no exit


def test_the_time_of_a_learner_is_looked_at_behind_each_step(tmp_path):
    source = Source(None)
    trainer, _ = run(tmp_path, source, PolicyVersion(3), steps=10, exits={"exit_duration": 1e-9})
    assert (trainer.version.step, source.told[-1][0]) == (4, "exit")


def test_a_learner_that_was_killed_behind_an_exit_has_nothing_to_do(tmp_path, monkeypatch):
    events = EventLog(event_path(tmp_path, "replay"), "replay-0")
    events.emit("learner.exited", version=PolicyVersion(2), reason="run.exit_interval=2 divides step 2")
    events.emit("replay.stop", reason="run.exit_interval=2 divides step 2", code=0)

    class Restored(Broken):
        def restore_or_start(self, report) -> None:
            self.version = PolicyVersion(2, 1)

    monkeypatch.setattr(role, "Trainer", Restored)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    config = Config.model_validate({"run": {"steps": 3, "start_timeout": 0.1}})
    assert role.main(config, tmp_path) == 0
    events.emit("process.start")  # the service of the next start
    events.close()
    assert role.main(config, tmp_path) == 1
