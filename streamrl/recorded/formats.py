"""The formats of a run's records: `environment.json` names them, a run of an unknown one is refused.

Each segment of the journal names its own format in its first line (`streamrl/replay/segments.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.observe import events, metrics
from streamrl.places import load_run, run_folder_of

FORMATS = {"events": events.FORMAT, "metrics": metrics.FORMAT}


def recorded_run(path: Path) -> Path:
    """`path`, where it is a run folder with records that this streamrl reads. Raises ConfigError.

    A run from before the formats were named has the first of each.
    """
    folder = run_folder_of(path)
    environment = folder / "environment.json"
    written = json.loads(environment.read_text()).get("formats", {}) if environment.is_file() else {}
    for name, known in FORMATS.items():
        if (given := written.get(name, 1)) != known:
            raise ConfigError(f"{folder}: {name} of format {given} cannot be read; allowed: {known}")
    return folder


def answered_run(path: Path) -> Path:
    """As `recorded_run`, of a run with groups. Raises ConfigError for one of `streamrl sft`, too."""
    folder = recorded_run(path)
    if load_run(folder).trains_rows:
        raise ConfigError(f"{folder}: a run of `streamrl sft` has no groups; allowed: a run of `streamrl train`")
    return folder
