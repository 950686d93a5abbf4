"""Drafts that are looked up leave the policy as it is: their trees, the draws from them, a real server's answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launch import tiny_model
from streamrl.config import Config
from streamrl.engine import cpu_ngram, ngram_drafts
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.engine.hardware import has_cuda
from streamrl.engine.ngram_drafts import without_twins
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.sources import make_source, make_staging
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

SIZE = 5
TIMEOUT = 60.0


def tree_of(parents: Sequence[int]) -> np.ndarray:
    """The mask [size, size] of a tree whose node i + 1 is below `parents[i]`."""
    mask = np.eye(len(parents) + 1, dtype=np.int64)
    for node, parent in enumerate(parents, 1):
        mask[node] |= mask[parent]
    return mask


# Last token 9; what SGLang makes of one draft, and of two of which one is token 0 itself.
FILLED = [
    ([9, 2, 0, 0, 0], tree_of([0, 0, 0, 0]), tree_of([0, 0, 2, 3])),
    ([9, 0, 3, 0, 0], tree_of([0, 1, 0, 0]), tree_of([0, 1, 1, 3])),
    ([9, 2, 3, 1, 2], tree_of([0, 0, 1, 2]), tree_of([0, 0, 1, 2])),
]


def test_what_fills_a_tree_is_a_chain_and_its_drafts_stay_where_they_are():
    tokens = np.array([each for drafted, _, _ in FILLED for each in drafted])
    masks = np.concatenate([mask.flatten() for _, mask, _ in FILLED])
    chained = without_twins(tokens, masks, SIZE).reshape(-1, SIZE, SIZE)
    for found, (_, _, expected) in zip(chained, FILLED, strict=True):
        assert found.tolist() == expected.tolist()
    assert np.array_equal(masks, np.concatenate([mask.flatten() for _, mask, _ in FILLED]))


def test_a_twin_takes_what_is_below_it_along():
    found = without_twins(np.array([9, 4, 4, 7]), tree_of([0, 0, 2]).flatten(), 4)
    assert found.reshape(4, 4).tolist() == tree_of([0, 1, 2]).tolist()


def drawn(drafted: Sequence[int], mask: np.ndarray, probabilities: torch.Tensor, coins: int) -> dict[int, float]:
    """How often each token is the first one, over all coins of a grid: `coins` for the draft, `coins` for the rest."""
    rows = coins * coins
    grid = (torch.arange(coins) + 0.5) / coins
    index, next_token, next_sibling = (torch.empty(rows, SIZE, dtype=torch.int64) for _ in range(3))
    positions = torch.empty(rows * SIZE, dtype=torch.int64)
    masks = torch.from_numpy(mask).repeat(rows, 1, 1).flatten()
    lengths = torch.full((rows,), 3)
    cpu_ngram.link_tree(masks, lengths, positions, index, next_token, next_sibling, rows, SIZE)
    predicts = torch.zeros(rows * SIZE, dtype=torch.int32)
    accept_index = torch.full((rows, SIZE), -1, dtype=torch.int32)
    cpu_ngram.draw_from_trees(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=torch.empty(rows, dtype=torch.int32),
        candidates=torch.tensor(drafted).repeat(rows, 1),
        retrive_index=index,
        retrive_next_token=next_token,
        retrive_next_sibling=next_sibling,
        uniform_samples=grid.repeat_interleave(coins).view(-1, 1).expand(-1, SIZE),
        uniform_samples_for_final_sampling=grid.repeat(coins),
        target_probs=probabilities.expand(rows, SIZE, -1),
    )
    counts = Counter(predicts.view(rows, SIZE)[:, 0].tolist())
    return {token: count / rows for token, count in counts.items()}


def test_each_token_is_drawn_as_often_as_the_policy_says_and_token_0_is_not_where_the_tree_is_filled_with_it():
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for drafted, filled, chained in FILLED:
        found = drawn(drafted, chained, probabilities, 40)
        assert [found[token] for token in range(4)] == pytest.approx(probabilities.tolist(), abs=0.02)
        if filled.tolist() != chained.tolist():
            assert drawn(drafted, filled, probabilities, 40)[0] > 0.19


def test_the_links_of_a_tree_are_first_child_and_next_sibling():
    index, next_token, next_sibling = (torch.empty(1, 6, dtype=torch.int64) for _ in range(3))
    positions = torch.empty(6, dtype=torch.int64)
    mask = torch.from_numpy(tree_of([0, 0, 1, 1, 2])).flatten()
    cpu_ngram.link_tree(mask, torch.tensor([7]), positions, index, next_token, next_sibling, 1, 6)
    assert positions.tolist() == [7, 8, 8, 9, 9, 9]
    assert next_token.tolist() == [[1, 3, 5, -1, -1, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1]]
    assert index.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_places_of_the_cache_are_read_written_and_packed_request_by_request():
    table = torch.zeros(3, 6, dtype=torch.int32)
    requests, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([3, 6])
    slots = torch.tensor([11, 12, 21, 22, 23])
    cpu_ngram.write_slots(requests, table, starts, ends, slots, 6)
    assert table.tolist() == [[0, 0, 0, 21, 22, 23], [0] * 6, [0, 11, 12, 0, 0, 0]]
    read, packed = torch.zeros(5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    cpu_ngram.read_slots(requests, table, starts, ends, read, 6)
    assert read.tolist() == slots.tolist()
    cpu_ngram.pack_slots(torch.tensor([[0, -1], [2, 4]]), slots, packed)
    assert packed.tolist() == [11, 21, 23, 0]


HEADS, GROUPS, WIDTH, VALUE, SCALE = 4, 2, 8, 6, 0.3


@pytest.mark.parametrize("window", [None, -1, 3])
def test_a_draft_attends_to_its_sequence_and_to_what_is_above_it_within_the_window(window):
    torch.manual_seed(0)
    keys, values = torch.randn(40, GROUPS, WIDTH), torch.randn(40, GROUPS, VALUE)
    query, places = torch.randn(2, SIZE, HEADS, WIDTH), torch.randperm(40).view(2, 20)
    requests, lengths, trees = (1, 0), (9, 2), (tree_of([0, 0, 1, 1]), tree_of([0, 1, 2, 3]))
    backend = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values),
        req_to_token_pool=SimpleNamespace(req_to_token=places),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=GROUPS,
        qk_head_dim=WIDTH,
        v_head_dim=VALUE,
        scaling=SCALE,
        sliding_window_size=window,
    )
    batch = SimpleNamespace(
        batch_size=2,
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(lengths),
        spec_info=SimpleNamespace(draft_token_num=SIZE, custom_mask=torch.from_numpy(np.stack(trees)).flatten()),
    )
    found = cpu_ngram._attend_trees(backend, query.view(2 * SIZE, -1), layer, batch).view(2, SIZE, HEADS, VALUE)
    for place, (request, length, tree) in enumerate(zip(requests, lengths, trees, strict=True)):
        for node in range(SIZE):
            seen = [*range(length), *(length + np.flatnonzero(tree[node])).tolist()]
            slots = places[request, seen if window in (None, -1) else seen[-window - 1 :]]
            key, value = (each[slots].repeat_interleave(HEADS // GROUPS, 1) for each in (keys, values))
            weights = (torch.einsum("hd,shd->hs", query[place, node], key) * SCALE).softmax(-1)
            torch.testing.assert_close(found[place, node], torch.einsum("hs,shv->hv", weights, value))


def test_truncation_keeps_the_most_probable_and_they_add_up_to_1():
    rows = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    assert cpu_ngram.keep_top_k(rows, torch.tensor([2, 1])).tolist() == [
        pytest.approx([0, 4 / 7, 3 / 7, 0]), pytest.approx([1, 0, 0, 0])
    ]  # fmt: skip
    assert cpu_ngram.keep_top_p(rows, torch.tensor([0.5, 1.0])).tolist() == [
        pytest.approx([0, 4 / 7, 3 / 7, 0]), pytest.approx([0.25] * 4)
    ]  # fmt: skip


def test_processes_that_sglang_starts_afresh_are_corrected_too():
    code = (
        "import sys; sys.argv[1:] = {words!r}\n"
        "from streamrl.engine import cpu_ngram, ngram_drafts\n"
        "ngram_drafts.install = lambda: print('corrected')\n"
        "cpu_ngram.install = lambda: None\n"
        "import runpy; runpy.run_module('streamrl.engine.launch', run_name='__mp_main__')\n"
    )
    for words, told in ((["--speculative-algorithm", "NGRAM"], "corrected\n"), (["--port", "1"], "")):
        run = subprocess.run(
            [sys.executable, "-c", code.format(words=words)], capture_output=True, text=True, timeout=120, check=True
        )
        assert run.stdout == told
    assert not ngram_drafts.drafts(["--speculative-algorithm", "EAGLE"])


# -- a real server

PROMPT = [2, 3, 4, 1]
PROMPTS, ANSWERS, LENGTH = 60, 4, 12


def config_of(model: Path, **publish: object) -> Config:
    """Servers whose table has so little that most of a tree is filled up, as with a real vocabulary."""
    speculation = {"algorithm": "ngram", "top_k": 1, "draft_tokens": 8}
    return Config.model_validate(
        {
            "model": {"path": model},
            "generate": {"speculation": speculation, "server_args": {"speculative_ngram_max_trie_depth": 3}},
            "publish": {"transport": "memory", "timeout": TIMEOUT, **publish},
        }
    )


class Policy:
    """Log-probs of every token behind every one of a batch of sequences, by Hugging Face."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.weights = [load_file(folder / "model.safetensors") for folder in folders]
        self.model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()

    def logprobs(self, version: int, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> torch.Tensor:
        """[B, T, vocabulary], of what follows each token."""
        self.model.load_state_dict(self.weights[version], strict=False)
        self.model.tie_weights()
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor(sequences)).logits / temperature, -1)


