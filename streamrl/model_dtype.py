"""`model.dtype: auto` as a dtype: bfloat16 where the machine is fast in it, which a run's record then has.

float32, bfloat16 ─────────────────────────────▶ as it is
auto ─▶ the run goes on ──────────────────────▶ that of its record
     └▶ a new one ─▶ GPUs, or a CPU that multiplies it ─▶ bfloat16
                  └▶ any other CPU ─▶ float32
"""

from __future__ import annotations

import sys
from functools import lru_cache

from streamrl.config import Config
from streamrl.engine.hardware import bfloat16_instructions, has_cuda
from streamrl.places import RECORD, load_run


def with_dtype(config: Config, *, fresh: bool = False, gpus: bool | None = None) -> Config:
    """The same configuration with a dtype in the place of `auto`, and a line that says which and why.

    fresh: a run that is there is not gone on with; gpus: has the machine some? None: this one is looked at.
    Raises ConfigError for a record that cannot be read.
    """
    if config.model.dtype != "auto":
        return config
    dtype: str
    if not fresh and (config.run_folder / RECORD).exists():
        dtype, why = load_run(config.run_folder).model.dtype, f"as in {config.run_folder}"
    else:
        dtype, why = _of_machine(has_cuda() if gpus is None else gpus)
    _say(f"model.dtype: auto is {dtype}, {why}")
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def _of_machine(gpus: bool) -> tuple[str, str]:
    """The dtype, and why."""
    if gpus:
        return "bfloat16", "on GPUs"
    if (found := bfloat16_instructions()) is not None:
        return "bfloat16", f"on a CPU with {found}"
    return "float32", "on a CPU without instructions for bfloat16"


@lru_cache  # once a process, however many runs it starts
def _say(line: str) -> None:
    print(f"streamrl: {line}", file=sys.stderr)
