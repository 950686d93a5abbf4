"""Tiny random Hugging Face models and random batches for the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from streamrl.config import Config
from streamrl.learner.trainer import Trainer
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan

FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
VOCABULARY = 131  # not a multiple of anything, so that the embedding is padded


def write_model(folder: Path, family: str = "qwen2", tied: bool = False) -> Path:
    """A model of two layers with random weights, biases and norms, saved by transformers."""
    torch.manual_seed(0)
    config_class, model_class = FAMILIES[family]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": tied,
    }
    if family == "qwen3":
        shape["head_dim"] = 32
    model = model_class(config_class(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_folder(family, tied)`: the folder of a tiny model, made once a session."""
    made: dict[tuple[str, bool], Path] = {}

    def get(family: str = "qwen2", tied: bool = False) -> Path:
        if (family, tied) not in made:
            made[family, tied] = write_model(tmp_path_factory.mktemp(f"{family}_{tied}"), family, tied)
        return made[family, tied]

    return get


def make_config(model: Path, **learner: object) -> Config:
    """A configuration for a tiny model; keyword arguments go into the learner section, `dtype` into the model."""
    optimizer = {"lr": 1e-2, "clip_grad": 1.0, **learner.pop("optimizer", {})}
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": learner.pop("dtype", "float32")},
            "algo": learner.pop("algo", {}),
            "generate": {"sampling": {"temperature": 0.8}},
            "learner": {"optimizer": optimizer, **learner},
            "checkpoint": {"keep": 2},
        }
    )


@pytest.fixture
def trainer_of() -> Iterator[Callable[..., Trainer]]:
    """`trainer_of(config, run_folder)`: a started trainer of one process; a former one is closed first."""
    open_trainers: list[Trainer] = []

    def make(config: Config, run_folder: Path) -> Trainer:
        while open_trainers:
            open_trainers.pop().close()
        trainer = Trainer(config, run_folder)
        open_trainers.append(trainer)
        trainer.restore_or_start()
        return trainer

    yield make
    for trainer in open_trainers:
        trainer.close()


def make_batch(step: int = 0, groups: int = 3, size: int = 4, seed: int = 0) -> Batch:
    """Groups of answers of uneven length, with stale tokens, masked tokens, an empty answer and a placeholder."""
    random = np.random.default_rng([seed, step])
    return Batch(step=step, groups=tuple(_group(random, step, index, size) for index in range(groups)))


def _group(random: np.random.Generator, step: int, index: int, size: int) -> Group:
    prompt = random.integers(0, VOCABULARY, random.integers(2, 9)).astype(np.int32)
    samples = [_sample(random, step, prompt, int(random.integers(1, 20))) for _ in range(size)]
    if index == 0:
        samples[0] = _sample(random, step, prompt, 0, finish_reason="placeholder")
    return Group(group_id=index, task="copy", prompt_index=index, samples=tuple(samples))


def _sample(
    random: np.random.Generator, step: int, prompt: np.ndarray, length: int, finish_reason: str = "stop"
) -> Sample:
    old = int(random.integers(0, length + 1))
    spans = [VersionSpan(PolicyVersion(max(0, step - 1)), 0, old), VersionSpan(PolicyVersion(step), old, length)]
    return Sample(
        prompt_ids=prompt,
        output_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
        logprobs=(-4 - random.random(length)).astype(np.float32),
        loss_mask=random.random(length) < 0.9,
        spans=tuple(span for span in spans if span.end > span.start),
        reward=float(random.random()),
        finish_reason=finish_reason,
    )
