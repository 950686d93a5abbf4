"""`streamrl retrain RUN`: the learner alone trains again from the groups that a run recorded, bit for bit.

No server, no service, no clock enters: the same batches in the same order give the same weights on CPU. With
`--set` the same batches are trained otherwise: another loss, weight rule or learning rate.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from streamrl import preflight
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.engine.hardware import has_cuda
from streamrl.hub.model import with_local_models
from streamrl.lab.output import check_new_folder
from streamrl.lab.sweep.plan import override
from streamrl.learner.role import run_recorded
from streamrl.learner_environment import learner_environment
from streamrl.observe.bars import Bar
from streamrl.observe.ending import saved_steps
from streamrl.observe.metrics import read_metrics
from streamrl.places import load_run
from streamrl.preflight.lengths import check_lengths
from streamrl.preflight.prompts import Longest
from streamrl.recorded.journal import batches, has_begin
from streamrl.recorded.weights import kept_versions, tensors
from streamrl.torchrun import torchrun
from streamrl.types import PolicyVersion

# Keys that `--set` may change: they say what is done with the data. All others say how it came about.
FREE = ("algo.", "critic.", "learner.", "checkpoint.", "observe.", "run.placement")

# Those of them that change no bit of the weights.
NO_EFFECT = (
    "checkpoint.", "observe.", "learner.tick", "learner.collective_timeout", "learner.bad_steps", "learner.bad_groups",
    "learner.empty_steps", "learner.peak_tflops", "learner.params_metrics", "learner.profile.", "run.placement",
)  # fmt: skip

# Those that take the same sums in another order.
ROUNDING = (
    "learner.ranks", "learner.layout.", "learner.tokens_per_micro_batch", "learner.share_prompts",
    "learner.as_served", "learner.recompute", "learner.overlap", "learner.threads",
)  # fmt: skip

LOW_ESS = 0.5  # off-policy effective sample size under which half of the data says nothing about the new policy

OUTPUT = ("run.folder", "run.name")


def main(run_folder: Path, output: Path, steps: int | None = None, changes: Sequence[str] = ()) -> int:
    """Train again into `output` and print the digest of the weights, and how they compare with those of the run.

    `changes`: key=value, what is done differently. Returns 0, or 1 when the groups of a step cannot be read, or when
    nothing that changes weights was changed and the run's kept weights of that step differ. With more than one rank
    the command starts itself again under torchrun. Raises ConfigError for a key that would change what the recorded
    data means.
    """
    if "RANK" not in os.environ:
        check_new_folder("--output", output)
    recorded = with_local_models(load_run(run_folder))
    again = [*changes, override("run.folder", str(output.absolute().parent)), override("run.name", output.name)]
    config = with_local_models(load_run(run_folder, again))
    changed = [key for key in config_file.changed(recorded, config) if key not in OUTPUT]
    _check(run_folder, recorded, config, changed)
    check_lengths(config, preflight.check_layout(config), Longest(tokens=1, whose="the shortest prompt"))
    if config.learner.ranks > 1 and "RANK" not in os.environ:
        _under_torchrun(config)
    if os.environ.get("RANK", "0") == "0":
        output.mkdir(parents=True, exist_ok=True)
        config_file.save(config, output / "config.yaml")
        for key in changed:
            print(f"  {key}: {config_file.value_at(config, key)}, in the run {config_file.value_at(recorded, key)}")
    count = _steps(run_folder, config.run.steps if steps is None else min(steps, config.run.steps))
    if steps is not None and count < steps and os.environ.get("RANK", "0") == "0":
        print(f"  --steps: {steps}, of which the run has {count}")
    with Bar("retrain", "steps", count) as bar:
        trainer = run_recorded(config, output, bar.over(islice(batches(run_folder), count or steps)))
    try:
        if (trained := trainer.version.step) < max(1, count):
            return _lacking(run_folder, trained, count) if trainer.rank == 0 else 1
        if config.checkpoint.export:
            trainer.export_model()
        weights = {name: tensor.cpu() for name, tensor in trainer.export()}
        if trainer.rank != 0:
            return 0
        if any(not key.startswith(NO_EFFECT) for key in changed):
            other = any(not key.startswith(NO_EFFECT + ROUNDING) for key in changed)
            return _report_other(run_folder, output, trainer.version.step, weights, off_policy=other)
        return _report(run_folder, output, trainer.version.step, weights)
    finally:
        trainer.close()


def _steps(run_folder: Path, steps: int) -> int:
    """How many of those that the run has trained are trained again: `steps` at most; 0 where only its journal is left.

    The last batch of the journal may have been handed out, and not trained, when the run was ended.
    """
    trained = [*saved_steps(run_folder), *(row["step"] for row in read_metrics(run_folder))]
    return min(steps, max(trained, default=0))


def _lacking(run_folder: Path, trained: int, count: int) -> int:
    """Tell that the journal ends before the run did, or has no step. Returns 1."""
    verify = f"; `streamrl journal {run_folder} --verify` says where its journal is damaged" if count else ""
    print(f"streamrl: the groups of {trained} steps of {run_folder} can be read, of {count}{verify}", file=sys.stderr)
    return 1


def _check(run_folder: Path, recorded: Config, config: Config, changed: Sequence[str]) -> None:
    if config.journal.keep != "all":
        raise ConfigError(f"journal.keep: {config.journal.keep} has not kept every group of {run_folder}; allowed: all")
    if not has_begin(run_folder):
        raise ConfigError(
            f"journal.keep: all, but the first groups of {run_folder} are lost, or were deleted before it was; "
            "allowed: a run with journal.keep=all from its first step"
        )
    for key in changed:
        if not key.startswith(FREE):
            raise ConfigError(
                f"{key}: {config_file.value_at(config, key)} would change what the recorded data means; allowed: "
                f"{config_file.value_at(recorded, key)} as in {run_folder}, or keys of {' '.join(FREE)}"
            )
    if config.learner.router_replay and not recorded.learner.router_replay:
        raise ConfigError(
            f"learner.router_replay: true needs routes that {run_folder} has not recorded; allowed: false"
        )


def _report(run_folder: Path, output: Path, step: int, weights: dict[str, torch.Tensor]) -> int:
    """Print what came out. Returns 1 when it differs from what the run kept."""
    print(f"retrained {step} steps of {run_folder} into {output}")
    print(f"  weights sha256 {digest(weights.items())}")
    different = _different(weights, run_folder, step)
    if different is None:
        print(f"  {run_folder} kept no weights of step {step} to compare with")
        return 0
    print(f"  equal to the run's weights of step {step}: {different or 'bit for bit'}")
    starts = {PolicyVersion.parse(row["version"]).incarnation for row in read_metrics(run_folder)}
    if different and len(starts) > 1:
        print(
            f"  the run was started {len(starts)} times: where a start had other keys of {' '.join(ROUNDING)}, "
            "sums were taken in another order, and weights differ in bits"
        )
    return 1 if different else 0


def _report_other(
    run_folder: Path, output: Path, step: int, weights: dict[str, torch.Tensor], *, off_policy: bool
) -> int:
    """Print what came out of another way of training, and, `off_policy`, what it can be taken for. Returns 0."""
    print(f"retrained {step} steps of {run_folder} into {output}, with the changes above")
    print(f"  weights sha256 {digest(weights.items())}")
    distance = _distance(weights, run_folder, step)
    if distance is None:
        print(f"  {run_folder} kept no weights of step {step} to compare with")
    else:
        print(f"  distance to the run's weights of step {step}: {distance:.2e} of their norm")
    before, after = _last_ess(run_folder, step), _last_ess(output, step)
    print(f"  effective sample size at the end: {_figure(after)}, in the run {_figure(before)}")
    for line in caveats(after) if off_policy else ():
        print(f"  {line}")
    return 0


def caveats(ess: float | None) -> Iterator[str]:
    """What has to be borne in mind of data that another policy brought about. `ess`: at the end, 0..1."""
    yield "off-policy: every answer was drawn by the weights of the recorded run, not by these ones"
    yield "  - rewards, lengths and pass rates in the metrics are the recorded ones, not those of these weights"
    yield "    (`streamrl eval --run-folder OUTPUT` measures them)"
    yield "  - staleness counts the run's steps, while the data is as far away as offpolicy/ess and offpolicy/kl say"
    yield "  - what these weights would have asked and found differently is not in the data: compare few steps"
    if ess is not None and ess < LOW_ESS:
        yield f"  - WARNING: an effective sample size below {LOW_ESS:g}: most of the data is another policy's by now"


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors, in the order of names."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _different(weights: dict[str, torch.Tensor], run_folder: Path, step: int) -> str | None:
    """Empty when the run's kept weights of `step` are equal, else which tensors differ; None: nothing is kept."""
    kept = _kept(run_folder, step)
    if kept is None:
        return None
    lacking, names = set(weights), list[str]()
    for name, tensor in kept:
        lacking.discard(name)
        if name not in weights or not torch.equal(tensor, weights[name]):
            names.append(name)
    names += sorted(lacking)
    return f"no, {len(names)} tensors differ, first {names[0]}" if names else ""


