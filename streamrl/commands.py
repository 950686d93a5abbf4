"""What each command of the command line does: options in, exit code out."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from streamrl.config import Config, senseless
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.shipped import config_path
from streamrl.engine.hardware import has_cuda
from streamrl.hub.model import with_local_model, with_local_models, with_local_teacher
from streamrl.learner_environment import learner_environment
from streamrl.loading import without_collections
from streamrl.model_dtype import with_dtype
from streamrl.places import RECORD, load_run, run_folder_of
from streamrl.recorded.formats import answered_run, recorded_run
from streamrl.tasks import left_out


def train(options: argparse.Namespace) -> int:
    config = config_file.load(options.config, options.override)
    if options.dry_run:
        from streamrl import dry_run

        return dry_run.main(config, fresh=options.fresh, gpus=options.gpus)
    if options.gpus is not None:
        raise ConfigError(f"--gpus: {options.gpus} is of a machine that is not this one; allowed: with --dry-run")
    return _run(config, fresh=options.fresh)


def _run(config: Config, *, fresh: bool = False) -> int:
    """One run on this machine, from start or resume to its end."""
    from streamrl.api.launching import launched

    with launched(config, fresh=fresh) as supervisor:
        return supervisor.run()


def sweep(options: argparse.Namespace) -> int:
    from streamrl.api.launching import launched
    from streamrl.lab.sweep import command
    from streamrl.lab.sweep.runner import INTERRUPTED

    def train(config: Config) -> int:
        with launched(config) as supervisor:
            code = supervisor.run()
        return INTERRUPTED if supervisor.interrupts else code  # also one that could save nothing

    return command.main(options.file, options.override, train, part=options.part, fresh=options.fresh)


def replay(options: argparse.Namespace) -> int:
    from streamrl.replay import service

    return service.main(*_role(options, "replay-0"))


def generator(options: argparse.Namespace) -> int:
    from streamrl.evaluate.in_run import RunEvaluator
    from streamrl.generate import worker_process
    from streamrl.preflight import machine

    node = f"-node-{options.node}" if options.node else ""
    config, folder = _role(options, f"generator-{options.index}{node}")
    try:
        machine.check_generator([config.of_worker(options.index).generate])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if options.node:
        from streamrl.generate import node as further_node

        return further_node.main(config, folder, options.index, options.node)
    return worker_process.main(config, folder, options.index, RunEvaluator)


def reward_model(options: argparse.Namespace) -> int:
    config, folder = _role(options, f"reward-model-{options.index}")
    if options.index >= config.reward_model.processes:
        raise ConfigError(
            f"--index: {options.index} is none of the {config.reward_model.processes} reward models of this run "
            "(reward_model.path, reward_model.workers); allowed: a smaller one"
        )
    from streamrl.reward_model import service

    return service.main(config, folder, options.index, alone=not options.lifeline)


def learner(options: argparse.Namespace) -> int:
    from streamrl.preflight import machine

    machine.check_learner()
    config, folder = _role(options, f"learner-{os.environ.get('RANK', '0')}")
    if has_cuda():
        os.environ.update(learner_environment(config, os.environ))
    with without_collections():
        from streamrl.learner import role

    return role.main(with_local_teacher(config), folder)


def evaluate(options: argparse.Namespace) -> int:
    """Measure the weights of a configuration, or those of an existing run by its own; `key=value` changes either."""
    if options.config is not None and options.run_folder is not None:
        options.override.insert(0, options.config)  # what comes after --run-folder is no file
        options.config = None
    elif options.config is not None:
        options.config = config_path(options.config)
    if (options.config is None) == (options.run_folder is None):
        raise ConfigError("eval takes either CONFIG [key=value ...] or --run-folder RUN; allowed: one of the two")
    if options.version is not None and (options.run_folder is None or options.model is not None):
        raise ConfigError("--version: names the weights of a run; allowed: with --run-folder and without --model")
    if options.config is not None:
        config = with_dtype(config_file.load(options.config, options.override), fresh=True)
    else:
        config = load_run(run_folder_of(options.run_folder), options.override)
    from streamrl.lab import evaluation

    return evaluation.main(config, options.run_folder, options.version, options.model, options.output)


def audit(options: argparse.Namespace) -> int:
    run_folder = answered_run(options.run)
    with without_collections():
        from streamrl.lab.audit import command

    return command.main(run_folder, options.tolerance)


def retrain(options: argparse.Namespace) -> int:
    run_folder = answered_run(options.run)
    with without_collections():
        from streamrl.lab import retrain

    return retrain.main(run_folder, options.output, options.steps, options.set)


def journal(options: argparse.Namespace) -> int:
    run_folder = recorded_run(options.run)
    from streamrl.lab import journal

    return journal.main(run_folder, options.verify, options.export)


def group(options: argparse.Namespace) -> int:
    run_folder = run_folder_of(options.run)
    from streamrl.lab import group

    return group.main(run_folder, options.id, options.json)


def trace(options: argparse.Namespace) -> int:
    run_folder = recorded_run(options.run)
    from streamrl.lab import trace

    return trace.main(run_folder, options.output)


def top(options: argparse.Namespace) -> int:
    if (options.run is None) == (options.url is None):
        raise ConfigError("top takes either RUN or --url URL; allowed: one of the two")
    if options.url is not None:
        if options.port is not None:
            raise ConfigError(f"--port: {options.port} would serve what {options.url} serves; allowed: with RUN")
        from streamrl.lab import top_endpoint

        return top_endpoint.main(options.url, once=options.once, every=options.every)
    run_folder = recorded_run(options.run)
    from streamrl.lab import top

    return top.main(run_folder, once=options.once, every=options.every, port=options.port)


def report(options: argparse.Namespace) -> int:
    run_folders = [recorded_run(run) for run in options.run]
    from streamrl.lab.report import command

    return command.main(run_folders, options.output, options.ratios)


def simulate(options: argparse.Namespace) -> int:
    """Simulate a recorded run, or a fleet that a file describes: then what is in RUN's place is an override."""
    given = {"--fleet": options.fleet, "--validate": options.validate, "--vary": options.vary, "--also": options.also}
    first, *others = [flag for flag, value in given.items() if value] or [""]
    if others and first in ("--fleet", "--validate"):
        raise ConfigError(f"{others[0]}: {first} has no use for it; allowed: without {first}")
    if options.fleet is not None:
        from streamrl.lab.simulate import command

        overrides = ([options.run] if options.run is not None else []) + options.override
        return command.main_fleet(options.fleet, overrides, options.json)
    if options.steps is not None and options.validate is None:
        raise ConfigError(f"--steps: {options.steps} is of the runs of --validate; allowed: with it, or run.steps=N")
    if options.run is None:
        raise ConfigError("simulate takes either RUN [key=value ...] or --fleet FILE; allowed: one of the two")
    from streamrl.lab.simulate import command

    run = Path(options.run)
    if options.validate is not None:
        config = run if run.is_file() else recorded_run(run) / RECORD
        steps = 30 if options.steps is None else options.steps
        return command.main_validate(config, options.override, options.validate, steps, options.json)
    run_folder = answered_run(run)
    return command.main(run_folder, options.override, vary=options.vary, others=options.also, output=options.json)


