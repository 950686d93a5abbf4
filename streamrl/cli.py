"""The command line: one thin function a command, exit codes 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from streamrl import __version__
from streamrl.config import Config, flags, senseless
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.shipped import config_path
from streamrl.engine.hardware import has_cuda
from streamrl.hub.model import with_local_model, with_local_models, with_local_teacher
from streamrl.learner_environment import learner_environment
from streamrl.places import RECORD, load_run, run_folder_of
from streamrl.recorded.formats import answered_run, recorded_run
from streamrl.replay.segments import JournalDamaged
from streamrl.sft import parsers as sft
from streamrl.starter import parsers as starter
from streamrl.tasks import left_out


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the user's own modules are found by dotted path, as under `python -m`
    options = _parse(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it tells at every import what it did not find
    try:
        return int(options.command(options))
    except ConfigError as error:
        for line in config_file.located(
            error.lines, getattr(options, "config", None), getattr(options, "override", ())
        ):
            print(f"streamrl: {line}", file=sys.stderr)
        return 2
    except JournalDamaged as error:
        print(f"streamrl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _train(options: argparse.Namespace) -> int:
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


def _sweep(options: argparse.Namespace) -> int:
    from streamrl.lab.sweep import command

    return command.main(options.file, options.override, _run, part=options.part, fresh=options.fresh)


def _replay(options: argparse.Namespace) -> int:
    from streamrl.replay import service

    return service.main(*_role(options, "replay-0"))


def _generator(options: argparse.Namespace) -> int:
    from streamrl.evaluate.in_run import RunEvaluator
    from streamrl.generate import worker
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
    return worker.main(config, folder, options.index, RunEvaluator)


def _learner(options: argparse.Namespace) -> int:
    from streamrl.preflight import machine

    machine.check_learner()
    config, folder = _role(options, f"learner-{os.environ.get('RANK', '0')}")
    if has_cuda():
        os.environ.update(learner_environment(config, os.environ))
    from streamrl.learner import role

    return role.main(with_local_teacher(config), folder)


def _eval(options: argparse.Namespace) -> int:
    """Of a configuration, or of an existing run with its own, which `key=value` may change as well."""
    if options.run_folder is not None and options.config is not None:
        options.override.insert(0, str(options.config))  # what stands behind --run-folder is no file
        options.config = None
    if (options.config is None) == (options.run_folder is None):
        raise ConfigError("eval takes either CONFIG [key=value ...] or --run-folder RUN; allowed: one of the two")
    if options.version is not None and (options.run_folder is None or options.model is not None):
        raise ConfigError("--version: names the weights of a run; allowed: with --run-folder and without --model")
    if options.config is not None:
        config = config_file.load(options.config, options.override)
    else:
        config = load_run(run_folder_of(options.run_folder), options.override)
    from streamrl.lab import evaluation

    return evaluation.main(with_local_model(config), options.run_folder, options.version, options.model, options.output)


def _audit(options: argparse.Namespace) -> int:
    run_folder = answered_run(options.run)
    from streamrl.lab import audit

    return audit.main(run_folder, options.tolerance)


def _retrain(options: argparse.Namespace) -> int:
    run_folder = answered_run(options.run)
    from streamrl.lab import retrain

    return retrain.main(run_folder, options.output, options.steps, options.set)


def _journal(options: argparse.Namespace) -> int:
    run_folder = recorded_run(options.run)
    from streamrl.lab import journal

    return journal.main(run_folder, options.verify, options.export)


def _group(options: argparse.Namespace) -> int:
    run_folder = run_folder_of(options.run)
    from streamrl.lab import group

    return group.main(run_folder, options.id, options.json)


def _trace(options: argparse.Namespace) -> int:
    run_folder = recorded_run(options.run)
    from streamrl.lab import trace

    return trace.main(run_folder, options.output)


def _top(options: argparse.Namespace) -> int:
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


def _report(options: argparse.Namespace) -> int:
    run_folders = [recorded_run(run) for run in options.run]
    from streamrl.lab.report import command

    return command.main(run_folders, options.output, options.ratios)


def _simulate(options: argparse.Namespace) -> int:
    """Of a recorded run, or of a fleet that a file describes: then what stands in RUN's place is an override."""
    if options.fleet is not None:
        from streamrl.lab.simulate import command

        overrides = ([str(options.run)] if options.run is not None else []) + options.override
        return command.main_fleet(options.fleet, overrides, options.json)
    if options.run is None:
        raise ConfigError("simulate takes either RUN [key=value ...] or --fleet FILE; allowed: one of the two")
    from streamrl.lab.simulate import command

    if options.validate is not None:
        config = options.run if options.run.is_file() else recorded_run(options.run) / RECORD
        return command.main_validate(config, options.override, options.validate, options.steps, options.json)
    run_folder = answered_run(options.run)
    return command.main(run_folder, options.override, vary=options.vary, others=options.also, output=options.json)


