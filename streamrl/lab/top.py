"""`streamrl top RUN`: a run as it goes on, in the terminal: what each role does, who holds it up, how fast it could be.

It reads the run folder alone, so that it works for a run of any machine that shares it, and after its end.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
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
from streamrl.observe.live import Glance, Live, shares
from streamrl.observe.prometheus import Exporter
from streamrl.observe.roofline import HOLDERS, Holder
from streamrl.observe.run_clock import RunClock
from streamrl.places import load_run

# Characters of a role's bar.
BAR = 32

# Events of note that are shown.
NOTES = 6

# Last steps of a run that is over.
ROWS = 5

# Seconds without a new record after which a run that goes on is said to be silent: a step of a large model lasts less.
SILENT = 60.0

# Colours of phases, the same in every role: green works, yellow waits, magenta hands weights over.
COLOURS = {
    "generate": "green", "forward": "green", "backward": "bright_green", "optimizer": "cyan", "scores": "blue",
    "critic": "blue",
    "train": "green", "send": "magenta", "publish": "magenta", "pause": "magenta", "keep": "blue", "save": "blue",
    "export": "blue", "evaluate": "cyan", "wait": "yellow", "idle": "bright_black",
    "start": "bright_black", "other": "white",
}  # fmt: skip

# Columns of the last steps: heading, metric, format.
COLUMNS = (
    ("step", "step", "d"), ("reward", "reward/mean", ".3f"), ("pass rate", "pass_rate", ".2f"),
    ("loss", "loss/total", ".4g"), ("trained tokens/s", "tokens/trained_per_s", ",.0f"),
    ("staleness", "staleness/mean", ".2f"), ("s", "time/step", ".2f"),
)  # fmt: skip

# Characters of an event of note.
_FIELD = 110


def main(run_folder: Path, *, once: bool = False, every: float = 1.0, port: int | None = None) -> int:
    """Show the run until it ends or Ctrl-C; `once`: as it is now, and no more. Always 0.

    Of a run that is over, its end. `every`: seconds between two looks. `port`: serve the Prometheus endpoint there
    meanwhile.
    """
    config = load_run(run_folder)
    terminal, live = Terminal(), Live(run_folder, clock=RunClock.of(run_folder))
    with _exporter(run_folder, port), contextlib.suppress(KeyboardInterrupt):
        live.read()
        if once or live.is_over:
            terminal.print(_shown(live, run_folder, config))
            return 0
        with Screen(frame(live, config), console=terminal, auto_refresh=False) as screen:
            while not live.is_over:
                time.sleep(every)
                live.read()
                screen.update(_shown(live, run_folder, config), refresh=True)
    return 0


def _shown(live: Live, run_folder: Path, config: Config) -> RenderableType:
    """The last seconds of a run that goes on; of one that is over all of it."""
    if live.is_over:
        live = Live(run_folder, math.inf, live.clock)
        live.read()
    return frame(live, config)


def frame(live: Live, config: Config) -> RenderableType:
    """Everything that is shown at one moment."""
    glance = live.glance()
    parts: list[RenderableType] = [_title(live, config, glance)]
    if live.is_over:
        parts.append(_end(live))
    parts.append(_roles(live, glance))
    if not config.trains_rows:
        parts.append(bottleneck(glance.held_up))
    if live.rows:
        figures = Table(show_header=False, box=None, pad_edge=False)
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column()
        for name, text in fields(live.rows, config, glance):
            if name not in ("waiting", "time"):  # the table of roles says it better
                figures.add_row(name, escape(text))
        parts += ["", figures]
    if live.rows and live.is_over:
        parts += ["", _last_steps(live.rows[-ROWS:])]
    if notes := list(live.notes)[-NOTES:]:
        parts += [
            "",
            Text("events of note", style="bold"),
            *(_event_line(record, live.clock.now()) for record in notes),
        ]
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
    state = "is over" if live.is_over else "goes on" if live.is_alive else "has not begun"
    silence = time.monotonic() - live.heard
    if live.is_alive and silence > SILENT:
        state += f", nothing new for {silence:.0f} s"
    stretch = f"{glance.end - glance.begin:.0f} s until {time.strftime('%H:%M:%S', time.localtime(glance.end))}"
    return Text(f"streamrl · {config.run.name} · {state}" + (f" · {stretch}" if glance.doing else ""), style="bold")


def _end(live: Live) -> Text:
    """How the run came to its end, by the replay service's last word."""
    if live.stop is None:
        return Text("ended without a last word", style="red")
    code = live.stop["code"]
    return Text(f"ended with exit code {code}: {live.stop['reason']}", style="green" if code == 0 else "red")


def _roles(live: Live, glance: Glance) -> Table:
    table = Table(box=None, pad_edge=False)
    over = live.is_over
    for heading in ("role", "end" if over else "now", "share of the time"):
        table.add_column(heading, header_style="dim", no_wrap=True)
    table.add_column("", ratio=1)
    if over:
        table.add_column("in total", header_style="dim", ratio=1)
    for role, seconds in glance.doing.items():
        track = live.timeline.tracks[role]
        phases = track.phases(glance.begin, glance.end)
        doing = phases[-1].name if phases and phases[-1].end >= glance.end else "gone"
        if over:
            doing = "killed" if track.is_alive else "ended"  # one that was killed did not say that it ends
        row: list[RenderableType] = [role, Text(doing, style=COLOURS.get(doing, "red")), bar(seconds), shares(seconds)]
        table.add_row(*row, *([_totals(live, role)] if over else []))
    return table


def _totals(live: Live, role: str) -> str:
    """Seconds of each phase since the run's start, its start included."""
    seconds = {phase: each for (name, phase), each in live.seconds.items() if name == role and each >= 0.5}
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{phase} {each:,.0f} s" for phase, each in ordered)


def _last_steps(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="the last steps", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, header_style="dim", justify="right")
    for row in rows:
        table.add_row(*("–" if row.get(name) is None else format(row[name], form) for _, name, form in COLUMNS))
    return table


def bar(seconds: dict[str, float]) -> Text:
    """The phases' shares as coloured blocks, working phases first."""
    whole, blocks, place = sum(seconds.values()), Text(), 0.0
    order = list(COLOURS)
    for name, part in sorted(seconds.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1):
        end = place + (part / whole * BAR if whole else 0.0)
        blocks.append("█" * (round(end) - round(place)), style=COLOURS.get(name, "red"))
        place = end
    return blocks


def bottleneck(held_up: dict[Holder, float]) -> Text:
    """Who held the run up most; of seconds or shares."""
    whole = sum(held_up.values())
    if not whole:
        return Text("roles are starting")
    holder = max(held_up, key=lambda each: held_up[each])
    text = Text("held up by ", style="dim").append(holder, style="bold")
    return text.append(f" {held_up[holder] / whole:.0%} of the time: {HOLDERS.get(holder, '')}", style="dim")


def _event_line(record: dict[str, Any], now: float) -> Text:
    details = ", ".join(
        f"{key} {value}" for key, value in record.items() if key not in ("time", "role", "event", "span", "phase")
    )
    ago = max(0.0, now - record["time"])
    line = f"  {_ago(ago):>9}  {record['role']:<12} {record['event']}  {' '.join(details.split())}"
    return Text(line if len(line) <= _FIELD else line[: _FIELD - 1] + "…", no_wrap=True)


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
