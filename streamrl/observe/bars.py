"""How far a long piece of work is: on a terminal a bar on stderr, elsewhere a plain line on stderr now and then.

    work ──advance, reach──▶ Bar ◀──looks── its thread ──▶ terminal: a bar, redrawn; a log: a line every LINE_EVERY

Work that is done in PATIENCE seconds shows nothing. stdout is never written to. Where it goes to the terminal too,
what is printed and logged meanwhile appears above the bar.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any, Protocol, Self, TextIO, TypeVar, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

T = TypeVar("T")

# Seconds before a terminal shows anything: a bar that only flashes says nothing.
PATIENCE = 2.0

# Seconds between two drawings of a bar: the time left counts down in whole seconds.
REDRAW = 0.25

# Seconds between two lines where there is no terminal, as of a run's console: an hour is 360 lines of a CI log.
LINE_EVERY = 10.0

# Seconds that the thread may take to end: it may be blocked in a write to a slow terminal.
JOIN = 5.0

# Cells of the bar: with the words behind it, it fits into 80 columns.
_WIDTH = 20

# Takes how much is done, and of how much, in one unit: `Bar.reach` is one.
Report = Callable[[float, float], None]


def silent(done: float, total: float) -> None:
    """The report that nobody reads."""


def paced(report: Report, every: float) -> Report:
    """`report` at most every so many seconds, and at the end."""
    last = -every

    def pace(done: float, total: float) -> None:
        nonlocal last
        if done >= total or time.monotonic() - last >= every:
            last = time.monotonic()
            report(done, total)

    return pace


class Bar:
    """One piece of work.

    Usage:
        with Bar("audit", "batches", total=400) as bar:
            bar.advance()
        for batch in track(batches, "audit", "batches"):
            ...
    """

    def __init__(self, what: str, unit: str, total: float | None = None) -> None:
        """`what` is done, counted in `unit`, to `total` of them; None: nobody knows. All may be set later."""
        self.what = what
        self.unit = unit
        self.total = total
        self.done = self.before = 0.0
        self._begun = self._reached = time.monotonic()
        self._over = threading.Event()
        self._view: _View | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._begun = self._reached = time.monotonic()
        self._view = _view_of(sys.stderr)
        if self._view is not None:
            self._thread = threading.Thread(target=self._show, args=(self._view,), name="bar", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN)
        if self._view is not None:
            self._view.close()

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more as done."""
        self.reach(self.done + amount)

    def found(self, amount: float = 1) -> None:
        """Count `amount` as done before now: it has taken no time."""
        self.before += amount
        self.advance(amount)

    def reach(self, done: float, total: float | None = None) -> None:
        """Set what is done by now, of `total` where that is given."""
        if done != self.done:
            self._reached = time.monotonic()
        self.done = done
        self.total = self.total if total is None else total

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each is done when the next one is asked for. The time counts from the first one on."""
        self._begun = self._reached = time.monotonic()
        for item in items:
            yield item
            self.advance()

    def _show(self, view: _View) -> None:
        """The thread: show what is done until the work is over."""
        wait = view.first
        while not self._over.wait(wait):
            with suppress(OSError, ValueError):  # a terminal that is gone ends no work
                view.show(self)
            wait = view.every

    def __str__(self) -> str:
        """In words, with rate and time left."""
        now = time.monotonic()
        seconds, since = now - self._begun, now - self._reached
        return words(self.done, self.total, self.unit, seconds, since, before=self.before)


def track(items: Iterable[T], what: str, unit: str, total: float | None = None) -> Iterator[T]:
    """The items, with a bar that is gone when the loop ends; `total` None: as many as `items` has, if it knows.

    Loop over it to its end, or leave the loop: the bar of an iterator that is kept stays.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Bar(what, unit, total) as bar:
        yield from bar.over(items)


