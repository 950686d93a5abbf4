"""The Python blocks of the documents run, and do what the text beside them says."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.config.task import ScoringConfig, TaskConfig, TaskShare
from streamrl.observe.metrics import MetricsWriter
from streamrl.tasks import user_reward
from streamrl.tasks.hosted import check_tasks
from streamrl.tasks.registry import build_task

DOCS = Path(__file__).parents[1] / "docs"
ELSEWHERE = {
    "first-hour.md",  # tests/test_first_hour.py
    "python.md",  # tests/end_to_end/test_python_run.py
    "journal.md",
    "howto-order.md",
    "howto-transport.md",
}  # its block reads the journal of a run; files: tests/test_own_choices.py


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run(page: str) -> dict[str, Any]:
    """The names that the page's blocks define, run one after another."""
    names: dict[str, Any] = {"__name__": page.removesuffix(".md").replace("-", "_")}
    for block in blocks(page):
        if re.search(r"^import (verifiers|gymnasium)", block, re.MULTILINE):  # end_to_end/test_foreign_environments.py
            compile(block, page, "exec")
        elif block.startswith("case "):  # of a match that is in a file of streamrl
            compile(f"def build():\n match name:\n{textwrap.indent(block, '  ')}", page, "exec")
        else:
            exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def model_folder(tmp_path, monkeypatch):
    """The working folder has the model that `make demo` makes, as far as the documents read it."""
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    config = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 10, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", sorted({page.name for page in DOCS.glob("*.md") if blocks(page.name)} - ELSEWHERE))
def test_the_blocks_of_a_page_run_one_after_another(page):
    run(page)


def test_the_sink_of_the_page_has_each_number_of_a_resumed_run_once(tmp_path):
    sink = run("watching.md")["Csv"]
    for steps in ((1, 2, 3), (2, 3)):
        writer = MetricsWriter(tmp_path, [sink(Config(), tmp_path, sink.Options())])
        writer.truncate_after(steps[0] - 1)
        for step in steps:
            writer.write({"step": step, "reward/mean": step / 2})
        writer.close()
    assert (tmp_path / "metrics.csv").read_text() == "1,reward/mean,0.5\n2,reward/mean,1.0\n3,reward/mean,1.5\n"


@pytest.mark.parametrize("name", ["Guessing", "Shorter", "SummedUp"])
def test_the_tasks_of_the_page_are_tasks_by_their_path(tmp_path, name):
    (block,) = [block for block in blocks("tasks.md") if f"class {name}(" in block]
    (tmp_path / "mine.py").write_text(block)
    share = TaskShare(name=f"{tmp_path}/mine.py:{name}")
    check_tasks([share], 1, "train", TaskConfig(scoring=ScoringConfig(processes=1)))
    assert build_task(share, 1, "train").prompt(0).index == 0


def test_the_conversation_of_the_page_gives_hints_in_the_order_of_numbers():
    (block,) = [block for block in blocks("tasks.md") if "class Guessing(" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    task = object.__new__(names["Guessing"])

    def hint(guess: str) -> str | None:
        observed = asyncio.run(task.observation(task.prompt(10), [SimpleNamespace(text=guess)]))
        return None if observed is None else observed[0]["content"]

    assert [hint(guess) for guess in ("9", " 11 ", "10", "ten")] == ["higher", "lower", None, "A number, please."]


def test_the_task_of_the_howto_asks_words_backwards(capsys):
    names = run("howto-task.md")
    text, reward = capsys.readouterr().out.split()
    assert (text, reward) == (names["prompt"].text, "1.0")
    wrong = names["Completion"](
        text="no", prompt_ids=names["nothing"], output_ids=names["nothing"], logprobs=names["logprobs"],
        spans=(), finish_reason="stop",
    )  # fmt: skip
    assert asyncio.run(names["task"].score(names["prompt"], wrong)).reward == 0
    prompt = names["task"].prompt(3)
    assert prompt == names["task"].prompt(3)
    assert prompt.answer == prompt.text[-2::-1]


def test_the_reward_of_the_howto_is_loaded_from_its_file(tmp_path):
    (block,) = blocks("howto-reward.md")
    (tmp_path / "rewards.py").write_text(block)
    judge = user_reward.prepare(["rewards.py:reward"])
    question = {"answer": "4", "row": {}, "finish_reason": "stop"}
    assert judge(text="it is 4", **question) == {"reward": 1.0, "parts": {"words": 3.0}}
    assert judge(text="it is 5", **question)["reward"] == 0.0
    assert judge(text="it is 4", **question | {"finish_reason": "length"}) == {"reward": -0.5, "parts": {}}
