"""The learner in every layout against one rank, on the batches of one run; on GPUs with memory and speed.

    a run ──journal──▶ `streamrl retrain --set learner.ranks=2 ...` ──▶ loss and gradient norm of every step

The same batches in the same order give the same loss and the same gradient norm, but for the order of the sums.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.lab.acceptance.check import Bench, Failed, Measured
from streamrl.lab.acceptance.quickstart import audited, measured_run
from streamrl.lab.acceptance.trial import Trial, command, ended, record_of
from streamrl.lab.plan.command import model_shape
from streamrl.lab.plan.learner_memory import fullest_rank
from streamrl.lab.plan.machines import GIB, Machines
from streamrl.observe.metrics import read_metrics

MIB = 1 << 20

RUN = "experts"  # the run of the mixture of experts
STEPS = 3

WITHOUT_ENGINE = "raise ImportError('hidden by streamrl doctor --gpu')"

# Largest relative difference of the gradient norm, and absolute one of the loss, whose terms cancel.
BARS = {"float32": (1e-4, 1e-5), "bfloat16": (0.1, 0.02)}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "ep2": {"expert": 2},
    "fsdp2": {"sharding": "full"},
}

# Bytes that CUDA's libraries take from torch's allocator, whatever the model: cuBLAS's and Transformer Engine's rooms.
WORKSPACES = 256 << 20


def experts(bench: Bench) -> Measured:
    """The run whose batches expert parallelism trains again."""
    with ended(bench, RUN, {"run.steps": STEPS}, model=bench.experts) as trial:
        return audited(trial.folder, f"{STEPS} steps of a mixture of experts")


def run(bench: Bench, layout: str) -> Measured:
    """Retrain in one layout on two ranks, and compare every step."""
    source = RUN if layout == "ep2" else measured_run(bench)
    keys = ["learner.ranks=2", *(f"learner.layout.{key}={value}" for key, value in LAYOUTS[layout].items())]
    return _compared(bench, source, f"layout-{layout}", keys)


def local(bench: Bench) -> Measured:
    """The same on one rank with the local layers, in the place of Transformer Engine's: it is hidden."""
    from streamrl.lab.acceptance.engine import check_engine  # it imports torch

    check_engine(bench)
    hidden = bench.folder / "without_engine"
    package = hidden / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(WITHOUT_ENGINE)
    paths = os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])
    keys = ["learner.overlap=false"]  # a key that changes no sum, as `--set` needs one
    return _compared(bench, measured_run(bench), "layers-local", keys, {"PYTHONPATH": paths})


def _compared(
    bench: Bench, source: str, name: str, keys: Sequence[str], environment: Mapping[str, str] | None = None
) -> Measured:
    record = record_of(bench, source)
    alone = record.configured(*keys, "generate.attach=[http://127.0.0.1:1]")  # no server beside: GPUs for the ranks
    output = bench.folder / "runs" / name
    words = ["retrain", str(record.folder), "--output", str(output), "--steps", str(STEPS), "--set", *keys]
    command(bench, name, *words, environment=environment)
    norm, loss = _differences(record, output)
    bars = BARS[bench.dtype]
    said = f"gradient norm {norm:.1e}, loss {loss:.1e} from one rank's"
    if not (norm <= bars[0] and loss <= bars[1]):
        raise Failed(f"{said}; allowed: {bars[0]:g} and {bars[1]:g}")
    planned = fullest_rank(alone, model_shape(alone, None), Machines()).peak
    memory = _memory(output, planned) if bench.gpus else f"plan {planned / MIB:.1f} MiB"
    speed = _utilisation(bench, output)
    return Measured("; ".join([said, memory, *speed]), f"{bars[0]:g}, {bars[1]:g}, no more memory than planned")


def _differences(record: Trial, output: Path) -> tuple[float, float]:
    """Largest difference of gradient norms, relative, and of losses. Raises Failed where a step is missing."""
    ours = {row["step"]: row for row in read_metrics(output)}
    theirs = {row["step"]: row for row in record.rows() if row["step"] <= STEPS}
    if ours.keys() != theirs.keys() or len(theirs) < STEPS:
        raise Failed(f"steps {sorted(ours)} were retrained, {sorted(theirs)} are recorded")
    norms = [_of(ours[step], "grad_norm", theirs[step]) / theirs[step]["grad_norm"] for step in theirs]
    return max(norms), max(_of(ours[step], "loss/total", theirs[step]) for step in theirs)


def _of(ours: dict[str, Any], name: str, theirs: dict[str, Any]) -> float:
    if ours[name] is None or theirs[name] is None:
        raise Failed(f"{name} of step {ours['step']} is not finite")
    return abs(float(ours[name]) - float(theirs[name]))


def _memory(output: Path, planned: int) -> str:
    """What torch's allocator gave out at the most. Raises Failed where `plan` says less."""
    peak = max(row["memory/peak"] for row in read_metrics(output))
    if peak > planned + WORKSPACES:
        raise Failed(f"{peak / GIB:.2f} GiB at the peak, {planned / GIB:.2f} GiB by `streamrl plan`")
    return f"{peak / GIB:.2f} GiB, plan {planned / GIB:.2f}"


def _utilisation(bench: Bench, output: Path) -> list[str]:
    """Model FLOPs utilisation at best; of a GPU whose peak is not known, TFLOP/s; nothing on a CPU."""
    if not bench.gpus:
        return []
    rows = list(read_metrics(output))
    shares = [row["learner/mfu"] for row in rows if "learner/mfu" in row]
    if not shares:
        most = max(row["learner/tflops"] for row in rows)
        return [f"{most:.1f} TFLOP/s a rank (no peak is known of {bench.gpus[0].name})"]
    return [f"MFU {max(shares):.2%}"]