def words(
    done: float, total: float | None, unit: str, seconds: float, since: float = 0.0, *, before: float = 0.0
) -> str:
    """What is done after so many seconds, at which rate, and how long the rest takes at this rate.

    `since`: seconds since the last one was done: where each takes longer than a second, they are time of the next one.
    `before`: of `done`, what was there at the beginning.

    >>> words(120, 400, "batches", 30.0)
    '120 of 400 batches, 4.0/s, 1:10 left'
    >>> words(1, 4, "runs", 90.0), words(1, 4, "runs", 150.0, since=60.0)
    ('1 of 4 runs, 1:30 each, 4:30 left', '1 of 4 runs, 1:30 each, 3:30 left')
    >>> words(0, None, "prompts", 5.0)
    '0 prompts, 0:05 so far'
    """
    known = total is not None and done <= total
    counted = f"{_count(done)} of {_count(total)} {unit}" if known and total is not None else f"{_count(done)} {unit}"
    if (now := done - before) <= 0 or seconds <= 0:
        return f"{counted}, {clock(seconds)} so far"
    if each := now == int(now) and now < seconds - since:
        rate, begun = now / (seconds - since), since
    else:
        rate, begun = now / seconds, 0.0
    paces = [f"{clock(1 / rate)} each" if each else _rate(rate)]
    if known and total is not None:
        paces.append(f"{clock(max(0.0, (total - done) / rate - begun))} left")
    else:
        paces.append(f"{clock(seconds)} so far")
    return ", ".join((counted, *paces))


def clock(seconds: float) -> str:
    """
    >>> clock(68), clock(7390)
    ('1:08', '2:03:10')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _rate(rate: float) -> str:
    return f"{rate:,.{0 if rate >= 100 else 1 if rate >= 1 else 2}f}/s"


def _count(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


# -- where it is shown


class _View(Protocol):
    first: float  # seconds before the first look
    every: float  # between two

    def show(self, bar: Bar) -> None: ...

    def close(self) -> None: ...


def _view_of(stream: TextIO | None) -> _View | None:
    """A terminal that can go back in a line, or a log; None where stderr is closed, or another bar is shown."""
    if stream is None or isinstance(stream, FileProxy) or stream.closed:
        return None
    terminal = _Terminal(file=stream)
    can_draw = stream.isatty() and terminal.is_interactive and not terminal.is_dumb_terminal
    return _Screen(terminal, stream) if can_draw else _Lines(stream)


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self.first = self.every = LINE_EVERY
        self._stream = stream

    def show(self, bar: Bar) -> None:
        self._stream.write(f"{bar.what}: {bar}\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class _Terminal(Console):
    """One that keeps its cursor: a process that is killed leaves a terminal with it."""

    def show_cursor(self, show: bool = True) -> bool:
        return False

    def print(self, *objects: Any, **how: Any) -> None:
        """Lines of others are wrapped by the terminal alone, as they are without a bar."""
        super().print(*objects, **how, soft_wrap=any(isinstance(each, Text) for each in objects))


class _Screen:
    """A bar at the bottom. Other text goes through rich, which puts it above; from the first moment on, by the thread
    that began the work: sys.stdout may be a file when the bar appears (`contextlib.redirect_stdout`)."""

    def __init__(self, terminal: Console, stream: TextIO) -> None:
        self.first, self.every = PATIENCE, REDRAW
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_WIDTH),
            TextColumn("{task.fields[words]}", markup=False),
        )
        self._progress = Progress(
            *columns, console=terminal, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._progress.add_task("", total=None, words="")
        self._errors, self._proxy = stream, cast(TextIO, FileProxy(terminal, stream))
        self._output = sys.stdout
        self._above = sys.stdout
        self._redirect(terminal)

    def show(self, bar: Bar) -> None:
        self._progress.update(self._task, description=bar.what, completed=bar.done, total=bar.total, words=str(bar))
        self._progress.start()
        self._progress.refresh()

    def close(self) -> None:
        """Wipe the bar out, and give the streams back."""
        with suppress(OSError, ValueError):
            self._progress.stop()
        if sys.stderr is self._proxy:
            sys.stderr = self._errors
        if sys.stdout is self._above:
            sys.stdout = self._output
        _move_logs(self._proxy, self._errors)

    def _redirect(self, terminal: Console) -> None:
        sys.stderr = self._proxy
        _move_logs(self._errors, self._proxy)
        if self._output is not None and not self._output.closed and self._output.isatty():
            self._above = sys.stdout = cast(TextIO, FileProxy(terminal, self._output))


def _move_logs(one: TextIO, other: TextIO) -> None:
    """Handlers of the root logger that write to `one` write to `other`: they hold the stream of their beginning."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is one:
            handler.setStream(other)
