"""`streamrl eval` by other engines than SGLang, and where they are refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from launch import tiny_model
from streamrl import run_folder
from streamrl.cli import main
from streamrl.config import file as config_file
from streamrl.evaluate.files import read_questions, read_summary
from streamrl.lab import evaluation
from streamrl.tasks import left_out
from streamrl.tasks.left_out import LeftOut, OfTask
from tests.generate import openai_endpoint

OWN = '''
from contextlib import asynccontextmanager

from streamrl import choices
from streamrl.generate.engines.base import Engine
from streamrl.generate.frozen import typed_answer


class Parrot(Engine):
    """Says the first token of the prompt, and the end."""

    class Options(choices.Options):
        logprob: float = -0.5

    @asynccontextmanager
    async def serving(self, config, scratch):
        yield self

    async def generate(self, input_ids, sampling, n, request_id=None, **options):
        told = [self.options.logprob] * 2
        return [typed_answer("parrot", str(index), [input_ids[0], 0], told, "stop") for index in range(n)]

    async def abort(self, request_id=""):
        pass
'''

SETTINGS = ("task.args.length=1", "evaluate.samples=2", "evaluate.prompts=3", "generate.sampling.max_new_tokens=4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, a configuration and an engine of one's own, in the working folder."""
    tiny_model.make(tmp_path / "tiny")
    task = {"name": "copy", "args": {"alphabet": "abcdefgh", "held_out": 0.5}}
    settings = {
        "model": {"path": str(tmp_path / "tiny")},
        "task": task,
        "run": {"name": "run", "folder": str(tmp_path)},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    (tmp_path / "parrot.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(*words: str) -> int:
    return main(["eval", "config.yaml", *SETTINGS, *words])


def test_each_engine_answers_an_evaluation(folder, capsys):
    with openai_endpoint.serving() as endpoint:
        assert evaluate("evaluate.engine=openai", f"evaluate.engine_options.url={endpoint.url}", "--output", "a") == 0
    assert evaluate("evaluate.engine=transformers", "--model", "tiny", "--output", "b") == 0
    assert evaluate("evaluate.engine=parrot.py:Parrot", "evaluate.engine_options.logprob=-1", "--output", "c") == 0
    assert "every answer" in capsys.readouterr().out
    found = {name: read_summary(folder / name) for name in "abc"}
    assert [found[name].label for name in "abc"] == [
        endpoint.url.partition("://")[2].replace("/", "--"),
        "tiny",
        "parrot",
    ]
    assert {each.tasks["copy"].answers for each in found.values()} == {9}
    assert {each.tasks["copy"].unanswered for each in found.values()} == {0.0}
    assert found["c"].tasks["copy"].figures["pass@1"].value == 1.0
    assert {answer.text for question in read_questions(folder / "a", "copy") for answer in question.answers} == {
        "cd=hb"
    }


PARROT = ("evaluate.engine=parrot.py:Parrot", "evaluate.engine_options.logprob=-1")


def test_every_figure_of_the_default_ones_is_in_the_table_of_80_columns(folder, capsys):
    assert evaluate(*PARROT, "evaluate.samples=8") == 0
    shown = {cells[1]: cells[2] for line in capsys.readouterr().out.splitlines() if len(cells := _cells(line)) == 3}
    pass_rates = {f"pass@{k}": "1.000 ± 0.000" for k in (1, 2, 4, 8)}
    assert shown.items() >= {"prompts": "3", **pass_rates, "greedy": "1.000 ± 0.000", "unanswered": "0.0%"}.items()
    assert shown.keys() >= {"reward", "length"}


def test_figures_are_told_where_the_answers_cannot_be_written(folder, capsys, monkeypatch):
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(evaluation, "write", full)
    assert evaluate(*PARROT, "--output", "kept") == 1
    out, err = capsys.readouterr()
    assert "1.000 ± 0.000" in out
    assert "every answer" not in out
    assert err.splitlines()[-1] == "streamrl: kept: No space left on device: the answers are not written"


def test_a_run_is_evaluated_on_the_prompts_that_fit_as_it_does_itself(folder):
    found = OfTask(limit=2, looked=4, too_long=1, shortest=3, longest=3, size=4, left_out=(0,))
    run_folder.make(config_file.load(Path("config.yaml"), SETTINGS), fresh=False)
    assert main(["eval", "--run-folder", "run", *PARROT, "--output", "all"]) == 0
    left_out.save(Path("run"), LeftOut(evaluated={"copy": found}))
    assert main(["eval", "--run-folder", "run", *PARROT, "--output", "fitting"]) == 0
    asked = {name: [each.prompt for each in read_questions(Path(name), "copy")] for name in ("all", "fitting")}
    assert len(asked["all"]) == 3
    assert asked["fitting"][:2] == asked["all"][1:]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["eval", "config.yaml", "evaluate.engine=openai"], "evaluate.engine_options.url: nothing is not allowed"),
        (["eval", "config.yaml", "evaluate.engine=opnai"], "nearest known value: openai"),
        (
            ["eval", "config.yaml", "evaluate.engine=openai", "evaluate.engine_options.url=http://a", "--model=b"],
            "--model: b is not what evaluate.engine=openai answers with, which has weights of its own; allowed: no",
        ),
        (
            ["train", "config.yaml", "generate.engine=transformers"],
            "generate.engine: transformers has weights that no learner publishes to, and tokens of no version: its "
            "log-probs are those of no behaviour policy of the run; allowed: sglang, and evaluate.engine=transformers",
        ),
        (["train", "config.yaml", "generate.engine=parrot.py:Parrot"], "generate.engine: parrot.py:Parrot has weights"),
        (
            ["train", "config.yaml", "evaluate.engine=transformers", "evaluate.every=5"],
            "evaluate.engine: transformers has no version of the run, whose evaluations (every=5) measure its versions",
        ),
    ],
)  # fmt: skip
def test_where_an_engine_does_not_fit_one_line_says_why(folder, capsys, words, line):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_an_endpoint_that_cannot_be_evaluated_ends_the_command_with_one_line(folder, capsys):
    with openai_endpoint.serving() as endpoint:
        endpoint.change = openai_endpoint.without_logprobs
        assert evaluate("evaluate.engine=openai", f"evaluate.engine_options.url={endpoint.url}") == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("streamrl: ")]
    assert "(sglang): its answers have no log-probs" in line
