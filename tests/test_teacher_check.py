"""A teacher or a critic that cannot read this policy's tokens is refused in one line, before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import tiny_model
from streamrl import cli, preflight
from streamrl.config import Config
from streamrl.config.senseless import warnings
from tests.operations_table import documented


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    tiny_model.make(folder, 1)
    return folder


@pytest.fixture
def told(whole: Path, tmp_path: Path, capsys, monkeypatch) -> Callable[..., str]:
    """`told(change, *overrides)`: the one line about a teacher whose folder was changed so."""

    def run(change: Callable[[Path], object], *overrides: str, key: str = "algo.distillation.teacher") -> str:
        change(shutil.copytree(whole, tmp_path / "teacher"))
        (tmp_path / "config.yaml").write_text(f"model: {{path: {whole}}}\n")
        monkeypatch.chdir(tmp_path)
        assert cli.main(["train", "config.yaml", f"{key}=teacher", *overrides]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1, line
        assert not (tmp_path / "runs").exists()
        return line

    return run


def with_settings(**settings: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


def with_other_letters(folder: Path) -> None:
    """As many tokens, two of them in each other's place."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(content))


def test_another_vocabulary_is_refused(told: Callable[..., str]) -> None:
    line = told(with_settings(vocab_size=9))
    documented("algo.distillation.teacher: ... has ... tokens, and the policy draws from ...; allowed: ...", line, 2)


def test_another_tokenizer_is_refused_though_its_size_is_the_same(told: Callable[..., str]) -> None:
    line = told(with_other_letters)
    assert "token 2 of the policy is 'a', and the teacher's has it at 3" in line
    documented("algo.distillation.teacher: ... has another tokenizer: ...; allowed: ...", line, 2)


def test_a_teacher_that_the_layout_does_not_cut_is_refused_by_name(told: Callable[..., str]) -> None:
    line = told(with_settings(num_hidden_layers=3), "learner.ranks=2", "learner.layout.pipeline=2")
    assert "learner.layout.pipeline: 2 stages of 1 chunks do not share 3 layers evenly" in line
    assert "(algo.distillation.teacher=" in line


def test_a_teacher_with_a_shorter_context_than_prompt_and_answer_is_refused(told: Callable[..., str]) -> None:
    line = told(with_settings(max_position_embeddings=8))
    documented("algo.distillation.teacher: ... has ... positions, and ... has ... tokens before ...", line, 2)


def test_a_critic_of_another_vocabulary_tokenizer_or_context_is_refused(told: Callable[..., str]) -> None:
    def refused(change: Callable[[Path], object]) -> str:
        shutil.rmtree("teacher", ignore_errors=True)
        return told(change, "algo.advantage.estimator=gae", key="critic.model")

    line = refused(with_settings(vocab_size=9))
    documented("critic.model: ... has ... tokens, and the policy draws from ...; allowed: ...", line, 2)
    line = refused(with_other_letters)
    documented("critic.model: ... has another tokenizer: ...; allowed: ...", line, 2)
    line = refused(with_settings(max_position_embeddings=8))
    documented("critic.model: ... has ... positions, and ... has ... tokens before ...", line, 2)


def test_more_rows_and_more_tokens_than_the_policys_are_allowed(whole: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(whole, tmp_path / "teacher")
    with_settings(vocab_size=64)(teacher)
    tiny_model.make_tokenizer(9).save_pretrained(teacher)
    config = {"model": {"path": whole}, "algo": {"distillation": {"teacher": teacher}}}
    preflight.check(Config.model_validate(config))


def test_what_belongs_to_a_teacher_has_no_effect_without_one() -> None:
    config = Config.model_validate({"algo": {"distillation": {"coefficient": 2.0}}})
    assert warnings(config) == ["algo.distillation.coefficient: 2.0 has no effect without algo.distillation.teacher"]
