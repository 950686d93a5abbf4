"""What a check of the acceptance run is: a declaration, what it is given, what it says, how it does not pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.engine.hardware import has_cuda

Verdict = Literal["ok", "failed", "skipped"]


class Skipped(Exception):
    """This machine cannot show it; the text is the reason."""


class Failed(Exception):
    """It was shown to be wrong; the text says what was found."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the driver describes it. Example: `Gpu(name="NVIDIA H200", capability=9.0, memory=143771)`."""

    name: str
    capability: float  # compute capability
    memory: int  # MiB


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What every check is given: the machine, the models, how much is to be done."""

    folder: Path  # of all runs of this acceptance run
    tiny: Path  # a tiny model: what runs are killed, and kept in every version, with
    experts: Path  # a tiny mixture of experts
    own: Path | None = None  # the user's model: it is measured in the tiny one's place
    quick: bool = False
    gpus: tuple[Gpu, ...] = ()  # those that may be used; none: everything runs on the CPU
    driver: str = ""

    @property
    def model(self) -> Path:
        """The one that is measured."""
        return self.own or self.tiny

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype of the weights: what is trained in on such a machine."""
        return "bfloat16" if self.gpus else "float32"

    def needs_cuda(self, what: str) -> None:
        """Raise Skipped on a machine without GPUs, or with a torch that cannot use them."""
        if not self.gpus or not has_cuda():
            raise Skipped(f"no GPU: {what}")


class Measured(msgspec.Struct, frozen=True):
    """What a check that has passed says. Example: `Measured("3.1e-06 nats", "at most 1e-4")`."""

    figure: str
    expected: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    check: str
    result: Verdict
    seconds: float = 0.0
    reason: str = ""  # of what failed or was skipped
    figure: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. It runs in a process of its own, and has failed where that is not done at its deadline."""

    name: str  # GROUP.WHAT, as --only takes it
    what: str
    run: str  # MODULE:FUNCTION, (Bench, *arguments) -> Measured; raises Skipped or Failed
    deadline: float  # seconds
    arguments: tuple[str, ...] = ()
    after: str = ""  # the check whose run it looks at, which has to have passed

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]
