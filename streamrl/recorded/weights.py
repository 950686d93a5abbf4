"""The weights that a run kept: which versions there are, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from streamrl.observe.events import event_path, role_events
from streamrl.observe.starting import READY
from streamrl.publish.kept_versions import kept_root
from streamrl.publish.peft import is_adapter, merge_adapter
from streamrl.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


def kept_versions(run_folder: Path) -> dict[PolicyVersion, Path]:
    """Every version that a run kept, with its Hugging Face or PEFT folder."""
    folders = kept_root(run_folder).glob("[0-9]*.[0-9]*")
    return {PolicyVersion.parse(folder.name): folder for folder in folders}


def asked_versions(run_folder: Path) -> frozenset[PolicyVersion] | None:
    """Every version that was to be kept when it was published, by the learner's log; None where there is none."""
    if not event_path(run_folder, "learner").exists():
        return None
    events = role_events(run_folder, "learner")
    return frozenset(PolicyVersion.parse(each["version"]) for each in events if each["event"] == "publish.keep")


def newest_start(run_folder: Path) -> int:
    """The incarnation of the last learner that was ready, by its log, also where it has made no step; 0 without one."""
    if not event_path(run_folder, "learner").exists():
        return 0
    events = role_events(run_folder, "learner")
    ready = (PolicyVersion.parse(each["version"]) for each in events if each["event"] == READY and "version" in each)
    return max((version.incarnation for version in ready), default=0)


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in a folder's safetensors, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                yield name, file.get_tensor(name)


def whole_weights(folder: Path, base: Path) -> dict[str, Tensor]:
    """The whole model of a kept version: as it is stored, or the model in `base` in float32 with its adapters merged.

    Raises ConfigError for adapters that have no place in the model.
    """
    if not is_adapter(folder):
        return dict(tensors(folder))
    weights = {name: tensor.float() for name, tensor in tensors(base)}
    merge_adapter(weights, folder)
    return weights
