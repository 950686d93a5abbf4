"""What `streamrl.train` makes of its arguments, and what it refuses in one line before anything is written."""

from __future__ import annotations

import io
import json
import os
from contextlib import nullcontext

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

import streamrl
from launch import tiny_model
from streamrl.api import train as module
from streamrl.api.inputs import DIGESTS, FUNCTIONS, TASK, Inputs
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.tasks.environment import Environment
from streamrl.tasks.functions.task import FunctionArguments, FunctionTask

ROWS = [{"prompt": f"{letter}=", "answer": letter} for letter in "abcdefgh"]


def pixel():
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    return file.getvalue()


def exact(completions, answer, **_):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """`refused(**arguments)`: the line with which a call is refused; nothing was written."""
    monkeypatch.chdir(tmp_path)
    tiny_model.make(tmp_path / "tiny")
    before = sorted(path for path in tmp_path.rglob("*"))

    def call(model="tiny", dataset=ROWS, reward=exact, **arguments):
        with pytest.raises(streamrl.ConfigError) as error:
            streamrl.train(model, dataset, reward, **arguments)
        assert sorted(path for path in tmp_path.rglob("*")) == before
        (line,) = str(error.value).splitlines()
        return line

    return call


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """`configured(*arguments, **arguments)`: the configuration, and the inputs, of a run that is not started."""
    monkeypatch.chdir(tmp_path)
    tiny_model.make(tmp_path / "tiny")

    def call(*given, **named):
        monkeypatch.setattr(module.Run, "start", lambda run, *, fresh: run)
        return streamrl.train(*given, **named)

    return call


def test_arguments_are_keys_of_the_configuration_under_shorter_names(configured, tmp_path):
    run = configured(
        "tiny", ROWS, exact, steps=7, name="sums", group_size=4, groups_per_step=np.int64(2), max_staleness=0.5,
        max_new_tokens=9, temperature=0.7, learning_rate=1e-5, learner__threads=2,
        **{"publish.every": 1, "journal": {"keep": "all"}},
    )  # fmt: skip
    config = run.config
    assert (config.run.steps, config.run.name, config.generate.group_size) == (7, "sums", 4)
    assert (config.replay.groups_per_step, config.replay.max_staleness) == (2, 0.5)
    assert (config.generate.sampling.max_new_tokens, config.generate.sampling.temperature) == (9, 0.7)
    assert (config.learner.optimizer.lr, config.learner.threads, config.journal.keep) == (1e-5, 2, "all")
    assert run.folder == tmp_path / "runs" / "sums"
    assert config.task.name == f"{run.folder}/inputs/task.py:Task"
    assert config.task.args["path"] == f"{run.folder}/inputs/dataset.jsonl"


def test_arguments_win_over_a_file_and_over_a_mapping(configured, tmp_path):
    (tmp_path / "base.yaml").write_text("run: {steps: 3, seed: 5}\n")
    run = configured("tiny", ROWS, exact, config="base.yaml", steps=4)
    assert (run.config.run.steps, run.config.run.seed) == (4, 5)
    run = configured("tiny", ROWS, exact, config={"run": {"steps": 3, "seed": 6}}, steps=4)
    assert (run.config.run.steps, run.config.run.seed) == (4, 6)


def test_a_configuration_alone_is_a_run_and_a_built_in_task_is_a_data_set(configured, tmp_path):
    (tmp_path / "whole.yaml").write_text("task: {name: successor}\nmodel: {path: tiny}\n")
    assert configured(config="whole.yaml").config.task.name == "successor"
    assert configured("tiny", "copy", task__args={"length": 2}).config.task.args == {"length": 2}


def test_a_data_set_of_the_library_and_one_for_evaluation_travel_as_parquet(configured, tmp_path):
    run = configured("tiny", datasets.Dataset.from_list(ROWS), exact, eval_dataset=ROWS[:2])
    run._inputs.write(tmp_path / "written")
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == [
        "dataset.parquet", "digests.json", "eval_dataset.jsonl", TASK,
    ]  # fmt: skip
    assert run.config.task.args["test_path"].endswith("eval_dataset.jsonl")


