"""Which rows a step trains, what is told of long ones, and what is refused, each by one line."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from launch import tiny_model
from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.sft import ALGO
from streamrl.generate.tokenizer import Tokenizer
from streamrl.learner.row_batches import RowBatches, held_out
from streamrl.learner.token_rows import HELD_OUT, ROWS, TRAINED, TokenRows, write
from streamrl.places import absolute, train_again
from streamrl.sft import command
from streamrl.sft.command import _rows, supervised
from streamrl.sft.rows import tokenise
from streamrl.tasks.environment import Message

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.make_tokenizer(8).save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Row i asks for 1 to 8 letters back."""
    path = tmp_path / "rows.jsonl"
    asked = [LETTERS[: 1 + number] for number in range(8)]
    path.write_text("".join(json.dumps({"prompt": text + "=", "answer": text}) + "\n" for text in asked))
    return path


def config_of(path: Path, *, batch: int = 3, seed: int = 1, **sft) -> Config:
    data = {"path": str(path), "chat": False, "cache": path.parent / "cache", **sft.pop("data", {})}
    return Config.model_validate({"run": {"seed": seed}, "sft": {"batch": batch, "data": data, **sft}})


def trained_rows(config: Config, run_folder: Path, steps: range) -> list[int]:
    source = RowBatches(config, run_folder)
    return [group.prompt_index for step in steps for group in source.next(step, 1.0).batch.groups]


def test_each_row_comes_once_an_epoch_in_an_order_that_seed_and_step_alone_give(rows, tokenizer, tmp_path):
    config = config_of(rows)
    assert tokenise(config, tokenizer, 100, tmp_path / ROWS) == []
    shown = trained_rows(config, tmp_path, range(8))
    epochs = [shown[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert trained_rows(config, tmp_path, range(5, 8)) == shown[15:]  # whatever was trained before
    assert trained_rows(config_of(rows, seed=2), tmp_path, range(8)) != shown
    source = RowBatches(config, tmp_path)
    assert source.next(3, 1.0).stats == {"rows/epoch": 1.5}
    sample = source.next(0, 1.0).batch.samples[0]
    sample.check()
    text = LETTERS[: 1 + shown[0]]
    assert tokenizer.text([sample.prompt_ids.tolist(), sample.output_ids.tolist()]) == [text + "=", text]
    assert sample.loss_mask.all()


def test_held_out_rows_are_never_trained_and_without_evaluation_every_row_is(rows, tokenizer, tmp_path):
    tokenise(config_of(rows, evaluate_every=2, data={"held_out_count": 3}), tokenizer, 100, tmp_path / ROWS)
    trained = TokenRows(tmp_path / ROWS / TRAINED)
    seen = {tuple(trained[row][0]) for row in range(len(trained))}
    held = {(*sample.prompt_ids, *sample.output_ids) for sample in held_out(tmp_path).samples}
    assert (len(seen), len(held), seen & held) == (5, 3, set())
    tokenise(config_of(rows), tokenizer, 100, tmp_path / "all" / ROWS)
    assert len(TokenRows(tmp_path / "all" / ROWS / TRAINED)) == 8
    assert held_out(tmp_path / "all") is None


def test_long_rows_are_left_out_or_cut_and_told(rows, tokenizer, tmp_path):
    lines = tokenise(config_of(rows), tokenizer, 10, tmp_path / "less")
    assert lines == ["sft.max_row_tokens: 4 of 8 rows are left out: above 10 tokens, the longest has 18"]
    assert TokenRows(tmp_path / "less" / TRAINED).longest == 10
    lines = tokenise(config_of(rows, long_rows="cut"), tokenizer, 8, tmp_path / "cut")
    cut = "5 of 8 rows are cut, 2 of them left out, cut before an answer"
    assert lines == [f"sft.max_row_tokens: {cut}: above 8 tokens, the longest has 18"]
    cut = TokenRows(tmp_path / "cut" / TRAINED)
    assert [len(cut[row][0]) for row in range(len(cut))] == [4, 6, 8, 8, 8, 8]
    with pytest.raises(
        ConfigError, match=r"^sft.max_row_tokens: 2 leaves out all 8 rows, the longest of 18 tokens; allowed"
    ):
        tokenise(config_of(rows), tokenizer, 2, tmp_path / "none")


def test_rows_come_back_from_their_files_as_they_were_written(tmp_path):
    written = [(np.arange(length, dtype=np.int32), np.arange(length) > 1) for length in (3, 5, 2)]
    write(tmp_path / "rows", written)
    read = TokenRows(tmp_path / "rows")
    assert len(read) == 3
    for row, (ids, trained) in enumerate(written):
        assert np.array_equal(read[row][0], ids)
        assert np.array_equal(read[row][1], trained)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"prompt": "question"}, "sft.data.prompt: 'question' is not allowed; allowed: one of prompt, answer"),
        ({"messages": "messages"}, "sft.data.messages: 'messages' is not allowed; allowed: one of prompt, answer"),
        ({"path": "gone.jsonl"}, "sft.data.path: 'gone.jsonl' cannot be loaded"),
        ({"held_out_count": 8}, "sft.data.held_out_count: 8 is not allowed where there are 8 different prompts"),
    ],
)
def test_a_data_set_that_does_not_fit_is_one_line_in_the_words_of_its_keys(rows, tokenizer, tmp_path, data, line):
    with pytest.raises(ConfigError) as refused:
        tokenise(config_of(rows, evaluate_every=1, data={"chat": True, **data}), tokenizer, 100, tmp_path / ROWS)
    assert [each[: len(line)] for each in refused.value.lines] == [line]


