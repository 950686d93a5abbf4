"""What `streamrl tune` tunes: what it may not write over, and what a finished run itself says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.lab.simulate.model import NEIGHBOURS, Answers, Model, RecordedGroup
from streamrl.lab.tune import command
from streamrl.lab.tune import tuned as tuned_module
from streamrl.lab.tune.runs import MICRO_BATCH, Measured
from streamrl.lab.tune.search import Rule
from streamrl.lab.tune.space import Devices, Space
from streamrl.lab.tune.speeds import LearnerSpeeds
from streamrl.lab.tune.tuned import Limits, Runs, Source, Tuned, tuned
from streamrl.places import run_that_wrote
from tests.lab.test_simulate_run import config, record, truth
from tests.lab.test_tune import figure, space


def tuning(*_: object) -> Tuned:
    raise ConfigError("it tunes")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with a base and a base of that, a link to it, a choice of before, and a run."""
    monkeypatch.setattr(command, "tuned", tuning)
    monkeypatch.chdir(tmp_path)
    for name, base in (("lowest", None), ("base", "lowest"), ("settings", "base"), ("tuned", "settings")):
        Path(f"{name}.yaml").write_text("run: {steps: 9}\n" if base is None else f"base: {base}.yaml\n")
    Path("link.yaml").symlink_to("settings.yaml")
    record(config(tmp_path, "run", groups_per_step=4), truth())
    return tmp_path


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["settings.yaml", "--output", "settings.yaml"], "the configuration that is tuned"),
        (["settings.yaml", "--output", "link.yaml"], "the configuration that is tuned"),
        (["link.yaml", "--output", "settings.yaml"], "the configuration that is tuned"),
        (["settings.yaml", "--output", "base.yaml"], "a base of settings.yaml"),
        (["settings.yaml", "--output", "lowest.yaml"], "a base of settings.yaml"),
        (["settings.yaml", "--json", "base.yaml"], "a base of settings.yaml"),
    ],
)
def test_what_is_tuned_is_not_written_over(
    words: list[str], what: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, flag, file = words
    before = Path(file).read_text()
    assert cli.main(["tune", *words]) == 2
    assert capsys.readouterr().err == f"streamrl: {flag}: {file} is {what}; allowed: another file\n"
    assert Path(file).read_text() == before


@pytest.mark.parametrize("tuned_one", ["run", "settings.yaml"])
@pytest.mark.parametrize("words", [["--json", "metrics.jsonl"], ["--output", "config.yaml"], ["--json", "run.json"]])
def test_what_a_run_has_written_is_not_written_over(
    words: list[str], tuned_one: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, name = words
    file = Path("run", name)
    file.touch()
    before = file.read_bytes()
    assert cli.main(["tune", tuned_one, flag, str(file)]) == 2
    run = files / "run"
    assert capsys.readouterr().err == f"streamrl: {flag}: {file} is a part of the run {run}; allowed: another file\n"
    assert file.read_bytes() == before


@pytest.mark.parametrize("kept", ["journal", "metrics.jsonl"])
def test_a_run_without_a_journal_or_before_its_first_row_is_one_too(kept: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    assert run_that_wrote(run / "config.yaml") is None  # a project's own
    (run / kept).touch()
    assert run_that_wrote(run / "config.yaml") == run.resolve()
    assert run_that_wrote(run / "mine.yaml") is None


@pytest.mark.parametrize("file", ["run/tuned.json", "run/choice/front.json"])
def test_other_files_in_a_run_folder_may_be_written_over(
    file: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).touch()
    assert cli.main(["tune", "run", "--json", file]) == 2
    assert capsys.readouterr().err == "streamrl: it tunes\n"


def test_the_written_file_trains_what_the_printed_command_does(tmp_path: Path) -> None:
    settings, written = tmp_path / "settings.yaml", tmp_path / "tuned.yaml"
    settings.write_text("task: {name: copy, args: {length: 3}}\n")
    chosen = ("replay.max_staleness=1",)
    for given, whole in (("run.seed=3", False), ("task.args={alphabet: abc}", True)):
        source = Source(settings, (given,))
        command.write(written, source, chosen)
        assert config_file.load(written) == config_file.load(settings, [given, "run.name=run-tuned", *chosen])
        assert ("base: " in written.read_text()) is not whole


def test_the_whole_configuration_is_written_where_two_files_would_be_refused_together(tmp_path: Path) -> None:
    settings, written = tmp_path / "settings.yaml", tmp_path / "tuned.yaml"
    settings.write_text("generate: {lag: 1}\n")
    given, chosen = "generate={groups_in_flight: 8}", ("replay.max_staleness=1",)
    command.write(written, Source(settings, (given,)), chosen)
    assert config_file.load(written) == config_file.load(settings, [given, "run.name=run-tuned", *chosen])


@pytest.mark.parametrize("file", ["tuned.yaml", "new.yaml"])
def test_a_choice_of_before_is_written_over(files: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "settings.yaml", "-o", file]) == 2
    assert capsys.readouterr().err == "streamrl: it tunes\n"


# -- a finished run


def of_run(run: Path, monkeypatch: pytest.MonkeyPatch, model: Model) -> tuple[Tuned, list[Model]]:
    """The run, tuned without a fit and without a simulation, and with which models it would have been simulated."""
    models: list[Model] = []

    def simulated(space: object, setting: object, own: Model, speeds: object, *, long: bool) -> object:
        models.append(own)
        return figure(1.0, 0.0)

    monkeypatch.setattr(tuned_module, "calibrate", lambda _: model)
    monkeypatch.setattr(tuned_module, "simulated", simulated)
    return tuned(Source.of(run, ()), Rule(), Limits(points=1), Runs()), models


def test_a_finished_run_is_judged_by_its_last_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(config(tmp_path, "learned", groups_per_step=4), truth())
    groups = tuple(RecordedGroup(step // 3, (step,), (0.0,), (False,)) for step in range(3 * 300))
    _, models = of_run(run, monkeypatch, replace(truth(), answers=Answers(groups)))
    for model in models:
        rng = random.Random(1)
        drawn = {model.answers.draw(rng, step, 1, 10**6).lengths[0] for step in range(40) for _ in range(200)}
        assert drawn == set(range(600, 900))


@pytest.mark.parametrize(("workers", "says"), [(1, False), (4, True)])
def test_workers_beyond_those_of_the_calibration_are_an_assumption(workers: int, says: bool, tmp_path: Path) -> None:
    """Runs for calibration have one, also where the configuration attaches servers, whose split stays as it is."""
    run = record(config(tmp_path, "calibration", groups_per_step=4), truth())
    attached = "generate.attach=[" + ", ".join(f"http://127.0.0.1:{4000 + place}" for place in range(workers)) + "]"
    wanted = space(f"generate.workers={workers}", attached)
    assert {split[0] for split in wanted.splits} == {workers}
    speeds = LearnerSpeeds(truth().learner, own=(1, 100), measured={}, doubling=0.9)
    notes = tuned_module._notes(wanted, speeds, Measured([run]))
    assert any(note.startswith("assumed: generate.workers: ") for note in notes) == says


def test_of_a_short_run_all_answers_are_the_last() -> None:
    groups = tuple(RecordedGroup(step, (step + 1,), (0.0,), (False,)) for step in range(NEIGHBOURS))
    assert Answers(groups).last.groups == groups
    assert Answers(groups[:5]).last.draw(random.Random(1), 0, 1, 9).step in range(5)


@pytest.mark.parametrize(("on_gpus", "divided"), [(True, "3 GPUs"), (False, "2 cores")])
def test_a_finished_run_says_itself_whether_it_had_gpus(
    on_gpus: bool, divided: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned_module, "has_cuda", lambda: not on_gpus)  # of this machine
    given = config(tmp_path, "elsewhere", groups_per_step=4)
    given = given.model_copy(update={"generate": given.generate.model_copy(update={"tensor_parallel": 2})})
    run = record(given, truth())
    if on_gpus:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        text = "".join(json.dumps({**row, "memory/allocated": 1, "memory/peak": 2}) + "\n" for row in rows)
        (run / "metrics.jsonl").write_text(text)
    found, _ = of_run(run, monkeypatch, truth())
    assert str(found.space.divided) == divided


def test_devices_of_another_kind_than_the_calibrated_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(config(tmp_path, "known", groups_per_step=4), truth())
    monkeypatch.setattr(tuned_module, "calibrate", lambda _: truth())
    with pytest.raises(ConfigError, match=r"^--gpus: 8, but speeds are calibrated on cores; allowed: --cores$"):
        tuned(Source.of(run, ()), Rule(), Limits(gpus=8), Runs())


def test_the_ends_of_a_simulated_run_count_for_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run three times as long has as many tokens/s, but for chance."""
    file = tmp_path / "settings.yaml"
    config_file.save(config(tmp_path, "known"), file)
    space = Space(Source(file, ()).load, Devices("cores", 2), oldest=8.0, seen=64)
    speeds = LearnerSpeeds(truth().learner, (1, space.configured.micro_batch))
    monkeypatch.setattr(tuned_module, "LONG_SIMULATIONS", 32)
    for bound, in_flight in ((0.0, 8), (8.0, 48)):
        setting = replace(space.configured, bound=bound, in_flight=in_flight)
        found = []
        for steps in (24, 72):
            monkeypatch.setattr(tuned_module, "LONG", steps)
            figures = tuned_module.simulated(space, setting, truth(), speeds, long=True)
            assert figures is not None
            found.append(figures.sustained)
        assert found[0] == pytest.approx(found[1], rel=0.03)


def test_micro_batches_of_other_runs_that_hold_no_long_answer_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for micro_batch in (300, 150, 250, 600):
        given = config(tmp_path, f"of-{micro_batch}", groups_per_step=4)
        learner = given.learner.model_copy(update={"tokens_per_micro_batch": micro_batch})
        runs.append(record(given.model_copy(update={"learner": learner}), truth()))
    measured = Measured(runs)
    speeds = tuned_module._speeds(truth(), measured, 0.9, config_file.load(runs[0] / "config.yaml"))
    assert speeds.micro_batches == [250, 300, 600]
    assert measured.left_out == [f"{MICRO_BATCH}=150: a prompt and its answer need up to 200 tokens"]
