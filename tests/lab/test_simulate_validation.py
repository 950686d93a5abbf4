"""`streamrl simulate RUN --validate` with a real server: everything up to the verdict, which needs a quiet machine."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import tiny_model
from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.simulate import validation
from streamrl.lab.simulate.figures import figures
from streamrl.lab.simulate.on_cores import RunEndedError
from streamrl.lab.simulate.validation import Compared, fewer, settings

TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core for generation, one for the learner")
ROW = {"time/step": 1.0, "time/wait": 0.5, "tokens/generated": 9, "idle/generator": 0.0, "staleness/p95": 1.0}


def compared(predicted: tuple[int, float], measured: tuple[int, float], speed: float = 1.0) -> Compared:
    """(trained tokens a step of one second, mean staleness) of both, and the machine's speed."""
    both = [
        figures(
            [
                {**ROW, "time": float(step), "tokens/trained": tokens, "staleness/mean": age, "staleness/max": 2}
                for step in range(6)
            ]
        )
        for tokens, age in (predicted, measured)
    ]
    return Compared("a setting", *both, speed)


def test_a_setting_holds_within_both_bars_alone() -> None:
    assert compared((109, 1.0), (100, 1.25)).holds
    assert not compared((112, 1.0), (100, 1.0)).holds
    assert not compared((88, 1.0), (100, 1.0)).holds
    assert not compared((100, 1.0), (100, 1.4)).holds


def test_a_prediction_is_for_the_machine_as_it_was_when_the_setting_ran() -> None:
    assert compared((100, 1.0), (125, 1.0), speed=1.25).holds
    assert not compared((100, 1.0), (100, 1.0), speed=1.25).holds


def test_every_setting_is_a_configuration() -> None:
    given = settings(Config())
    assert len(given) == len(set(given)) == 6
    for setting in given:
        config_file.load(None, setting)


def test_what_is_neither_a_run_nor_a_configuration_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", str(tmp_path), "--validate"]) == 2
    assert f"{tmp_path}: no run folder" in capsys.readouterr().err
    broken = tmp_path / "settings.yaml"
    broken.write_text("replay: {max_stalenes: 2}\n")
    assert cli.main(["simulate", str(broken), "--validate"]) == 2
    assert "replay.max_stalenes" in capsys.readouterr().err


@TWO_CORES
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "4"], "--steps: 4 are too few to calibrate; allowed: above 4"),
        (["replay.reuse=2"], "--validate: replay.max_staleness=0 replay.order=fifo: replay.reuse: 2 trains old tokens"),
        (["run.placement=shared"], "--validate: generate.attach: http://127.0.0.1:1 has devices of its own"),
        (["generate.servers=2"], "--validate: generate.attach: 1 addresses for generate.workers=1"),
    ],
)
def test_what_could_not_be_compared_is_refused_before_anything_is_started(
    words: list[str], line: str, model_folders: tuple[Path, Path], monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validation, "serving", lambda *_: pytest.fail("a server was started"))
    path = f"model.path={model_folders[0]}"
    assert cli.main(["simulate", "configs/quickstart.yaml", path, *words, "--validate"]) == 2
    assert capsys.readouterr().err.startswith(f"streamrl: {line}")


@TWO_CORES
def test_each_run_has_its_own_length_and_way_to_the_server(
    model_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(path: Path, *others: Any) -> None:
        raise RunEndedError(config_file.load(path, others[-1]).model_dump_json())

    server = SimpleNamespace(address="http://127.0.0.1:2", pid=os.getpid())
    monkeypatch.setattr(validation, "serving", lambda *_: nullcontext(server))
    monkeypatch.setattr(validation, "pin", lambda *_: None)
    monkeypatch.setattr(validation, "_measure", measured)
    monkeypatch.setattr(validation.preflight, "check", lambda *_: None)  # nobody listens there
    file = tmp_path / "settings.yaml"
    attached = "attach: ['http://127.0.0.1:1'], router: 'http://127.0.0.1:3'"
    file.write_text(f"run: {{epochs: 2}}\nmodel: {{path: {model_folders[0]}}}\ngenerate: {{{attached}}}\n")
    with pytest.raises(RunEndedError) as ended:
        validation.validate(file, (), 1)
    config = Config.model_validate_json(str(ended.value))
    assert (config.run.epochs, config.run.steps) == (None, validation.STEPS)
    assert (config.generate.router, [str(each) for each in config.generate.attach]) == (None, [server.address])


@pytest.mark.parametrize(
    ("given", "few"),
    [
        (["generate.groups_in_flight=8"], ["generate.lag=null", "generate.groups_in_flight=2"]),
        (["generate.lag=0.5"], ["generate.lag=null", "generate.groups_in_flight=3"]),
        (["generate.submission=sample", "generate.lag=0"], ["generate.lag=null", "generate.requests_in_flight=16"]),
    ],
)
def test_the_second_calibration_has_a_quarter_in_flight_in_every_form(given: list[str], few: list[str]) -> None:
    assert fewer(config_file.load(None, given)) == few
    config_file.load(None, [*given, *few])


@pytest.mark.slow
@TWO_CORES
def test_settings_are_run_for_real_and_compared_with_what_was_predicted(tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny")
    file = tmp_path / "settings.yaml"  # a run folder has one, too: nothing else of it is needed
    model = ["run.steps=6", f"model.path={tmp_path / 'tiny'}", "generate.group_size=4", "generate.groups_in_flight=8"]
    config = config_file.load(None, [*model, "replay.groups_per_step=4", "replay.max_staleness=1"])
    config_file.save(config, file)
    output = tmp_path / "figures.json"
    words = ["simulate", str(file), "--validate", "1", "--steps", "8", "--json", str(output)]
    assert cli.main(words) in (0, 1)  # the bars themselves need a machine that does nothing else
    rows = json.loads(output.read_text())
    assert [row["setting"] for row in rows] == ["the calibration run", "replay.max_staleness=0 replay.order=fifo"]
    assert rows[0]["machine"] is None
    assert rows[1]["machine"] > 0
    for row in rows:
        assert row["predicted"]["trained"] > 0 < row["measured"]["trained"]
    assert rows[1]["predicted"]["staleness_max"] == rows[1]["measured"]["staleness_max"] == 0
