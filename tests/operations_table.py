"""The failures of docs/operations.md: the rows of its tables, and how a test shows that a row's line is what is seen.

A row is one line of a table whose columns are `the line | what to do`. In the line `...` replaces what varies. The code
is that of the process that ends, by the heading above the table, `exit code N`; without one the run goes on. A test
calls `documented` with the row's line, what it saw, and the exit code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operations.md"
COLUMNS = ["the line", "what to do"]
GOES_ON = None  # the exit code of a failure that ends nothing


@dataclass(frozen=True, slots=True)
class Row:
    """One failure."""

    line: str
    code: int | None
    cure: str

    @property
    def literal(self) -> str:
        """What of the line is the same each time."""
        return self.line.replace("...", "")

    def is_in(self, text: str) -> bool:
        """Does a line of the text have it? What is before and behind it, such as a time, is left open."""
        pattern = re.compile(".*".join(map(re.escape, self.line.split("..."))))
        return any(pattern.search(line) for line in text.splitlines())


def rows() -> list[Row]:
    """The rows of all such tables, in their order. Raises ValueError for one that cannot be read."""
    found: list[Row] = []
    inside, code = False, GOES_ON
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            ends = re.search(r"exit code (\d+)$", line)
            code = int(ends[1]) if ends else GOES_ON
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells == COLUMNS:
            inside = True
        elif not cells:
            inside = False
        elif inside and not set("".join(cells)) <= set("-:"):
            found.append(_row(cells, code))
    return found


def _row(cells: list[str], code: int | None) -> Row:
    try:
        line, cure = cells
        return Row(_code(line), code, cure)
    except ValueError as error:
        raise ValueError(f"{PAGE.name}: {cells}: {error}") from error


def _code(cell: str) -> str:
    """What is between backticks."""
    if not (cell.startswith("`") and cell.endswith("`") and len(cell) > 2):
        raise ValueError(f"{cell!r} is to be between backticks")
    return cell[1:-1].replace("\\|", "|")


def documented(line: str, seen: str, code: int | None) -> None:
    """Assert that the page has a row with this line and this code, and that the line was seen."""
    row = next((row for row in rows() if row.line == line), None)
    assert row is not None, f"{PAGE.name} has no row with the line {line!r}"
    assert row.code == code, f"{PAGE.name} says {row.code} for {line!r}, the exit code was {code}"
    assert row.is_in(seen), f"{line!r} was not seen in:\n{seen}"
