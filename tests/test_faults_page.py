"""tests/faults.md: every test that a row names is there, and every row names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "faults.md"


def rows() -> list[tuple[str, list[str]]]:
    """(fault, tests) of every row of the page's tables."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 2 and cells != ["fault", "test"] and not set("".join(cells)) <= set("-:"):
            found.append((cells[0], re.findall(r"`(tests/[^`]+)`", cells[1])))
    return found


@pytest.mark.parametrize(("fault", "tests"), rows(), ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_a_fault_has_tests_that_are_there(fault: str, tests: list[str]) -> None:
    assert fault
    assert tests
    for test in tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), f"{path} is not there"
        if name:
            functions = (
                node.name
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            assert name in functions, f"{path} has no test {name}"
