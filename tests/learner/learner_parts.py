"""Tiny random models, configurations and batches, for the learner's tests and for the ranks that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamrl.config import Config
from streamrl.learner.trainer import Trainer
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan

VOCABULARY = 131  # not a multiple of anything, so that the embedding is padded


def write_model(folder: Path, family: str = "qwen2", tied: bool = False) -> Path:
    """A model of two layers with random weights, biases and norms, saved by transformers."""
    import transformers

    classes = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    torch.manual_seed(0)
    config_class, model_class = classes[family]
    shape: dict[str, Any] = {
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


def make_config(model: Path, dtype: str = "float32", optimizer: dict[str, Any] | None = None, **learner: Any) -> Config:
    """A configuration for a tiny model; further keyword arguments go into the learner section."""
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": dtype},
            "generate": {"sampling": {"temperature": 0.8}},
            "algo": {"entropy": 0.01},
            "learner": {"optimizer": {"lr": 1e-2, **(optimizer or {})}, **learner},
            "checkpoint": {"keep": 2},
        }
    )


def make_batch(step: int = 0, groups: int = 3, size: int = 4) -> Batch:
    """Groups of answers of uneven length, with stale tokens, masked tokens and a placeholder."""
    random = np.random.default_rng(step)
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


def gradients(trainer: Trainer, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradient of a step's loss on this batch, by parameter, summed over ranks, without an update."""
    share = trainer._ranks.scatter(trainer._shares(batch) if trainer.rank == 0 else None)
    trainer._forward_backward(share)
    return {name: p.main_grad.clone() for name, p in trainer._model.named_parameters()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of gradients, relative to each parameter's largest entry."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in theirs)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of what the trainer exports."""
    return {name: tensor.clone() for name, tensor in trainer.export()}
