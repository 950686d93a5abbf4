"""Which line of a data file is broken, and how."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from streamrl.config.task import TaskShare
from streamrl.tasks.broken_lines import MOST, broken_lines
from streamrl.tasks.registry import build_task
from tests.operations_table import documented

GOOD = '{"prompt": "1+1", "answer": "2"}'


@pytest.fixture
def refused(tmp_path: Path):
    """`refused(line, ...)`: what the task says of a file with these lines, without what they begin with."""

    def run(*lines: str | bytes, **args: object) -> list[str]:
        file = tmp_path / "data.jsonl"
        file.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        share = TaskShare(name="jsonl", args={"path": str(file), "cache": str(tmp_path / "cache"), **args})
        with pytest.raises(ValueError, match=r"task\.args\.path") as refusal:
            build_task(share, seed=1, split="train")
        begin = f"task.args.path: {file}:"
        assert all(line.startswith(begin) for line in str(refusal.value).splitlines()), refusal.value
        return [line.removeprefix(begin).partition("; allowed")[0] for line in str(refusal.value).splitlines()]

    return run


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "1+1" "answer": "2"}', "3: not JSON (Expecting ',' delimiter at column 18)"),
        ("[1, 2]", "3: a list, and no mapping of columns"),
        (b'{"prompt": "\xff", "answer": "2"}', "3: not text in UTF-8"),
        ('{"prompt": "1+1", "answer": ["2"]}', "3: 'answer' is a list, and text in line 1"),
        ('{"prompt": "1+1", "answer": null}', "3: 'answer' is missing"),
        ('{"prompt": "1+1"}', "3: 'answer' is missing"),
    ],
)
def test_a_broken_line_is_told_with_its_number_and_what_is_wrong(refused, line, told) -> None:
    assert refused(GOOD, "", line, GOOD.replace("1+1", "1+2")) == [told]


def test_every_broken_line_is_told_up_to_a_number(refused) -> None:
    assert [line.partition(":")[0] for line in refused(GOOD, "{", GOOD, "}")] == ["2", "4"]
    assert len(refused(GOOD, *["{"] * (MOST + 5))) == MOST


def test_a_row_may_lack_what_nobody_needs(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(GOOD + '\n{"prompt": "1+2", "answer": "3", "note": null}\n{"prompt": "1+3", "answer": null}\n')
    assert broken_lines(str(file)) == []
    assert broken_lines(str(tmp_path / "*.jsonl"), ["prompt", "answer"]) == [f"{file}:3: 'answer' is missing"]


def test_the_line_is_that_of_the_documents(refused, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f"{GOOD}\n{{\n")
    with pytest.raises(ValueError, match="not JSON") as refusal:
        build_task(TaskShare(name="jsonl", args={"path": str(file)}), seed=1, split="train")
    documented("task.args.path: ...: not JSON (...)...", str(refusal.value), 2)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_a_row_of_another_format_without_an_answer_is_told(tmp_path: Path, kind: str) -> None:
    file, rows = tmp_path / f"data.{kind}", {"prompt": ["1+1", "1+2", "1+3"], "answer": ["2", "None", None]}
    _write(file, rows)
    args = {"path": str(file), "cache": str(tmp_path / "cache")}
    told = f"task.args.path: {file}: row 2: 'answer' is missing; allowed: a value in each row"
    with pytest.raises(ValueError, match="missing") as refusal:
        build_task(TaskShare(name="jsonl", args=args), seed=1, split="train")
    assert str(refusal.value) == told
    _write(tmp_path / f"other.{kind}", {"prompt": ["2+1", "2+2"], "answer": ["3", "4"]})
    tested = {**args, "path": str(tmp_path / f"other.{kind}"), "test_path": str(file)}
    with pytest.raises(ValueError, match="missing") as refusal:
        build_task(TaskShare(name="jsonl", args=tested), seed=1, split="train")
    assert str(refusal.value) == told.replace("args.path", "args.test_path")


def _write(file: Path, columns: dict[str, list[str | None]]) -> None:
    data = datasets.Dataset.from_dict(columns)
    match file.suffix:
        case ".json":
            file.write_text(json.dumps(data.to_list()))
        case ".csv":
            data.to_csv(file, index=False)
        case ".parquet":
            data.to_parquet(file)
