"""The command line: one thin function a command, exit codes 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from streamrl import __version__, commands
from streamrl.config import file as config_file
from streamrl.config import flags
from streamrl.config.file import ConfigError
from streamrl.config.shipped import config_path
from streamrl.observe.unwritten import settle
from streamrl.replay.segments import JournalDamaged
from streamrl.sft import parsers as sft
from streamrl.starter import parsers as starter


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    takes_keys = False  # of the configuration: its help ends with their reference, which takes a while to write

    def format_help(self) -> str:
        if self.takes_keys:
            self.epilog = f"keys, defaults, [allowed values]:\n{config_file.describe()}"
        return super().format_help()

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
    finally:
        settle()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides may also come after a flag, where argparse leaves them over."""
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
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    _add_train(subparsers)
    sft.add_command(subparsers, _command, _add_config)
    for add in (
        _add_roles, _add_evaluation, _add_audit, _add_retrain, _add_sweep, _add_trace, _add_top, _add_report,
        _add_records, _add_simulate, _add_tune, _add_plan, _add_convert, _add_doctor,
    ):  # fmt: skip
        add(subparsers)
    starter.add_commands(subparsers, _command)
    return parser


def _add_train(subparsers: argparse._SubParsersAction) -> None:
    train = _command(subparsers, "train", commands.train, "start a run on this machine, or resume it")
    _add_config(train, optional=False)
    train.add_argument("--fresh", action="store_true", help="keep an existing run folder as NAME.1 and start a new one")
    train.add_argument("--dry-run", action="store_true", help="check everything, print what would start, start nothing")
    train.add_argument("--gpus", type=flags.index, metavar="N", help="with --dry-run: as on a machine with N GPUs")


def _add_roles(subparsers: argparse._SubParsersAction) -> None:
    for name, function, text in (
        ("replay", commands.replay, "the replay service of a run"),
        ("generator", commands.generator, "one generator worker of a run, with its SGLang server"),
        ("reward-model", commands.reward_model, "one reward model of a run (reward_model.path)"),
        ("learner", commands.learner, "one rank of the learner (start it under torchrun)"),
    ):
        role = _command(subparsers, name, function, text)
        _add_config(role, optional=True)
        role.add_argument("--run-folder", type=Path, help="an existing run, instead of CONFIG")
        role.add_argument(
            "--lifeline", type=flags.count, action="append", metavar="PID", help="end when this process ends"
        )
        if name in ("generator", "reward-model"):
            role.add_argument("--index", type=flags.index, default=0, help="number of the worker")
        if name == "generator":
            role.add_argument(
                "--node", type=flags.index, default=0, help="of its server's nodes; not 0: only the server's part there"
            )


def _add_evaluation(subparsers: argparse._SubParsersAction) -> None:
    evaluation = _command(
        subparsers, "eval", commands.evaluate, "measure weights on held-out prompts: pass@k, greedy, length"
    )
    _add_config(evaluation, optional=True, read=str)  # with --run-folder it is an override
    evaluation.add_argument("--run-folder", type=Path, help="an existing run, instead of CONFIG")
    evaluation.add_argument("--version", help="kept version of the run, STEP.INCARNATION (default: the newest)")
    evaluation.add_argument("--model", type=Path, help="model folder whose weights are measured instead")
    evaluation.add_argument("--output", type=Path, help="new folder (default: evaluations/NAME in the run folder)")


def _add_audit(subparsers: argparse._SubParsersAction) -> None:
    audit = _command(subparsers, "audit", commands.audit, "check a run's guarantees from what it recorded")
    audit.add_argument("run", type=Path, help="run folder")
    audit.add_argument(
        "--tolerance",
        type=flags.limit,
        help="largest log-prob difference of a token, in nats (default: 1e-4 in float32, 3 times its own rounding in "
        "bfloat16); the limits of the 99th percentile and of the mean stay",
    )


