"""`streamrl convert SOURCE OUT`: a Hugging Face folder becomes a Megatron checkpoint, or the other way round.

    SOURCE ─▶ what is it? does it fit? ─▶ ranks on this machine (learner/conversion.py) ─▶ draft ──rename──▶ OUT

The ranks run without accelerators, as many as the layout has, and end with this command.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader

from streamrl.choices import FAMILIES
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig, LoraConfig
from streamrl.hub.model import with_local_model
from streamrl.lab.output import check_new_folder
from streamrl.lab.plan.parameters import whole_model
from streamrl.learner import torch_format
from streamrl.learner.layout_fit import check_fit
from streamrl.learner.shape import (
    BY_TRANSFORMERS,
    FLOAT32,
    ModelShape,
    open_weights,
    read_shape,
    weight_files,
)
from streamrl.lifeline import end_tree, unwinding_at_sigterm
from streamrl.observe.bars import Bar
from streamrl.observe.tail import Tail
from streamrl.places import load_run
from streamrl.torchrun import rank_environment, torchrun

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's, in the folder that holds its checkpoints
DESCRIPTION = "huggingface"  # inside a checkpoint: config.json and the tokenizer

ALLOWED = (
    "a Hugging Face folder (config.json and safetensors), a Megatron checkpoint "
    f"({TRACKER}, metadata.json of the format torch_dist, or mp_rank_* of the format torch), or RUN/checkpoints/step_N"
)

BYTES = {"float32": 4, "bfloat16": 2}  # of a value, by dtype
_STORED = {"F32": "float32", "BF16": "bfloat16", torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MODEL = (
    "embedding",
    "decoder",
    "output_layer",
    "vision",
    "inner",
)  # first words of the names of weights in a checkpoint

_REFUSAL = "streamrl: "  # how the one line begins by which a rank refuses
_READ = "bytes read:"  # how the lines begin by which the first rank says how far it is
_REASON = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b.*")

POLL = 0.2  # seconds between two looks at what is written

KILL_GRACE = 15.0  # seconds between SIGTERM and SIGKILL of ranks that are late


class ConversionFailed(RuntimeError):
    """The ranks did not come to their end; the text says how."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is converted.

    Example: a run's checkpoint is `Source(Path("models/tiny"), Path("runs/a/checkpoints/step_40"))`.
    """

    model: Path  # Hugging Face folder: config.json, tokenizer, and without a checkpoint the weights
    checkpoint: Path | None = None  # folder with Megatron's metadata.json
    adapters: LoraConfig = field(default_factory=LoraConfig)
    family: str | None = None  # `model.family`; None: found by the architecture


def main(
    source: Path,
    output: Path,
    sizes: dict[str, int],
    *,
    dtype: str | None,
    model: Path | None,
    timeout: float,
    family: str | None = None,
) -> int:
    """Convert. Returns 0, or 1 when a rank failed or `timeout` seconds have passed; then there is no `output`.

    sizes: tensor, pipeline and expert, over how many ranks the model is cut, and so the files of a Megatron
    checkpoint that is written. dtype: of the weights that are written; None: as they are stored. model: where
    config.json and tokenizer are taken from if not from beside a checkpoint. family: as `model.family`; None: that of
    the run. Raises ConfigError with one line for whatever is refused.
    """
    begun = time.monotonic()
    check_new_folder("OUT", output)
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"--{name}: {size} is not allowed; allowed: a whole number from 1")
    found = identify(source, model)
    found = replace(found, family=family or found.family)
    shape = _shape(found)
    if shape.vision is not None and found.checkpoint is None:
        raise ConfigError(
            f"SOURCE: {source} is a vision-language model, of which no Megatron checkpoint is written; allowed: a "
            "checkpoint of a run, which becomes a Hugging Face folder"
        )
    if not shape.family.by_megatron and found.checkpoint is None:
        raise ConfigError(
            f"SOURCE: {source} is built by transformers, and Megatron-LM has no such model; allowed: a checkpoint of a "
            "run with model.implementation=transformers, which becomes a Hugging Face folder"
        )
    config = _config(found, _layout(found, sizes), shape, dtype or _stored_dtype(found), timeout)
    size = whole_model(shape) * BYTES[config.model.dtype] + (_pads(shape, config) if found.checkpoint is None else 0)
    _check_space(output, size)
    kinds = ("Hugging Face", "Megatron") if found.checkpoint is None else ("Megatron", "Hugging Face")
    print(
        f"{source} ({kinds[0]}) -> {output} ({kinds[1]}): {shape.architecture}, {whole_model(shape):,} parameters, "
        f"{config.model.dtype}, {_layout_text(config)}"
    )
    try:
        with _draft(output) as draft:
            _run_ranks(config, found, draft, timeout, size)
            (draft / "whole").rename(output)
    except ConversionFailed as failure:
        print(f"streamrl: {failure}", file=sys.stderr)
        return 1
    written = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output}: {written / 1e6:,.1f} MB in {time.monotonic() - begun:.0f} s")
    return 0


def identify(source: Path, model: Path | None = None) -> Source:
    """What SOURCE is, by the files in it. Raises ConfigError for none of `ALLOWED`.

    model: `--model`, a Hugging Face folder that says what a checkpoint's model is.
    """
    if (source / TRACKER).is_file():
        return _iteration(_latest(source), model)
    if (source / "checkpoint.json").is_file():
        return _step(source, model)
    if (source / "metadata.json").is_file() or torch_format.is_torch_format(source):
        return _iteration(source, model)
    if not (source / "config.json").is_file():
        raise ConfigError(f"SOURCE: {source} is nothing that can be converted; allowed: {ALLOWED}")
    if model is not None:
        raise ConfigError(f"--model: {model} would describe {source}, which has a config.json; allowed: without it")
    return Source(source)


def _latest(source: Path) -> Path:
    """The checkpoint that Megatron-LM's tracker names."""
    name = (source / TRACKER).read_text().strip()
    folder = source / (f"iter_{int(name):07d}" if name.isdecimal() else name)
    if name != "release" and not name.isdecimal():
        raise ConfigError(f"SOURCE: {source / TRACKER} says {name!r}; allowed: release, or a number")
    if not (folder / "metadata.json").is_file() and not torch_format.is_torch_format(folder):
        raise ConfigError(
            f"SOURCE: {folder} has neither metadata.json nor {torch_format.FOLDERS}; allowed: Megatron's formats "
            "torch_dist and torch"
        )
    return folder


