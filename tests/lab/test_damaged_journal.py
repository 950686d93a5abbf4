"""What each command says of a run whose journal is damaged: one line, the documented exit code, no traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import tiny_model
from streamrl import cli
from streamrl.recorded.journal import RunJournal
from streamrl.replay.segments import segment_path
from tests.lab.report_run import make_model, record_run
from tests.lab.test_simulate_run import config, record, truth
from tests.operations_table import documented

HEAD = 32  # bytes before a record
DEADLINE = 240.0  # seconds of one command


def flip(run: Path, position: int) -> None:
    path = segment_path(run / "journal", 0)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def in_frames(run: Path) -> None:
    """A bit of the first group's answers: its record can be read, its samples cannot."""
    _, second = (group.place.offset for group in RunJournal(run).groups[:2])
    flip(run, second - 1)


def in_record(run: Path) -> None:
    """A bit of the third group's record: nothing behind it can be read."""
    flip(run, RunJournal(run).groups[2].place.offset + HEAD + 2)


def whole(run: Path) -> None:
    segment_path(run / "journal", 0).write_bytes(b"this is no journal\n" * 100)


DAMAGES: tuple[Callable[[Path], None], ...] = (in_frames, in_record, whole)

# (command, its exit code behind each damage)
COMMANDS = [
    (["journal", "RUN"], (0, 0, 0)),
    (["journal", "RUN", "--verify"], (1, 1, 1)),
    (["audit", "RUN"], (1, 1, 1)),
    (["report", "RUN", "--ratios", "no"], (0, 0, 0)),
    (["group", "RUN", "0"], (2, 2, 2)),  # its service has no event of it
    (["top", "RUN", "--once"], (0, 0, 0)),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    make_model(folder / "model")
    return record_run(folder / "run", folder / "model", steps=2, journal__keep="all", replay__groups_per_step=3)


@pytest.fixture
def damaged(run: Path, tmp_path: Path) -> Callable[[Callable[[Path], None]], Path]:
    def make(damage: Callable[[Path], None]) -> Path:
        copy = tmp_path / damage.__name__
        shutil.copytree(run, copy)
        damage(copy)
        return copy

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("words", "codes"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_a_command_ends_with_its_code_and_at_most_one_line(
    words: list[str], codes: tuple[int, ...], damaged, capsys: pytest.CaptureFixture[str]
) -> None:
    for damage, code in zip(DAMAGES, codes, strict=True):
        folder = damaged(damage)
        assert cli.main([str(folder) if word == "RUN" else word for word in words]) == code, damage.__name__
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("streamrl")]
        problems = [line for line in out.splitlines() if "PROBLEM" in line]
        assert len(lines) + bool(problems) == (1 if code else 0), (damage.__name__, out, err)
        assert "Traceback" not in err
        shutil.rmtree(folder)


def test_a_damaged_journal_is_told_by_its_first_place(damaged, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["journal", str(damaged(in_frames)), "--verify"]) == 1
    documented("segment ...: damage of ... bytes at byte ...; ... damaged places in ...", capsys.readouterr().err, 1)


def test_a_simulation_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(config(tmp_path, "known"), truth())
    in_frames(folder)
    assert cli.main(["simulate", str(folder)]) == 1
    err = capsys.readouterr().err
    documented("...: the frames of the record at byte ... do not match their checksum", err, 1)
    assert [line.startswith("streamrl: ") for line in err.splitlines()] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_training_again_ends_with_one_line(damage: Callable[[Path], None], damaged, tmp_path: Path) -> None:
    folder = damaged(damage)
    tiny_model.make(tmp_path / "model", 1)
    command = [sys.executable, "-m", "streamrl.cli"]
    again = subprocess.run(
        [*command, "retrain", str(folder), "--output", str(tmp_path / "again")],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert again.returncode == 1, again.stderr
    assert len([line for line in again.stderr.splitlines() if line.startswith("streamrl: ")]) == 1
    assert "Traceback" not in again.stderr
