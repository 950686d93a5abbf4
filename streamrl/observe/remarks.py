"""What the end of a run says besides its figures: where its sinks have written, and the hints that there were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape
from rich.table import Table

from streamrl.observe.events import role_events
from streamrl.observe.hints import Hint, hints_of


def print_remarks(run_folder: Path, rows: Sequence[dict[str, Any]], terminal: Terminal) -> None:
    """Print both; nothing where there is nothing of the kind. `rows`: of metrics.jsonl."""
    for sink, where in places(run_folder).items():
        terminal.print(f"\n{sink.lower()}: {where}", soft_wrap=True, highlight=False, markup=False)
    if hints := hints_of(rows):
        table = Table(title="Hints", title_justify="left", show_header=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for hint in hints:
            table.add_row(steps(hint), escape(hint.advice))
        terminal.print(table)


def places(run_folder: Path) -> dict[str, str]:
    """Sink: where it shows what it was given, as the last start of the learner said."""
    records = role_events(run_folder, "learner")
    return {record["name"]: record["where"] for record in records if record["event"] == "sink"}


def steps(hint: Hint) -> str:
    """`steps 40 to 60`, `from step 40`."""
    return f"from step {hint.begin}" if hint.end is None else f"steps {hint.begin} to {hint.end}"
