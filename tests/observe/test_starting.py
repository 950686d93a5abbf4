"""What a newcomer sees between the command and the first step."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.observe.events import EventLog, Events, event_path
from streamrl.observe.starting import Starting, begin_part, loading

CONFIG = Config.model_validate({"generate": {"workers": 2}, "replay": {"groups_per_step": 4, "max_staleness": 1}})


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def log_of(folder, role: str, index: int = 0, *, starts: bool = True) -> EventLog:
    return EventLog(event_path(folder, role, index), f"{role}-{index}", starts=starts)


def test_each_role_has_its_part_and_its_seconds_from_the_imports_to_the_groups_of_the_first_step(tmp_path):
    clock = Clock()
    starting = Starting(CONFIG, tmp_path, clock)
    waiting = "waits for the replay service"
    assert starting.lines() == [("replay-0", "imports, 0:00"), ("generators (2)", waiting), ("learner-0", waiting)]
    replay = log_of(tmp_path, "replay")
    replay.emit("ready", address="tcp://")
    clock.time += 2
    starting.read()
    assert starting.lines()[0] == ("replay-0", "ready")
    clock.time += 5
    learner, workers = (
        log_of(tmp_path, "learner", starts=False),
        [log_of(tmp_path, "generator", index) for index in (0, 1)],
    )
    begin_part(learner, "builds the model")
    begin_part(workers[0], "servers load the model")
    starting.read()
    assert str(starting) == (
        "replay-0 ready; generator-0 servers load the model, 0:05; generator-1 starts, 0:05; "
        "learner-0 builds the model, 0:05"
    )
    loading(learner, "loads the weights")(1_200_000_000, 3_100_000_000)
    for worker in workers:
        worker.emit("ready")
    clock.time += 60
    starting.read()
    assert ("generators (2)", "ready") in starting.lines()
    assert starting.lines()[-1] == ("learner-0", "loads the weights 1.2 of 3.1 GB, 1:05")
    learner.emit("ready", version="0.0")
    replay.emit("group.accepted", worker="generator-0", group_id=0)
    starting.read()
    assert starting.lines()[-1] == ("first step", "1 of 4 groups")


def test_what_a_former_start_wrote_is_passed_over(tmp_path):
    for role in ("replay", "learner"):
        former = log_of(tmp_path, role)
        former.emit("ready")
        former.close()
    starting = Starting(CONFIG, tmp_path)
    starting.read()
    assert [what.partition(",")[0] for _, what in starting.lines()] == [
        "imports", "waits for the replay service", "waits for the replay service",
    ]  # fmt: skip


def test_a_role_that_ends_in_its_start_is_said_to(tmp_path):
    starting = Starting(CONFIG, tmp_path)
    log_of(tmp_path, "replay").close()
    starting.read()
    assert starting.lines()[0][1].startswith("ended")


def test_a_rank_without_a_log_reports_to_nobody():
    loading(Events(), "loads the weights")(1, 2)


def test_a_learner_that_had_nothing_to_do_is_no_process_of_the_run(tmp_path):
    log = log_of(tmp_path, "learner", starts=False)
    begin_part(log, "builds the model")
    log.close()
    assert "process." not in log.path.read_text()
