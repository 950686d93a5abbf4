"""The gradient of a step with replayed experts, in any layout: `replay_at_work.py CONFIG.json OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from learner_parts import make_batch
from megatron.core import parallel_state
from msgspec.structs import replace

from streamrl.config import Config
from streamrl.learner.forward import Passes, wrap
from streamrl.learner.huggingface import export_weights, load_weights
from streamrl.learner.model import build
from streamrl.learner.packing import Packing, plan_batch
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import ModelShape, read_shape
from streamrl.types import Batch


def routed_batch(shape: ModelShape) -> Batch:
    """Samples whose tokens were routed to random experts; of one sample in three nothing is known."""
    random = np.random.default_rng(5)
    experts, width = shape.moe.experts, shape.layers * shape.moe.top_k

    def routing(tokens: int) -> np.ndarray:
        choices = random.permuted(np.tile(np.arange(experts), (tokens, shape.layers, 1)), axis=2)
        return choices[..., : shape.moe.top_k].reshape(tokens, width).astype(np.int16)

    groups = []
    for group in make_batch(groups=4, longest=30).groups:
        samples = list(group.samples)
        for index, sample in enumerate(samples):
            if len(sample.output_ids) and index % 3:
                samples[index] = replace(sample, extras={"routed_experts": routing(len(sample.output_ids))})
        groups.append(replace(group, samples=tuple(samples)))
    return Batch(step=0, groups=tuple(groups))


def replayed_gradient(config: Config) -> dict[str, torch.Tensor]:
    """The gradient of the sum of the step's log-probs, by Hugging Face name; empty on other ranks than the first."""
    ranks = Ranks.start(config)
    try:
        shape = read_shape(config.model.path)
        chunks = build(shape, config, ranks.device)
        load_weights(chunks, config.model.path)
        passes = Passes(wrap(chunks, config, ranks), ranks, config)
        batch = routed_batch(shape)
        packing = Packing(
            ranks=parallel_state.get_data_parallel_world_size(),
            budget=64,
            share_prompts=True,
            multiple=config.learner.layout.pipeline,
            routing=(shape.layers, shape.moe.top_k),
        )
        advantages = [sample.reward - 0.5 for sample in batch.samples]
        mine = plan_batch(batch, advantages, packing)[parallel_state.get_data_parallel_rank()]
        passes.forward_backward(mine, _sum)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.main_grad
        return {name: tensor.clone() for name, tensor in export_weights(chunks)}
    finally:
        ranks.stop()


def _sum(logprobs: torch.Tensor, entropy: torch.Tensor, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = logprobs.sum()
    return loss, {"loss": loss.detach()}


if __name__ == "__main__":
    config_path, out = map(Path, sys.argv[1:])
    result = replayed_gradient(Config.model_validate_json(config_path.read_text()))
    if result:  # the first rank
        torch.save(result, out)
