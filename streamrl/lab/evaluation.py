"""`streamrl eval`: one set of weights, measured on held-out prompts.

weights of a run's version, of a model folder, or of model.path ─▶ server, or a model in this process ─┐
weights that an endpoint has ─▶ that endpoint ─────────────────────────────────────────────────────────┤
                                                                                                       └▶ evaluate/
What answers is `evaluate.engine`; evaluate/ gives the table and the files.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console as Terminal
from rich.table import Table

from streamrl.config import Config, senseless
from streamrl.config.file import ConfigError
from streamrl.config.learner import LoraConfig
from streamrl.engine.client import EngineError
from streamrl.engine.hardware import has_cuda
from streamrl.engine.server import ServerFailed
from streamrl.evaluate.estimate import Mean
from streamrl.evaluate.evaluator import ORDER, check_evaluated, evaluate, host_evaluated
from streamrl.evaluate.files import evaluation_folder, free_folder, write
from streamrl.evaluate.results import Evaluation, Question
from streamrl.generate.engines import make_engine
from streamrl.generate.engines.base import Engine
from streamrl.generate.frozen import VERSION
from streamrl.hub.model import with_local_model
from streamrl.hub.repository import label
from streamrl.lab.output import check_new_folder
from streamrl.observe.bars import Bar
from streamrl.observe.ending import MODEL, saved_model
from streamrl.preflight.machine import check_generator, check_served, rounding
from streamrl.publish.peft import is_adapter
from streamrl.recorded.weights import kept_versions
from streamrl.tasks import left_out
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.hosted import close_tasks
from streamrl.tasks.left_out import OfTask
from streamrl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Weights:
    """What is evaluated: a folder with whole weights or with adapters, and what it is called."""

    folder: Path
    label: str
    step: int | None = None  # learner steps in them, where a run made them


def main(config: Config, run_folder: Path | None, version: str | None, model: Path | None, output: Path | None) -> int:
    """Evaluate, write the files, print the table. Returns 0; 1 when the server failed or gave no answer at all.

    run_folder: of an existing run, whose kept `version` is meant (None: the newest, which may be its trained model).
    model: a folder instead.
    output: a new folder; None: RUN/evaluations/NAME, with a number behind it where that is taken. Raises ConfigError.
    """
    if output is not None and output.exists():
        raise ConfigError(f"--output: {output} exists; allowed: a new folder")
    check_new_folder("--output", output)
    if model is None or is_adapter(model):  # else the configuration's own is not loaded
        config = with_local_model(config)
    engine = make_engine(config.evaluate.engine, config.evaluate.engine_options)
    weights, served = evaluated(engine, config, run_folder, version, model)
    if engine.trains:
        check_generator(served.generate.each_pool)
        if has_cuda():
            check_served(served)
    try:
        check_evaluated(served)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    senseless.warn(rounding(served) if engine.trains else ())
    too_long = {} if run_folder is None else left_out.load(run_folder).evaluated
    try:
        evaluation, questions = uvloop.run(_evaluate(engine, served, weights, too_long))
    except (ServerFailed, EngineError, ScorerUnready, OSError) as failure:
        print(f"streamrl: {failure}", file=sys.stderr)
        return 1
    _print(evaluation)
    folder = output or free_folder(evaluation_folder(run_folder or config.run_folder, weights.label))
    try:
        write(folder, evaluation, questions)
    except OSError as failure:
        print(f"streamrl: {folder}: {failure.strerror}: the answers are not written", file=sys.stderr)
        return 1
    print(f"every answer: {folder / 'index.html'}")
    return 0 if any(found.answers for found in evaluation.tasks.values()) else 1


def evaluated(
    engine: Engine, config: Config, run_folder: Path | None, version: str | None, model: Path | None
) -> tuple[Weights, Config]:
    """What is evaluated, and the configuration of what answers. Raises ConfigError where they do not go together."""
    name = config.evaluate.engine
    if engine.loads_weights:
        weights = choose_weights(config, run_folder, version, model)
        if is_adapter(weights.folder) and not engine.loads_adapters:
            raise ConfigError(
                f"{weights.folder}: holds adapters, and evaluate.engine={name} loads whole weights; allowed: a folder "
                "with whole weights, or another engine"
            )
        return weights, serving_config(config, weights)
    for option, given in (("--version", version), ("--model", model)):
        if given is not None:
            raise ConfigError(
                f"{option}: {given} is not what evaluate.engine={name} answers with, which has weights of its own; "
                f"allowed: no {option}"
            )
    return Weights(config.model.path, engine.label), config


def choose_weights(config: Config, run_folder: Path | None, version: str | None, model: Path | None) -> Weights:
    """The weights that the options name. Raises ConfigError where there are none."""
    if model is not None:
        if not is_adapter(model) and not (model / "config.json").exists():
            raise ConfigError(
                f"--model: {model} is no model; allowed: a Hugging Face folder (config.json, safetensors, tokenizer), "
                "with whole weights or adapters"
            )
        return Weights(model, model.resolve().name)
    if run_folder is None:
        return Weights(config.model.path, label(config.model.path.resolve()), step=0)
    kept = kept_versions(run_folder)
    if (trained := saved_model(run_folder)) is not None:
        kept[trained] = run_folder / MODEL
    if not kept:
        raise ConfigError(
            f"{run_folder}: no version was kept (publish.keep_every), nor a trained model written "
            "(checkpoint.export); allowed: --model FOLDER"
        )
    wanted = max(kept) if version is None else _parse(version)
    if wanted not in kept:
        raise ConfigError(f"--version: {version} was not kept; allowed: {', '.join(map(str, sorted(kept)))}")
    return Weights(kept[wanted], str(wanted), wanted.step)


def serving_config(config: Config, weights: Weights) -> Config:
    """`config` for one server of our own, in the first pool's settings, that starts with `weights`.

    Raises ConfigError for a folder that is no model, or an adapter of another rank or base than the configuration's.
    """
    own = config.generate.each_pool[0].model_copy(update={"workers": 1, "attach": ()})
    evaluated = config.model_copy(update={"generate": own})
    lora = config.learner.lora
    if is_adapter(weights.folder):
        if not lora.by_adapter:
            raise ConfigError(
                f"{weights.folder}: holds adapters, learner.lora.rank={lora.rank}; allowed: a configuration with "
                "adapters (learner.lora.publish=adapter), or a folder with whole weights"
            )
        return _with_lora(evaluated, lora.model_copy(update={"adapter": weights.folder}))
    if not (weights.folder / "config.json").exists():
        raise ConfigError(
            f"model.path: {weights.folder} is no model; allowed: a Hugging Face folder (config.json, safetensors, "
            "tokenizer)"
        )
    if weights.folder == config.model.path:
        return evaluated
    model = config.model.model_copy(update={"path": weights.folder})
    return _with_lora(evaluated.model_copy(update={"model": model}), LoraConfig())


def _with_lora(config: Config, lora: LoraConfig) -> Config:
    return config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})


def _parse(version: str) -> PolicyVersion:
    try:
        return PolicyVersion.parse(version)
    except ValueError as error:
        raise ConfigError(f"--version: {error}") from None


async def _evaluate(
    engine: Engine, config: Config, weights: Weights, too_long: Mapping[str, OfTask]
) -> tuple[Evaluation, dict[str, list[Question]]]:
    """Evaluate by what the engine serves. `too_long`: what the run leaves out of the same data.

    Raises ServerFailed, EngineError, ScorerUnready.
    """
    sampling = config.evaluate.sampling(config.generate.sampling)
    asked = config.model_copy(update={"generate": config.generate.model_copy(update={"sampling": sampling})})
    async with contextlib.AsyncExitStack() as stack:
        # A run's own servers keep their logs and keys.
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-eval-")))
        tasks = await host_evaluated(config)
        stack.push_async_callback(close_tasks, tasks)
        left_out.apply(
            {name: task for name, task in tasks.items() if name in too_long and too_long[name].size == task.size},
            too_long,
            ORDER,
        )
        with Bar("server", "ready", 1):
            handles = await stack.enter_async_context(engine.handles(asked, scratch))
        with Bar("eval", "prompts") as bar:
            return await evaluate(
                config, tasks, handles, VERSION, label=weights.label, step=weights.step, report=bar.reach
            )


def _print(evaluation: Evaluation) -> None:
    """The figures with their standard errors."""
    terminal = Terminal()
    table = Table("task", "figure", title=f"Evaluation of {evaluation.label}", title_justify="left")
    table.add_column("value", justify="right", no_wrap=True)
    for task, found in evaluation.tasks.items():
        figures = {name: _cell(figure) for name, figure in found.figures.items()}
        rows = {"prompts": str(found.prompts), **figures, "unanswered": f"{found.unanswered:.1%}"}
        for place, (name, value) in enumerate(rows.items(), start=1):
            table.add_row(task if place == 1 else "", name, value, end_section=place == len(rows))
    terminal.print(table)
    for task, found in evaluation.tasks.items():
        for reason in found.reasons:
            terminal.print(f"{task}: answers are missing: {reason}", markup=False, soft_wrap=True)
    if not evaluation.complete:
        terminal.print("not every prompt was asked in evaluate.timeout")


def _cell(figure: Mean) -> str:
    return f"{figure.value:.3f}" if figure.error is None else f"{figure.value:.3f} ± {figure.error:.3f}"