def _plan(options: argparse.Namespace) -> int:
    from streamrl.lab.plan import command
    from streamrl.lab.plan.machines import Machines

    machines = Machines.of(options)
    files = {"shape": options.shape, "figures": options.figures, "output": options.json}
    return command.main(options.config, options.override, machines, **files)


def _convert(options: argparse.Namespace) -> int:
    from streamrl.lab import convert

    sizes = {name: getattr(options, name) for name in ("tensor", "pipeline", "expert")}
    how = {"dtype": options.dtype, "model": options.model, "family": options.family, "timeout": options.timeout}
    return convert.main(options.source, options.output, sizes, **how)


def _doctor(options: argparse.Namespace) -> int:
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
    from streamrl import run_folder
    from streamrl.lifeline import end_with

    if (options.config is None) == (options.run_folder is None):
        raise ConfigError("a role takes either CONFIG [key=value ...] or --run-folder RUN; allowed: one of the two")
    if options.run_folder is None:
        config = with_local_models(config_file.load(options.config, options.override))
        folder = run_folder.prepare(config, fresh=False)
        if config.run.epochs is not None:
            config = with_local_model(load_run(folder))  # has them as steps
        senseless.warn([*senseless.warnings(config), *left_out.load(folder).lines()])
    else:
        folder = run_folder_of(options.run_folder)
        config = with_local_model(load_run(folder))
    if options.lifeline:
        end_with({*options.lifeline, os.getppid()}, grace=config.run.stop_timeout)  # the parent may be torchrun
    run_folder.claim(folder, name, timeout=config.run.start_timeout)
    return config, folder


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides may also stand behind a flag, where argparse leaves them over."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and ("override" not in options or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.override += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="streamrl", description="Asynchronous off-policy streaming RL for language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    train = _command(commands, "train", _train, "start a run on this machine, or resume it")
    _add_config(train, optional=False)
    train.add_argument("--fresh", action="store_true", help="keep an existing run folder as NAME.1 and start anew")
    train.add_argument("--dry-run", action="store_true", help="check everything, print what would start, start nothing")
    train.add_argument("--gpus", type=flags.index, metavar="N", help="with --dry-run: as on a machine with N GPUs")

    sft.add_command(commands, _command, _add_config)

    for name, function, text in (
        ("replay", _replay, "the replay service of a run"),
        ("generator", _generator, "one generator worker of a run, with its SGLang server"),
        ("learner", _learner, "one rank of the learner (start it under torchrun)"),
    ):
        role = _command(commands, name, function, text)
        _add_config(role, optional=True)
        role.add_argument("--run-folder", type=Path, help="an existing run, instead of CONFIG")
        role.add_argument(
            "--lifeline", type=flags.count, action="append", metavar="PID", help="end when this process ends"
        )
        if name == "generator":
            role.add_argument("--index", type=flags.index, default=0, help="number of the worker")
            role.add_argument(
                "--node", type=flags.index, default=0, help="of its server's nodes; not 0: only the server's part there"
            )

    evaluation = _command(commands, "eval", _eval, "measure weights on held-out prompts: pass@k, greedy, length")
    _add_config(evaluation, optional=True)
    evaluation.add_argument("--run-folder", type=Path, help="an existing run, instead of CONFIG")
    evaluation.add_argument("--version", help="kept version of the run, STEP.INCARNATION (default: the newest)")
    evaluation.add_argument("--model", type=Path, help="model folder whose weights are measured instead")
    evaluation.add_argument("--output", type=Path, help="new folder (default: evaluations/NAME in the run folder)")

    _add_audit(commands)

    retrain = _command(commands, "retrain", _retrain, "train the learner again from a run's recorded groups")
    retrain.add_argument("run", type=Path, help="run folder")
    retrain.add_argument("--output", type=Path, required=True, help="new folder for metrics and checkpoints")
    retrain.add_argument("--steps", type=flags.count, help="learner steps (default: all that are recorded)")

    retrain.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="key=value",
        help="keys of algo and learner that differ from the run's: the same data, trained otherwise",
    )  # fmt: skip

    sweep = _command(commands, "sweep", _sweep, "run many settings with several seeds, and compare them")
    sweep.add_argument("file", type=config_path, help="YAML: base, set, grid, points, seeds (docs/sweep.md)")
    sweep.add_argument("override", nargs="*", metavar="key=value", help="keys of the configuration, for every point")
    sweep.add_argument("--fresh", action="store_true", help="keep a former sweep as NAME.1 and start anew")
    part = sweep.add_mutually_exclusive_group()
    for flag, text in (
        ("jobs", "print one command line a run, for separate machines, and start nothing"),
        ("results", "table and plots of what is there; start nothing"),
    ):
        part.add_argument(
            "--print-jobs" if flag == "jobs" else "--results", dest="part", action="store_const", const=flag, help=text
        )
    sweep.set_defaults(part="all")

    trace = _command(commands, "trace", _trace, "write what every process did: a trace, or a line a second")
    trace.add_argument("run", type=Path, help="run folder")
    trace.add_argument(
        "-o", "--output", type=Path, help="FILE.json for Perfetto (default: trace.json in the run folder), or FILE.csv"
    )

    top = _command(commands, "top", _top, "show a run as it goes on: what each role does and who holds it up")
    top.add_argument("run", type=Path, nargs="?", help="run folder; also of a run on other hosts, or one that is over")
    top.add_argument("--url", metavar="URL", help="http://HOST:PORT of a run's Prometheus endpoint, instead of RUN")
    top.add_argument("--once", action="store_true", help="show it as it is now, and end")
    top.add_argument("--every", type=flags.seconds, default=1.0, metavar="SECONDS", help="time between two looks")
    top.add_argument(
        "--port", type=flags.port, help="serve the Prometheus endpoint on this port of 127.0.0.1 meanwhile"
    )

    report = _command(commands, "report", _report, "write one HTML page about one or several runs")
    report.add_argument("run", type=Path, nargs="+", help="run folder")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    report.add_argument(
        "--ratios",
        choices=("auto", "yes", "no"),
        default="auto",
        help="compute log-prob ratios of the shown tokens from kept weights (auto: of up to 1 GiB a version)",
    )

    for add in (_add_records, _add_simulate, _add_plan, _add_convert, _add_doctor):
        add(commands)
    starter.add_commands(commands, _command)
    return parser


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    text = "say what is installed, which accelerators there are, which paths are taken"
    doctor = _command(commands, "doctor", _doctor, text)
    doctor.add_argument("--gpu", action="store_true", help="try everything that a GPU machine has to show, in a table")
    doctor.add_argument("--quick", action="store_true", help="with --gpu: smaller batches")
    doctor.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="with --gpu: these checks, or groups")
    doctor.add_argument("--model", type=Path, metavar="FOLDER", help="with --gpu: measured in a tiny one's place")
    doctor.add_argument("--json", type=Path, metavar="PATH", help="with --gpu: write the table here")


