"""Megatron-LM's checkpoints of `--ckpt-format torch`: one pickled file for each rank, cut as the ranks were.

    iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    TT tensor rank, PPP pipeline rank, EEE expert rank
    {"args": Namespace, "checkpoint_version": 3.0, "model": state_dict, ...}

Of a file only tensors, containers and `args` are built; whatever else it names is an `Unread`, and runs nothing.
Source: Megatron-LM, `megatron/training/checkpointing.py`, `get_checkpoint_name`.
"""

from __future__ import annotations

import pickle
import re
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig

FILE = "model_optim_rng.pt"
FOLDERS = "mp_rank_*"

VERSION = 3.0  # since when query, key and value of a group lie together

# Name by Transformer Engine's layers -> by the local ones: there a norm is part of the layer behind it.
LOCAL_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(\w+)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(\w+)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)

_BUILT = {  # module -> what a file of weights may name in it
    "argparse": {"Namespace"},
    "collections": {"OrderedDict"},
    "torch": {name for name in dir(torch) if name.endswith("Storage") or isinstance(getattr(torch, name), torch.dtype)}
    | {"Size", "device"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
}


class Unread:
    """What a file names beside weights and arguments; it takes whatever is done to it."""

    def __init__(self, *values: object, **keys: object) -> None: ...

    def __new__(cls, *values: object, **keys: object) -> Unread:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if name in _BUILT.get(module, ()) else Unread


_PICKLE = types.ModuleType("weights")  # torch.load asks for a module in pickle's place
_PICKLE.__dict__.update(Unpickler=_Unpickler, load=lambda file, **how: _Unpickler(file, **how).load())


@dataclass(frozen=True, slots=True)
class Cut:
    """How the ranks that wrote a checkpoint were laid out."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def layout(self) -> LayoutConfig:
        sizes = {name: getattr(self, name) for name in self.__slots__}
        return LayoutConfig.model_validate(sizes)

    def folder(self, tensor: int, pipeline: int, expert: int) -> str:
        """Where the rank of this position has its file."""
        name = f"mp_rank_{tensor:02d}"
        name += f"_{pipeline:03d}" if self.pipeline > 1 else ""
        return name + (f"_{expert:03d}" if self.expert > 1 else "")


def is_torch_format(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint of this format."""
    return any(checkpoint.glob(f"{FOLDERS}/{FILE}"))


def read_cut(checkpoint: Path) -> Cut:
    """By the arguments in the first file. Raises ConfigError for those that are not read, with the reason."""
    path = min(checkpoint.glob(f"{FOLDERS}/{FILE}"))
    content = read_file(path)
    version = content.get("checkpoint_version", 0)
    if version != VERSION:
        raise ConfigError(f"SOURCE: {path} has checkpoint_version {version}; allowed: {VERSION}")
    args = content.get("args")
    sizes = {name: getattr(args, f"{name}_model_parallel_size", 1) or 1 for name in ("tensor", "pipeline", "expert")}
    inside = getattr(args, "expert_tensor_parallel_size", None) or (sizes["tensor"] if _experts(args) else 1)
    if inside not in (1, sizes["tensor"]):
        raise ConfigError(
            f"SOURCE: {path} has experts cut in {inside}, tensors in {sizes['tensor']}, so that several ranks have one "
            f"file; allowed: expert_tensor_parallel_size 1 or {sizes['tensor']}"
        )
    if "model" not in content:
        raise ConfigError(
            f"SOURCE: {path} holds {', '.join(map(str, content))}; allowed: with `model`, one chunk a rank, without "
            "virtual pipeline stages"
        )
    return Cut(**sizes, expert_tensor=inside)


def _experts(args: object) -> int:
    return getattr(args, "num_experts", None) or 0


def dtypes(checkpoint: Path) -> Iterator[torch.dtype]:
    """The dtypes of the weights in the first file."""
    content = read_file(min(checkpoint.glob(f"{FOLDERS}/{FILE}")))
    yield from (value.dtype for value in _tensors(content["model"]).values())


def read_file(path: Path) -> dict[str, Any]:
    """What a rank has written; tensors are read from the disk where they are used.

    Raises ConfigError for a file that is missing, damaged, or of torch before 1.6.
    """
    if not path.is_file():
        raise ConfigError(f"SOURCE: {path} is missing; allowed: the files of all ranks")
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"SOURCE: {path} is cut short, or none of torch.save; allowed: whole, of torch from 1.6")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PICKLE)
    except (RuntimeError, pickle.UnpicklingError, EOFError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"SOURCE: {path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"SOURCE: {path} holds {type(content).__name__}; allowed: Megatron-LM's dictionary")
    return content


def read_weights(
    checkpoint: Path, position: tuple[int, int, int], needed: Mapping[str, torch.Tensor], vocabulary: int
) -> dict[str, torch.Tensor]:
    """The weights of one rank, by the names of the local layers.

    position: its tensor, pipeline and expert rank. needed: its parameters, by name. vocabulary: rows of embedding and
    output layer that are tokens; the rows behind them depend on the layout and become 0.
    Raises ConfigError for a tensor that is missing, of another shape, or has no place.
    """
    cut = read_cut(checkpoint)
    tensor, pipeline, expert = position
    path = checkpoint / cut.folder(tensor, pipeline, expert) / FILE
    given = _tensors(read_file(path)["model"])
    if missing := needed.keys() - given.keys():
        raise ConfigError(f"SOURCE: {path}: tensor {min(missing)} is missing")
    if unused := given.keys() - needed.keys():
        raise ConfigError(f"SOURCE: {path}: {min(unused)} and {len(unused) - 1} more have no place in the model")
    for name in VOCABULARY & needed.keys():
        rows = torch.cat([_tensors(read_file(each)["model"])[name] for each in _beside(checkpoint, cut, pipeline)])
        given[name] = _own_rows(rows, tensor, len(needed[name]), vocabulary, f"{path}: tensor {name}")
    for name, own in needed.items():
        if given[name].shape != own.shape:
            raise ConfigError(
                f"SOURCE: {path}: tensor {name} is {list(given[name].shape)}, the model needs {list(own.shape)}"
            )
    return given


# Whose rows are tokens, and pads.
VOCABULARY = {"embedding.word_embeddings.weight", "output_layer.weight"}


def _own_rows(rows: torch.Tensor, rank: int, count: int, vocabulary: int, what: str) -> torch.Tensor:
    """The `count` rows of the tensor-parallel rank of all that were written; those that are no token are 0."""
    if len(rows) < vocabulary:
        raise ConfigError(f"SOURCE: {what} has {len(rows)} rows over all ranks, the model needs {vocabulary}")
    own = rows.new_zeros(count, rows.shape[1])
    tokens = rows[rank * count : min((rank + 1) * count, vocabulary)]
    own[: len(tokens)] = tokens
    return own


def _beside(checkpoint: Path, cut: Cut, pipeline: int) -> Iterator[Path]:
    """A file of each tensor-parallel rank of one pipeline stage, in order."""
    for tensor in range(cut.tensor):
        folders = (cut.folder(tensor, pipeline, expert) for expert in range(cut.expert))
        found = [path for folder in folders if (path := checkpoint / folder / FILE).is_file()]
        yield found[0] if found else checkpoint / cut.folder(tensor, pipeline, 0) / FILE


def _tensors(state: Mapping[str, Any]) -> OrderedDict[str, torch.Tensor]:
    """The weights of a state_dict, by the names of the local layers; scales of FP8 are none."""
    return OrderedDict((_local(name), value) for name, value in state.items() if isinstance(value, torch.Tensor))


def _local(name: str) -> str:
    for pattern, local in LOCAL_NAMES:
        name = pattern.sub(local, name)
    return name
