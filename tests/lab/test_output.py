"""Files that a command is to write are looked at before its work."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from streamrl.lab.output import output_file, output_folder


@pytest.mark.parametrize(("name", "said"), [(".", "is a folder"), ("nowhere/figures.json", "nowhere is no folder")])
def test_a_flag_for_a_file_that_cannot_be_written_is_refused_as_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    parser = ArgumentParser()
    parser.add_argument("--json", type=output_file)
    assert parser.parse_args(["--json", str(tmp_path / "figures.json")]).json == tmp_path / "figures.json"
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path / name)])
    assert f"{said}; allowed: a file" in capsys.readouterr().err


def test_a_flag_for_a_folder_that_cannot_be_written_is_refused_as_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    parser = ArgumentParser()
    parser.add_argument("--keep", type=output_folder)
    for allowed in ("", "new", "new/inside"):
        assert parser.parse_args(["--keep", str(tmp_path / allowed)]).keep == tmp_path / allowed
    for refused in ("file", "file/inside"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--keep", str(tmp_path / refused)])
        assert "file cannot be written; allowed: a folder that can be written" in capsys.readouterr().err
