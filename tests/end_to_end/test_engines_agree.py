"""One model behind three engines: an SGLang server's own interface, its OpenAI endpoint, and transformers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.evaluate.files import read_questions, read_summary
from streamrl.generate.engines import make_engine
from tests.generate.openai_endpoint import RECORDED

pytestmark = pytest.mark.slow

DEADLINE = 400.0  # seconds; the start of a server on busy cores
PROMPTS = ([2, 3, 1], [9, 4, 4, 1], [5, 1], [6, 7, 8, 1])
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16, "stop_token_ids": [0]}


@pytest.fixture(scope="module")
def server(model_folders, serving, tmp_path_factory) -> Iterator[Server]:
    """With a tokenizer, as an endpoint of somebody else's has one."""
    settings = {"model": {"path": model_folders[0]}, "generate": {"server_args": {"skip_tokenizer_init": False}}}
    with serving(Config.model_validate(settings), tmp_path_factory.mktemp("engine")) as server:
        yield server


def test_greedy_ids_are_equal_and_log_probs_close(server: Server, model_folders: tuple[Path, Path], tmp_path: Path):
    async def own() -> list[Answer]:
        client = EngineClient(server.address, timeout=DEADLINE)
        try:
            return [(await client.generate(prompt, GREEDY, 1))[0] for prompt in PROMPTS]
        finally:
            await client.close()

    async def of(name: str, options: dict[str, Any]) -> list[Answer]:
        config = Config.model_validate({"model": {"path": model_folders[0]}})
        async with make_engine(name, options).serving(config, tmp_path) as policy:
            return [(await policy.generate(prompt, GREEDY, 1))[0] for prompt in PROMPTS]

    expected = asyncio.run(own())
    for name, options in (("openai", {"url": f"{server.address}/v1"}), ("transformers", {})):
        found = asyncio.run(of(name, options))
        assert [answer.output_ids for answer in found] == [answer.output_ids for answer in expected], name
        gaps = [np.abs(logprobs(one) - logprobs(other)).max() for one, other in zip(found, expected, strict=True)]
        assert max(gaps) < 1e-4, name
        ends = [answer.meta_info.finish_reason.type for answer in found]
        assert ends == [answer.meta_info.finish_reason.type for answer in expected], name


def logprobs(answer: Answer) -> np.ndarray:
    return np.array([entry[0] for entry in answer.meta_info.output_token_logprobs])


def test_the_recorded_answer_has_the_form_of_the_servers(server: Server):
    async def ask() -> list[Any]:
        async with aiohttp.ClientSession(server.address) as session:
            async with session.get("/v1/models") as response:
                models = await response.json()
            body = {"model": "tiny", "prompt": [2, 3, 1], "temperature": -3, "logprobs": 0, "return_token_ids": True}
            async with session.post("/v1/completions", json=body) as response:
                error = await response.json()
            async with session.post("/v1/completions", json=body | {"temperature": 0}) as response:
                return [models, error, await response.json()]

    for name, found in zip(("models", "error", "completion"), asyncio.run(ask()), strict=True):
        assert form(found) == form(RECORDED[name]), name


def form(value: Any) -> Any:
    """Keys and types; of a list the first item's."""
    if isinstance(value, dict):
        return {key: form(each) for key, each in value.items() if key not in ("matched_stop", "root")}
    if isinstance(value, list):
        return [form(each) for each in value[:1]]
    return type(value).__name__


def test_an_evaluation_by_each_gives_the_same_greedy_answers(
    server: Server, model_folders: tuple[Path, Path], tmp_path: Path
):
    settings = {
        "run": {"name": "run", "folder": str(tmp_path), "start_timeout": DEADLINE},
        "model": {"path": str(model_folders[0])},
        "task": {"name": "copy", "args": {"length": 2, "alphabet": "abcdefgh", "held_out": 0.5}},
        "evaluate": {"samples": 4, "prompts": 8, "timeout": DEADLINE},
        "generate": {"sampling": {"max_new_tokens": 4}},
    }
    config = str(tmp_path / "config.yaml")
    Path(config).write_text(json.dumps(settings))
    greedy = {}
    for name, options in (("sglang", {}), ("openai", {"url": f"{server.address}/v1"}), ("transformers", {})):
        words = [f"evaluate.engine={name}", f"evaluate.engine_options={json.dumps(options)}"]
        folder = tmp_path / name
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "eval", config, *words, "--output", str(folder)],
            capture_output=True, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = read_summary(folder).tasks["copy"]
        assert (found.answers, found.unanswered) == (8 * 5, 0.0)
        greedy[name] = [question.greedy and question.greedy.text for question in read_questions(folder, "copy")]
    assert greedy["sglang"] == greedy["openai"] == greedy["transformers"]
