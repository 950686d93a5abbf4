"""A conversation of a mixture of experts with a real server: the experts of every token are the model's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from launch import tiny_model
from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.tokenizer import Tokenizer
from streamrl.moe_routing import OUTPUT, PROMPT
from streamrl.tasks.environment import Completion, Prompt, Score
from streamrl.tasks.turns import TurnByTurn

LAYERS, TOP_K, SAMPLES = 3, 2, 3


class Talk(TurnByTurn):
    """Three turns, with the same words between them."""

    max_turns = 3

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="cafbedhg=")

    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> str:
        return "gabe="

    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        return Score(reward=0.0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Weights that are sharp enough for routing that differs by token."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    tiny_model.make(folder, family="qwen3_moe", layers=LAYERS)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: 0.3 * torch.randn(tensor.shape, generator=generator) if tensor.ndim > 1 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_the_experts_and_the_log_probs_of_all_turns_are_those_of_hugging_face(mixture, serving, tmp_path):
    generate = {"sampling": {"max_new_tokens": 5}}
    config = Config.model_validate(
        {"model": {"path": mixture}, "learner": {"router_replay": True}, "generate": generate}
    )

    async def go(address: str) -> list[Completion]:
        client = EngineClient(address, timeout=100)
        try:
            inference = EngineInference(client, Tokenizer(mixture), config.generate, Load(), routed_experts=True)
            rollouts = await Talk().rollout_group(inference, Talk().prompt(0), SAMPLES)
            assert not inference.failures
            return [rollout.completion for rollout in rollouts]
        finally:
            await client.close()

    with serving(config, tmp_path) as server:
        answers = asyncio.run(go(server.address))
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    for answer in answers:
        ids = torch.from_numpy(np.concatenate([answer.prompt_ids, answer.output_ids])[None].astype(np.int64))
        with torch.no_grad():
            found = model(ids, output_router_logits=True)
        start, length = len(answer.prompt_ids), len(answer.output_ids)
        logprobs = torch.log_softmax(found.logits[0, start - 1 : -1], -1).gather(1, ids[0, start:, None])[:, 0].numpy()
        mask = answer.loss_mask
        assert 0 < mask.sum() < length
        np.testing.assert_allclose(answer.logprobs[mask], logprobs[mask], rtol=0, atol=1e-4)
        routed = np.concatenate([answer.extras[PROMPT].reshape(-1, LAYERS * TOP_K)[:start], answer.extras[OUTPUT]])
        routed = routed.reshape(-1, LAYERS, TOP_K)[:-1]  # nothing reads the last token
        assert (routed >= 0).all()
        for layer, scores in enumerate(found.router_logits):
            expected = scores.topk(TOP_K, -1).indices.sort(-1).values.numpy()[:-1]
            assert np.array_equal(np.sort(routed[:, layer], -1), expected)
