"""`streamrl train CONFIG --dry-run`: all checks of a start, and what would start on which GPUs; nothing is.

    GPUs ─▶ preflight ─▶ run folder ─▶ every process of this host with its GPUs, and the commands

Who gets which GPU is decided in `device_map.py` and `supervisor.py`: this only prints it. On a machine that is made up
(`--gpus`) neither memory nor packages are looked at, and a model that is not here is known by its `model.shape`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence

from streamrl import preflight, run_folder
from streamrl.config import Config, senseless
from streamrl.config.generate import GenerateConfig
from streamrl.config.refused import Refusals
from streamrl.device_map import DeviceMap, device_map
from streamrl.engine.hardware import has_cuda, visible_gpus
from streamrl.hub.files import lacking
from streamrl.hub.model import with_local_models
from streamrl.hub.repository import model_of
from streamrl.lab.plan.command import model_shape
from streamrl.model_dtype import with_dtype
from streamrl.observe.ending import resume_line
from streamrl.places import absolute
from streamrl.preflight import machine
from streamrl.preflight.epochs import with_steps
from streamrl.preflight.model import attached_towers, check_model
from streamrl.supervisor import Supervisor
from streamrl.tasks import left_out

NOT_HERE = "not checked: packages and memory of that machine"
NO_WEIGHTS = "not checked: the weights of {}, which a start fetches to {}"
NO_MODEL = "; weights, tokenizer, prompts and the wire, as {} is not here"


def main(config: Config, *, fresh: bool, gpus: int | None = None) -> int:
    """Check, print, return 0. `gpus`: of a machine that is made up; None: this one's. Raises ConfigError."""
    by_shape = gpus is not None and _is_known_by_shape(config)
    config = absolute(config if by_shape else with_local_models(config, "description"))
    names = _names(gpus)
    config = with_dtype(config, fresh=fresh, gpus=bool(names))
    if names:
        machine.check_served(config)
    placed = device_map(config, len(names)) if names else None
    unchecked = _check(config, made_up=gpus is not None, fresh=fresh)
    if not fresh and (recorded := left_out.load(config.run_folder)).trained:
        config = with_steps(config, recorded)
    run_folder.check(config, fresh=fresh)
    supervisor = Supervisor(config, config.run_folder, names)
    of_which = f"GPUs {','.join(names)}" if names else "no GPU: every process runs on the CPU"
    print(f"{config.run.name}: {of_which}")
    for row in _lines(["process", "GPUs", "what"], *_rows(config, placed, names)):
        print(f"  {row}")
    is_complete = supervisor.is_complete() and not fresh
    going_on = None if fresh or is_complete else resume_line(config.run_folder, config.run.steps)
    if going_on is not None:
        print(going_on)
    print("all steps are done: none of them starts" if is_complete else "the first starts, the others once it listens:")
    for role in () if is_complete else supervisor.roles:
        settings = [f"{name}={value}" for name, value in role.environment.items()]
        print(f"  {role.name}: {' '.join([*settings, shlex.join(_without_pid(role.command))])}")
    if unchecked:
        print(unchecked)
    warnings = senseless.warnings(config)
    warnings += attached_towers(config)
    senseless.warn([*warnings, *machine.crowding(config), *machine.rounding(config)] if gpus is None else warnings)
    print(f"nothing was started or written; run folder: {config.run_folder}")
    return 0


def _names(gpus: int | None) -> tuple[str, ...]:
    """The GPUs, by the names of CUDA_VISIBLE_DEVICES."""
    if gpus is not None:
        return tuple(map(str, range(gpus)))
    return visible_gpus() if has_cuda() else ()


def _check(config: Config, *, made_up: bool, fresh: bool) -> str:
    """What `train` checks before it makes the run folder. Returns what could not be checked. Raises ConfigError."""
    if not made_up:
        refusals, unchecked = Refusals(), ""
        with refusals:
            machine.check_machine(config)
        with refusals:
            unchecked = _preflight(config, fresh=fresh)
        refusals.tell()
        return unchecked
    if not _is_known_by_shape(config):
        return "; ".join(filter(None, [NOT_HERE, _preflight(config, fresh=fresh)]))
    check_model(config, model_shape(config, None))
    return NOT_HERE + NO_MODEL.format(config.model.path)


def _is_known_by_shape(config: Config) -> bool:
    return config.model.shape is not None and not (config.model.path / "config.json").is_file()


def _preflight(config: Config, *, fresh: bool) -> str:
    """Of a model of the hub the weights are not fetched for a dry run. Returns what could not be checked."""
    folders = [folder for folder in (config.model.path, config.algo.distillation.teacher) if folder is not None]
    models = [model for folder in folders if (model := model_of(folder)) is not None and lacking(folder, "whole")]
    senseless.warn(preflight.check(config, fresh=fresh, weights=not models).lines())
    return "; ".join(NO_WEIGHTS.format(model.name, model.root) for model in models)


def _rows(config: Config, placed: DeviceMap | None, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(process, its GPUs, what it is) of every process, in the order of their starts."""

    def of(gpus: Sequence[int]) -> str:
        return ",".join(names[gpu] for gpu in gpus) if gpus else "-"

    yield "replay-0", "-", "replay service"
    pools = [pool for pool in config.generate.each_pool for _ in range(pool.workers)]
    for index, pool in enumerate(pools):
        yield f"generator-{index}", "-", _worker(config, index, pool)
        for server in range(0 if pool.attach else pool.servers):
            gpus = placed.workers[index][server] if placed else ()
            yield f"  server {server}", of(gpus), f"SGLang, tensor parallel {pool.tensor_parallel}"
    for index in range(config.reward_model.processes):
        gpus = placed.reward_models[index] if placed else ()
        yield f"reward-model-{index}", of(gpus), f"reward model {config.reward_model.path}"
    critic = ", a critic on each" if config.algo.advantage.has_critic else ""
    yield "learner-0", "-", f"ranks: {config.learner.ranks}{critic}"
    for rank in range(config.learner.ranks):
        yield f"  rank {rank}", of(placed.ranks[rank : rank + 1] if placed else ()), "learner"


def _worker(config: Config, index: int, pool: GenerateConfig) -> str:
    named = f" of pool {pool.name}" if pool.name else ""
    if not pool.attach:
        return f"generator worker{named}"
    return f"generator worker{named}, attached to {', '.join(config.of_worker(index).generate.attach)}"


def _without_pid(command: Sequence[str]) -> list[str]:
    """The process that roles end with would be another one."""
    return ["PID" if word == str(os.getpid()) else word for word in command]


def _lines(*rows: Sequence[str]) -> Iterator[str]:
    """Rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
