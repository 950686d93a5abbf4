"""The formats of a run's records: told by the run, and checked by every command that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.recorded.formats import FORMATS, recorded_run
from tests.operations_table import documented


def a_run(folder: Path, environment: dict[str, object]) -> Path:
    config_file.save(Config.model_validate({}), folder / "config.yaml")
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "words", [["audit"], ["journal"], ["report"], ["simulate"], ["top", "--once"], ["trace"], ["retrain", "--output=X"]]
)
def test_records_of_an_unknown_format_are_refused_in_one_line(
    tmp_path: Path, name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path, {"formats": {**FORMATS, name: 7}})
    code = cli.main([*words, str(run)])
    said = capsys.readouterr().err
    documented("... of format ... cannot be read; allowed: ...", said, code)
    assert said == f"streamrl: {run}: {name} of format 7 cannot be read; allowed: {FORMATS[name]}\n"


def test_records_of_the_present_formats_are_read_and_so_are_those_that_name_none(tmp_path: Path) -> None:
    for environment in ({"formats": FORMATS}, {}):
        assert recorded_run(a_run(tmp_path, environment)) == tmp_path
    (tmp_path / "environment.json").unlink()
    assert recorded_run(tmp_path) == tmp_path
