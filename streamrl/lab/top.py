"""`streamrl top RUN`: a run as it goes on, in the terminal: what each role does, who holds it up, how fast it could be.

It reads the run folder alone, so that it works for a run of any machine that shares it, and after its end.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live as Screen
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from streamrl.config import Config
from streamrl.observe.console import fields
from streamrl.observe.events import now
from streamrl.observe.live import Glance, Live, shares
from streamrl.observe.prometheus import Exporter
from streamrl.observe.roofline import HOLDERS
from streamrl.places import load_run

# Characters of a role's bar.
BAR = 32

# Events of note that are shown.
NOTES = 6

# Colours of phases, the same in every role: green works, yellow waits, magenta hands weights over.
COLOURS = {
    "generate": "green", "forward": "green", "backward": "bright_green", "optimizer": "cyan", "scores": "blue",
    "train": "green", "send": "magenta", "publish": "magenta", "pause": "magenta", "keep": "blue", "save": "blue",
    "export": "blue", "evaluate": "cyan", "wait": "yellow", "idle": "bright_black",
    "start": "bright_black", "other": "white",
}  # fmt: skip

# Characters of an event of note.
_FIELD = 110


def main(run_folder: Path, *, once: bool = False, every: float = 1.0, port: int | None = None) -> int:
    """Show the run until it ends or Ctrl-C; `once`: as it is now, and no more. Always 0.

    `every`: seconds between two looks. `port`: serve the Prometheus endpoint there meanwhile.
    """
    config = load_run(run_folder)
    terminal, live = Terminal(), Live(run_folder)
    with _exporter(run_folder, port), contextlib.suppress(KeyboardInterrupt):
        live.read()
        if not live.is_alive and live.timeline.tracks:  # it is over: all of it
            live = Live(run_folder, math.inf)
            live.read()
        if once:
            terminal.print(frame(live, config))
            return 0
        with Screen(frame(live, config), console=terminal, auto_refresh=False) as screen:
            while live.is_alive or not live.timeline.tracks:
                time.sleep(every)
                live.read()
                screen.update(frame(live, config), refresh=True)
    return 0


def frame(live: Live, config: Config) -> RenderableType:
    """Everything that is shown at one moment."""
    glance = live.glance()
    parts: list[RenderableType] = [_title(live, config, glance), _roles(live, glance), _bottleneck(glance)]
    if live.rows:
        figures = Table(show_header=False, box=None, pad_edge=False)
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column()
        for name, text in fields(live.rows, config, glance):
            if name not in ("waiting", "time"):  # the table of roles says it better
                figures.add_row(name, escape(text))
        parts += ["", figures]
    if notes := list(live.notes)[-NOTES:]:
        parts += ["", Text("events of note", style="bold"), *(_event_line(record) for record in notes)]
    return Group(*parts)


@contextlib.contextmanager
def _exporter(run_folder: Path, port: int | None) -> Iterator[None]:
    exporter = None if port is None else Exporter(run_folder, port)
    try:
        yield
    finally:
        if exporter is not None:
            exporter.close()


def _title(live: Live, config: Config, glance: Glance) -> Text:
    state = "goes on" if live.is_alive else "is over" if live.timeline.tracks else "has not begun"
    stretch = f"{glance.end - glance.begin:.0f} s until {time.strftime('%H:%M:%S', time.localtime(glance.end))}"
    return Text(f"streamrl · {config.run.name} · {state}" + (f" · {stretch}" if glance.doing else ""), style="bold")


def _roles(live: Live, glance: Glance) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("role", "now", "share of the time"):
        table.add_column(heading, header_style="dim", no_wrap=True)
    table.add_column("", ratio=1)
    for role, seconds in glance.doing.items():
        phases = live.timeline.tracks[role].phases(glance.begin, glance.end)
        doing = phases[-1].name if phases and phases[-1].end >= glance.end else "gone"
        table.add_row(role, Text(doing, style=COLOURS.get(doing, "red")), _bar(seconds), shares(seconds))
    return table


def _bar(seconds: dict[str, float]) -> Text:
    """The phases' shares as coloured blocks, working phases first."""
    whole, bar, place = sum(seconds.values()), Text(), 0.0
    order = list(COLOURS)
    for name, part in sorted(seconds.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1):
        end = place + (part / whole * BAR if whole else 0.0)
        bar.append("█" * (round(end) - round(place)), style=COLOURS.get(name, "red"))
        place = end
    return bar


def _bottleneck(glance: Glance) -> Text:
    whole = sum(glance.held_up.values())
    if not whole:
        return Text("roles are starting")
    holder = glance.bottleneck
    text = Text("held up by ", style="dim").append(holder, style="bold")
    return text.append(f" {glance.held_up[holder] / whole:.0%} of the time: {HOLDERS[holder]}", style="dim")


def _event_line(record: dict[str, Any]) -> Text:
    details = ", ".join(
        f"{key} {value}" for key, value in record.items() if key not in ("time", "role", "event", "span", "phase")
    )
    ago = max(0.0, now() - record["time"])
    line = f"  {_ago(ago):>9}  {record['role']:<12} {record['event']}  {' '.join(details.split())}"
    return Text(line if len(line) <= _FIELD else line[: _FIELD - 1] + "…", no_wrap=True)


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