@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="has a GPU, and no stand-ins")
@pytest.mark.parametrize("interruption", ["retract", "in_place"])
def test_a_server_with_drafts_draws_by_the_policy_and_tells_its_log_probs(
    serving, model_folders, tmp_path, interruption
):
    config, policy = config_of(model_folders[0], interruption=interruption), Policy(model_folders)

    async def work(address: str) -> None:
        client = EngineClient(address, TIMEOUT)
        try:
            for temperature in (1.0, 2.0):
                await check_draws(client, policy, 0, temperature)
            await check_greedy(client, policy, 0)
            staging = make_staging(config)  # its memory is gone with it
            staged = staging.fill(PolicyVersion(1), policy.weights[1].items())
            state = ServerState(name="server-0", version=PolicyVersion(0))
            manifest = make_source(config, Path("/nowhere"), "tcp://127.0.0.1:1").manifest(state, staged)
            sampling = {"max_new_tokens": 800, "ignore_eos": True, "temperature": 1.0}
            under_way = asyncio.ensure_future(client.generate(PROMPT, sampling, n=4, cache="0.0"))
            await asyncio.sleep(1.0)
            await make_sink(config, client, RequestGate()).apply(staged.version, manifest)
            for answer in await under_way:
                check_versions(answer, policy, exact=interruption == "retract")
            await check_draws(client, policy, 1, 1.0)
        finally:
            await client.close()

    with serving(config, tmp_path) as server:
        asyncio.run(work(server.address))