def _distance(weights: dict[str, torch.Tensor], run_folder: Path, step: int) -> float | None:
    """Euclidean distance to the run's kept weights of `step`, over their norm; None: nothing to compare is kept."""
    kept = _kept(run_folder, step)
    if kept is None:
        return None
    apart = norm = 0.0
    for name, tensor in kept:
        if name not in weights or weights[name].shape != tensor.shape:  # adapters of another rank
            return None
        apart += float((weights[name].cpu().double() - tensor.double()).square().sum())
        norm += float(tensor.double().square().sum())
    return math.sqrt(apart / norm) if norm else None


def _kept(run_folder: Path, step: int) -> Iterator[tuple[str, torch.Tensor]] | None:
    """The tensors of the run's newest kept version of `step`, one at a time; None where none is kept."""
    folders = [folder for version, folder in sorted(kept_versions(run_folder).items()) if version.step == step]
    return tensors(folders[-1]) if folders else None


def _last_ess(folder: Path, step: int) -> float | None:
    """Mean `offpolicy/ess` of the last tenth of the first `step` steps."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step and row.get("offpolicy/ess") is not None]
    values = [row["offpolicy/ess"] for row in rows[-max(1, len(rows) // 10) :]]
    return sum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _under_torchrun(config: Config) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.learner.threads)}
    if has_cuda():
        environment |= learner_environment(config, os.environ)
    os.execve(sys.executable, [*torchrun(config.learner.ranks, "streamrl.cli"), *sys.argv[1:]], environment)