def test_rows_with_images_are_the_same_rows_again_and_other_ones_in_a_long_array_are_not(tmp_path):
    image = datasets.Dataset.from_list([{"prompt": "see", "image": {"bytes": pixel(), "path": None}}])
    image = image.cast_column("image", datasets.Image())
    longer = [list(range(3000)), [*range(1500), -1, *range(1501, 3000)]]
    arrays = [datasets.Dataset.from_list([{"prompt": "a", "x": x}]).with_format("numpy") for x in longer]
    for number, (data, others) in enumerate([(image, image), (arrays[0], arrays[0]), (arrays[0], arrays[1])]):
        inputs = [Inputs(tmp_path), Inputs(tmp_path)]
        for each, rows in zip(inputs, (data, others), strict=True):
            each.add_data("dataset", rows, numbered=False)
        inputs[0].write(tmp_path / str(number))
        with pytest.raises(ConfigError, match="its rows are not those") if number == 2 else nullcontext():
            inputs[1].check(tmp_path / str(number))


def test_an_environments_rows_are_held_out_by_what_they_are_and_not_by_their_numbers(tmp_path):
    """Rows with one prompt are told apart by their numbers, which are each data set's own."""
    rows = [{"prompt": "guess", "target": f"t{number}"} for number in range(30)]
    inputs = Inputs(tmp_path)
    paths = {
        key: inputs.add_data(key, given, numbered=True)
        for key, given in {"path": rows, "test_path": [rows[20], {"prompt": "guess", "target": "new"}]}.items()
    }
    inputs.write(tmp_path)
    arguments = FunctionArguments(**paths, cache=str(tmp_path / "cache"))
    tasks = {split: FunctionTask(arguments, 1, split) for split in ("train", "probe")}
    found = {split: {task.row(index)["target"] for index in range(task.size)} for split, task in tasks.items()}
    assert found == {"train": {f"t{number}" for number in range(30)} - {"t20"}, "probe": {"t20", "new"}}


