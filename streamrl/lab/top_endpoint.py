"""`streamrl top --url http://HOST:PORT`: a run by its Prometheus endpoint, where its folder is out of reach."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live as Screen
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from streamrl.config.file import ConfigError
from streamrl.lab.top import bar, bottleneck
from streamrl.observe.live import WINDOW, shares
from streamrl.observe.roofline import Holder
from streamrl.observe.scrape import EndpointError, Scraped, scrape

# Looks in a row without an answer after which the run is given up: its host may be busy for a moment.
MISSES = 3

# Metrics that are shown where the endpoint has them; the evaluations of all tasks, too.
FIGURES = (
    "step", "reward/mean", "pass_rate", "signal_rate", "tokens/generated_per_s", "tokens/trained_per_s",
    "staleness/mean", "staleness/max", "buffer/groups", "samples/failed", "loss/total", "distillation/kl", "grad_norm",
    "length/mean", "time/step", "learner/tflops", "learner/mfu", "idle/learner", "idle/generator",
)  # fmt: skip


def main(url: str, *, once: bool = False, every: float = 1.0) -> int:
    """Show the run until Ctrl-C; `once`: as it is now, and no more. `every`: seconds between two looks.

    Returns 0, or 1 with one line where nobody answers, or nobody does any more. Raises ConfigError for another URL
    than http://HOST:PORT, with a path if it is not /metrics.
    """
    address = endpoint(url)
    looks = Looks()
    terminal = Terminal()
    try:
        looks.add(scrape(address), time.monotonic())
        if once:
            terminal.print(frame(url, looks))
            return 0
        with (
            contextlib.suppress(KeyboardInterrupt),
            Screen(frame(url, looks), console=terminal, auto_refresh=False) as screen,
        ):
            for scraped in _watch(address, every):
                looks.add(scraped, time.monotonic())
                screen.update(frame(url, looks), refresh=True)
    except EndpointError as error:
        print(f"streamrl: {url}: {error}", file=sys.stderr)
        return 1
    return 0


def endpoint(url: str) -> str:
    """Where the metrics are. Raises ConfigError.

    >>> endpoint("http://node-3:9464")
    'http://node-3:9464/metrics'
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of an IPv6 address
        known = False
    if not known or any(ord(sign) <= ord(" ") for sign in url):
        raise ConfigError(f"--url: {url!r}; allowed: http://HOST:PORT of a run with observe.prometheus_port")
    return url if parts.path.strip("/") else parts._replace(path="/metrics").geturl()


class Looks:
    """The looks of the last WINDOW seconds: counters say by their growth what was done meanwhile."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Scraped]] = deque()

    def add(self, scraped: Scraped, now: float) -> None:
        """`now`: seconds on a clock that does not jump."""
        self._kept.append((now, scraped))
        while len(self._kept) > 2 and self._kept[1][0] <= now - WINDOW:
            self._kept.popleft()

    @property
    def last(self) -> Scraped:
        return self._kept[-1][1]

    def doing(self) -> tuple[float | None, dict[str, dict[str, float]]]:
        """(seconds between the first look and the last, role -> phase -> seconds in them); at first since the start."""
        (begin, before), (end, after) = self._kept[0], self._kept[-1]
        grown = {
            role: {phase: value - before.seconds.get(role, {}).get(phase, 0.0) for phase, value in phases.items()}
            for role, phases in after.seconds.items()
        }
        smallest = min((value for phases in grown.values() for value in phases.values()), default=0.0)
        if before is after or smallest < 0 or not any(any(phases.values()) for phases in grown.values()):
            return None, after.seconds
        return end - begin, grown


def frame(url: str, looks: Looks) -> RenderableType:
    """Everything that is shown at one moment."""
    scraped = looks.last
    seconds, doing = looks.doing()
    stretch = "since its start" if seconds is None else f"the last {seconds:.0f} s"
    parts: list[RenderableType] = [Text(f"streamrl · {url} · {stretch}", style="bold")]
    roles = Table(box=None, pad_edge=False)
    for heading in ("role", "share of the time", ""):
        roles.add_column(heading, header_style="dim", no_wrap=bool(heading))
    for role, phases in sorted(doing.items()):
        roles.add_row(role, bar(phases), shares(phases))
    parts += [roles, bottleneck(cast(dict[Holder, float], scraped.held_up))]
    figures = Table(show_header=False, box=None, pad_edge=False)
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(justify="right")
    for name, value in _figures(scraped):
        figures.add_row(escape(name), f"{value:,.6g}")
    return Group(*parts, "", figures if scraped.row else Text("no step yet"))


def _figures(scraped: Scraped) -> Iterator[tuple[str, float]]:
    row = scraped.row
    yield from ((name, row[name]) for name in FIGURES if name in row)
    yield from ((name, value) for name, value in sorted(row.items()) if name.startswith("eval"))
    for side in (side for side in ("learner", "generators") if side in scraped.limits):
        yield f"limit of the {side}, tokens/s", scraped.limits[side]


def _watch(address: str, every: float) -> Iterator[Scraped]:
    """Look after look. Raises EndpointError after MISSES of them without an answer."""
    misses = 0
    while True:
        time.sleep(every)
        try:
            scraped = scrape(address)
        except EndpointError as error:
            misses += 1
            if misses >= MISSES:
                raise EndpointError(f"{error}; it did before: the run is over, or out of reach") from None
            continue
        misses = 0
        yield scraped