def tune(options: argparse.Namespace) -> int:
    """Choose settings for a configuration, which is calibrated first, or for a finished run."""
    if options.cores is not None and options.gpus is not None:
        raise ConfigError(f"--gpus: {options.gpus} beside --cores {options.cores}; allowed: one of the two")
    from streamrl.lab.tune import command
    from streamrl.lab.tune.search import Rule
    from streamrl.lab.tune.tuned import Limits, Runs

    rule = Rule(within=options.within, mean_age=options.mean_age)
    limits = Limits(**{name: getattr(options, name) for name in ("cores", "gpus", "oldest", "doubling", "points")})
    runs = Runs(folder=options.folder, steps=options.steps, budget=options.budget, others=tuple(options.also))
    files = {"output": options.output, "figures": options.json}
    return command.main(options.config, options.override, rule, limits, runs, **files)


def plan(options: argparse.Namespace) -> int:
    from streamrl.lab.plan import command
    from streamrl.lab.plan.machines import Machines

    machines = Machines.of(options)
    files = {"shape": options.shape, "figures": options.figures, "output": options.json}
    return command.main(options.config, options.override, machines, **files)


def convert(options: argparse.Namespace) -> int:
    from streamrl.lab import convert

    sizes = {name: getattr(options, name) for name in ("tensor", "pipeline", "expert")}
    how = {"dtype": options.dtype, "model": options.model, "family": options.family, "timeout": options.timeout}
    return convert.main(options.source, options.output, sizes, **how)


def doctor(options: argparse.Namespace) -> int:
    if options.gpu:
        from streamrl.lab.acceptance import command

        return command.main(quick=options.quick, only=options.only, output=options.json, model=options.model)
    given = {"--quick": options.quick, "--only": options.only, "--json": options.json, "--model": options.model}
    for flag in (flag for flag, value in given.items() if value):
        raise ConfigError(f"{flag}: it is of the acceptance run; allowed: with --gpu")
    from streamrl.lab import doctor

    return doctor.main()


def _role(options: argparse.Namespace, name: str) -> tuple[Config, Path]:
    """The configuration and run folder of a role: an existing run, or one made from a configuration.

    This process is the only `name` of the run from now on.
    """
    from streamrl import locks, run_folder
    from streamrl.lifeline import end_with

    if (options.config is None) == (options.run_folder is None):
        raise ConfigError("a role takes either CONFIG [key=value ...] or --run-folder RUN; allowed: one of the two")
    if options.run_folder is None:
        config = with_dtype(with_local_models(config_file.load(options.config, options.override)))
        folder = run_folder.prepare(config, fresh=False)
        if config.run.epochs is not None:
            config = with_local_model(load_run(folder))  # has them as steps
        senseless.warn([*senseless.warnings(config), *left_out.load(folder).lines()])
    else:
        folder = run_folder_of(options.run_folder)
        config = with_local_model(load_run(folder))
    if options.lifeline:
        end_with({*options.lifeline, os.getppid()}, grace=config.run.stop_timeout)  # the parent may be torchrun
    locks.claim(folder, name, timeout=config.run.start_timeout)
    return config, folder