@pytest.mark.parametrize(
    ("trained", "held_out", "left"),
    [
        ([{"prompt": "play"}] * 50, [{"prompt": "play"}] * 10, 40),  # the environment draws what is played
        ([{"prompt": "play", "seed": seed} for seed in range(50)], [{"prompt": "play"}] * 3, 50),
    ],
)
def test_an_environment_may_have_one_question_for_all_rows(trained, held_out, left, tmp_path):
    inputs = Inputs(tmp_path)
    paths = {
        key: inputs.add_data(key, rows, numbered=True) for key, rows in (("path", trained), ("test_path", held_out))
    }
    inputs.write(tmp_path)
    arguments = FunctionArguments(**paths, cache=str(tmp_path / "cache"))
    assert [FunctionTask(arguments, 1, split).size for split in ("train", "probe")] == [left, len(held_out)]
    (tmp_path / "file.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    arguments = arguments.model_copy(update={"test_path": str(tmp_path / "file.jsonl")})
    assert FunctionTask(arguments, 1, "probe").size == len(held_out)  # of a file, whose rows have no numbers


@pytest.mark.parametrize(
    "text", ["Be kind \N{GRINNING FACE}", "\x85 \u2028 \x00 \x9f \ufeff", "\\u0041 \"'", "\U00020000"]
)
def test_a_text_is_in_the_configuration_as_it_was_given(configured, text):
    assert configured("tiny", "copy", task__args={"system": text}).config.task.args["system"] == text


def test_a_function_of_a_file_is_named_by_it_and_any_other_is_pickled(configured, tmp_path, capsys):
    offset = 1.0
    run = configured("tiny", ROWS, [exact, lambda text: offset], reward_weights=[1, 2])
    run._inputs.write(tmp_path / "written")
    written = (tmp_path / "written" / TASK).read_text()
    assert "test_train" in written
    assert ":exact" in written
    assert f"{FUNCTIONS}:<lambda>" in written
    assert (tmp_path / "written" / FUNCTIONS).exists()
    said = capsys.readouterr().err
    assert "reward exact: loaded from" in said
    assert "reward <lambda>: pickled by value into" in said


def test_what_is_no_reward_data_or_key_is_refused_in_one_line(refused):
    assert refused(dataset=None).startswith("dataset: none was given; allowed: ")
    assert refused(reward=None).startswith("reward: none was given; allowed: a function")
    assert (
        refused(reward=[exact, "exact"])
        == "reward: 'exact' is not allowed; allowed: a function, or a list of functions"
    )
    assert refused(reward_weights=[1, 2]) == "reward_weights: 2 for 1 rewards; allowed: one for each"
    assert refused(reward=[None]).startswith("reward: None is not allowed; allowed: a function")
    assert refused(dataset=[]) == "dataset: it has no rows; allowed: at least two"
    assert refused(dataset=["2+2="]) == 'dataset[0]: 2+2= is not allowed; allowed: a mapping with "prompt"'
    assert refused(dataset=[{"prompt": "a=", "answer": {1}}]).startswith("dataset[0]: Object of type set")
    assert refused(learning_rat=1e-5).startswith("learning_rat: unknown argument; allowed: model, dataset")
    assert "learner.optimizer.ler" in refused(learner__optimizer__ler=1)
    assert refused(steps=object()).startswith("run.steps: a value of type object is not allowed")
    assert "run.steps: 0 is not allowed" in refused(steps=0)
    assert refused(environment=object).startswith("environment: object has no method reset")
    assert refused(tools=[lambda a: a]).startswith("tools: <lambda> has no docstring")
    assert refused(tools=["double"]).startswith("tools: 'double' is not allowed; allowed: a function with types")
    assert refused(tools=double).endswith("is not allowed; allowed: a list of functions")
    assert refused(reward="rewards.py:exact").startswith("reward: 'rewards.py:exact' is not allowed; allowed: ")


@pytest.mark.parametrize("config", [5, ["run.steps=7"], b"base.yaml"])
def test_a_configuration_that_is_neither_file_nor_mapping_is_refused(refused, config):
    line = refused(config=config)
    assert line.startswith(f"config: a value of type {type(config).__name__} is not allowed; allowed: a YAML file, a ")


def test_the_configuration_of_a_run_is_one_for_the_next(configured):
    first = configured("tiny", "copy", steps=9, seed=4, task__args={"length": 2})
    again = configured(config=first.config, name="again")
    assert config_file.changed(first.config, again.config) == ["run.name"]


def test_whatever_is_no_argument_is_told_at_once(configured):
    with pytest.raises(ConfigError) as error:
        configured("tiny", ROWS, exact, stepz=1, lerning_rate=3, run__steps=4, steps=3)
    stepz, rate, twice = str(error.value).splitlines()
    assert stepz.startswith("stepz: unknown argument")
    assert rate.startswith("lerning_rate: unknown argument")
    assert twice == "steps: the same key as run__steps; allowed: one of them"


def test_turns_of_an_answer_that_has_one_are_refused(refused):
    assert refused(max_turns=3) == "max_turns: an answer is one turn here; allowed: beside tools or environment"


def test_callbacks_that_cannot_be_called_are_refused_before_anything_starts(configured):
    with pytest.raises(ConfigError) as error:
        configured("tiny", ROWS, exact, on_step="print", on_checkpoint=print, on_evaluation=[print])
    assert str(error.value).splitlines() == [
        "on_step: 'print' is not allowed; allowed: a function",
        "on_evaluation: [<built-in function print>] is not allowed; allowed: a function",
    ]


@pytest.mark.parametrize("weights", [1.0, ["many"], [[1]]])
def test_weights_that_are_no_numbers_are_refused(refused, weights):
    assert refused(reward_weights=weights).startswith("reward_weights: ")


def test_weights_may_be_an_array(configured):
    configured("tiny", ROWS, [exact, lambda completion: 0.0], reward_weights=np.array([1.0, 0.1]))


@pytest.mark.parametrize(
    "rows",
    [
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        {"prompt": ["a", "b"]},
        (row for row in ROWS),
        pandas.DataFrame(ROWS),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_what_is_no_list_of_rows_is_refused(refused, rows):
    told = f"dataset: a value of type {type(rows).__name__} is not allowed; allowed: a list of rows, or a "
    assert refused(dataset=rows).startswith(told)


class Needy:
    def __init__(self, size):
        self.size = size


@pytest.mark.parametrize(("made", "name"), [(Needy, "Needy"), (Needy(1), "Needy")])
def test_an_environment_that_cannot_be_made_is_refused(refused, made, name):
    assert refused(environment=made).startswith(f"environment: {name} cannot be made: TypeError: ")


class Guess:
    def reset(self, **row): ...

    def step(self, text):
        return "", 0.0, True


class Own(Environment):
    """A task of its own."""


def double(text: str) -> str:
    """Say a text twice."""
    return text + text


BUILT_IN, CONFIGURED, OWN = "the built-in task copy", "the task of the configuration", "Own, a task of its own,"


@pytest.mark.parametrize(
    ("form", "used", "unused"),
    [
        (BUILT_IN, {"dataset": "copy"}, {"tools": [double], "environment": Guess, "eval_dataset": ROWS}),
        (BUILT_IN, {"dataset": "copy"}, {"reward_weights": [1.0]}),
        (CONFIGURED, {"config": {"task": {"name": "copy"}}}, {"reward_weights": [1.0], "eval_dataset": ROWS}),
        (OWN, {"environment": Own}, {"dataset": ROWS, "reward": exact, "reward_weights": [1], "tools": [double]}),
        (OWN, {"environment": Own}, {"dataset": "copy", "eval_dataset": ROWS}),
    ],
)
def test_arguments_that_a_form_of_the_call_does_not_use_are_refused(configured, form, used, unused):
    configured("tiny", **used)
    for given in ({name: value} for name, value in unused.items()):
        with pytest.raises(streamrl.ConfigError, match=f"^{next(iter(given))}: {form} has no use for it; allowed: "):
            configured("tiny", **used, **given)
    with pytest.raises(streamrl.ConfigError) as refused:
        configured("tiny", **used, **unused)
    assert {line.partition(":")[0] for line in str(refused.value).splitlines()} == unused.keys()


def test_none_is_null_for_a_key_and_not_given_for_a_short_name(configured, tmp_path):
    (tmp_path / "base.yaml").write_text("run: {progress_timeout: 7000, steps: 9}\ntask: {name: copy}\n")
    run = configured("tiny", config="base.yaml", run__progress_timeout=None, steps=None, tools=[]).config.run
    assert (run.progress_timeout, run.steps) == (None, 9)
    assert configured("tiny", config="base.yaml", **{"run.steps": None, "run.epochs": 2}).config.run.epochs == 2


def test_what_a_check_of_the_start_finds_is_raised_to_the_caller(refused):
    assert "'level', which is no column" in refused(reward=lambda completions, level: [])
    assert refused(dataset=ROWS[:1], reward=exact).startswith("task.args.path: ")
    assert refused(model="no/such/folder").startswith("model.path: ")


def test_a_record_of_a_run_loads_again(configured, tmp_path):
    config_file.save(configured("tiny", ROWS, exact).config, tmp_path / "config.yaml")
    assert config_file.load(tmp_path / "config.yaml").task.args["path"].endswith("dataset.jsonl")


def test_a_full_disk_leaves_the_inputs_of_a_run_as_they_were(configured, tmp_path, monkeypatch):
    inputs = configured("tiny", ROWS, lambda text: 1.0)._inputs
    inputs.write(tmp_path / "inputs")
    before = {path.name: path.read_bytes() for path in (tmp_path / "inputs").iterdir()}
    for name in before:
        draft = tmp_path / "inputs" / f".{name}.{os.getpid()}"
        draft.symlink_to("/dev/full")
        with pytest.raises(streamrl.ConfigError, match="No space left on device; allowed: a folder"):
            inputs.write(tmp_path / "inputs")
        assert {path.name: path.read_bytes() for path in (tmp_path / "inputs").iterdir()} == before
    inputs.check(tmp_path / "inputs")
    (tmp_path / "inputs" / DIGESTS).write_text("")
    with pytest.raises(streamrl.ConfigError, match=f"{DIGESTS} is damaged; allowed: the same call without that file"):
        inputs.check(tmp_path / "inputs")


@pytest.mark.parametrize("changed", [ROWS[:-1], [{**row, "answer": "b"} for row in ROWS]])
def test_a_run_is_not_resumed_with_other_rows(configured, tmp_path, changed):
    first = configured("tiny", ROWS, exact)
    first._inputs.write(tmp_path / "inputs")
    first._inputs.check(tmp_path / "inputs")
    with pytest.raises(streamrl.ConfigError, match="dataset: its rows are not those that the run in"):
        configured("tiny", changed, exact)._inputs.check(tmp_path / "inputs")
