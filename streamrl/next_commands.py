"""What a run leaves to a user, in lines that a shell of this folder takes as they are: where the model is, what to do.

The trained model is in runs/quickstart/model
  streamrl eval --run-folder runs/quickstart     # measure it
  ...
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from streamrl.config import Config
from streamrl.engine.hardware import has_cuda
from streamrl.engine.server import CPU_ARGUMENTS, command_line
from streamrl.observe.ending import ADAPTER, MODEL, saved_model, saved_steps
from streamrl.places import RECORD, program

# Without them SGLang looks for a GPU; the others of CPU_ARGUMENTS leave room for a learner beside the server.
_CPU_SERVER = ("device", "attention_backend", "sampling_backend")


def closing_lines(config: Config, run_folder: Path) -> list[str]:
    """At most 8 lines about a complete run: where its model is, then a command and its purpose each."""
    version, model = saved_model(run_folder), run_folder / MODEL
    run = _here(run_folder)
    commands = [(f"streamrl report {run}", "what happened, as one page")]
    if config.publish.keep_every > 0 and config.journal.keep == "all" and not config.trains_rows:
        commands.append((f"streamrl audit {run}", "check the record, each log-prob by the Hugging Face model"))
    commands.append(_go_on(config, run_folder))
    if version is not None and version.step >= config.run.steps:
        head = f"The trained model is in {_here(model)}:"
        commands[:0] = [(f"streamrl eval --run-folder {run}", "measure it"), (_serve(model), "serve it"),
                        (_transformers(model), "use it")]  # fmt: skip
    else:
        head = "The trained model is in the last checkpoint:"
        commands[:0] = [(command, "make a Hugging Face folder of it") for command in _convert(run_folder)]
    return [head, *(f"  {_called(command)}  # {purpose}" for command, purpose in commands)]


def train_line(config: Config, run_folder: Path, given: Path) -> str | None:
    """The command that goes on from a run of `streamrl sft` with reinforcement learning, by its configuration `given`.

    None for the record of a run, whose `algo` is not that of answers, and where there is no model.
    """
    if given.resolve() == (run_folder / RECORD).resolve() or saved_model(run_folder) is None:
        return None
    model = shlex.quote(f"model.path={_relative(run_folder / MODEL)}")
    command = f"streamrl train {_here(given)} run.name={_free_name(config, run_folder)} {model}"
    return f"{_called(command)}  # reinforcement learning from it"


def interrupted_line(run_folder: Path) -> str | None:
    """Where the weights of a run are that has not come to its end; None where it has saved none."""
    commands = _convert(run_folder)
    if not commands:
        return None
    newest = run_folder / "checkpoints" / f"step_{saved_steps(run_folder)[-1]}"
    return f"the newest checkpoint is {_here(newest)}; this makes a model of it: {_called(commands[0])}"


def _convert(run_folder: Path) -> Sequence[str]:
    """The command that makes a model of the newest checkpoint; none where there is no checkpoint."""
    steps = saved_steps(run_folder)
    if not steps:
        return ()
    target = run_folder / MODEL
    if target.exists():  # of another step
        target = target.with_name(f"{MODEL}-{steps[-1]}")
    return (f"streamrl convert {_here(run_folder / 'checkpoints' / f'step_{steps[-1]}')} {_here(target)}",)


def _serve(model: Path) -> str:
    if has_cuda():
        return f"python -m sglang.launch_server --model-path {_here(model)}"
    flags = shlex.join(command_line({name: CPU_ARGUMENTS[name] for name in _CPU_SERVER}))
    return f"python -m streamrl.engine.launch --model-path {_here(model)} {flags}"


def _transformers(model: Path) -> str:
    path = json.dumps(_relative(model), ensure_ascii=False)  # a string of Python, too, and without a shell's quotes
    code = f'from transformers import pipeline; print(pipeline("text-generation", {path})("Hello"))'
    return f"python -c {shlex.quote(code)}"


def _go_on(config: Config, run_folder: Path) -> tuple[str, str]:
    """Further steps of this run, or, where the schedule ends with it, a run that begins with its model."""
    command = f"streamrl {'sft' if config.trains_rows else 'train'} {_here(run_folder / RECORD)}"
    if config.learner.optimizer.decay == "constant":
        epochs = config.sft.epochs if config.trains_rows else None
        longer = f"run.steps={2 * config.run.steps}" if epochs is None else f"sft.epochs={2 * epochs}"
        return f"{command} {longer}", "train as long again"
    name = _free_name(config, run_folder)
    key, folder = ("learner.lora.adapter", ADAPTER) if config.learner.lora.by_adapter else ("model.path", MODEL)
    command = f"{command} run.name={name} {shlex.quote(f'{key}={_relative(run_folder / folder)}')}"
    return command, "a new run from its model: the learning rate's decay ends with run.steps"


def _free_name(config: Config, run_folder: Path) -> str:
    """A name that no run has yet."""
    names = (f"{config.run.name}-{number}" for number in itertools.count(2))
    return next(name for name in names if not run_folder.with_name(name).exists())


def _called(command: str) -> str:
    """`command` with the programs by the names under which a shell finds those of this process."""
    first, _, rest = command.partition(" ")
    found = program() if first == "streamrl" else _python()
    return f"{shlex.quote(found)} {rest}"


def _python() -> str:
    found = shutil.which("python")
    return "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable


def _here(path: Path) -> str:
    """`path` for a shell in the present folder."""
    return shlex.quote(_relative(path))


def _relative(path: Path) -> str:
    """From the present folder where it is below that one, else absolute; never like a flag."""
    whole = os.path.abspath(path)
    below = os.path.relpath(whole)
    if below.startswith(os.pardir):
        return whole
    return f"./{below}" if below.startswith("-") else below