def _add_retrain(subparsers: argparse._SubParsersAction) -> None:
    retrain = _command(subparsers, "retrain", commands.retrain, "train the learner again from a run's recorded groups")
    retrain.add_argument("run", type=Path, help="run folder")
    retrain.add_argument("--output", type=Path, required=True, help="new folder for metrics and checkpoints")
    retrain.add_argument("--steps", type=flags.count, help="learner steps (default: all that are recorded)")
    retrain.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="key=value",
        help="keys of algo, critic, learner, checkpoint and observe, and run.placement, that differ from the run's: "
        "the same data, trained otherwise",
    )  # fmt: skip


def _add_sweep(subparsers: argparse._SubParsersAction) -> None:
    sweep = _command(subparsers, "sweep", commands.sweep, "run many settings with several seeds, and compare them")
    sweep.add_argument("file", type=config_path, help="YAML: base, set, grid, points, seeds (docs/sweep.md)")
    sweep.add_argument("override", nargs="*", metavar="key=value", help="keys of the configuration, for every point")
    sweep.add_argument("--fresh", action="store_true", help="keep a former sweep as NAME.1 and start a new one")
    part = sweep.add_mutually_exclusive_group()
    text = "print one command line a run, for separate machines, and start nothing"
    part.add_argument("--print-jobs", dest="part", action="store_const", const="jobs", help=text)
    text = "table and plots of what is there; start nothing"
    part.add_argument("--results", dest="part", action="store_const", const="results", help=text)
    sweep.set_defaults(part="all")


def _add_trace(subparsers: argparse._SubParsersAction) -> None:
    trace = _command(subparsers, "trace", commands.trace, "write what every process did: a trace, or a line a second")
    trace.add_argument("run", type=Path, help="run folder")
    trace.add_argument(
        "-o", "--output", type=Path, help="FILE.json for Perfetto (default: trace.json in the run folder), or FILE.csv"
    )


def _add_top(subparsers: argparse._SubParsersAction) -> None:
    top = _command(subparsers, "top", commands.top, "show a run as it goes on: what each role does and who holds it up")
    top.add_argument("run", type=Path, nargs="?", help="run folder; also of a run on other hosts, or one that is over")
    top.add_argument("--url", metavar="URL", help="http://HOST:PORT of a run's Prometheus endpoint, instead of RUN")
    top.add_argument("--once", action="store_true", help="show it as it is now, and end")
    top.add_argument("--every", type=flags.seconds, default=1.0, metavar="SECONDS", help="time between two looks")
    top.add_argument(
        "--port", type=flags.port, help="serve the Prometheus endpoint on this port of 127.0.0.1 meanwhile"
    )


def _add_report(subparsers: argparse._SubParsersAction) -> None:
    report = _command(subparsers, "report", commands.report, "write one HTML page about one or several runs")
    report.add_argument("run", type=Path, nargs="+", help="run folder")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    report.add_argument(
        "--ratios",
        choices=("auto", "yes", "no"),
        default="auto",
        help="compute log-prob ratios of the shown tokens from kept weights (auto: of up to 1 GiB a version)",
    )


def _add_records(subparsers: argparse._SubParsersAction) -> None:
    """The commands that show what a run has recorded."""
    journal = _command(subparsers, "journal", commands.journal, "show, verify or export what a run's journal holds")
    journal.add_argument("run", type=Path, help="run folder")
    journal.add_argument("--verify", action="store_true", help="read every byte; exit code 1 for anything damaged")
    journal.add_argument("--export", type=Path, metavar="FILE", help="write all samples to FILE.jsonl or FILE.parquet")

    group = _command(
        subparsers, "group", commands.group, "print the life of one group: tickets, workers, refusals, step, checkpoint"
    )
    group.add_argument("run", type=Path, help="run folder")
    group.add_argument("id", type=int, help="the group's id")
    group.add_argument("--json", action="store_true", help="as one line of JSON")


def _add_simulate(subparsers: argparse._SubParsersAction) -> None:
    simulate = _command(subparsers, "simulate", commands.simulate, "say what a run would have been with other settings")
    simulate.add_argument("run", nargs="?", help="run folder; for --validate a configuration file, too")
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
    simulate.add_argument("--steps", type=flags.count, help="--validate: learner steps of each real run (default: 30)")
    simulate.add_argument("--fleet", type=Path, metavar="FILE", help="plan fleets from the figures in a YAML file")
    simulate.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")


