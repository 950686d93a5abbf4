"""Weights between a folder and a model that transformers builds: transformers reads them, and says how they are called.

    safetensors ──transformers (experts of a layer become one tensor)──▶ a copy on the host ──▶ parameters, buffers
    parameters, buffers ──transformers' way back, a layer at a time──▶ (name of the folder, tensor)

The names of what goes out are those of the folder, or it is refused: a server would not know others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.learner.shape import WeightsMismatchError, open_weights, weight_files
from streamrl.learner.whole.model import INNER, WholeModel
from streamrl.observe.bars import Report, silent

# What a name has in front of a layer's own part.
_LAYER = re.compile(r".*?\.\d+\.")


@torch.no_grad()
def load(model: WholeModel, folder: Path, key: str, report: Report = silent) -> None:
    """Set every tensor of the model, in its dtype; the host holds the folder's meanwhile, on every rank.

    Raises WeightsMismatchError, naming the tensor, when one is missing, has another shape, or is not used.
    """
    _refuse_other_names(model, folder, key)
    tensors = _read(model, folder)
    own = {name: tensor for name, tensor in model.inner.state_dict(keep_vars=True).items() if name in tensors}
    done, total = 0, sum(tensor.nbytes for tensor in own.values())
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
        done += tensor.nbytes
        report(done, total)


@torch.no_grad()
def export(model: WholeModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder, on the first rank; on the others nothing. As `huggingface.export_weights`."""
    if dist.get_rank() == 0:
        yield from named(model)


def named(model: WholeModel, device: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors in the model's order, a tied one once. device: "meta" for names and shapes alone."""
    own = model.state_dict(keep_vars=True)
    for _, some in groupby((name for name in model.names() if name.startswith(INNER)), _layer_of):
        tensors = {name.removeprefix(INNER): own[name].detach() for name in some}
        if device is not None:
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        yield from _as_in_folders(model.inner, tensors).items()


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else ""


def _as_in_folders(inner: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(inner, tensors)
    return found


def _read(model: WholeModel, folder: Path) -> dict[str, Tensor]:
    """The folder's tensors by the names of the model that transformers makes of them."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=model.config.params_dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    loaded, told = found
    for name, stored, needed in sorted(told["mismatched_keys"]):
        raise WeightsMismatchError(f"{folder}: tensor {name} is {list(stored)}, the model needs {list(needed)}")
    if missing := set(told["missing_keys"]):
        raise WeightsMismatchError(f"{folder}: tensor {min(missing)} is missing")
    if unused := set(told["unexpected_keys"]):
        raise WeightsMismatchError(f"{folder}: {min(unused)} and {len(unused) - 1} more have no place in the model")
    tensors: dict[str, Tensor] = loaded.state_dict()
    return tensors


def _refuse_other_names(model: WholeModel, folder: Path, key: str) -> None:
    """Raise WeightsMismatchError where a tensor would go out by a name that the folder does not have."""
    there: set[str] = set()
    for path in weight_files(folder, key):
        with open_weights(path, key) as file:
            there.update(file.keys())
    if others := {name for name, _ in named(model, "meta")} - there:
        raise WeightsMismatchError(
            f"{key}: {folder} has no tensor {min(others)}, as transformers calls it when it saves "
            f"{model.shape.architecture}; allowed: a folder that transformers has saved"
        )
