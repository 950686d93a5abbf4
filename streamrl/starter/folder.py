"""`streamrl init FOLDER`: a folder from which a first run starts at once.

FOLDER/config.yaml (with comments), config.schema.json, and the files of the task: rewards.py, data.jsonl
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from streamrl.choices import TASKS
from streamrl.config import file as config_file
from streamrl.config.refused import ConfigError
from streamrl.config.schema import FIRST_LINE, write_beside
from streamrl.lab.output import check_new_folder
from streamrl.places import program
from streamrl.starter.commented import commented, heading
from streamrl.tasks.arguments import not_among

TINY = Path("models/tiny")

# Learning rates of a tiny model with random weights, and of a pretrained one.
TINY_LR, PRETRAINED_LR = 2e-3, 1e-5

# The form of a model's name at the hub.
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def main(folder: Path, task: str, model: str | None) -> int:
    """Write the folder, say what is in it and what to run next. Returns 0. Raises ConfigError."""
    check_new_folder("FOLDER", folder)
    if task not in TASKS.names:
        raise ConfigError(not_among("--task", task, TASKS.names))
    folder, path = Path(os.path.abspath(folder)), _model(model)
    files = {"config.yaml": _configuration(folder, task, path, model), **TASKS.load(task).starter.files}
    try:
        written = _write(folder, files)
    except OSError as error:
        raise ConfigError(f"FOLDER: {folder}: {error.strerror}; allowed: a folder that can be written") from None
    print(f"{task}: {heading(TASKS.load(task))}")
    for file in written:
        print(f"  {file}")
    print("next:")
    if model is None and not Path(path).exists():
        print(f"  python -m launch.tiny_model {shlex.quote(path)}")
    print(f"  {shlex.join([program(), 'train', str(folder / 'config.yaml')])}")
    return 0


def _write(folder: Path, files: dict[str, str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return [*(folder / name for name in files), write_beside(folder / "config.yaml")]


def _configuration(folder: Path, task: str, path: str, model: str | None) -> str:
    kind = TASKS.load(task)
    values: dict[str, Any] = {
        "run.name": re.sub(r"[^\w.-]", "_", folder.name).lstrip(".-") or "first",
        "run.folder": str(folder / "runs"),
        "run.steps": 100,
        "model.path": path,
        "model.dtype": "float32" if model is None else _dtype(Path(path)),
        "task.name": task,
        "task.args": kind.starter.args_in(str(folder)),
        "generate.workers": 1,
        "generate.group_size": 8,
        "generate.sampling.temperature": 1.0,
        "generate.sampling.max_new_tokens": kind.starter.max_new_tokens,
        "replay.groups_per_step": 8,
        "replay.max_staleness": 2,
        "algo.loss": "clip",
        "algo.kl": 0.0,
        "learner.ranks": 1,
        "learner.optimizer.lr": TINY_LR if model is None else PRETRAINED_LR,
        "checkpoint.every": 50,
        "evaluate.every": 0,
        "observe.wandb": "off",
    }
    text = commented(values, kind)
    config_file.checked(config_file.parse_yaml(text, where="config.yaml"))
    about = "# A first run: the keys that are changed most; `streamrl train --help` lists all of them.\n"
    places = "# The paths are absolute, so that the commands work in any folder.\n\n"
    return FIRST_LINE + about + places + text


def _model(given: str | None) -> str:
    """The folder, as an absolute path, or what can only be a model's name at the hub."""
    if given is not None and _HUB.fullmatch(given) and not Path(given).parent.exists():
        return given
    return os.path.abspath(TINY if given is None else given)


def _dtype(folder: Path) -> str:
    """The one that the weights are stored in, where the folder says so and it can be trained in."""
    try:
        config = json.loads((folder / "config.json").read_text())
        stored = config.get("dtype") or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        stored = None
    return "float32" if stored == "float32" else "bfloat16"
