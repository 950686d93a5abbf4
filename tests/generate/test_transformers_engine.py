"""A model in the process itself, against plain forward passes of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.utils import logging

from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.generate.engines import make_engine
from streamrl.generate.frozen import EngineRefused
from streamrl.generate.transformers_policy import TransformersPolicy

PROMPT = [1, 4, 2, 8]


@pytest.fixture(scope="module")
def policy(model_folders: tuple[Path, Path]) -> Iterator[TransformersPolicy]:
    policy = TransformersPolicy(model_folders[0], dtype="float32")
    yield policy
    policy.close()


def ask(policy: TransformersPolicy, n: int = 1, **sampling: Any) -> list[Answer]:
    return asyncio.run(policy.generate(PROMPT, sampling, n))


def ids_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def test_loading_draws_no_bar(model_folders, capfd):
    logging.enable_progress_bar()
    TransformersPolicy(model_folders[0], dtype="float32").close()
    assert "%|" not in capfd.readouterr().err


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_the_log_probs_are_those_of_a_plain_forward(policy, model_folders, forward_logprobs, temperature):
    weights = load_file(model_folders[0] / "model.safetensors")
    answers = ask(policy, 3, temperature=temperature, max_new_tokens=12, top_p=0.9, sampling_seed=5)
    for answer in answers:
        expected = forward_logprobs(weights, [*PROMPT, *answer.output_ids], temperature or 1.0)[len(PROMPT) - 1 :]
        told = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        assert (expected - told).abs().max() < 1e-5
        assert [(span.version, span.start, span.end) for span in answer.meta_info.weight_versions] == [("0.0", 0, 12)]
        assert answer.meta_info.finish_reason.type == "length"
    assert (len({*map(tuple, ids_of(answers))}) == 1) == (temperature == 0.0)


@pytest.mark.parametrize(
    "truncation", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.6}, {"top_k": 3, "top_p": 0.9, "min_p": 0.2}, {}]
)
def test_a_request_is_drawn_from_the_truncated_distribution_that_it_names(
    policy, model_folders, forward_logprobs, truncation
):
    weights = load_file(model_folders[0] / "model.safetensors")
    chances = [float(forward_logprobs(weights, [*PROMPT, token], 2.0)[-1].exp()) for token in range(10)]
    wanted = _truncated(np.array(chances), **truncation)
    answers = ask(policy, 4000, temperature=2.0, max_new_tokens=1, seed=1, **truncation)
    found = np.bincount([answer.output_ids[0] for answer in answers], minlength=10) / 4000
    assert set(np.flatnonzero(found)) == set(np.flatnonzero(wanted))
    assert np.abs(found - wanted).max() < 5 * 0.5 / 4000**0.5
    assert (np.count_nonzero(wanted) == 10) == (not truncation)  # else the test would show little


def _truncated(chances: np.ndarray, top_k: int = 10, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """The distribution that is left of `chances` [V]: k likeliest, then p of them, then those of min_p of the first."""
    order = np.argsort(-chances)
    left = np.zeros_like(chances)
    left[order[:top_k]] = chances[order[:top_k]]
    left /= left.sum()
    before = np.cumsum(left[order]) - left[order]
    left[order[before >= top_p]] = 0
    left[left < min_p * left.max()] = 0
    return left / left.sum()


def test_an_answer_ends_with_an_end_token_or_the_token_that_completes_a_stop_string(policy):
    (whole,) = ask(policy, temperature=0.0, max_new_tokens=12)
    text = "abcdefgh"[whole.output_ids[1] - 2] + "abcdefgh"[whole.output_ids[2] - 2]
    (by_text,) = ask(policy, temperature=0.0, max_new_tokens=12, stop=[text])
    (by_id,) = ask(policy, temperature=0.0, max_new_tokens=12, stop_token_ids=[whole.output_ids[1]])
    place = next(at for at in range(1, 12) if whole.output_ids[at - 1 : at + 1] == whole.output_ids[1:3])
    assert by_text.output_ids == whole.output_ids[: place + 1]
    assert by_id.output_ids == whole.output_ids[: whole.output_ids.index(whole.output_ids[1]) + 1]
    assert by_text.meta_info.finish_reason.type == by_id.meta_info.finish_reason.type == "stop"


def test_a_seed_gives_the_same_answers_again_and_leaves_torch_as_it_was(policy):
    state = torch.get_rng_state()
    first, second, other = (ids_of(ask(policy, 4, max_new_tokens=8, seed=seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert torch.equal(state, torch.get_rng_state())


def test_an_aborted_request_gives_what_it_has_and_a_waiting_one_nothing(policy):
    async def run() -> list[list[Answer]]:
        sampling = {"max_new_tokens": 1900}
        asked = [asyncio.ensure_future(policy.generate(PROMPT, sampling, 2, name)) for name in ("a", "b")]
        await asyncio.sleep(0.1)
        await policy.abort()
        return await asyncio.gather(*asked)

    running, waiting = asyncio.run(run())
    assert {answer.meta_info.finish_reason.type for answer in running + waiting} == {"abort"}
    assert all(len(answer.output_ids) < 1900 for answer in running)
    assert ids_of(waiting) == [[], []]


@pytest.mark.parametrize(
    ("sampling", "options", "line"),
    [
        ({"frequency_penalty": 0.5}, {}, "sampling frequency_penalty=0.5 is not possible; allowed: temperature, top_p"),
        ({"top_p": 1.5}, {}, "sampling top_p=1.5 is not possible; allowed: above 0, up to 1"),
        ({"top_k": 0}, {}, "sampling top_k=0 is not possible; allowed: -1, or 1 or more"),
        ({"stop": [""]}, {}, "sampling stop=('',) is not possible"),
        ({}, {"routed_experts": True}, "allowed: learner.router_replay=false"),
        ({}, {"images": ["a.png"]}, "allowed: tasks of text"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(policy, sampling, options, line):
    with pytest.raises(EngineRefused) as refused:
        asyncio.run(policy.generate(PROMPT, sampling, 1, **options))
    assert str(refused.value).startswith("transformers: ")
    assert line in str(refused.value)


def test_a_handle_gives_typed_answers_and_a_folder_that_is_no_model_is_refused(model_folders, tmp_path):
    async def answer(model: Path) -> Any:
        config = Config.model_validate({"model": {"path": model}, "generate": {"sampling": {"max_new_tokens": 4}}})
        async with make_engine("transformers", {}).handles(config, tmp_path) as handles:
            return await handles(greedy=True).generate("caf=", 2)

    first, second = asyncio.run(answer(model_folders[0]))
    assert first.text == second.text
    assert first.prompt_ids.tolist() == [4, 2, 7, 1]
    (tmp_path / "tokenizer.json").write_bytes((model_folders[0] / "tokenizer.json").read_bytes())
    with pytest.raises(EngineRefused, match="cannot be loaded"):
        asyncio.run(answer(tmp_path))
