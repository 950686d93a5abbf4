"""Every failure that docs/operations.md names is exercised by a test, line for line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.operations_table import ROOT, Row, documented, rows

LEAST = 12  # characters of a line that are the same each time: fewer would match anything


def test_every_row_has_a_test_of_its_own() -> None:
    shown = {line for _, line in _shown()}
    assert len(rows()) > 50
    assert [row.line for row in rows() if row.line not in shown] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.line[:60])
def test_a_row_says_enough(row: Row) -> None:
    assert len(row.literal.strip()) >= LEAST
    assert row.cure
    assert row.code in (None, 0, 1, 2, 130)


def test_no_row_is_there_twice() -> None:
    lines = [row.line for row in rows()]
    assert len(lines) == len(set(lines))


def test_every_line_that_a_test_shows_has_its_row() -> None:
    """What `documented` would refuse when such a test runs, without running it."""
    known = {row.line for row in rows()}
    assert [(test, line) for test, line in _shown() if line not in known] == []


def test_a_line_that_differs_from_the_page_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests import operations_table

    page = tmp_path / "operations.md"
    page.write_text(
        "## Failed, exit code 1\n| the line | what to do |\n|---|---|\n| `no room for ... in ...` | make room |\n"
    )
    monkeypatch.setattr(operations_table, "PAGE", page)
    documented("no room for ... in ...", "12:00 no room for 3 MB in /tmp\n", 1)
    with pytest.raises(AssertionError, match="was not seen"):
        documented("no room for ... in ...", "there is room\n", 1)
    with pytest.raises(AssertionError, match=r"says 1 .* exit code was 2"):
        documented("no room for ... in ...", "no room for 3 MB in /tmp", 2)
    with pytest.raises(AssertionError, match="has no row"):
        documented("no space for ...", "no space for 3 MB", 1)


def _shown() -> list[tuple[str, str]]:
    """(test, line) of every test that calls `documented`."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path != Path(__file__):
                found += [(f"{path.relative_to(ROOT)}::{node.name}", line) for line in _documented_by(node)]
    return found


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
