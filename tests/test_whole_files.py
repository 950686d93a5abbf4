"""Files and folders that appear complete or not at all."""

import os
from pathlib import Path

import pytest

from streamrl import whole_files
from streamrl.whole_files import drafted, drafted_folder, write_whole


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