@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="has a GPU, and no stand-ins")
def test_a_server_whose_layers_have_windows_draws_with_drafts_by_the_policy(serving, tmp_path):
    folder, generator = tmp_path / "model", torch.Generator().manual_seed(1)
    tiny_model.make(folder, family="gemma3_text")
    sharp = {
        name: 0.3 * torch.randn(tensor.shape, generator=generator) if tensor.ndim > 1 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(sharp, folder / "model.safetensors", metadata={"format": "pt"})
    policy = Policy([folder])

    async def work(address: str) -> None:
        client = EngineClient(address, TIMEOUT)
        try:
            await check_draws(client, policy, 0, 1.0)
            await check_greedy(client, policy, 0)
        finally:
            await client.close()

    with serving(config_of(folder), tmp_path) as server:
        asyncio.run(work(server.address))


async def check_draws(client: EngineClient, policy: Policy, version: int, temperature: float) -> None:
    """Log-probs are the policy's at the temperature, each token comes as often as it says, and drafts are kept."""
    sampling = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": temperature}
    prompts = np.random.default_rng(version).integers(0, 10, (PROMPTS, 7)).tolist()
    asked = (client.generate(prompt, sampling, n=ANSWERS, cache=f"{version}.0") for prompt in prompts)
    answers = [answer for each in await asyncio.gather(*asked) for answer in each]
    assert sum(answer.meta_info.spec_num_correct_drafts for answer in answers) > 0
    assert all(0 < answer.meta_info.spec_verify_ct < LENGTH for answer in answers)
    sequences = [
        [*prompt, *answer.output_ids]
        for prompt, answer in zip(np.repeat(prompts, ANSWERS, axis=0).tolist(), answers, strict=True)
    ]
    expected = policy.logprobs(version, sequences, temperature)[:, -LENGTH - 1 : -1]
    drawn = torch.tensor([answer.output_ids for answer in answers])
    told = torch.tensor([[entry[0] for entry in answer.meta_info.output_token_logprobs] for answer in answers])
    torch.testing.assert_close(told, expected.gather(-1, drawn[..., None])[..., 0], atol=1e-4, rtol=0)
    probabilities = expected[:, 1:].exp()  # the first token is drawn without drafts
    found = torch.nn.functional.one_hot(drawn[:, 1:], probabilities.shape[-1])
    beyond = (found - probabilities).sum((0, 1)) / (probabilities * (1 - probabilities)).sum((0, 1)).sqrt()
    assert beyond.abs().max() < 5, beyond  # standard deviations, of each token


async def check_greedy(client: EngineClient, policy: Policy, version: int) -> None:
    sampling = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}
    (answer,) = await client.generate(PROMPT, sampling, n=1, cache=f"{version}.0")
    most = policy.logprobs(version, [[*PROMPT, *answer.output_ids]])[0].argmax(-1)
    assert most[len(PROMPT) - 1 : -1].tolist() == answer.output_ids


def check_versions(answer: Answer, policy: Policy, *, exact: bool) -> None:
    """Each span has the log-probs of its version, as far as the cache was its own."""
    spans = answer.meta_info.weight_versions
    assert [span.version for span in spans] == ["0.0", "1.0"]
    assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, len(answer.output_ids))
    found = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
    for version, span in enumerate(spans if exact else spans[:1]):
        expected = policy.logprobs(version, [[*PROMPT, *answer.output_ids]])[0, len(PROMPT) - 1 : -1]
        logprobs = expected.gather(-1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(found[span.start : span.end], logprobs[span.start : span.end], atol=1e-4, rtol=0)
