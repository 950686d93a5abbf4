"""A tokenizer that is none, is another model's, or cannot end an answer is refused before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import tiny_model
from streamrl import cli
from tests.operations_table import documented

ENDS = ("config.json", "generation_config.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    tiny_model.make(folder, 1)
    return folder


@pytest.fixture
def told(whole: Path, tmp_path: Path, capsys, monkeypatch) -> Callable[[Callable[[Path], object]], str]:
    """`told(change)`: the one line about a model folder that was changed so."""

    def run(change: Callable[[Path], object]) -> str:
        folder = tmp_path / "model"
        shutil.copytree(whole, folder)
        change(folder)
        (tmp_path / "config.yaml").write_text("model: {path: model}\n")
        monkeypatch.chdir(tmp_path)
        assert cli.main(["train", "config.yaml"]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1, line
        assert not (tmp_path / "runs").exists()
        return line

    return run


def of_more_letters(folder: Path) -> None:
    tiny_model.make_tokenizer(20).save_pretrained(folder)


def without_end(folder: Path) -> None:
    for name in ENDS:
        settings = json.loads((folder / name).read_text())
        kept = {key: value for key, value in settings.items() if not key.startswith("eos_token")}
        (folder / name).write_text(json.dumps(kept))


def with_an_end_beyond(folder: Path) -> None:
    without_end(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": 500}))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0", "model'),
        lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\x00" * 1000),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "tokenizer_config.json").write_text("{"),
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    ],
)
def test_one_that_is_missing_or_corrupt_is_one_line(told, change) -> None:
    documented("model.path: ...: no tokenizer (...); allowed: ...", told(change), 2)


def test_one_with_more_tokens_than_the_embedding_has_rows_is_one_line(told) -> None:
    line = told(of_more_letters)
    documented(
        "model.path: ...: the tokenizer has a token of id ..., and the embedding ... rows; allowed: ...", line, 2
    )


@pytest.mark.parametrize("change", [without_end, with_an_end_beyond])
def test_one_that_cannot_end_an_answer_is_one_line(told, change) -> None:
    documented("model.path: ...: ...end token..., and every answer would be cut; allowed: ...", told(change), 2)


def test_a_special_token_beyond_the_embedding_is_left_alone(whole: Path, tmp_path: Path) -> None:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    from streamrl.generate.tokenizer import Tokenizer

    shutil.copytree(whole, tmp_path / "model")
    fast = Fast.from_file(str(tmp_path / "model" / "tokenizer.json"))
    before = Tokenizer(tmp_path / "model").largest_id
    fast.add_special_tokens([AddedToken("<image>", special=True)])
    fast.save(str(tmp_path / "model" / "tokenizer.json"))
    assert Tokenizer(tmp_path / "model").largest_id == before