def _add_audit(commands: argparse._SubParsersAction) -> None:
    audit = _command(commands, "audit", _audit, "check a run's guarantees from what it recorded")
    audit.add_argument("run", type=Path, help="run folder")
    audit.add_argument(
        "--tolerance",
        type=flags.limit,
        help="largest log-prob difference of a token (default: 1e-4 in float32, 2 in bfloat16)",
    )


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    simulate = _command(commands, "simulate", _simulate, "say what a run would have been with other settings")
    simulate.add_argument("run", type=Path, nargs="?", help="run folder; for --validate a configuration file, too")
    simulate.add_argument("override", nargs="*", metavar="key=value", help="keys that differ from the run's")
    simulate.add_argument("--vary", action="append", default=[], metavar="KEY=V,V", help="a row for each of the values")
    simulate.add_argument("--also", type=Path, action="append", default=[], metavar="RUN", help="calibrate by it, too")
    simulate.add_argument(
        "--validate",
        type=flags.count,
        nargs="?",
        const=6,
        metavar="N",
        help="run N settings for real and compare (default: 6)",
    )
    simulate.add_argument("--steps", type=flags.count, default=30, help="learner steps of each real run (default: 30)")
    simulate.add_argument("--fleet", type=Path, metavar="FILE", help="plan fleets from the figures in a YAML file")
    simulate.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")


