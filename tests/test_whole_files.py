"""Files and folders that appear complete or not at all."""

import os
import shutil
from pathlib import Path

import pytest

from streamrl import whole_files
from streamrl.whole_files import drafted, drafted_folder, former_of, replace_folder, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(draft: Path) -> None:
    draft.write_text("half of")
    raise ZeroDivisionError


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_takes_the_place_of_what_was_there(tmp_path, durable):
    path = tmp_path / "address"
    for content, expected in (("größer", "größer".encode()), (b"\0\n", b"\0\n"), ("", b"")):
        write_whole(path, content, durable=durable)
        assert path.read_bytes() == expected
    assert names(tmp_path) == ["address"]


def test_what_was_there_stays_until_the_block_ends_and_where_it_fails(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("before")
    with drafted(path) as draft:
        draft.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    with pytest.raises(ZeroDivisionError), drafted(path) as draft:
        write_half(draft)
    assert (path.read_text(), names(tmp_path)) == ("after", ["metrics.jsonl"])


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("before")
    (tmp_path / f".trace.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "x" * 100_000)
    assert (path.read_text(), names(tmp_path)) == ("before", ["trace.json"])


def test_a_durable_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(tmp_path, monkeypatch):
    done = []
    replace = os.replace
    monkeypatch.setattr(whole_files, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(os, "replace", lambda draft, path: (done.append("named"), replace(draft, path)))
    write_whole(tmp_path / "blame.json", "{}", durable=True)
    assert done == [f".blame.json.{os.getpid()}", "named", tmp_path.name]


def test_a_folder_takes_the_place_of_what_was_there_with_what_a_killed_process_left(tmp_path):
    folder, left = tmp_path / "3.0", tmp_path / f".3.0.{os.getpid()}"
    for each in (folder, left):
        each.mkdir()
        (each / "former").write_text("")
    with drafted_folder(folder) as draft:
        (draft / "weights").write_text("")
        assert names(folder) == ["former"]
    assert (names(folder), names(tmp_path)) == (["weights"], ["3.0"])
    with pytest.raises(ZeroDivisionError), drafted_folder(folder):
        _ = 1 / 0
    assert (names(folder), names(tmp_path)) == (["weights"], ["3.0"])


def test_a_folder_that_replaces_nothing_leaves_what_somebody_has_put_there(tmp_path):
    folder = tmp_path / "evaluations" / "3.0"
    with drafted_folder(folder, replaces=False) as draft:
        (draft / "summary.json").write_text("ours")
    with pytest.raises(OSError, match="not empty"), drafted_folder(folder, replaces=False) as draft:
        (draft / "summary.json").write_text("another")
    assert ((folder / "summary.json").read_text(), names(folder.parent)) == ("ours", ["3.0"])


FORMER, NEW = {"config": "former", "weights": "former"}, {"config": "new", "weights": "new"}


def write_folder(folder: Path, durable: bool) -> None:
    with drafted_folder(folder, durable=durable) as draft:
        for name, content in NEW.items():
            (draft / name).write_text(content)


def read_folder(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def former_folder(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in FORMER.items():
        (folder / name).write_text(content)
    return folder


class Killed(BaseException):
    """Nothing that the process still does after it reaches the disk."""


def killed_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The process is killed behind so many renames and removals of files and folders. The list of those."""
    done: list[str] = []

    def alive(name, original):
        def call(*arguments, **keywords):
            if len(done) == calls:
                raise Killed
            done.append(name)
            return original(*arguments, **keywords)

        return call

    def remove(folder, ignore_errors=False):  # one file after another, as rmtree does
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()
        if folder.exists():
            folder.rmdir()

    monkeypatch.setattr(shutil, "rmtree", remove)
    for name in ("rename", "unlink", "rmdir"):
        monkeypatch.setattr(Path, name, alive(name, getattr(Path, name)))
    return done


@pytest.mark.parametrize("durable", [False, True])
def test_a_kill_at_any_point_leaves_one_of_two_folders_whole_and_the_next_writer_begins_with_it(
    former_folder, durable, monkeypatch
):
    for calls in range(5):  # two renames; two files and the folder
        with monkeypatch.context() as patch:
            done = killed_after(calls, patch)
            with pytest.raises(Killed):
                write_folder(former_folder, durable)
        assert len(done) == calls
        present = former_folder if former_folder.exists() else former_of(former_folder)
        assert read_folder(present) == (FORMER if calls < 2 else NEW)
        with pytest.raises(ZeroDivisionError), drafted_folder(former_folder):
            _ = 1 / 0
        assert read_folder(former_folder) == (FORMER if calls < 2 else NEW)
        restore(former_folder)
    write_folder(former_folder, durable)
    assert (read_folder(former_folder), names(former_folder.parent)) == (NEW, ["adapter"])


def restore(folder: Path) -> None:
    """As it was before the kill."""
    for path in folder.parent.iterdir():
        shutil.rmtree(path)
    folder.mkdir()
    for name, content in FORMER.items():
        (folder / name).write_text(content)


def test_where_the_second_rename_fails_the_former_folder_has_its_name_again(former_folder, monkeypatch):
    rename, calls = Path.rename, []

    def fails_once(path, target):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_once)
    with pytest.raises(OSError, match="No space left"):
        write_folder(former_folder, durable=False)
    assert (read_folder(former_folder), names(former_folder.parent)) == (FORMER, ["adapter"])


def test_what_is_left_of_a_removed_folder_never_gets_its_name_back_and_goes_with_the_next_writer(
    former_folder, tmp_path, monkeypatch
):
    left = former_of(tmp_path / "other")
    left.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            replace_folder(tmp_path / "other", former_folder)
    assert names(tmp_path) == [left.name, "adapter"]
    former_of(former_folder).mkdir()
    with drafted_folder(former_folder):
        assert not former_of(former_folder).exists(), "three copies at once"


def test_a_durable_folder_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_former_one_goes(
    former_folder, monkeypatch
):
    done: list[str] = []
    rename, draft = Path.rename, f".adapter.{os.getpid()}"
    monkeypatch.setattr(whole_files, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(Path, "rename", lambda path, target: (done.append(f"{path.name} named"), rename(path, target)))
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: path.exists() and (done.append("removed"), remove(path)))
    write_folder(former_folder, durable=True)
    assert sorted(done[:2]) == ["config", "weights"]
    assert done[2:] == [draft, "adapter named", f"{draft} named", former_folder.parent.name, "removed"]