def test_a_row_that_cannot_be_trained_is_named_by_its_number(tmp_path, tokenizer):
    path = tmp_path / "rows.parquet"
    import pandas

    pandas.DataFrame({"prompt": ["a=", "b="], "answer": ["a", None]}).to_parquet(path)
    with pytest.raises(ConfigError, match=rf"^sft.data.path: {path}: row 1: 'answer' is missing; allowed: a value"):
        tokenise(config_of(path), tokenizer, 100, tmp_path / ROWS)
    pandas.DataFrame({"prompt": [["a="], ["b="]], "answer": ["a", "b"]}).to_parquet(path)
    with pytest.raises(ConfigError, match=rf"^sft.data: row 0 of {path}: .* allowed: rows"):
        tokenise(config_of(path), tokenizer, 100, tmp_path / ROWS)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([], "sft.data.path: null has no rows; allowed"),
        (["sft.data.path=x.jsonl", "sft.batch=0"], "sft.batch: 0 is not allowed"),
        (
            ["sft.data.path=x.jsonl", "sft.data.messages=m", "sft.data.chat=false"],
            "sft.data.messages: 'm' needs the chat",
        ),
        (["sft.data.path=x.jsonl", "sft.data.messages=m", "sft.data.suffix=s"], "sft.data.suffix: 's' is for prompts"),
        (
            ["sft.data.path=x.jsonl", "sft.max_row_tokens=5000"],
            "sft.max_row_tokens: 5000 is above learner.tokens_per_micro",
        ),
        (
            ["sft.data.path=x.jsonl", "sft.epochs=1", "run.steps=null", "run.epochs=2"],
            "run.epochs: 2 is of a task's prompts; allowed: null, with sft.epochs",
        ),
        (["sft.data=x.jsonl"], "sft.data: x.jsonl is not allowed; allowed: a mapping of path, "),
    ],
)
def test_the_command_refuses_a_bad_value_in_one_line(given, line, capsys):
    assert cli.main(["sft", "configs/quickstart.yaml", *given]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"streamrl: {line}" in told.replace("override ", "")


def test_the_record_of_a_run_is_that_of_rows_and_train_refuses_it_as_sft_refuses_a_run_of_train(tmp_path, capsys):
    config = supervised(absolute(Config.model_validate({"run": {"folder": tmp_path}})))
    assert config.trains_rows
    assert not Config().trains_rows
    assert config.algo == ALGO
    (tmp_path / "run").mkdir()
    config_file.save(config, tmp_path / "run" / "config.yaml")
    assert "sft" in train_again(config, tmp_path / "run")
    tiny_model.make(tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", f"run.folder={tmp_path}"]
    assert cli.main(["train", str(tmp_path / "run" / "config.yaml"), *given, "run.name=other"]) == 2
    assert (
        "algo.loss: streamrl.algo.cross_entropy:CrossEntropy trains the rows of `streamrl sft`"
        in capsys.readouterr().err
    )


def test_prompts_are_rendered_with_the_variables_that_a_run_of_train_gives_its_template(tmp_path):
    tiny_model.make(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'h' if thinking else 'g' }}"
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = []
    for thinking in (True, False):
        task = {"chat_template_kwargs": {"thinking": thinking}}
        config = Config.model_validate({"model": {"path": tmp_path / "model"}, "task": task})
        _, made = command._checked(supervised(absolute(config)))
        prompts.append(made.prompt_ids([Message(role="user", content="a")]).tolist())
        assert not made.unread_variables
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ah", "ag")]
    assert prompts == expected


def test_a_run_that_was_killed_before_it_had_its_rows_begins_again(rows, tmp_path, monkeypatch):
    tiny_model.make(tmp_path / "model")
    begun = []
    monkeypatch.setattr(
        command, "RowsSupervisor", lambda config, *_: begun.append(config.run.steps) or SimpleNamespace(run=lambda: 0)
    )
    words = [
        f"model.path={tmp_path / 'model'}", f"run.folder={tmp_path / 'runs'}", "run.name=mine", "run.steps=null",
        f"sft.data.path={rows}", "sft.data.chat=false", f"sft.data.cache={tmp_path / 'cache'}", "sft.epochs=2",
        "sft.batch=4", "learner.optimizer.decay=cosine",
    ]  # fmt: skip
    assert cli.main(["sft", "configs/quickstart.yaml", *words]) == 0
    shutil.rmtree(tmp_path / "runs" / "mine" / ROWS)
    assert cli.main(["sft", "configs/quickstart.yaml", *words]) == 0
    assert begun == [4, 4]  # of 8 rows


@pytest.mark.parametrize(("every", "refused"), [(1, True), (0, False)])
def test_a_resume_with_fewer_tokens_a_micro_batch_holds_the_rows_that_are_held_out_too(every, refused, rows, tmp_path):
    for split, length in ((TRAINED, 20), (HELD_OUT, 40)):
        write(tmp_path / split, [(np.zeros(length, np.int32), np.ones(length, np.bool_))])
    config = config_of(rows, evaluate_every=every)
    learner = config.learner.model_copy(update={"tokens_per_micro_batch": 32})
    config = config.model_copy(update={"learner": learner})
    line = r"^learner\.tokens_per_micro_batch: 32 cannot hold the run's longest row, of 40 tokens; allowed: at least 4"
    outcome = pytest.raises(ConfigError, match=line) if refused else nullcontext()
    with outcome, _rows(config, None, 64, tmp_path) as (folder, lines):
        assert (folder, lines) == (tmp_path, [])
