"""The Prometheus endpoint of a run: the metrics of the last step, and what each role has done with its time.

Names are those of `metrics.jsonl` with `streamrl_` before them and `_` for what Prometheus does not allow:
`reward/mean` is `streamrl_reward_mean`. A variant for one staleness has the label `staleness`, one of a task the label
`task`, a part of the reward the label `part`. Every name is in `families`.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.observe.live import Glance, Live
from streamrl.observe.metrics import METRICS
from streamrl.observe.run_clock import RunClock

PREFIX = "streamrl_"

_VARIANT = re.compile(r"^(?P<name>.*)/(?P<staleness>s\d+(?:_\d+|\+)?)$")
_OF_TASK = re.compile(r"^(?P<kind>eval|task)/(?P<task>[\w.-]+)/(?P<name>.*)$")
_PART = re.compile(r"^(?P<name>reward/part)/(?P<part>[\w.-]+)$")

PHASE_SECONDS = PREFIX + "phase_seconds"
HELD_UP = PREFIX + "held_up_share"
LIMIT = PREFIX + "roofline_tokens_per_s"
HINT = PREFIX + "hint"

# Names that are not in the table of metrics.
OWN = {
    PHASE_SECONDS + "_total": "seconds that each role has spent in each phase since the run's start",
    HELD_UP: "share of the last seconds in which each side held the run up",
    HINT: "1 for each hint that goes on",
    LIMIT: "trained tokens a second now, and at the limit of the learner and of the generators",
}


def prometheus_name(name: str) -> tuple[str, dict[str, str]]:
    """The name and labels of a metric.

    >>> prometheus_name("offpolicy/ess/s3_4")
    ('streamrl_offpolicy_ess', {'staleness': 's3_4'})
    """
    labels: dict[str, str] = {}
    if found := _PART.match(name):  # also one that is called s0
        name, labels = found["name"], {"part": found["part"]}
    elif found := _OF_TASK.match(name):
        name, labels = f"{found['kind']}/{found['name']}", {"task": found["task"]}
    elif found := _VARIANT.match(name):
        name, labels = found["name"], {"staleness": found["staleness"]}
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name), labels


def families() -> set[str]:
    """Every name that the endpoint can give; those of `pass@K` with the letter K."""
    return {prometheus_name(metric.name)[0] for metric in METRICS} | set(OWN)


class Exporter:
    """Serves what a run folder tells. `close` it.

    Usage:
        exporter = Exporter(run_folder, port=9464)
        exporter.close()
    """

    def __init__(self, run_folder: Path, port: int, host: str = "127.0.0.1") -> None:
        """Begin to serve at once. Raises ConfigError for an address that cannot be used."""
        registry = CollectorRegistry()
        registry.register(_Collector(Live(run_folder, clock=RunClock.of(run_folder))))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:
            raise _unusable(host, port, error) from error
        self.port = int(self._server.server_port)

    @classmethod
    def of(cls, config: Config, run_folder: Path) -> Exporter | None:
        """The endpoint that `observe` asks for."""
        observe = config.observe
        return cls(run_folder, observe.prometheus_port, observe.prometheus_host) if observe.prometheus_port else None

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_address(config: Config) -> None:
    """Could the endpoint that `observe` asks for be served here? Raises ConfigError."""
    host, port = config.observe.prometheus_host, config.observe.prometheus_port
    if not port:
        return
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    """`error`: a UnicodeError where the host is no name at all."""
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"observe.prometheus_port: {host}:{port} cannot be used ({reason}); allowed: a free port")


class _Collector(Collector):
    """Reads the run's files when Prometheus asks, from a thread of the endpoint's."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._lock = threading.Lock()  # two that ask at once would feed one timeline

    def collect(self) -> Iterator[Family]:
        with self._lock:
            self._live.read()
            glance, seconds = self._live.glance(), dict(self._live.seconds)
            row = dict(self._live.rows[-1]) if self._live.rows else {}
        yield from _of_row(row)
        yield _of_phases(seconds)
        yield from _of_glance(glance)

    def describe(self) -> list[Family]:
        """Nothing: names are known when they are read."""
        return []


def _of_row(row: dict[str, Any]) -> Iterator[Family]:
    """The figures of the last step. What is no number is left out."""
    meanings = {prometheus_name(metric.name)[0]: metric.meaning for metric in METRICS}
    found: dict[str, GaugeMetricFamily] = {}
    labels_of: dict[str, list[str]] = {}
    varied = {match["name"] for match in map(_VARIANT.match, row) if match}
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        family, labels = prometheus_name(name)
        if family not in found:
            labels_of[family] = list(labels) or (["staleness"] if name in varied else [])
            found[family] = GaugeMetricFamily(family, meanings.get(family, name), labels=labels_of[family])
        found[family].add_metric([labels.get(label, "all") for label in labels_of[family]], float(value))
    yield from found.values()


def _of_phases(seconds: dict[tuple[str, str], float]) -> Family:
    family = CounterMetricFamily(PHASE_SECONDS, OWN[PHASE_SECONDS + "_total"], labels=["role", "phase"])
    for labels, value in sorted(seconds.items()):
        family.add_metric(labels, value)
    return family


def _of_glance(glance: Glance) -> Iterator[Family]:
    held = GaugeMetricFamily(HELD_UP, OWN[HELD_UP], labels=["by"])
    whole = sum(glance.held_up.values())
    for holder, part in glance.held_up.items():
        held.add_metric([holder], part / whole if whole else 0.0)
    yield held
    hints = GaugeMetricFamily(HINT, OWN[HINT], labels=["name"])
    for hint in glance.hints:
        hints.add_metric([hint.rule.name], 1.0)
    yield hints
    limits = GaugeMetricFamily(LIMIT, OWN[LIMIT], labels=["of"])
    if glance.roofline is not None:
        for side in ("now", "learner", "generators"):
            limits.add_metric([side], getattr(glance.roofline, side))
    yield limits