def _iteration(checkpoint: Path, model: Path | None) -> Source:
    """A checkpoint of Megatron's: its model is described beside it where `streamrl convert` wrote it."""
    beside = [folder / DESCRIPTION for folder in (checkpoint, checkpoint.parent)]
    described = [model] if model is not None else [path for path in beside if (path / "config.json").is_file()]
    if not described:
        raise ConfigError(
            f"SOURCE: {checkpoint} has no config.json in {beside[1]}; allowed: --model with the Hugging Face folder "
            "that it came from"
        )
    return Source(described[0], checkpoint)


def _step(checkpoint: Path, model: Path | None) -> Source:
    """A checkpoint of a run: described by its own export, or by the model that the run started from."""
    try:
        fixed = json.loads((checkpoint / "checkpoint.json").read_text())["fixed"]
        adapters = LoraConfig(rank=fixed["lora_rank"], alpha=fixed["lora_alpha"], targets=fixed["lora_targets"])
    except (ValueError, KeyError, TypeError) as error:
        said = " ".join(repr(error).split())
        raise ConfigError(f"SOURCE: {checkpoint / 'checkpoint.json'} is none of this streamrl's: {said}") from None
    if model is None and (checkpoint / DESCRIPTION / "config.json").is_file():
        model = checkpoint / DESCRIPTION
    run = checkpoint.resolve().parents[1]
    recorded = load_run(run) if (run / "config.yaml").is_file() else None
    if model is None and recorded is not None:
        model = with_local_model(recorded, "description").model.path
    if model is None or not (model / "config.json").is_file():
        problem = f"{run} has no config.yaml" if model is None else f"{model} has no config.json"
        raise ConfigError(f"SOURCE: {checkpoint}: {problem}; allowed: --model with the Hugging Face folder of the run")
    return Source(model, checkpoint, adapters, None if recorded is None else recorded.model.built_by)


