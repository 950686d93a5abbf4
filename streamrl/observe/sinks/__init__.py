"""Where metrics go besides `metrics.jsonl`: `observe.sink`, and those with a key of their own. One file each."""

from __future__ import annotations

from pathlib import Path

from streamrl.choices import SINKS
from streamrl.config import Config
from streamrl.observe.sinks.base import Sink


def open_sinks(config: Config, run_folder: Path) -> list[Sink]:
    """The sinks that `observe` asks for, each once."""
    observe = config.observe
    wanted: list[type[Sink]] = [each for name in SINKS.names if (each := SINKS.load(name)).is_asked_for(observe)]
    if observe.sink is not None and (own := observe.chosen("sink")) not in wanted:
        wanted.append(own)
    return [each(config, run_folder, each.Options.model_validate(observe.sink_options)) for each in wanted]
