"""Before a run starts: which prompts are too long is found, told, recorded, and stays as it is when the run goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from streamrl import cli, preflight
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.generate.tokenizer import Tokenizer
from streamrl.places import load_run
from streamrl.preflight import prompts
from streamrl.run_folder import prepare
from streamrl.tasks import left_out
from streamrl.tasks.hosted import close_tasks, host_tasks
from streamrl.tasks.left_out import fitting_prompt, fitting_size
from tests.operations_table import documented

LENGTHS = [5, 60, 9, 44, 7, 300, 12, 46]  # letters of the rows: as many tokens, and one for "="
LEFT = 5  # of them fit beside an answer of 16 tokens in a context of 64: 46 tokens


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    write(file, LENGTHS)
    return file


def write(file: Path, lengths: list[int]) -> None:
    """Rows whose first letters differ, each twice: so every row is trained, as another question is held out."""
    texts = ["abcdefgh"[place % 8] + "a" * (length - 1) + "=" for place, length in enumerate(lengths)]
    held_out = file.with_name("held_out.jsonl")
    file.write_text("".join(json.dumps({"prompt": text, "answer": "a"}) + "\n" for text in texts))
    held_out.write_text(
        json.dumps({"prompt": "hhh=", "answer": "h"}) + "\n" + json.dumps({"prompt": "h" * 99, "answer": "h"})
    )


@pytest.fixture
def configured(rows: Path, tmp_path: Path, model_folders: tuple[Path, Path]):
    def make(context: int = 64, **changes) -> Config:
        args = {"path": str(rows), "test_path": str(rows.with_name("held_out.jsonl")), "chat": False, "judge": "text"}
        tree = {
            "run": {"name": "one", "folder": tmp_path / "runs"},
            "model": {"path": model_folders[0]},
            "task": {"name": "jsonl", "args": {**args, "cache": str(tmp_path / "cache")}},
            "generate": {"server_args": {"context_length": context}},
        }
        for section, values in changes.items():
            tree[section] = {**tree.get(section, {}), **values}
        return Config.model_validate(tree)

    return make


def ids_by(tokenizer: Tokenizer):
    async def tokenise(prompt):
        return tokenizer.prompt_ids(prompt.content)

    return tokenise


def texts(config: Config, folder: Path) -> list[str | None]:
    """Of the first two epochs, as a worker asks them."""

    async def ask() -> list[str | None]:
        tasks = await host_tasks(config.task.trained, config.run.seed, "train", config.task)
        try:
            left_out.apply(tasks, left_out.load(folder).trained, config.run.seed)
            task, tokenise = tasks["jsonl"], ids_by(Tokenizer(config.model.path))
            return [(await fitting_prompt(task, i, tokenise)).text for i in range(2 * (fitting_size(task) or 0))]
        finally:
            await close_tasks(tasks)

    return asyncio.run(ask())


def test_prompts_that_leave_an_answer_no_room_are_told_and_never_asked(configured):
    config = configured()
    folder = prepare(config, fresh=False)
    found = left_out.load(folder)
    assert list(found.lines()) == [
        "task.max_prompt_tokens: 3 of 8 prompts of jsonl are left out: above 46 tokens, the longest has 301"
    ]
    asked = texts(config, folder)
    assert len(asked) == 2 * LEFT
    assert {len(text or "") for text in asked} == {6, 10, 45, 8, 13}
    assert set(asked[:LEFT]) == set(asked[LEFT:])


def test_a_held_out_prompt_that_is_too_long_is_not_evaluated(configured):
    found = preflight.check(configured(evaluate={"every": 1}))
    assert (found.evaluated["jsonl"].looked, found.evaluated["jsonl"].too_long) == (2, 1)


def test_the_key_leaves_out_more_and_a_run_without_any_prompt_is_refused(configured, tmp_path):
    assert (
        preflight.check(configured(task={**dumped(configured()), "max_prompt_tokens": 10})).trained["jsonl"].too_long
        == 5
    )
    with pytest.raises(ConfigError) as refused:
        preflight.check(configured(task={**dumped(configured()), "max_prompt_tokens": 5}))
    documented(
        "task.max_prompt_tokens: ... leaves out all ... prompts of ... that were looked at, ...; allowed: ...",
        str(refused.value), 2,
    )  # fmt: skip
    assert not (tmp_path / "runs").exists()


def dumped(config: Config) -> dict:
    return {"name": config.task.name, "args": config.task.args}


def test_a_run_that_goes_on_asks_what_it_asked_whatever_the_context_is_now(configured, rows):
    folder = prepare(configured(), fresh=False)
    asked = texts(configured(), folder)
    prepare(configured(context=512), fresh=False)
    assert texts(configured(), folder) == asked
    with pytest.raises(ConfigError, match=r"max_new_tokens: 16 does not fit behind prompt . of jsonl with 45 tokens"):
        prepare(configured(context=50), fresh=False)
    write(rows, [*LENGTHS, 8, 9])
    with pytest.raises(ConfigError) as refused:
        prepare(configured(), fresh=False)
    documented(
        "task.args: ... has ... prompts, and had ... when the run began; allowed: the same data, --fresh, or another "
        "run.name",
        str(refused.value), 2,
    )  # fmt: skip
    prepare(configured(), fresh=True)
    assert left_out.load(folder).trained["jsonl"].size == 10


@pytest.mark.parametrize(("side", "end"), [("cut_left", "aa="), ("cut_right", "aaa"), ("cut_middle", "aa=")])
def test_a_run_cuts_what_it_would_leave_out_and_a_resume_does_it_at_the_same_place(configured, side, end):
    def kept(config: Config) -> list[str]:
        async def ask() -> list[str]:
            tasks = await host_tasks(config.task.trained, config.run.seed, "train", config.task)
            try:
                left_out.apply(tasks, left_out.load(config.run_folder).trained, config.run.seed)
                task, tokenizer = tasks["jsonl"], Tokenizer(config.model.path)
                prompts = [await fitting_prompt(task, index, ids_by(tokenizer)) for index in range(len(LENGTHS))]
                assert task.cut is not None
                ids = [task.cut.kept(tokenizer.prompt_ids(prompt.content)) for prompt in prompts]
                return tokenizer.text([each.tolist() for each in ids])
            finally:
                await close_tasks(tasks)

        return asyncio.run(ask())

    config = configured(task={**dumped(configured()), "long_prompts": side})
    folder = prepare(config, fresh=False)
    (line,) = left_out.load(folder).lines()
    assert line == (
        f"task.max_prompt_tokens: 3 of 8 prompts of jsonl are cut ({side}): above 46 tokens, the longest has 301"
    )
    asked = kept(config)
    assert sorted(len(text) for text in asked) == [6, 8, 10, 13, 45, 46, 46, 46]
    assert {text[-3:] for text in asked if len(text) == 46} == {end}
    longer = configured(context=512, task={**dumped(configured()), "long_prompts": side})
    prepare(longer, fresh=False)
    assert kept(longer) == asked
    with pytest.raises(ConfigError, match=r"task.long_prompts: leave_out differs from cut_"):
        prepare(configured(), fresh=False)


def test_a_run_that_may_have_no_long_prompt_is_refused(configured, tmp_path):
    with pytest.raises(ConfigError) as refused:
        preflight.check(configured(task={**dumped(configured()), "long_prompts": "refuse"}))
    assert str(refused.value) == (
        "task.long_prompts: refuse, and 3 of 8 prompts of jsonl have more than 46 tokens, the longest 301; allowed: "
        "leave_out, cut_left, cut_right, cut_middle, or another task.max_prompt_tokens"
    )
    assert not (tmp_path / "runs").exists()


def test_epochs_are_recorded_as_the_steps_of_the_prompts_that_fit(configured):
    config = configured(run={"epochs": 2}, replay={"groups_per_step": 2})
    folder = prepare(config, fresh=False)
    recorded = load_run(folder)
    assert (recorded.run.steps, recorded.run.epochs) == (LEFT, None)
    assert prepare(config, fresh=False) == folder  # the same ones again


def test_a_record_that_cannot_be_read_is_one_line(configured):
    folder = prepare(configured(), fresh=False)
    (folder / left_out.FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"left_out\.json: .*; allowed: the file that the run was started with"):
        prepare(configured(), fresh=False)


def test_of_more_prompts_than_are_looked_at_a_sample_says_it_and_each_is_looked_at_when_it_is_asked(
    configured, monkeypatch
):
    monkeypatch.setattr(prompts, "MOST", 4)
    config = configured()
    folder = prepare(config, fresh=False)
    found = left_out.load(folder).trained["jsonl"]
    assert (found.looked, found.left_out) == (4, None)
    asked = texts(config, folder)
    assert len(asked) == 2 * len(LENGTHS)
    assert all(len(text or "") <= 46 for text in asked)


def test_a_chat_template_counts_and_only_what_may_be_too_long_is_tokenised(model_folders, monkeypatch):
    class Counting(Tokenizer):
        tokenised = 0

        def prompt_ids(self, *words):
            self.tokenised += 1
            return super().prompt_ids(*words)

    from streamrl.tasks.environment import Prompt
    from tests.tasks.test_left_out import Numbered

    class Chat(Numbered):
        def prompt(self, index: int) -> Prompt:
            return Prompt(index=index, messages=({"role": "user", "content": "a" * (index % 1000)},))

    monkeypatch.setattr(prompts, "TOKENISED", 8)
    tokenizer = Counting(model_folders[0])
    seen = asyncio.run(prompts.measure_prompts({"chat": Chat(2000)}, tokenizer, 950, {}))
    found = seen.of_tasks["chat"]
    assert found.left_out == tuple(index for index in range(2000) if index % 1000 + 1 > 950)
    assert (seen.longest.tokens, found.longest, found.looked) == (950, 1000, 2000)
    assert tokenizer.tokenised < 200


def test_the_user_is_told_before_anything_starts(configured, tmp_path, monkeypatch, capsys):
    from streamrl.config import file as config_file
    from streamrl.supervisor import Supervisor

    monkeypatch.setattr(Supervisor, "run", lambda self: 0)
    config_file.save(configured(), tmp_path / "config.yaml")
    assert cli.main(["train", str(tmp_path / "config.yaml")]) == 0
    assert "streamrl: warning: task.max_prompt_tokens: 3 of 8 prompts of jsonl are left out" in capsys.readouterr().err
    assert cli.main(["train", str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    assert "3 of 8 prompts of jsonl are left out" in capsys.readouterr().err
