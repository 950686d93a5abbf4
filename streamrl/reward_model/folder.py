"""Whether the folder of the reward model is a sequence classifier with one score: read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.config.file import ConfigError

CLASSIFIER = "ForSequenceClassification"  # the end of its architecture's name
ALLOWED = "a Hugging Face folder of a sequence classifier (config.json, safetensors, tokenizer)"


def check_folder(config: Config) -> None:
    """Refuse a folder that cannot score answers. Raises ConfigError with one line."""
    settings = config.reward_model
    if settings.path is None:
        return
    described = read_description(settings.path)
    label_of(described, settings.path, settings.label)
    if not any(settings.path.glob("*.safetensors")):
        raise ConfigError(f"reward_model.path: {settings.path} has no safetensors; allowed: {ALLOWED}")
    if not any((settings.path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(f"reward_model.path: {settings.path} has no tokenizer; allowed: {ALLOWED}")
    if settings.chat_template and not _has_template(settings.path):
        raise ConfigError(
            f"reward_model.chat_template: {settings.path} has no chat template; allowed: false, or a folder with one"
        )


def read_description(folder: Path) -> dict[str, Any]:
    """The config.json of a sequence classifier. Raises ConfigError for any other folder."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"reward_model.path: {folder} has no config.json; allowed: {ALLOWED}")
    described = _mapping(folder / "config.json")
    architectures = described.get("architectures")
    if not architectures or not str(architectures[0]).endswith(CLASSIFIER):
        given = architectures[0] if architectures else "no architecture"
        raise ConfigError(
            f"reward_model.path: {folder} is {given}, and no sequence classifier; allowed: an architecture that ends "
            f"with {CLASSIFIER}"
        )
    if "auto_map" in described:
        raise ConfigError(
            f"reward_model.path: {folder} brings code of its own (auto_map), which is never run; allowed: a folder "
            "that transformers loads by itself"
        )
    return described


def label_of(described: dict[str, Any], folder: Path, label: int | str | None) -> int:
    """Which of the model's outputs is the score. Raises ConfigError where that is not clear."""
    names = {int(number): str(name) for number, name in (described.get("id2label") or {}).items()}
    count = len(names) or int(described.get("num_labels", 2))  # transformers' own default
    names = names or {number: f"LABEL_{number}" for number in range(count)}
    listed = ", ".join(f"{number} ({name})" for number, name in sorted(names.items())[:8])
    if label is None:
        if count != 1:
            raise ConfigError(f"reward_model.label: {folder} has {count} labels; allowed: one of {listed}")
        return 0
    found = [number for number, name in names.items() if label in (number, name) or label == str(number)]
    if not found:
        raise ConfigError(f"reward_model.label: {label!r} is none of {folder}; allowed: one of {listed}")
    return found[0]


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(_mapping(file).get("chat_template"))


def _mapping(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"reward_model.path: {file} cannot be read ({error}); allowed: {ALLOWED}") from None
