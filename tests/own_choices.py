"""The how-to pages' choices of a user's own, written into a folder outside of streamrl."""

from __future__ import annotations

import re
from pathlib import Path

from streamrl.choices import Kind
from tests.documented_commands import ROOT, blocks

PAGES = (
    "howto-order.md",
    "howto-transport.md",
    "howto-loss.md",
    "howto-task.md",
    "howto-model.md",
    "tasks.md",
    "watching.md",
)
BESIDE = ("environments.md", "engines.md", "openai.md")  # pages with files, and without a test of them
OWN = (
    "replay.order=by_age.py:ByAge",
    "replay.order_options.oldest_first=true",
    "replay.curriculum=halves.py:Halves",
    "replay.release=fixed.py:Fixed",
    "replay.release_options.seconds=5",
    "replay.adaptive.enabled=true",
    "replay.adaptive.controller=by_reward.py:ByReward",
    "publish.transport=fetched.py:Fetched",
    "publish.transport_options.local=fetched",
    "algo.loss=spo.py:Spo",
    "algo.loss_options.penalty=0.5",
    "algo.weight=sqrt_weight.py:SquareRoot",
    "algo.proximal=interpolate",
    "algo.covariance=slow_down.py:SlowDown",
    "observe.sink=csv_sink.py:Csv",
)


def write_files(folder: Path) -> None:
    """Every block of the pages that begins with the name of a file."""
    for page in (*PAGES, *BESIDE):
        for language, text in blocks(ROOT / "docs" / page):
            if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
                (folder / name[1]).write_text(text)


def path_of(kind: Kind, name: str) -> str:
    """A built-in choice as one of the user's own is given: `streamrl.replay.orders.fifo:Fifo` for `fifo`."""
    return f"{kind.package}.{name}:{kind.load(name).__qualname__}"
