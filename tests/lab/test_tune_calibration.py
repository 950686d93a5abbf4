"""The calibration runs of `streamrl tune` and `simulate --validate`: what is refused, left out, and set for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.lab.simulate import validation
from streamrl.lab.simulate.validation import fewer
from streamrl.lab.tune import runs
from streamrl.lab.tune.runs import MICRO_BATCH, Calibration, Measured, cores_of, tokens_needed
from streamrl.observe.bars import Bar
from streamrl.recorded.journal import RunJournal
from tests.lab.test_simulate_run import config, record, truth
from tests.lab.test_simulate_validation import TWO_CORES

# Keys that a calibration run sets itself, and that the user's own keys depend on.
COLLIDING = (
    ["learner.optimizer.decay=cosine", "learner.optimizer.lr=1e-5", "learner.optimizer.min_lr=1e-6"],
    ["generate.groups_in_flight=32", "generate.least_in_flight=16"],
)


def calibration(given: Config, folder: Path, *words: str) -> Calibration:
    """Runs of 6 steps in the folder, of a configuration in a file beside it."""
    file = folder.with_name("settings.yaml")
    config_file.save(given, file)
    return Calibration(file, words, folder, steps=6, budget=60.0, ranks=[])


# -- keys


@pytest.mark.parametrize("words", COLLIDING)
def test_the_users_keys_go_with_those_of_calibration_runs(words: list[str], tmp_path: Path) -> None:
    found = calibration(config_file.load(None, [*words, f"model.path={tmp_path}"]), tmp_path / "runs")
    found.prepare()
    for name, more in found._wanted():
        assert found._load(name, more).learner.optimizer.lr == 1e-12


@pytest.mark.parametrize("word", ["run.exit_interval=2", "run.exit_duration=1"])
def test_calibration_runs_make_all_their_steps_whatever_ends_the_users_run_before(word: str, tmp_path: Path) -> None:
    found = calibration(config_file.load(None, [word, f"model.path={tmp_path}"]), tmp_path / "runs", word)
    found.prepare()
    for name, more in found._wanted():
        run = found._load(name, more).run
        assert run.exit_interval is run.exit_duration is None


@TWO_CORES
@pytest.mark.parametrize("words", COLLIDING)
def test_they_go_with_those_of_a_validation_too(
    words: list[str], model_folders: tuple[Path, Path], monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serving(*_: object) -> None:
        raise ConfigError("a server is started")

    monkeypatch.setattr(validation, "serving", serving)
    path = f"model.path={model_folders[0]}"
    assert cli.main(["simulate", "configs/quickstart.yaml", path, *words, "--validate"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "streamrl: a server is started"


def test_a_quarter_in_flight_is_less_than_the_configured_least() -> None:
    given = ["generate.groups_in_flight=32", "generate.least_in_flight=16"]
    few = ["generate.lag=null", "generate.groups_in_flight=8", "generate.least_in_flight=0"]
    assert fewer(config_file.load(None, given)) == few
    config_file.load(None, [*given, *few])
    assert fewer(config_file.load(None, [*given[:1], "generate.least_in_flight=8"])) == few[:2]


def test_the_second_run_is_checked_before_the_first_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "fewer", lambda _: ["generate.groups_in_flight=0"])
    with pytest.raises(ConfigError, match=r"generate\.groups_in_flight: 0"):
        calibration(config_file.load(None, [f"model.path={tmp_path}"]), tmp_path / "runs").prepare()


# -- where


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = calibration(config_file.load(None, [f"model.path={tmp_path}"]), tmp_path / "runs")
    found.folder = tmp_path / "file" / "runs"
    found.prepare()
    with pytest.raises(ConfigError, match=r"--folder: .*file/runs: Not a directory; allowed: a folder that can be"):
        found.run()


def test_who_takes_turns_on_the_same_cores_has_no_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "has_cuda", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cores_of(Config()) == ({0, 1}, {2, 3})
    assert cores_of(config_file.load(None, ["run.placement=shared"])) is None


# -- micro batches


def test_a_micro_batch_that_holds_no_long_answer_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of one token and an answer of 200 need 200: nothing is predicted from the last one."""
    asked = []
    monkeypatch.setattr(Calibration, "_alone", lambda self, kind: float(kind[1]))
    monkeypatch.setattr(runs.preflight, "check", lambda given, fresh: asked.append(given))
    for budget, left_out, measured_ones in (
        (300, [f"{MICRO_BATCH}=150: a prompt and its answer need up to 200 tokens"], {(1, 600)}),
        (400, [], {(1, 200), (1, 800)}),
    ):
        folder = tmp_path / str(budget)
        given = config(folder, "calibration")
        learner = given.learner.model_copy(update={"tokens_per_micro_batch": budget})
        given = given.model_copy(update={"learner": learner})
        found = calibration(given, folder, f"model.path={tmp_path}")
        found.prepare()
        record(given, truth())
        measured = Measured([folder / "calibration"])
        with Bar("calibrate", "runs", 3) as bar:
            found._measure_learner(measured, bar)
        assert (measured.left_out, set(measured.learner)) == (left_out, measured_ones)
    assert [each.learner.tokens_per_micro_batch for each in asked] == [200]


def test_a_micro_batch_holds_the_longest_sequence_that_was_recorded(tmp_path: Path) -> None:
    given = config(tmp_path, "run")
    run, journal = record(given, truth()), RunJournal(tmp_path / "run")
    longest = max(max(journal.load(group).lengths) for group in journal.groups)
    short = given.generate.sampling.model_copy(update={"max_new_tokens": 2})  # of one of several turns
    turns = given.generate.model_copy(update={"sampling": short})
    assert tokens_needed(run, given) == 200
    assert tokens_needed(run, given.model_copy(update={"generate": turns})) == longest > 2


def test_a_micro_batch_that_train_refuses_is_left_out_by_its_line(
    tmp_path: Path, model_folders: tuple[Path, Path]
) -> None:
    words = [f"model.path={model_folders[0]}", "generate.sampling.max_new_tokens=64", f"{MICRO_BATCH}=100"]
    found = calibration(config_file.load(Path("configs/quickstart.yaml"), words), tmp_path / "runs")
    found.prepare()
    refused = found._refusal(50)
    assert refused is not None
    assert refused.startswith(f"{MICRO_BATCH}: 50 cannot hold prompt ")
    assert found._refusal(90) is None
