"""What the Prometheus endpoint of a run says, under the names of `metrics.jsonl`: the other end of `prometheus.py`."""

from __future__ import annotations

import queue
import re
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from streamrl.observe.metrics import METRICS
from streamrl.observe.prometheus import HELD_UP, LIMIT, PHASE_SECONDS, PREFIX, prometheus_name

# Seconds that a request may take as a whole: the endpoint reads the run's files before it answers.
DEADLINE = 10.0

# Bytes of an answer that are read: that of a run has some ten thousand.
LARGEST = 1 << 24

_NAMES = {prometheus_name(metric.name)[0]: metric.name for metric in METRICS}


class EndpointError(RuntimeError):
    """Nobody answers, or who answers is no run; the text says which, in a few words."""


@dataclass(slots=True)
class Scraped:
    """One look at an endpoint."""

    row: dict[str, float] = field(default_factory=dict)  # metric -> value in the last step; of a task `NAME (TASK)`
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # role -> phase -> seconds since the run's start
    held_up: dict[str, float] = field(default_factory=dict)  # holder -> share of the last seconds
    limits: dict[str, float] = field(default_factory=dict)  # now, learner, generators -> tokens/s


def scrape(url: str) -> Scraped:
    """Ask the endpoint, in DEADLINE seconds at most. Raises EndpointError."""
    return parse(_get(url))


def parse(text: str) -> Scraped:
    """Read an answer in Prometheus's text format. Raises EndpointError where no name of it is a run's."""
    found, known = Scraped(), False
    try:
        for family in text_string_to_metric_families(text):
            known = known or family.name.startswith(PREFIX)
            for sample in family.samples:
                _add(found, sample.name, sample.labels, sample.value)
    except ValueError:
        known = False
    if not known:
        raise EndpointError(f"what answers is no run: it has no metric {PREFIX}*")
    return found


def _add(found: Scraped, name: str, labels: dict[str, str], value: float) -> None:
    if name.removesuffix("_total") == PHASE_SECONDS:
        found.seconds.setdefault(labels["role"], {})[labels["phase"]] = value
    elif name == HELD_UP:
        found.held_up[labels["by"]] = value
    elif name == LIMIT:
        found.limits[labels["of"]] = value
    elif name.startswith(PREFIX) and labels.get("staleness", "all") == "all":
        task = f" ({labels['task']})" if "task" in labels else ""
        known = re.sub(r"^eval/TASK/", "eval/", _NAMES.get(name, name.removeprefix(PREFIX)))
        found.row[known + task] = value


def _get(url: str) -> str:
    """The body. In a thread: names are looked up, and bytes trickle in, without a deadline of their own."""
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def ask() -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a run's host is no address of the web
        try:
            with opener.open(url, timeout=DEADLINE) as answer:
                answers.put(answer.read(LARGEST).decode(errors="replace"))
        except (OSError, HTTPException, ValueError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="scrape", daemon=True).start()
    try:
        answer = answers.get(timeout=DEADLINE)
    except queue.Empty:
        raise EndpointError(f"no answer in {DEADLINE:g} s") from None
    if isinstance(answer, urllib.error.HTTPError):
        raise EndpointError(f"what answers is no run: {answer.code} {answer.reason}")
    if isinstance(answer, Exception):
        raise EndpointError(f"nobody answers: {getattr(answer, 'reason', None) or answer}")
    return answer