def _shape(source: Source) -> ModelShape:
    """The model's. Raises ConfigError for a family that there is not, and for a model that is not built."""
    try:
        return read_shape(source.model, key="SOURCE", family=source.family)
    except ValueError as error:
        said = str(error).replace(FAMILIES.key, "--family").replace(BY_TRANSFORMERS, "")
        raise ConfigError(said) from None


def _config(source: Source, layout: LayoutConfig, shape: ModelShape, dtype: str, timeout: float) -> Config:
    """What the ranks need to know. Raises ConfigError where the model cannot be cut so."""
    try:
        check_fit(shape, layout)
    except ConfigError as error:
        raise ConfigError(str(error).replace("learner.layout.", "--")) from None
    ranks = layout.pipeline * math.lcm(layout.tensor, layout.expert * layout.expert_tensor)
    learner = {
        "ranks": ranks, "layout": layout, "lora": source.adapters, "collective_timeout": timeout, "tick": timeout / 2,
    }  # fmt: skip
    model = {"path": source.model.resolve(), "dtype": dtype}
    model |= {"family": source.family} if shape.family.by_megatron else {"implementation": "transformers"}
    return Config.model_validate({"model": model, "learner": learner})


def _layout(source: Source, sizes: dict[str, int]) -> LayoutConfig:
    """Over how many ranks the model is cut: as `sizes` says, or as the files of the format torch are.

    Raises ConfigError where both say something, and not the same.
    """
    if source.checkpoint is None or not torch_format.is_torch_format(source.checkpoint):
        return LayoutConfig.model_validate(sizes)
    cut = torch_format.read_cut(source.checkpoint)
    for name, size in sizes.items():
        if size not in (1, getattr(cut, name)):
            raise ConfigError(
                f"--{name}: {size} is not how {source.checkpoint} is cut, and the format torch is read as it was "
                f"written; allowed: {getattr(cut, name)}, or without"
            )
    return cut.layout()


def _layout_text(config: Config) -> str:
    layout, ranks = config.learner.layout, config.learner.ranks
    return f"{ranks} ranks: tensor {layout.tensor}, pipeline {layout.pipeline}, expert {layout.expert}"


def _stored_dtype(source: Source) -> str:
    """The dtype of the weights as they lie there. Raises ConfigError where there are several, or another one."""
    stored = set(_checkpoint_dtypes(source.checkpoint) if source.checkpoint else _safetensors_dtypes(source.model))
    names = {_STORED.get(dtype, str(dtype)) for dtype in stored}
    if len(names) != 1 or not names <= BYTES.keys():
        given = ", ".join(sorted(names)) or "none"
        raise ConfigError(f"--dtype: needed, the weights are stored as {given}; allowed: {', '.join(BYTES)}")
    return names.pop()


def _checkpoint_dtypes(checkpoint: Path) -> Iterator[torch.dtype]:
    if torch_format.is_torch_format(checkpoint):
        yield from torch_format.dtypes(checkpoint)
        return
    if not (checkpoint / ".metadata").is_file():
        raise ConfigError(
            f"SOURCE: {checkpoint} has no .metadata; allowed: a whole checkpoint of the format torch_dist"
        )
    for name, stored in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        if name.partition(".")[0] in _MODEL and hasattr(stored, "properties") and not name.endswith(FLOAT32):
            yield stored.properties.dtype


def _safetensors_dtypes(folder: Path) -> Iterator[str]:
    for path in weight_files(folder, "SOURCE"):
        with open_weights(path, "SOURCE") as tensors:
            names = [name for name in tensors.keys() if not name.endswith(FLOAT32)]  # noqa: SIM118, no dict
            yield from (tensors.get_slice(name).get_dtype() for name in names)


