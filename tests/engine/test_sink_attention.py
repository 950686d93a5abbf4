"""What replaces SGLang's attention with sinks and windows on CPUs, against its definition."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.random_models import load_model, write_model
from streamrl.config import Config
from streamrl.engine import sink_attention
from streamrl.engine.client import EngineClient
from streamrl.engine.hardware import has_cuda
from tests.documented_commands import ROOT

HEADS, GROUPS, WIDTH, VALUE, SCALE = 4, 2, 8, 6, 0.3
LENGTHS, NEW = (9, 1, 6), (4, 1, 6)  # of sequences, and how many of their tokens are new
SLOTS, PLACES = [3, 0, 2], torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(4, 10)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def by_definition(query, key, value, sinks, window):
    """Of the last token of a sequence: query [h, d], key [s, g, d], value [s, g, v] -> [h, v]."""
    key, value = (each[-1 - window :].repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    weights = (torch.einsum("hd,shd->hs", query, key) * SCALE).exp()
    return torch.einsum("hs,shv->hv", weights / (weights.sum(-1) + sinks.exp())[:, None], value)


@pytest.mark.parametrize("window", [None, 3])
def test_new_tokens_attend_to_their_sequence_within_the_window_and_to_the_sink(window):
    keys, values, sinks = torch.randn(40, GROUPS, WIDTH), torch.randn(40, GROUPS, VALUE), torch.randn(HEADS)
    query, output = torch.randn(sum(NEW), HEADS, WIDTH), torch.empty(sum(NEW), HEADS, VALUE)
    lengths, new, slots = torch.tensor(LENGTHS), torch.tensor(NEW), torch.tensor(SLOTS)
    backend = SimpleNamespace(sinks=sinks)
    named = {"scaling": SCALE, "sliding_window_size": window, "enable_gqa": True, "causal": True}
    sink_attention.extend(
        backend, query, output, keys, values, PLACES, slots, lengths, lengths - new, new, None, **named
    )

    def expected(index, length, of_query):
        places = PLACES[SLOTS[index], :length]
        return by_definition(of_query, keys[places], values[places], sinks, 40 if window is None else window)

    rows = iter(query)
    tokens = [
        expected(index, length - count + token + 1, next(rows))
        for index, (length, count) in enumerate(zip(LENGTHS, NEW, strict=True))
        for token in range(count)
    ]
    torch.testing.assert_close(output, torch.stack(tokens))

    last = torch.empty(3, HEADS, VALUE)
    named["causal"] = False
    sink_attention.decode(backend, query[:3], last, keys, values, PLACES, slots, lengths, None, **named)
    following = [expected(index, length, query[index]) for index, length in enumerate(LENGTHS)]
    torch.testing.assert_close(last, torch.stack(following))


def test_models_with_sinks_are_known_by_their_architecture(tmp_path):
    assert not sink_attention.has_sinks(tmp_path)
    for architecture in ("Qwen2ForCausalLM", "GptOssForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert sink_attention.has_sinks(tmp_path) == architecture.startswith("GptOss")


PROMPTS = (
    list(range(20, 40)),
    [*range(20, 40), *range(5, 25)],
)  # longer than the window, and begin alike
TIMEOUT = 240.0


async def asked(address):
    """The arguments that a server runs with, and its answers."""
    client = EngineClient(address, TIMEOUT)
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    try:
        answers = [(await client.generate(prompt, sampling, 1))[0] for prompt in PROMPTS]
        return await client.server_info(TIMEOUT), answers
    finally:
        await client.close()


@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="SGLang's own backends look keys up in a cache of windows")
def test_a_real_server_has_one_cache_for_layers_with_and_without_a_window(serving, tmp_path):
    folder = write_model(tmp_path / "model", "gpt_oss")
    config = Config.model_validate({"model": {"path": folder, "dtype": "float32"}})
    with serving(config, tmp_path) as server:
        given, answers = asyncio.run(asked(server.address))
    assert given["disable_hybrid_swa_memory"] is True
    model = load_model(folder, dtype=torch.float32, attn_implementation="eager")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.output_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        told = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        torch.testing.assert_close(told, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="SGLang verifies drafts with sinks on a GPU")
def test_drafts_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    command = [sys.executable, "-m", "streamrl.engine.launch", "--model-path", str(tmp_path)]
    command += ["--speculative-algorithm", "NGRAM"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "generate.speculation: on CPUs, drafts are not verified with sinks" in done.stderr