def _add_tune(subparsers: argparse._SubParsersAction) -> None:
    text = "choose bound, window, groups in flight, publish interval, servers and ranks by simulation"
    tune = _command(subparsers, "tune", commands.tune, text)
    tune.add_argument(
        "config", type=config_path, metavar="CONFIG", help="YAML file; a finished run's folder: no new run"
    )
    tune.add_argument("override", nargs="*", metavar="key=value", help="keys that differ from the file")
    tune.add_argument("--also", type=Path, action="append", default=[], metavar="RUN", help="calibrate by it, too")
    tune.add_argument("--folder", type=Path, help="of the calibration runs (default: runs/NAME-tune)")
    tune.add_argument("--steps", type=flags.count, help="learner steps of a calibration run (default: 30)")
    tune.add_argument("--budget", type=flags.seconds, metavar="SECONDS", help="of all of them (default: 3600)")
    for name, unit in (("cores", "cores"), ("gpus", "GPUs")):
        tune.add_argument(f"--{name}", type=flags.count, metavar="N", help=f"{unit} to divide (default: those in use)")
    tune.add_argument(
        "--oldest", type=flags.limit, metavar="S", help="largest bound (default: 8, or the configuration's)"
    )
    tune.add_argument("--mean-age", type=flags.limit, metavar="STEPS", help="mean age of trained tokens at the most")
    tune.add_argument(
        "--within", type=flags.share, default=0.02, metavar="SHARE",
        help="of the fastest one's tokens/s, given up for fresher data (default: 0.02)",
    )  # fmt: skip
    tune.add_argument(
        "--doubling", type=flags.share, default=0.9, metavar="SHARE",
        help="of a rank's tokens/s that each doubling of unmeasured ranks keeps (default: 0.9)",
    )  # fmt: skip
    tune.add_argument("--points", type=flags.count, default=200, help="settings to simulate at the most (default: 200)")
    tune.add_argument("-o", "--output", type=Path, metavar="FILE.yaml", help="write a configuration with the choice")
    tune.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")


def _add_plan(subparsers: argparse._SubParsersAction) -> None:
    from streamrl.lab.plan.machines import add_flags

    plan = _command(
        subparsers, "plan", commands.plan, "say what a launch will use, and refuse what cannot fit; start nothing"
    )
    plan.add_argument("config", type=config_path, help="YAML file")
    plan.add_argument("override", nargs="*", metavar="key=value", help="keys that differ from the file")
    plan.add_argument("--shape", type=config_path, metavar="FILE", help="a config.json (else the model's)")
    plan.add_argument(
        "--figures", type=Path, metavar="FILE", help="of a server and the learner, as for simulate --fleet"
    )
    plan.add_argument("--json", type=Path, metavar="PATH", help="write the plan here")
    add_flags(plan)


def _add_convert(subparsers: argparse._SubParsersAction) -> None:
    text = "turn a Hugging Face folder into a Megatron checkpoint, or back"
    convert = _command(subparsers, "convert", commands.convert, text)
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


def _add_doctor(subparsers: argparse._SubParsersAction) -> None:
    text = "say what is installed, which accelerators there are, which paths are taken"
    doctor = _command(subparsers, "doctor", commands.doctor, text)
    doctor.add_argument("--gpu", action="store_true", help="try everything that a GPU machine has to show, in a table")
    doctor.add_argument("--quick", action="store_true", help="with --gpu: smaller batches")
    doctor.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="with --gpu: these checks, or groups")
    doctor.add_argument("--model", type=Path, metavar="FOLDER", help="with --gpu: measured in a tiny one's place")
    doctor.add_argument("--json", type=Path, metavar="PATH", help="with --gpu: write the table here")


def _command(subparsers: argparse._SubParsersAction, name: str, function: object, text: str) -> _Parser:
    parser: _Parser = subparsers.add_parser(
        name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=function)
    return parser


def _add_config(parser: _Parser, *, optional: bool, read: Callable[[str], Any] = config_path) -> None:
    parser.add_argument("config", type=read, nargs="?" if optional else None, help="YAML file")
    parser.add_argument("override", nargs="*", metavar="key=value", help="keys that differ from the file")
    parser.takes_keys = True


if __name__ == "__main__":
    raise SystemExit(main())
