"""`streamrl sweep`: what is run, what is run again and what is not, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl import cli, model_dtype, run_folder
from streamrl.api import launching
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.engine.keys import NO_KEYS
from streamrl.lab.sweep import command, plots, runner, servers
from streamrl.lab.sweep.plan import read
from streamrl.lab.sweep.servers import SharedServers, server_kind
from streamrl.observe.events import event_path
from streamrl.tasks import left_out
from streamrl.tasks.left_out import LeftOut, OfTask
from tests.lab.sweep_runs import MakeSweep, Trained, row, run, sweep_maker


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: [])  # tests/lab/test_sweep_results.py looks at them


@pytest.fixture
def make_sweep(tmp_path: Path, model_folders: tuple[Path, Path]) -> MakeSweep:
    return sweep_maker(tmp_path, model_folders[0])


@pytest.mark.parametrize("part", ["--results", "--print-jobs"])
def test_what_starts_nothing_sets_no_sweep_aside(make_sweep, tmp_path, capsys, part):
    file = make_sweep(seeds=[1])
    run(file, Trained())
    assert cli.main(["sweep", str(file), part, "--fresh"]) == 2
    assert "--fresh: nothing is started" in capsys.readouterr().err
    assert [folder.name for folder in (tmp_path / "sweeps").iterdir()] == ["mine"]


def test_done_runs_are_passed_over_a_failed_one_is_told_and_run_again(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2])
    first = Trained({"max_staleness_2-seed1": 1})
    assert run(file, first) == ["max_staleness_2-seed1"]
    assert len(first.runs) == 4  # the failed one did not end the sweep
    assert "max_staleness_2-seed1: FAILED: exit code 1" in capsys.readouterr().out
    assert run(file, second := Trained()) == []
    assert second.runs == ["max_staleness_2-seed1"]
    assert run(file, third := Trained()) == []
    assert third.runs == []


def test_a_file_that_cannot_be_written_fails_its_run_alone(make_sweep, tmp_path, monkeypatch, capsys):
    file = make_sweep(seeds=[1, 2])
    log = tmp_path / "sweeps" / "mine" / "logs" / "base-seed1.log"
    log.mkdir(parents=True)

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runner, "write_whole", full)
    assert run(file, trained := Trained()) == ["base-seed1"]
    assert trained.runs == ["base-seed2"]
    said = capsys.readouterr().out
    assert f"base-seed1: FAILED: {log}: Is a directory\n" in said
    assert f"{tmp_path / 'sweeps' / 'mine' / 'seconds.json'} cannot be written: No space left on device\n" in said


def test_fresh_keeps_the_former_sweep_and_starts_a_new_one_and_failed_runs_make_the_exit_code_1(
    make_sweep, tmp_path, capsys
):
    file = make_sweep(seeds=[1])
    failing = Trained({"base-seed1": 1})
    assert command.main(file, [], failing) == 1
    assert "1 of 1 runs failed: base-seed1" in capsys.readouterr().err
    assert command.main(file, [], failing, fresh=True) == 1
    assert len(failing.runs) == 2
    assert (tmp_path / "sweeps" / "mine.1" / "results.json").exists()


def test_a_run_with_steps_of_other_settings_is_neither_done_nor_gone_on_with(make_sweep, tmp_path, capsys):
    file = make_sweep(seeds=[1])
    run(file, Trained())
    folder = tmp_path / "sweeps" / "mine" / "runs" / "base-seed1"
    for setting, was in (("algo.eps_low=0.1", "0.2"), ("replay.release=eager", "just_in_time"), ("run.steps=2", "3")):
        assert run(file, again := Trained(), setting) == ["base-seed1"]
        assert again.runs == []
        key, now = setting.split("=")
        refused = f"{key}: {now}, and 3 steps in {folder} were made with {was}; allowed: the same, without that folder"
        assert f"base-seed1: FAILED: {refused}, or --fresh\n" in capsys.readouterr().out
    assert run(file, longer := Trained(), "run.steps=5") == []
    assert longer.runs == ["base-seed1"]
    assert run(file, done := Trained(), "run.steps=5", "run.exit_interval=5") == []
    assert done.runs == []


def test_a_run_that_made_no_step_may_have_other_settings(make_sweep, tmp_path):
    def train(config: Config) -> int:
        run_folder.make(config, fresh=False)  # as `streamrl train`: the folder of another configuration is refused
        return again(config)

    file = make_sweep(seeds=[1])
    assert run(file, Trained({"base-seed1": 1})) == ["base-seed1"]
    again = Trained()
    sweep = read(file, ["algo.eps_low=0.1"])
    assert runner.run_jobs(sweep, sweep.jobs(), train) == []
    assert again.runs == ["base-seed1"]
    runs = {folder.name for folder in (tmp_path / "sweeps" / "mine" / "runs").iterdir()}
    assert runs >= {"base-seed1", "base-seed1.1"}


def test_a_run_that_failed_after_its_last_step_is_not_done(make_sweep, tmp_path):
    file = make_sweep(seeds=[1])
    assert run(file, Trained()) == []
    event_path(tmp_path / "sweeps" / "mine" / "runs" / "base-seed1", "replay").unlink()
    assert command.main(file, [], lambda config: 1) == 1
    results = json.loads((tmp_path / "sweeps" / "mine" / "results.json").read_text())
    assert results["points"][0]["unfinished"] == {"1": 3}


def test_a_sweep_that_runs_is_left_alone_by_a_second_one(make_sweep, tmp_path):
    file = make_sweep(seeds=[1])

    def train(config: Config) -> int:
        for fresh in (False, True):
            with pytest.raises(
                ConfigError, match=f"{tmp_path / 'sweeps' / 'mine'} is in use by another `streamrl sweep`"
            ):
                command.main(file, [], Trained(), fresh=fresh)
        return Trained()(config)

    assert command.main(file, [], train) == 0
    assert command.main(file, [], Trained()) == 0


def test_a_folder_that_cannot_be_written_is_refused_with_one_line(make_sweep, tmp_path):
    (tmp_path / "a file").write_text("")
    file = make_sweep(folder=str(tmp_path / "a file"))
    with pytest.raises(ConfigError, match=r"folder: .*a file/mine: .*; allowed: a folder that may be written"):
        command.main(file, [], Trained())


def test_sigterm_between_two_runs_ends_the_sweep_as_a_signal_within_one_does(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]})
    before = signal.getsignal(signal.SIGTERM)

    def train(config: Config) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError

    assert command.main(file, [], train) == 130
    assert "streamrl: interrupted; this goes on with it: " in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_ends_the_sweep_also_where_a_check_turns_what_it_meets_into_its_own_error(make_sweep):
    started: list[str] = []

    def train(config: Config) -> int:
        started.append(config.run.name)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise ConfigError(f"task.name: {error}") from None
        raise AssertionError

    assert command.main(make_sweep(grid={"replay.max_staleness": [0, 2]}), [], train) == 130
    assert started == ["max_staleness_0-seed1"]


def test_with_fresh_the_prompts_of_the_former_runs_do_not_count(make_sweep, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{word}", "answer": "b"}}\n' for word in ("ab", "ba", "c"))
    )
    task = {"task.name": "jsonl", "task.args": {"path": str(tmp_path / "rows.jsonl"), "prompt": "prompt"}}
    file = make_sweep(set=task, seeds=[1])
    assert command.main(file, [], Trained()) == 0
    seen = OfTask(limit=8, looked=4, too_long=0, shortest=0, longest=0, size=4, left_out=())
    left_out.save(tmp_path / "sweeps" / "mine" / "runs" / "base-seed1", LeftOut(trained={"jsonl": seen}))
    with pytest.raises(ConfigError, match="2 prompts, and had 4 when the run began"):
        command.main(file, [], Trained())
    assert command.main(file, [], Trained(), fresh=True) == 0


class Interrupted:
    """A supervisor that was interrupted and could save nothing."""

    interrupts = 2

    def run(self) -> int:
        return 1


def test_an_interrupted_run_that_could_save_nothing_ends_the_sweep_too(make_sweep, monkeypatch):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]})
    started: list[str] = []

    @contextmanager
    def launched(config: Config) -> Iterator[Interrupted]:
        started.append(config.run.name)
        yield Interrupted()

    monkeypatch.setattr(launching, "launched", launched)
    assert cli.main(["sweep", str(file)]) == 130
    assert started == ["max_staleness_0-seed1"]


def test_with_fresh_the_dtype_of_the_former_runs_does_not_count(make_sweep, monkeypatch):
    file = make_sweep(set={"model.dtype": "auto"}, seeds=[1])
    monkeypatch.setattr(model_dtype, "bfloat16_instructions", lambda: None)
    assert run(file, Trained()) == []
    monkeypatch.setattr(model_dtype, "bfloat16_instructions", lambda: "avx512_bf16")
    dtypes: list[str] = []

    def train(config: Config) -> int:
        dtypes.append(config.model.dtype)
        return Trained()(config)

    assert command.main(file, [], train, fresh=True) == 0
    assert dtypes == ["bfloat16"]


def test_a_signal_ends_the_sweep_with_130_and_the_next_start_goes_on(make_sweep):
    file = make_sweep(grid={"replay.max_staleness": [0, 2, 4]})
    assert command.main(file, [], first := Trained({"max_staleness_2-seed1": runner.INTERRUPTED})) == 130
    assert first.runs == ["max_staleness_0-seed1", "max_staleness_2-seed1"]
    assert run(file, second := Trained()) == []
    assert second.runs == ["max_staleness_2-seed1", "max_staleness_4-seed1"]


def test_a_refused_run_is_told_by_its_line_and_does_not_end_the_sweep(make_sweep, capsys):
    def train(config: Config) -> int:
        if config.replay.max_staleness == 0:
            raise ConfigError("model.path: nothing is no model")
        return Trained()(config)

    sweep = read(make_sweep(grid={"replay.max_staleness": [0, 2]}))
    assert runner.run_jobs(sweep, sweep.jobs(), train) == ["max_staleness_0-seed1"]
    assert "max_staleness_0-seed1: FAILED: model.path: nothing is no model" in capsys.readouterr().out


def test_what_is_to_do_is_told_before_it_begins_and_how_long_by_the_runs_that_have_ended(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2])
    assert command.main(file, [], Trained({"max_staleness_2-seed2": 1})) == 1
    first = capsys.readouterr().out.splitlines()
    assert first[0] == "4 runs, 0 done; how long they take is known when the first one ends"
    ended = r"\[1/4\] max_staleness_0-seed1: done in \d s; less than a minute left"
    assert any(re.fullmatch(ended, line) for line in first)
    sweep = read(file)
    (sweep.folder / "seconds.json").write_text('{"max_staleness_0-seed1": 60, "max_staleness_0-seed2": 120}')
    assert runner.seconds_left(sweep, sweep.jobs()) == 90  # max_staleness_2 takes as long as the others
    (sweep.folder / "seconds.json").write_text('{"max_staleness_0-seed1": 60, "max_staleness_2-seed1": 300}')
    assert runner.to_do(sweep, sweep.jobs()) == "4 runs, 3 done; about 5 minutes by the time of the finished ones"
    command.main(file, [], Trained(), part="results")
    assert capsys.readouterr().out.startswith("4 runs, 3 done; about 5 minutes")


def test_what_a_study_takes_is_told_before_its_first_run_where_its_file_says_it(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2], minutes=45)
    assert command.main(file, [], Trained()) == 0
    assert capsys.readouterr().out.startswith("4 runs, 0 done; about 3.0 hours, at 45 minutes a run as its file says\n")


def test_a_begun_run_has_the_share_of_its_steps_left(make_sweep):
    sweep = read(file := make_sweep(seeds=[1, 2]))
    run(file, Trained())
    (sweep.folder / "seconds.json").write_text('{"base-seed1": 90}')
    metrics = sweep.jobs()[1].config.run_folder / "metrics.jsonl"
    metrics.write_text(json.dumps(row(1)) + "\n")
    assert runner.seconds_left(sweep, sweep.jobs()) == pytest.approx(60)  # two of three steps


def test_a_run_that_was_gone_on_with_is_not_timed(make_sweep):
    sweep = read(file := make_sweep(seeds=[1]))
    run(file, Trained())
    assert json.loads((sweep.folder / "seconds.json").read_text()).keys() == {"base-seed1"}
    (sweep.folder / "seconds.json").unlink()
    metrics = sweep.jobs()[0].config.run_folder / "metrics.jsonl"
    metrics.write_text(json.dumps(row(1)) + "\n")
    assert run(file, Trained()) == []
    assert not (sweep.folder / "seconds.json").exists()


def test_runs_share_servers_exactly_where_the_servers_would_be_started_alike():
    def kind(**tree: object) -> str | None:
        return server_kind(Config.model_validate(tree))

    assert kind() == kind(run={"seed": 9}, replay={"max_staleness": 8}, algo={"weight": "none"})
    assert kind() != kind(generate={"server_args": {"max_running_requests": 4}})
    assert kind() != kind(generate={"threads": 2})
    assert kind() != kind(generate={"workers": 2}) == kind(generate={"servers": 2})
    assert kind() != kind(model={"path": "models/other"})
    assert kind() != kind(learner={"freeze_vision": True})  # they keep the features of images
    assert kind(generate={"attach": ["http://127.0.0.1:1"]}) is None
    assert kind(learner={"lora": {"rank": 4, "publish": "adapter"}}) is None


def test_shared_servers_make_room_for_a_run_that_starts_its_own(tmp_path, monkeypatch):
    """On GPUs a run's own are placed where the shared ones were."""
    living: set[object] = set()

    class Scripted:
        exit_code, address = None, "http://127.0.0.1:1"

        def __init__(self, *_: object, **__: object) -> None:
            living.add(self)

        async def ready(self, *_: object) -> None: ...

        async def stop(self) -> None:
            living.remove(self)

    monkeypatch.setattr(servers, "Server", Scripted)
    monkeypatch.setattr(servers, "engine_keys", lambda *_: NO_KEYS)
    shared = SharedServers(tmp_path)
    assert shared.addresses(Config()) == [Scripted.address]
    assert len(living) == 1
    own = Config.model_validate({"generate": {"speculation": {"algorithm": "ngram"}}})
    assert shared.addresses(own) == []
    assert not living
    assert shared.addresses(Config()) == [Scripted.address]
    shared.stop()
    assert not living


@pytest.mark.parametrize(
    "tree",
    [
        {"run": {"placement": "shared"}},
        {"model": {"dtype": "bfloat16"}, "generate": {"quantization": "fp8"}},
        {"generate": {"speculation": {"algorithm": "ngram"}}},
        {"generate": {"server_nodes": 2, "tensor_parallel": 2}},
        {"generate": {"pools": [{"name": "a"}, {"name": "b"}]}},
    ],
)
def test_a_run_starts_its_own_servers_where_it_could_not_be_given_any(tree):
    config = Config.model_validate(tree)
    assert server_kind(config) is None
    if not config.generate.pools:
        tree = config_file.as_tree(config)
        tree["generate"]["attach"] = ["http://127.0.0.1:1"]
        with pytest.raises(ConfigError, match="attach"):  # what each role of the run would say
            config_file.checked(tree)
