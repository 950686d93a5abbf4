"""Tokens a second that a run may expect: `streamrl simulate --fleet`'s model of the circle, with this run's GPUs.

The figures of a server and of the learner come from a file; without one nothing is known, and nothing is said.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.lab.plan.machines import Machines
from streamrl.lab.simulate.figures import Figures
from streamrl.lab.simulate.fleet import Fleet, enough_steps, fleet_model, read_fleet, steady


@dataclass(frozen=True, slots=True)
class Expected:
    """What the simulation says."""

    step_seconds: float
    figures: Figures

    def as_json(self) -> dict[str, Any]:
        return {"step_seconds": self.step_seconds, **asdict(self.figures)}


def expected(config: Config, path: Path, machines: Machines) -> Expected:
    """Simulate the run with the figures in `path`. Raises ConfigError where they are of other servers."""
    fleet = read_fleet(path)
    _check(config, fleet, machines)
    cut = min(fleet.answers.longest, *(pool.sampling.max_new_tokens for pool in config.generate.each_pool))
    fleet = fleet.model_copy(update={"answers": fleet.answers.model_copy(update={"longest": cut})})
    short = config.model_copy(update={"run": config.run.model_copy(update={"steps": enough_steps(config)})})
    return Expected(*steady(short, fleet_model(fleet, config.learner.ranks, config), config.run.seed))


def _check(config: Config, fleet: Fleet, machines: Machines) -> None:
    if not machines.has_gpus:
        raise ConfigError("--figures: they are of GPUs, and --gpus-per-host is 0; allowed: a run on GPUs")
    for pool in config.generate.each_pool:
        if pool.tensor_parallel != fleet.server.gpus:
            raise ConfigError(
                f"--figures: server.gpus: {fleet.server.gpus} is not generate.tensor_parallel="
                f"{pool.tensor_parallel}; allowed: figures of a server of {pool.tensor_parallel} GPUs"
            )