def _pads(shape: ModelShape, config: Config) -> int:
    """Bytes of the rows that Megatron has behind the vocabulary."""
    rows = shape.padded_vocabulary(config.learner.layout.tensor) - shape.vocabulary
    return rows * shape.hidden * (1 if shape.tied else 2) * BYTES[config.model.dtype]


def _check_space(output: Path, needed: int) -> None:
    """Raise ConfigError where `needed` bytes do not fit beside `output`."""
    there = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ConfigError(f"OUT: {output} needs {needed / 1e9:.1f} GB, {there} has {free / 1e9:.1f} GB free")


@contextmanager
def _draft(output: Path) -> Iterator[Path]:
    """A folder beside `output` that is gone afterwards, also when the command is interrupted."""
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        with unwinding_at_sigterm():
            yield draft
    finally:
        shutil.rmtree(draft)


def _run_ranks(config: Config, source: Source, draft: Path, timeout: float, size: int) -> None:
    """The ranks, from start to end, writing `size` bytes to `draft`/whole. Raises ConfigError with what they refuse.

    Raises ConversionFailed for another end of theirs, and when they have not ended in `timeout` seconds.
    """
    (draft / "config.json").write_text(config.model_dump_json())
    count = config.learner.ranks
    command = torchrun(count, "streamrl.learner.conversion")
    command += [str(draft / "config.json"), str(draft / "whole"), "--lifeline", str(os.getpid())]
    if source.checkpoint is not None:
        command += ["--checkpoint", str(source.checkpoint)]
    # Any machine holds any number of ranks when none of them takes a GPU.
    environment = {**os.environ, **rank_environment(count), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (draft / "log").open("wb") as log:
        ranks = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = _await(ranks, draft, timeout, size)
        finally:
            end_tree(ranks.pid, timeout=KILL_GRACE if ranks.poll() is None else 0)
            ranks.wait(KILL_GRACE)
    if code:
        _raise_reason((draft / "log").read_text(errors="replace").splitlines(), code)


def _await(ranks: subprocess.Popen[bytes], draft: Path, timeout: float, size: int) -> int:
    """Their exit code. Shows what they have read, then what they have written; raises ConversionFailed at the end."""
    deadline = time.monotonic() + timeout
    log = Tail(draft / "log")
    with Bar("read", "MB", size / 1e6) as bar:
        while not _written(draft) and (code := _wait(ranks, deadline, timeout)) is None:
            for line in (line.decode(errors="replace") for line in log.lines()):
                if line.startswith(_READ):
                    done, total = map(float, line.removeprefix(_READ).split())
                    bar.reach(done / 1e6, total / 1e6)
    with Bar("write", "MB", size / 1e6) as bar:
        while (code := _wait(ranks, deadline, timeout)) is None:
            bar.reach(_written(draft) / 1e6)
    return code


def _wait(ranks: subprocess.Popen[bytes], deadline: float, timeout: float) -> int | None:
    """Their exit code, or None after POLL seconds. Raises ConversionFailed at the deadline."""
    try:
        return ranks.wait(POLL)
    except subprocess.TimeoutExpired:
        if time.monotonic() > deadline:
            raise ConversionFailed(f"the ranks had not ended after --timeout {timeout:g} s") from None
        return None


def _written(draft: Path) -> int:
    """Bytes of what the ranks write, wherever it lies before it has its name."""
    sizes = 0
    for folder, _, names in os.walk(draft):  # one that is renamed meanwhile has nothing
        for name in names if folder != str(draft) else ():
            with suppress(FileNotFoundError):  # renamed meanwhile
                sizes += os.stat(os.path.join(folder, name)).st_size
    return sizes


def _raise_reason(lines: list[str], code: int) -> None:
    """Raise what the log of the ranks that ended with `code` says: a refusal of theirs, or their error."""
    lines = [line.strip() for line in lines if not line.startswith(_READ)]
    for line in lines:
        if line.startswith(_REFUSAL):
            raise ConfigError(line.removeprefix(_REFUSAL))
    reasons = [line for line in lines if _REASON.fullmatch(line)]
    last = [line for line in lines if line][-1:]
    raise ConversionFailed(f"the ranks ended with exit code {code}: {' '.join(reasons[:1] or last)}")
