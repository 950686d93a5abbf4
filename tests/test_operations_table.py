"""Every failure that docs/operations.md names is exercised by the test that its row names, line for line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.operations_table import ROOT, Row, documented, rows

LEAST = 12  # characters of a line that are the same each time: fewer would match anything


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.line[:60])
def test_a_row_names_a_test_that_shows_its_line(row: Row) -> None:
    path, _, name = row.test.partition("::")
    assert (ROOT / path).is_file(), f"{path} is not there"
    functions = {
        node.name: node
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in functions, f"{path} has no test {name}"
    assert row.line in _documented_by(functions[name]), f"{row.test} does not call documented({row.line!r}, ...)"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.line[:60])
def test_a_row_says_enough(row: Row) -> None:
    assert len(row.literal.strip()) >= LEAST
    assert row.failure
    assert row.cure
    assert row.code in (None, 1, 2, 130)


def test_no_row_stands_twice() -> None:
    keys = [(row.line, row.test) for row in rows()]
    assert len(keys) == len(set(keys))


def test_every_line_that_a_test_shows_has_its_row() -> None:
    """What `documented` would refuse when such a test runs, without running it."""
    known = {(row.line, row.test) for row in rows()}
    missing = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                test = f"{path.relative_to(ROOT)}::{node.name}"
                missing += [(test, line) for line in _documented_by(node) if (line, test) not in known]
    assert not missing


def test_a_line_that_differs_from_the_page_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests import operations_table

    page = tmp_path / "operations.md"
    here = "tests/test_operations_table.py::test_a_line_that_differs_from_the_page_is_told"
    page.write_text(
        "| failure | the line | code | what to do | test |\n|---|---|---|---|---|\n"
        f"| a | `no room for ... in ...` | 1 | make room | `{here}` |\n"
    )
    monkeypatch.setattr(operations_table, "PAGE", page)
    documented("no room for ... in ...", "12:00 no room for 3 MB in /tmp\n", 1)
    with pytest.raises(AssertionError, match="was not seen"):
        documented("no room for ... in ...", "there is room\n", 1)
    with pytest.raises(AssertionError, match=r"says 1 .* exit code was 2"):
        documented("no room for ... in ...", "no room for 3 MB in /tmp", 2)
    with pytest.raises(AssertionError, match="has no row"):
        documented("no space for ...", "no space for 3 MB", 1)


def _documented_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The first arguments of the calls of `documented` in a function, those that are written out."""
    return [
        call.args[0].value
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "documented"
        and isinstance(call.args[0], ast.Constant)
    ]
