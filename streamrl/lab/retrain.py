"""`streamrl retrain RUN`: the learner alone trains again from the groups that a run recorded, bit for bit.

No server, no service, no clock enters: the same batches in the same order give the same weights on CPU.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.learner.batches import RecordedBatches
from streamrl.learner.role import run_recorded
from streamrl.publish.kept import kept_versions
from streamrl.replay.journal import recorded_batches


def main(run_folder: Path, output: Path, steps: int | None = None) -> int:
    """Train again into `output` and print the digest of the weights, and whether the run kept the same ones.

    Returns 0, or 1 when the run's kept weights of that step differ. With more than one rank the command
    starts itself again under torchrun.
    """
    if "RANK" not in os.environ and output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output: {output} is not empty; allowed: a new folder")
    config = config_file.load(
        run_folder / "config.yaml",
        [f"run.folder={output.parent}", f"run.name={output.name}"],
    )
    if config.journal.keep != "all":
        raise ConfigError(f"journal.keep: {config.journal.keep} has not kept every group of {run_folder}; allowed: all")
    if config.learner.ranks > 1 and "RANK" not in os.environ:
        _under_torchrun(config)
    if os.environ.get("RANK", "0") == "0":
        output.mkdir(parents=True, exist_ok=True)
        config_file.save(config, output / "config.yaml")
    trainer = run_recorded(config, output, RecordedBatches(islice(recorded_batches(run_folder / "journal"), steps)))
    try:
        weights = dict(trainer.export())
        return _report(run_folder, output, trainer.version.step, weights) if trainer.rank == 0 else 0
    finally:
        trainer.close()


def _report(run_folder: Path, output: Path, step: int, weights: dict[str, torch.Tensor]) -> int:
    """Print what came out. Returns 1 when it differs from what the run kept."""
    print(f"retrained {step} steps of {run_folder} into {output}")
    print(f"  weights sha256 {digest(weights.items())}")
    different = _different(weights, run_folder, step)
    if different is None:
        print(f"  {run_folder} kept no weights of step {step} to compare with")
        return 0
    print(f"  equal to the run's weights of step {step}: {different or 'bit for bit'}")
    return 1 if different else 0


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors, in the order of names."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _different(weights: dict[str, torch.Tensor], run_folder: Path, step: int) -> str | None:
    """Empty when the run's kept weights of `step` are equal, else which tensors differ; None: nothing is kept."""
    folders = [folder for version, folder in sorted(kept_versions(run_folder).items()) if version.step == step]
    if not folders:
        return None
    names: list[str] = []
    for file in sorted(folders[-1].glob("*.safetensors")):
        with safe_open(file, framework="pt") as kept:
            names += [name for name in kept.keys() if not torch.equal(kept.get_tensor(name), weights[name])]  # noqa: SIM118
    return f"no, {len(names)} tensors differ, first {names[0]}" if names else ""


def _under_torchrun(config: Config) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={config.learner.ranks}"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.learner.threads)}
    os.execve(sys.executable, [sys.executable, *torchrun, "-m", "streamrl.cli", *sys.argv[1:]], environment)