def _add_plan(commands: argparse._SubParsersAction) -> None:
    from streamrl.lab.plan.machines import add_flags

    plan = _command(commands, "plan", _plan, "say what a launch will use, and refuse what cannot fit; start nothing")
    plan.add_argument("config", type=config_path, help="YAML file")
    plan.add_argument("override", nargs="*", metavar="key=value", help="keys that differ from the file")
    plan.add_argument("--shape", type=config_path, metavar="FILE", help="a config.json (else the model's)")
    plan.add_argument(
        "--figures", type=Path, metavar="FILE", help="of a server and the learner, as for simulate --fleet"
    )
    plan.add_argument("--json", type=Path, metavar="PATH", help="write the plan here")
    add_flags(plan)


def _add_convert(commands: argparse._SubParsersAction) -> None:
    text = "turn a Hugging Face folder into a Megatron checkpoint, or back"
    convert = _command(commands, "convert", _convert, text)
    convert.add_argument("source", type=Path, metavar="SOURCE", help="Hugging Face folder, or Megatron checkpoint")
    convert.add_argument("output", type=Path, metavar="OUT", help="new folder, in the other form")
    for name, what in (("tensor", "tensor-parallel"), ("pipeline", "pipeline-parallel"), ("expert", "expert-parallel")):
        convert.add_argument(
            f"--{name}", type=flags.count, default=1, metavar="N", help=f"{what} size of the ranks (default: 1)"
        )
    convert.add_argument("--dtype", choices=("float32", "bfloat16"), help="of what is written (default: as stored)")
    convert.add_argument("--model", type=Path, metavar="FOLDER", help="config.json and tokenizer of a checkpoint")
    convert.add_argument(
        "--family", metavar="CLASS", help="as model.family (default: of the run, or by the architecture)"
    )
    convert.add_argument("--timeout", type=flags.seconds, default=3600.0, metavar="SECONDS", help="(default: 3600)")


def _add_records(commands: argparse._SubParsersAction) -> None:
    """The commands that show what a run has recorded."""
    journal = _command(commands, "journal", _journal, "show, verify or export what a run's journal holds")
    journal.add_argument("run", type=Path, help="run folder")
    journal.add_argument("--verify", action="store_true", help="read every byte; exit code 1 for anything damaged")
    journal.add_argument("--export", type=Path, metavar="FILE", help="write all samples to FILE.jsonl or FILE.parquet")

    group = _command(
        commands, "group", _group, "print the life of one group: tickets, workers, refusals, step, checkpoint"
    )
    group.add_argument("run", type=Path, help="run folder")
    group.add_argument("id", type=int, help="the group's id")
    group.add_argument("--json", action="store_true", help="as one line of JSON")


def _command(commands: argparse._SubParsersAction, name: str, function: object, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=function)
    return parser


def _add_config(parser: argparse.ArgumentParser, *, optional: bool) -> None:
    parser.add_argument("config", type=config_path, nargs="?" if optional else None, help="YAML file")
    parser.add_argument("override", nargs="*", metavar="key=value", help="keys that differ from the file")
    parser.epilog = f"keys, defaults, [allowed values]:\n{config_file.describe()}"


if __name__ == "__main__":
    raise SystemExit(main())
