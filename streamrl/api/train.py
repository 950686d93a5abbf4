"""`streamrl.train`: a model, data and a reward as Python objects, and every key of the configuration by its name."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.api.following import Callbacks, Row
from streamrl.api.inputs import FOLDER, Data, Inputs
from streamrl.api.run import Run
from streamrl.choices import TASKS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.refused import Refusals
from streamrl.places import absolute
from streamrl.tasks.environment import Environment
from streamrl.tasks.functions.episodes import check_environment
from streamrl.tasks.functions.rewards import RewardFunction
from streamrl.tasks.functions.tools import tools_of

Reward = Callable[..., Any]

# Characters that YAML reads otherwise than JSON, or not at all, where they are not escaped.
_OTHERWISE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")

# Arguments that are keys of the configuration under a shorter name.
KEYS = {
    "model": "model.path",
    "name": "run.name",
    "steps": "run.steps",
    "seed": "run.seed",
    "group_size": "generate.group_size",
    "groups_per_step": "replay.groups_per_step",
    "max_staleness": "replay.max_staleness",
    "max_new_tokens": "generate.sampling.max_new_tokens",
    "temperature": "generate.sampling.temperature",
    "learning_rate": "learner.optimizer.lr",
    "max_turns": "task.args.max_turns",
}


def train(
    model: str | Path | None = None,
    dataset: Data | str | Path | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    environment: Callable[[], Any] | type[Environment] | None = None,
    eval_dataset: Data | str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    fresh: bool = False,
    on_step: Callable[[Row], Any] | None = None,
    on_checkpoint: Callable[[Path], Any] | None = None,
    on_evaluation: Callable[[Row], Any] | None = None,
    **keys: Any,
) -> Run:
    """Start a run on this machine, or resume the one of this name, and return at once with a handle to it.

    model: a folder, or a name of the Hugging Face hub. dataset: rows with a column `prompt` (text, or a list of chat
    messages), a `datasets.Dataset`, the path of a file, a data set's name on the hub, or a built-in task.
    eval_dataset: rows that are held out, instead of a part of the others.

    reward: one function or several, as TRL has them, `f(prompts, completions, **columns) -> list[float | None]`, or of
    one answer, `f(completion, **columns) -> float`; either may be `async`. reward_weights: one for each, default 1.
    tools: functions with types and a docstring. environment: a class with `reset` and `step`, one with `reset` and
    methods that are tools, or a subclass of `streamrl.tasks.environment.Environment`.

    config: a YAML file, or a mapping of sections. fresh: keep a run of this name as NAME.1, and start a new one.
    on_step and on_evaluation are called with a row of metrics, on_checkpoint with a folder, in a thread of their own;
    what they raise stops the run.

    keys: `steps`, `name`, `seed`, `group_size`, `groups_per_step`, `max_staleness` (steps), `max_new_tokens` (tokens),
    `temperature`, `learning_rate`, `max_turns`, and any key of the configuration: `learner__optimizer__lr=1e-5`, or
    `**{"learner.optimizer.lr": 1e-5}`. None is null for a key, and "not given" for a short name.

    Raises ConfigError, with a line for each mistake, for what cannot run and for arguments that would not be used,
    before anything is started or written.

    Example:
        run = streamrl.train("models/tiny", [{"prompt": "ab="}, {"prompt": "ba="}], lambda completions, **_: [...])
    """
    path, base = _base(config)
    given = _overrides({"model": model, **keys})
    _refuse_callbacks(on_step=on_step, on_checkpoint=on_checkpoint, on_evaluation=on_evaluation)
    _refuse_unused(
        dataset=dataset, reward=reward, reward_weights=reward_weights, tools=tools or None, environment=environment,
        eval_dataset=eval_dataset,
    )  # fmt: skip
    inputs: Inputs | None = None
    if dataset is not None or reward is not None or tools or environment is not None:
        inputs = Inputs(absolute(config_file.load(path, [*base, *given])).run_folder / FOLDER)
        asked = Asked(_rewards(reward, reward_weights), tools, environment)
        if keys.get("max_turns") is not None and not tools and environment is None and not _is_built_in(dataset):
            raise ConfigError("max_turns: an answer is one turn here; allowed: beside tools or environment")
        base += _task(inputs, dataset, eval_dataset, asked)
    run = Run(config_file.load(path, [*base, *given]), inputs, Callbacks(on_step, on_checkpoint, on_evaluation))
    return run.start(fresh=fresh)


def _base(config: Any) -> tuple[Path | None, list[str]]:
    """The file, or the keys, that a call builds on. Raises ConfigError for what is neither."""
    if config is None:
        return None, []
    if isinstance(config, str | Path):
        return Path(config), []
    if isinstance(config, Config):
        config = config_file.as_tree(config)
    if not isinstance(config, Mapping):
        kind = type(config).__name__
        raise ConfigError(f"config: a value of type {kind} is not allowed; allowed: a YAML file, a mapping of sections")
    return None, [_override(key, value) for key, value in config.items()]


def _refuse_callbacks(**given: Any) -> None:
    """Refuse what cannot be called. Raises ConfigError, with a line for each."""
    refusals = Refusals()
    refusals.add(
        *(
            f"{name}: {value!r} is not allowed; allowed: a function"
            for name, value in given.items()
            if value is not None and not callable(value)
        )
    )
    refusals.tell()


@dataclass(frozen=True, slots=True)
class Asked:
    """The functions of a call."""

    rewards: Sequence[RewardFunction]
    tools: Sequence[Callable[..., Any]]
    environment: Callable[[], Any] | None


def _refuse_unused(**given: Any) -> None:
    """Refuse arguments that this form of a call has no use for. Raises ConfigError, with a line for each."""
    dataset, environment = given["dataset"], given["environment"]
    names = {name for name, value in given.items() if value is not None}
    if _is_task(environment):
        unused, form = names - {"environment"}, f"{environment.__name__}, a task of its own,"
        allowed = "an environment that is no subclass of Environment, and gets the rows of dataset"
    elif _is_built_in(dataset) and not given["reward"]:
        unused, form = names - {"dataset", "reward"}, f"the built-in task {dataset}"
        allowed = "rows, a file or a hub name as dataset"
    else:
        unused = names if names <= {"eval_dataset", "reward_weights"} else set()
        form, allowed = "the task of the configuration", "beside dataset and reward"
    refusals = Refusals()
    refusals.add(*(f"{name}: {form} has no use for it; allowed: {allowed}" for name in given if name in unused))
    refusals.tell()


def _is_task(environment: Any) -> bool:
    return isinstance(environment, type) and issubclass(environment, Environment)


def _is_built_in(dataset: Any) -> bool:
    return isinstance(dataset, str) and dataset in TASKS.names


def _task(
    inputs: Inputs,
    dataset: Data | str | Path | None,
    eval_dataset: Data | str | Path | None,
    asked: Asked,
) -> list[str]:
    """What the configuration says of the task. Raises ConfigError."""
    rewards, environment = asked.rewards, asked.environment
    if environment is not None and _is_task(environment):
        return [_override("task.name", inputs.set_task((), (), environment))]
    if _is_built_in(dataset) and not rewards:
        return [_override("task.name", dataset)]
    if dataset is None:
        raise ConfigError(
            "dataset: none was given; allowed: rows with a prompt, a datasets.Dataset, a file, a hub name"
        )
    if not rewards and environment is None:
        raise ConfigError(f"reward: none was given; allowed: a function, or as dataset one of {', '.join(TASKS.names)}")
    if not isinstance(asked.tools, Sequence):
        raise ConfigError(f"tools: {asked.tools!r} is not allowed; allowed: a list of functions")
    try:
        check_environment(environment, tools_of(asked.tools))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    args = {"path": dataset, "test_path": eval_dataset}
    for key, data in {"dataset": dataset, "eval_dataset": eval_dataset}.items():
        if data is not None and not isinstance(data, str | Path):
            args["path" if key == "dataset" else "test_path"] = inputs.add_data(
                key, data, numbered=environment is not None
            )
    task = inputs.set_task(rewards, asked.tools, environment)
    given = {key: str(value) for key, value in args.items() if value is not None}
    return [_override("task.name", task), *(_override(f"task.args.{key}", value) for key, value in given.items())]


def _rewards(reward: Reward | Sequence[Reward] | None, weights: Sequence[float] | None) -> list[RewardFunction]:
    """Raises ConfigError for what is no function, and for another number of weights."""
    given: list[Any] = [] if reward is None else list(reward) if isinstance(reward, list | tuple) else [reward]
    for each in given:
        if not callable(each):
            raise ConfigError(f"reward: {each!r} is not allowed; allowed: a function, or a list of functions")
    try:
        each_weight = [1.0] * len(given) if weights is None else [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise ConfigError(f"reward_weights: {weights!r} is not allowed; allowed: a list of numbers") from None
    if len(each_weight) != len(given):
        raise ConfigError(f"reward_weights: {len(each_weight)} for {len(given)} rewards; allowed: one for each")
    try:
        return [RewardFunction(each, weight) for each, weight in zip(given, each_weight, strict=True)]
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _overrides(keys: Mapping[str, Any]) -> list[str]:
    """As on the command line: `key=value`.

    Raises ConfigError, with a line for each that is neither an argument nor a key, or the same key as another one.
    """
    known = inspect.signature(train).parameters
    found: dict[str, str] = {}
    names: dict[str, str] = {}
    refusals = Refusals()
    for name, value in keys.items():
        key = KEYS.get(name) or name.replace("__", ".")
        if value is None and (name in KEYS or "." not in key):
            continue  # not given
        if "." not in key and not isinstance(value, Mapping):
            allowed = ", ".join([*(each for each in known if each != "keys"), *KEYS])
            refusals.add(f"{name}: unknown argument; allowed: {allowed}, and keys such as learner__optimizer__lr")
        elif key in found:
            refusals.add(f"{name}: the same key as {names[key]}; allowed: one of them")
        else:
            with refusals:
                found[key], names[key] = _override(key, value), name
    refusals.tell()
    return list(found.values())


def _override(key: str, value: Any) -> str:
    """Raises ConfigError for a value that no YAML file could have."""
    try:
        return f"{key}={_OTHERWISE.sub(_escaped, json.dumps(value, default=_plain, ensure_ascii=False))}"
    except TypeError as error:
        raise ConfigError(f"{key}: {error}; allowed: what YAML can hold") from None


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _plain(value: Any) -> Any:
    """Paths as text, numbers of numpy as Python's."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} is not allowed")
