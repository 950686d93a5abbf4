"""The experts of each token, from a real server to the learner's row."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from launch import tiny_model
from streamrl.config import Config
from streamrl.config.task import OverlongConfig
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server, server_arguments
from streamrl.generate.group import run_group
from streamrl.generate.inference import EngineInference, Load
from streamrl.generate.moe_routing import routing_columns, shared_prompt_routing
from streamrl.generate.tokenizer import Tokenizer
from streamrl.learner.packing import Packing, plan_batch
from streamrl.observe.events import EventLog
from streamrl.tasks.environment import Completion, Environment, Prompt, Score
from streamrl.tasks.overlong import Overlong
from streamrl.types import Batch, PolicyVersion, Sample, Ticket, VersionSpan

START_TIMEOUT = 200.0  # seconds
LAYERS, TOP_K, SIZE = 3, 2, 3


def encoded(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


@pytest.mark.parametrize(("prompt", "output"), [(4, 6), (6, 4), (7, 1), (1, 1), (9, 5)])
def test_the_columns_hold_every_token_that_was_read(prompt, output):
    experts = np.random.default_rng(1).integers(0, 8, (prompt + output - 1, LAYERS, TOP_K))
    columns = routing_columns(encoded(experts), prompt, output)
    flat = experts.reshape(-1, LAYERS * TOP_K)
    assert all(len(column) == output and column.dtype == np.int16 for column in columns.values())
    assert np.array_equal(columns["routed_experts"][:-1], flat[prompt:])
    assert (columns["routed_experts"][-1] == -1).all()
    rows = columns["prompt_routed_experts"].reshape(-1, LAYERS * TOP_K)
    assert np.array_equal(rows[:prompt], flat[:prompt])
    assert (rows[prompt:] == -1).all()


def test_an_empty_answer_has_no_routing():
    assert routing_columns("", 4, 0) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [(encoded(np.zeros(7)), "7 routed experts for 5 tokens"), ("", "0 routed experts"), ("*", "no int32 numbers")],
)
def test_routing_that_does_not_fit_the_tokens_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        routing_columns(text, 4, 2)


def test_one_of_the_samples_that_share_a_prompt_and_a_version_carries_its_routing():
    def sample(prompt: list[int], tokens: int, step: int = 0, exact: bool = True) -> Sample:
        experts = np.zeros((len(prompt) + tokens - 1, 1, 1))
        spans = [VersionSpan(PolicyVersion(0), 0, 1), VersionSpan(PolicyVersion(step), 1, tokens, exact)]
        return Sample(
            prompt_ids=np.array(prompt, np.int32),
            output_ids=np.zeros(tokens, np.int32),
            logprobs=np.zeros(tokens, np.float32),
            loss_mask=np.ones(tokens, np.bool_),
            spans=tuple(spans),
            reward=0.0,
            extras=routing_columns(encoded(experts), len(prompt), tokens),
        )

    group = (Sample.placeholder(), sample([1, 2], 3), sample([1, 2], 2), sample([1, 2], 3, step=1), sample([3], 2))
    shared = shared_prompt_routing(group)
    assert ["prompt_routed_experts" in each.extras for each in shared] == [False, True, False, True, True]
    assert ["routed_experts" in each.extras for each in shared] == [False, True, True, True, True]
    kept = (sample([1], 2), sample([1], 2, step=1, exact=False), sample([1], 2, step=1))  # the prompt: read by 0, 0, 1
    assert ["prompt_routed_experts" in each.extras for each in shared_prompt_routing(kept)] == [True, False, True]


class Task(Environment):
    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="cafbedhg=")

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(reward=float(len(completion.output_ids)))


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def mixture(request, tmp_path_factory):
    """A mixture of experts with weights that are sharp enough for routing that differs by token."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    tiny_model.make(folder, family=request.param, layers=LAYERS)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            weights[name] = 0.3 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def routed_group(mixture, tmp_path_factory):
    """A group that a real server generated and told the routing of."""
    config = Config.model_validate({"model": {"path": mixture}, "learner": {"router_replay": True}})
    server = Server(config, tmp_path_factory.mktemp("engine"), index=0)
    events = EventLog(tmp_path_factory.mktemp("run") / "events.jsonl", "generator-0")
    first = PolicyVersion(0)
    ticket = Ticket(group_id=0, attempt=0, task="copy", prompt_index=0, seed=1, issued_version=first, deadline=0.0)

    async def go():
        client = EngineClient(server.address, timeout=60)
        try:
            await server.ready(client, START_TIMEOUT)
            inference = EngineInference(client, Tokenizer(mixture), config.generate, Load(), routed_experts=True)
            overlong = Overlong(OverlongConfig(), longest=8)
            return await run_group(
                ticket, Task(), inference, SIZE, longest=1000, temperature=1.0, overlong=overlong, events=events
            )
        finally:
            await client.close()

    try:
        return asyncio.run(go())
    finally:
        asyncio.run(server.stop())


@pytest.mark.slow
def test_the_servers_routing_reaches_the_learners_row_and_is_the_models(mixture, routed_group):
    batch = Batch(step=0, groups=(routed_group,))
    packing = Packing(ranks=1, budget=4096, share_prompts=False, routing=(LAYERS, TOP_K))
    ((micro,),) = plan_batch(batch, [1.0] * SIZE, packing)
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    chosen = {}
    for layer, module in enumerate(model.model.layers):
        if hasattr(module.mlp, "gate"):  # else it is dense

            def keep(gate, inputs, output, layer=layer):
                chosen[layer] = output[2]

            module.mlp.gate.register_forward_hook(keep)
    seen = 0
    for start, length, _, _ in micro.segments:
        routed = micro.routed_experts[start : start + length]
        with torch.no_grad():
            model(torch.from_numpy(micro.ids[None, start : start + length]))
        for layer, experts in chosen.items():
            expected = experts.sort(-1).values.numpy()
            known = (routed[:, layer] >= 0).all(1)
            assert np.array_equal(np.sort(routed[:, layer], -1)[known], expected[known])
        assert known[:-1].all()  # the prompt's too
        seen += int(known.sum())
    assert seen > len(micro.ids) / 2


def test_a_server_is_asked_to_keep_the_routing_where_it_is_replayed(mixture):
    for replay in (False, True):
        config = Config.model_validate({"model": {"path": mixture}, "learner": {"router_replay": replay}})
        assert ("enable_return_routed_experts" in server_arguments(config, 0)) == replay
