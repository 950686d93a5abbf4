"""`learner.megatron`: which field of which of Megatron-Core's configurations it sets, checked without an import of it.

    learner.megatron: {moe_router_dtype: fp32}
        ──▶ the dataclasses' source, as it is installed ──▶ TransformerConfig(..., moe_router_dtype="fp32")

A field that several of the configurations have is set in each, as one argument of Megatron's is.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from streamrl.config import Config
from streamrl.config.refused import ConfigError, Refusals
from streamrl.config.words import as_text
from streamrl.learner.annotations import converted, fits, words
from streamrl.learner.megatron_owned import is_free, owner

KEY = "learner.megatron"

Target = Literal["TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"]

# Where Megatron-Core defines each, and the base whose fields it has too.
SOURCES: dict[Target, tuple[tuple[str, str], ...]] = {
    "TransformerConfig": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "OptimizerConfig": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "DistributedDataParallelConfig": (
        ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ),
}


def check(config: Config) -> None:
    """Refuse fields that Megatron-Core has not, or streamrl sets, or nothing reads, and values of another type than the
    field's.

    Without Megatron-Core on this machine only the second is looked at. Raises ConfigError with a line for each.
    """
    refusals, known = Refusals(), installed() if config.learner.megatron else {}
    for name, value in config.learner.megatron.items():
        if (reason := owner(name)) is not None:
            refusals.add(f"{KEY}.{name}: {reason}")
        elif known and name not in known:
            refusals.add(_unknown(name, value, known))
        elif known and not is_free(name):
            refusals.add(f"{KEY}.{name}: streamrl does not know what it changes; allowed: no value")
        elif known and (line := _wrong(name, value, known[name])) is not None:
            refusals.add(line)
        elif known and config.learner.layout.fully_sharded and known[name].keys() == {"DistributedDataParallelConfig"}:
            refusals.add(
                f"{KEY}.{name}: {as_text(value)} is of Megatron's DDP, which learner.layout.sharding=full takes the "
                "place of; allowed: no value, or sharding=optimizer"
            )
    if (asked := fp8(config)) is not None and config.model.dtype != "bfloat16":
        refusals.add(
            f"{asked} needs Transformer Engine's layers, which are of bfloat16, and model.dtype is "
            f"{config.model.dtype}; allowed: null, or model.dtype=bfloat16"
        )
    if asked is not None and config.learner.layout.fully_sharded:
        refusals.add(
            f"{asked} with learner.layout.sharding=full, which gathers weights in model.dtype; allowed: null, or "
            "sharding=optimizer"
        )
    refusals.tell()


def fp8(config: Config) -> str | None:
    """The setting that trains in FP8, as `learner.megatron.fp8: hybrid`; None where none does."""
    given = config.learner.megatron.get("fp8")
    return None if given is None else f"{KEY}.fp8: {as_text(given)}"


def values_of(fields: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Those of `learner.megatron` that this configuration has, as its constructor takes them."""
    known = installed() if fields else {}
    return {name: converted(known[name][target], value) for name, value in fields.items() if target in known[name]}


def refused(fields: Mapping[str, Any], error: Exception) -> ConfigError:
    """What Megatron-Core says of fields that do not fit together or to the model, as one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"{KEY}: {as_text(dict(fields))} is refused by Megatron-Core: {said}; allowed: what it takes")


@functools.cache
def installed() -> dict[str, dict[Target, ast.expr]]:
    """The type of each field in each configuration that has it; empty where Megatron-Core is not installed."""
    folder = _folder()
    found: dict[str, dict[Target, ast.expr]] = {}
    if folder is None:
        return found
    for target, places in SOURCES.items():
        for file, name in places:
            for field, annotation in _fields(folder / file, name):
                found.setdefault(field, {})[target] = annotation
    return found


def _folder() -> Path | None:
    """Found without an import of Megatron-Core, which takes seconds."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return None if found is None or found.origin is None else Path(found.origin).parent


def _fields(file: Path, name: str) -> Iterator[tuple[str, ast.expr]]:
    """The public fields of a dataclass in a file of Python."""
    classes = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    for statement in next(node for node in classes if node.name == name).body:
        if isinstance(statement, ast.AnnAssign) and not (field := ast.unparse(statement.target)).startswith("_"):
            yield field, statement.annotation


def _unknown(name: str, value: Any, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, [each for each in known if is_free(each)], n=1, cutoff=0.5)
    hint = f"; nearest known key: {KEY}.{near[0]}" if near else ""
    version = metadata.version("megatron-core")
    return (
        f"{KEY}.{name}: unknown field (given {as_text(value)}); allowed: those of {', '.join(SOURCES)} of "
        f"Megatron-Core {version}{hint}"
    )


def _wrong(name: str, value: Any, of: Mapping[Target, ast.expr]) -> str | None:
    for annotation in of.values():
        if not fits(annotation, value):
            allowed = words(annotation) or "nothing that a configuration can give"
            return f"{KEY}.{name}: {as_text(value)} is not allowed; allowed: {allowed}"
    return None
