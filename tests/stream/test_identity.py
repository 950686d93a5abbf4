"""The id of a run: one for a folder, whichever process makes it, and what is of another run is told apart."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.file import ConfigError
from streamrl.stream.identity import AnotherRun, RunIdentity, run_identity
from tests.operations_table import documented

MAKE = """
import secrets, sys
from pathlib import Path
from streamrl.stream.identity import run_identity

make = secrets.token_hex

def token_hex(size):
    print("no id yet", flush=True)
    sys.stdin.readline()
    return make(size)

secrets.token_hex = token_hex
print(run_identity(Path(sys.argv[1])).id)
"""


def test_roles_that_make_the_folder_at_once_agree_on_one_id(tmp_path: Path) -> None:
    """None of them finds an id; then one after another writes its own, and says which one it has."""
    command = [sys.executable, "-c", MAKE, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    roles = [subprocess.Popen(command, **pipes) for _ in range(4)]
    assert [role.stdout.readline() for role in roles] == ["no id yet\n"] * 4
    told = {role.communicate("\n", timeout=60)[0].strip() for role in roles}
    assert told == {run_identity(tmp_path / "run").id}


def test_two_folders_are_two_runs_and_a_renamed_one_stays_itself(tmp_path: Path) -> None:
    first, second = run_identity(tmp_path / "a"), run_identity(tmp_path / "b")
    assert first.id != second.id
    (tmp_path / "a").rename(tmp_path / "a.1")
    assert run_identity(tmp_path / "a.1") == first
    assert not first.adopted


def test_a_folder_from_before_the_id_is_adopted_once_and_said_in_one_line(tmp_path: Path, caplog) -> None:
    (tmp_path / "config.yaml").write_text("")
    with caplog.at_level(logging.WARNING):
        made = run_identity(tmp_path)
        assert run_identity(tmp_path) == made
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} is from before runs had ids: it is adopted as run {made.id}"
    ]
    assert [made.owns(run) for run in (None, made.id, "b")] == [True, True, False]


def test_what_is_of_another_run_or_of_none_is_refused_with_both_ids() -> None:
    run = RunIdentity(id="a")
    run.check("journal/000000.journal", "a")
    with pytest.raises(AnotherRun, match=r"^000000.journal is of run b, and its run folder is of run a; allowed: .*"):
        run.check("000000.journal", "b")
    with pytest.raises(AnotherRun, match="is of a run without an id, and its run folder is of run a"):
        run.check("000000.journal", None)


def test_a_host_without_the_folder_gets_the_id_by_configuration(tmp_path: Path) -> None:
    assert run_identity(tmp_path, "given").id == "given"
    assert run_identity(tmp_path, "given").id == run_identity(tmp_path).id == "given"
    with pytest.raises(AnotherRun, match=r"run.id: other differs from given of .*run.json; allowed: the same"):
        run_identity(tmp_path, "other")


@pytest.mark.parametrize("content", ["", "{", '{"id": 3}', "\x00\x01"])
def test_a_damaged_file_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=r"run.json: .*; allowed: .*") as refused:
        run_identity(tmp_path)
    assert "\n" not in str(refused.value)
    documented("run.json: ...; allowed: ...", str(refused.value), 2)
