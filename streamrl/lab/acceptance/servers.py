"""Servers that are cut or quantised otherwise, each with the gap of its log-probs to the learner's."""

from __future__ import annotations

from typing import Any

from streamrl.lab.acceptance.check import Bench, Measured, Skipped
from streamrl.lab.acceptance.quickstart import MEASURED, gap
from streamrl.lab.acceptance.trial import ended

STEPS = 2
FP8 = 8.9  # compute capability from which a GPU multiplies in FP8

# A server that quantises rounds otherwise than the learner: times the limits of the audit.
FP8_ALLOWANCE = 4.0

SETTINGS: dict[str, dict[str, Any]] = {
    "tp2": {"generate.tensor_parallel": 2},
    "ep2": {"generate.tensor_parallel": 2, "generate.server_args": {"ep_size": 2}},
    "dp_attention": {
        "generate.tensor_parallel": 2,
        "generate.server_args": {"dp_size": 2, "enable_dp_attention": True},
    },
    "ngram": {"generate.speculation.algorithm": "ngram"},
    "fp8": {"generate.quantization": "fp8"},
}


def run(bench: Bench, kind: str) -> Measured:
    """Two synchronous steps: every token is trained by the version that generated it."""
    if kind != "tp2":
        bench.needs_cuda(f"a server with {kind} has no kernels on the CPU")
    if kind == "fp8" and (lowest := min(gpu.capability for gpu in bench.gpus)) < FP8:
        raise Skipped(f"compute capability {lowest:g}; FP8 needs {FP8:g}")
    settings = {**MEASURED, "run.steps": STEPS, **SETTINGS[kind]}
    with ended(bench, f"server-{kind}", settings, model=bench.experts if kind == "ep2" else bench.model) as trial:
        return gap(bench, trial.folder, allowance=FP8_ALLOWANCE if kind == "fp8" else 1.0)
