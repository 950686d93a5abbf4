"""The live table of a run: what it learns, how fast, how stale, and who waits for whom.

It reads what the roles append to `metrics.jsonl` and `events/`, so it needs no connection to them.
In a terminal it is one table that is redrawn; elsewhere a line every ten seconds.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.live import Live as Screen
from rich.markup import escape
from rich.table import Table

from streamrl.config import Config
from streamrl.observe.failed import failed_samples
from streamrl.observe.live import Glance, Live, sentence
from streamrl.observe.starting import Starting
from streamrl.observe.summary import print_summary
from streamrl.observe.terminal import Terminal

# Seconds between two lines where there is no terminal: a run of six minutes then fills half a screen.
LINE_EVERY = 10.0

# Points of the sparkline.
_WIDTH = 40

# Steps over which rates and idle fractions are averaged: one step of a small run takes half a second.
_WINDOW = 5

# Seconds between two looks at the event logs: what they say is of the last half minute.
GLANCE_EVERY = 1.0

# Reward parts, or tasks, that a line names.
_NAMED = 6

# Share of answers from which a line says that they are cut: a single one is the tail of the lengths.
_LEAST_CUT = 0.01

# The part that every task gives, whose mean is the pass rate.
EXACT = "exact"

_BLOCKS = "▁▂▃▄▅▆▇█"


class Console:
    """Shows a run while it goes on.

    Usage:
        console = Console(config, run_folder)
        console.refresh()  # a few times a second
        console.close()
        console.summary()
    """

    def __init__(self, config: Config, run_folder: Path, terminal: Terminal | None = None) -> None:
        self._config = config
        self._run_folder = run_folder
        # A notebook's kernel sets FORCE_COLOR, by which rich would take it for a terminal.
        self._terminal = terminal or Terminal(force_terminal=sys.stdout.isatty(), force_jupyter=False)
        self._live = Live(run_folder)
        self._glance = Glance()
        self._glanced = self._printed = time.monotonic()
        self._starting = Starting(config, run_folder)
        self._read(poll=True)
        self._before = {_key(row) for row in self._rows}  # a resume writes those that it keeps again
        self._announced: set[tuple[str, str]] = set()  # sinks with their places, as they were printed
        self._hinted = self._rows[-1]["step"] if self._rows else 0  # step up to which hints were printed
        self._screen: Screen | None = None
        if config.observe.console and self._terminal.is_terminal:
            self._screen = Screen(self.table(), console=self._terminal, auto_refresh=False, transient=False)
            self._screen.start()

    def refresh(self) -> None:
        """Read what has been appended and show it."""
        self._read(poll=time.monotonic() - self._glanced >= GLANCE_EVERY)
        self._announce()
        if self._screen is not None:
            self._screen.update(self.table(), refresh=True)
        elif time.monotonic() - self._printed >= LINE_EVERY:
            self._print_line()

    def close(self) -> None:
        """Show the last state and give the terminal back. May be called twice."""
        self._read(poll=True)
        self._announce()
        if self._screen is not None:
            self._screen.update(self.table(), refresh=True)
            self._screen.stop()
            self._screen = None
        elif self._has_begun:
            self._print_line()
        self._before |= {_key(row) for row in self._rows}

    def summary(self) -> None:
        """Print what was learned, and the figures."""
        print_summary(self._config, self._run_folder, self._terminal)

    @property
    def _rows(self) -> list[dict[str, Any]]:
        return self._live.rows

    @property
    def _has_begun(self) -> bool:
        """A step was made since the start; of a resume maybe one that had been made before."""
        return bool(self._rows) and _key(self._rows[-1]) not in self._before

    def _read(self, *, poll: bool) -> None:
        """The metrics, and where asked for a `poll` of what the roles do."""
        if not poll:
            self._live.read_rows()
            return
        self._live.read()
        self._starting.read()
        self._glance, self._glanced = self._live.glance(), time.monotonic()

    def _announce(self) -> None:
        """Print what is said once: where the sinks write, hints that have begun or ended. Above a table on a screen."""
        for place in self._glance.places.items():
            if place not in self._announced:
                self._announced.add(place)
                self._print(f"{place[0].lower()}: {place[1]}")
        for step, line in self._live.hints.lines:
            if step > self._hinted:
                self._print(line)
        self._hinted = self._rows[-1]["step"] if self._rows else 0  # a resume goes back

    def _print(self, line: str) -> None:
        self._terminal.print(line, soft_wrap=True, highlight=False, markup=False)

    def _print_line(self) -> None:
        self._printed = time.monotonic()
        begun = self._has_begun
        self._print(one_line(self._rows, self._config, self._glance) if begun else f"no step yet; {self._starting}")

    def table(self) -> Table:
        """What a terminal shows now."""
        table = Table(title=f"streamrl · {self._config.run.name}", title_justify="left", show_header=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        if not self._has_begun:
            for name, value in self._starting.lines():
                table.add_row(name, value)
            table.add_row("", "no step yet")
        for name, value in fields(self._rows, self._config, self._glance) if self._rows else ():
            table.add_row(name, escape(value))
        return table


def who_waits(idle_learner: float, idle_generator: float) -> str:
    """Who waits for whom, in words, from the two idle shares of 0..1."""
    if max(idle_learner, idle_generator) < 0.1:
        return "nobody waits"
    learner = f"learner waits for the generators {idle_learner:.0%} of the time"
    generator = f"generators wait for the learner {idle_generator:.0%} of the time"
    if min(idle_learner, idle_generator) >= 0.1:
        return f"{learner}, {generator}"
    return learner if idle_learner > idle_generator else generator


def sparkline(values: list[float]) -> str:
    """The course of `values`, from 0 (or their least) to 1 (or their largest), in `_WIDTH` characters at most."""
    if not values:
        return ""
    count = min(_WIDTH, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [_mean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(_BLOCKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def one_line(rows: list[dict[str, Any]], config: Config, glance: Glance) -> str:
    """The state of a run as one line of text."""
    known = dict(fields(rows, config, glance))
    if config.trains_rows:
        words = [f"{name} {known[name]}" for name in ("step", "loss", "held out") if name in known]
        return " | ".join([*words, known["tokens/s"]])
    reward = f"reward {_latest(rows, 'reward/mean'):.3f}"
    words = [f"step {known['step']}", reward, known["tokens/s"], f"staleness {known['staleness']}", known["waiting"]]
    if (limits := glance.roofline) is not None:
        words.append(f"limit {limits.limit:,.0f}/s by the {limits.limited_by}")
    if "failed" in known:
        words.append(f"failed {known['failed']}")
    return " | ".join(words)


def fields(rows: list[dict[str, Any]], config: Config, glance: Glance) -> Iterator[tuple[str, str]]:
    """The lines of the table: (name, text). One metrics row at least."""
    last = rows[-1]
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    yield "step", f"{last['step']} of {config.run.steps}, {_latest(rows, 'time/step'):.2f} s each"
    if config.trains_rows:
        yield from _of_rows(rows)
        yield from _remarks(glance)
        return
    yield "reward", f"{_latest(rows, 'reward/mean'):.3f}  {sparkline(rewards)}"
    yield "pass rate", f"{_latest(rows, 'pass_rate'):.2f}, groups with signal {_latest(rows, 'signal_rate'):.2f}"
    if last.get("distillation/kl") is not None:
        yield "teacher", f"reverse KL {_latest(rows, 'distillation/kl'):.3f} nats/token"
    if last.get("critic/loss") is not None:
        yield "critic", f"explained variance {_latest(rows, 'critic/explained_variance'):.2f}"
    for name, begin, end in (("reward parts", "reward/part/", ""), ("tasks", "task/", "/reward/mean")):
        if means := _named(rows, begin, end):
            yield name, means
    if (cut := _latest(rows, "length/cut")) >= _LEAST_CUT:
        yield "cut", f"{cut:.0%} of the answers at the length limit"
    generated, trained = _latest(rows, "tokens/generated_per_s"), _latest(rows, "tokens/trained_per_s")
    yield "tokens/s", f"generated {generated:,.0f}/s, trained {trained:,.0f}/s"
    if last.get("learner/mfu") is not None:
        yield "learner", f"{_latest(rows, 'learner/tflops'):.3g} TFLOP/s a rank, MFU {_latest(rows, 'learner/mfu'):.1%}"
    if (failed := failed_samples(rows[-_WINDOW:])) is not None:
        yield "failed", failed
    largest = max(row.get("staleness/max") or 0 for row in rows)
    allowed = math.ceil(config.replay.bound)
    mean = _latest(rows, "staleness/mean")
    yield "staleness", f"mean {mean:.2f}, max {largest:g} of {allowed} allowed"
    waiting, slots = last.get("buffer/groups") or 0, config.replay.slots
    yield "buffer", f"{waiting:g} groups wait, {slots} slots, {(last.get('buffer/bytes') or 0) / 2**20:.1f} MiB"
    yield "waiting", who_waits(_latest(rows, "idle/learner"), _latest(rows, "idle/generator"))
    if glance.doing:
        yield "time", sentence(glance)
    if glance.roofline is not None:
        yield "roofline", str(glance.roofline)
    yield from _remarks(glance)


def _of_rows(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What a run of `streamrl sft` learns."""
    losses = {
        name: [row[name] for row in rows if row.get(name) is not None] for name in ("loss/total", "loss/held_out")
    }
    yield "loss", f"{_latest(rows, 'loss/total'):.4f} nats/token  {sparkline(losses['loss/total'])}"
    if held_out := losses["loss/held_out"]:
        yield "held out", f"{held_out[-1]:.4f} nats/token, {held_out[0]:.4f} at first"
    yield "epochs", f"{rows[-1].get('rows/epoch') or 0.0:.2f}"
    yield "tokens/s", f"trained {_latest(rows, 'tokens/trained_per_s'):,.0f}/s"
    yield "optimizer", f"gradient norm {_latest(rows, 'grad_norm'):.3g}, learning rate {_latest(rows, 'lr'):.3g}"


def _remarks(glance: Glance) -> Iterator[tuple[str, str]]:
    yield from ((sink.lower(), where) for sink, where in glance.places.items())
    yield from (("hint", hint.advice) for hint in glance.hints)


def _named(rows: list[dict[str, Any]], begin: str, end: str) -> str:
    """`format 0.80, length 0.25`: the metrics of the last row with such names, without the part that says `right`."""
    names = [name for name in rows[-1] if name.startswith(begin) and name.endswith(end)]
    words = [
        f"{label} {_latest(rows, name):.3f}"
        for name in names
        if (label := name.removeprefix(begin).removesuffix(end)) != EXACT
    ]
    more = f", and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    """What tells a row from that of the same step in another life of the run."""
    return row["step"], row.get("version"), row.get("time")


def _latest(rows: list[dict[str, Any]], name: str) -> float:
    """The mean of the last few steps; 0 where a metric is missing."""
    return _mean([row[name] for row in rows[-_WINDOW:] if row.get(name) is not None])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
