"""The reward model beside: its scores are transformers' own, its batches fit, and what it says is checked."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path

import msgspec
import pytest
import torch
from aiohttp import ClientError, ClientSession, web
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from launch import tiny_model, tiny_reward_model
from streamrl.config import Config
from streamrl.config.refused import ConfigError
from streamrl.config.task import ScoringConfig
from streamrl.generate import worker_process
from streamrl.observe.events import EventLog, Events
from streamrl.reward_model.batches import Batches, Waiting
from streamrl.reward_model.classifier import Classifier
from streamrl.reward_model.client import RewardModels, Unanswered
from streamrl.reward_model.folder import check_folder
from streamrl.reward_model.service import Service
from streamrl.reward_model.wire import PATH, Ask, BadReply, Turn, scores_of, write_address
from streamrl.stream.keys import bearer_token, key_folder
from streamrl.tasks.environment import Prompt
from streamrl.tasks.failures import ScorerUnready, describe
from streamrl.tasks.scoring import ScorerBroken, Scoring
from tests.operations_table import documented

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    tiny_reward_model.make(folder)
    return folder


def config_of(folder: Path, **settings) -> Config:
    given = {"path": folder, "timeout": 5.0, "patience": 20.0, "retry": 0.05, **settings}
    return Config.model_validate({"reward_model": given, "task": {"rewards": [{"name": "reward_model"}]}})


def ask_of(count: int) -> Ask:
    rng = random.Random(7)
    answers = ["".join(rng.choices(LETTERS, k=rng.randint(1, 40))) for _ in range(count)]
    return Ask(answers=answers, messages=[Turn("user", "caf=")])


def test_a_model_whose_positions_begin_behind_padding_takes_as_many_tokens_as_it_has_positions_for(tmp_path: Path):
    tiny_reward_model.make(tmp_path)  # for its tokenizer
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    RobertaForSequenceClassification(
        RobertaConfig(vocab_size=16, max_position_embeddings=14, pad_token_id=1, num_labels=1, **sizes)
    ).save_pretrained(tmp_path)
    classifier = Classifier(config_of(tmp_path).reward_model)
    assert classifier.longest == 12
    assert len(classifier.scores([[3] * 12])) == 1
    with pytest.raises((IndexError, RuntimeError)):
        classifier.scores([[3] * 13])


def by_transformers(folder: Path, ask: Ask, label: int = 0) -> list[float]:
    """Answer by answer, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for answer in ask.answers:
        turns = [*({"role": each.role, "content": each.content} for each in ask.messages)]
        turns.append({"role": "assistant", "content": answer})
        ids = tokenizer.apply_chat_template(turns, tokenize=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            found.append(model(**ids).logits[0, label].item())
    return found


async def through_service(config: Config, run_folder: Path, model, call):
    """What `call(models)` gives, with one process's endpoint in this one."""
    token = bearer_token(key_folder(config, run_folder), "api")
    events = EventLog(run_folder / "events" / "reward-model-0.jsonl", "reward-model-0")
    service = Service(config, model, token, events)
    write_address(run_folder, 0, await service.start())
    models = RewardModels(config, run_folder, Events())
    try:
        return await call(models)
    finally:
        await models.close()
        await service.close()
        events.close()


def test_scores_are_those_of_transformers_whatever_shares_a_batch(folder, tmp_path):
    ask = ask_of(12)
    prompt = Prompt(index=0, messages=tuple({"role": each.role, "content": each.content} for each in ask.messages))
    config = config_of(folder, tokens_per_batch=120)

    async def call(models):
        return await asyncio.gather(*(models.scores(prompt, ask.answers[at : at + 4]) for at in (0, 4, 8)))

    model = Classifier(config.reward_model)
    found = [score for some in asyncio.run(through_service(config, tmp_path, model, call)) for score in some]
    expected = by_transformers(folder, ask)
    assert len(set(expected)) == len(expected)
    assert found == pytest.approx(expected, abs=1e-5)


def test_an_answer_that_is_too_long_has_a_reason_and_the_others_a_score(folder, tmp_path):
    config = config_of(folder, tokens_per_batch=50, chat_template=False)
    call = lambda models: models.scores(Prompt(index=0, text="ab"), ["a" * 60, "b"])  # noqa: E731
    long, short = asyncio.run(through_service(config, tmp_path, Classifier(config.reward_model), call))
    assert "62 tokens" in long
    assert math.isfinite(short)


def test_an_answer_for_which_the_accelerator_has_no_room_has_a_reason_and_the_others_a_score(folder, tmp_path):
    config = config_of(folder, chat_template=False)
    model = Classifier(config.reward_model)

    def without_room(_, args, given) -> None:
        if given["input_ids"].shape[1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model._model.register_forward_pre_hook(without_room, with_kwargs=True)
    call = lambda models: models.scores(Prompt(index=0, text="ab"), ["a" * 60, "b"])  # noqa: E731
    long, short = asyncio.run(through_service(config, tmp_path, model, call))
    assert "MemoryError: CUDA out of memory" in long
    assert math.isfinite(short)


class Failing:
    """A model that fails for no input's sake."""

    longest, most = 100, None

    def ids(self, ask: Ask) -> list[list[int]]:
        return [[1] for _ in ask.answers]

    def scores(self, batch: list[list[int]]) -> list[float]:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_model_that_has_failed_keeps_no_call_waiting_for_its_end(folder, tmp_path):
    async def go() -> None:
        events = EventLog(tmp_path / "events" / "reward-model-0.jsonl", "reward-model-0")
        service = Service(config_of(folder), Failing(), "token", events)
        address = await service.start()
        async with ClientSession(headers={"Authorization": "Bearer token"}) as session:
            asked = asyncio.create_task(session.post(address + PATH, data=msgspec.json.encode(ask_of(1))))
            await service.failed.wait()
            await asyncio.wait_for(service.close(), 30)  # aiohttp itself would wait for a minute
            with pytest.raises(ClientError):
                await asked
        events.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("change", "keys", "line"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, {}, "reward_model.path: .* is Qwen2ForCausalLM, and no sequence"),
        ({"auto_map": {}}, {}, "code of its own"),
        ({"id2label": {"0": "bad", "1": "good"}}, {}, r"reward_model.label: .* 2 labels; allowed: one of 0 \(bad\)"),
        ({"id2label": {"0": "bad", "1": "good"}}, {"label": "fine"}, "reward_model.label: 'fine' is none"),
        ({"id2label": {"0": "bad", "1": "good"}}, {"label": "good"}, None),
        ({}, {"label": 3}, "reward_model.label: 3 is none"),
        ({}, {}, None),
    ],
)
def test_a_folder_that_cannot_score_is_refused_in_one_line(folder, tmp_path, change, keys, line):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | change))
    config = config_of(tmp_path, **keys)
    if line is None:
        check_folder(config)
        return
    with pytest.raises(ConfigError, match=line) as refused:
        check_folder(config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_folder_with_a_file_that_is_no_mapping_is_refused_in_one_line(folder, tmp_path, name, text):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"reward_model.path: .*/{name} cannot be read") as refused:
        check_folder(config_of(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_model_without_its_head_is_refused(tmp_path):
    tiny_model.make(tmp_path / "policy")
    file = tmp_path / "policy" / "config.json"
    described = json.loads(file.read_text())
    described |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "score"}}
    file.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"lacks score\.weight"):
        Classifier(config_of(tmp_path / "policy").reward_model)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"scores": []}', b'{"scores": [{"score": 1.0}, {}]}', b'{"scores": [{"score": "x"}, {"score": 1}]}',
     b'{"scores": [{"score": 1.0}, {"score": 2.0, "error": "both"}]}', b'{"scores": [{"score": 1}, {"score": 1e999}]}'],
)  # fmt: skip
def test_a_bad_reply_is_refused(body):
    with pytest.raises(BadReply):
        scores_of(body, 2)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60))
def test_every_batch_fits_and_every_answer_is_in_one(lengths, tokens):
    batches = Batches(tokens=tokens, wait=1.0, most=100)
    batches.add(Waiting([0] * length, arrived=float(place)) for place, length in enumerate(lengths))
    seen = []
    while (due := batches.due(now=1000.0)) is not None:
        assert due == 0.0
        oldest, batch = batches.waiting[0], batches.take()
        assert oldest in batch
        assert len(batch) * max(len(each.ids) for each in batch) <= tokens
        seen += batch
    assert sorted(each.arrived for each in seen) == list(range(len(lengths)))


def test_a_queue_that_is_full_refuses_a_call_as_a_whole():
    batches = Batches(tokens=10, wait=1.0, most=3)
    assert batches.add([Waiting([0], 0.0), Waiting([0], 0.0)])
    assert not batches.add([Waiting([0], 0.0), Waiting([0], 0.0)])
    assert batches.due(now=0.25) == 0.75


class Broken:
    """A reward model that fails in a way of its own on its first calls, then scores."""

    def __init__(self, *replies: web.Response | float) -> None:
        self.replies = list(replies)  # a number: seconds without any
        self.asked = 0

    async def __call__(self, request: web.Request) -> web.Response:
        self.asked += 1
        ask = msgspec.json.decode(await request.read(), type=Ask)
        reply = self.replies.pop(0) if self.replies else None
        if isinstance(reply, float):
            await asyncio.sleep(reply)
        if isinstance(reply, web.Response):
            return reply
        return web.json_response({"scores": [{"score": float(len(answer))} for answer in ask.answers]})


async def asked(tmp_path: Path, broken: Broken, **settings):
    config = config_of(tmp_path, **settings)
    app = web.Application()
    app.router.add_post(PATH, broken)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    write_address(tmp_path, 0, f"http://127.0.0.1:{runner.addresses[0][1]}")
    models = RewardModels(config, tmp_path, Events())
    try:
        return await models.scores(Prompt(index=0, text="ab"), ["a", "abc"])
    finally:
        await models.close()
        await runner.cleanup()


def test_what_is_late_full_or_nonsense_is_asked_again(tmp_path):
    full, nonsense = web.Response(status=503, text="full"), web.Response(body=b'{"scores": [{"score": 1.0}]}')
    broken = Broken(full, nonsense, 4.0)
    assert asyncio.run(asked(tmp_path, broken, timeout=3.0, patience=100.0)) == [1.0, 3.0]
    assert broken.asked == 4


def test_none_that_answers_in_time_leaves_the_group_unjudged_with_the_last_reason(tmp_path):
    broken = Broken(*(web.Response(status=503, text="full") for _ in range(10_000)))
    with pytest.raises(ScorerUnready, match=r"patience=2 s: reward-model-0: status 503: full") as raised:
        asyncio.run(asked(tmp_path, broken, timeout=1.5, patience=2))
    scoring = Scoring(ScoringConfig(window=4, most_failed=0.5))
    with pytest.raises(ScorerBroken) as broke:
        scoring.count("copy", [describe(raised.value)] * 4)
    documented(
        "the scorer of ... failed on ... of its last ... answers (task.scoring.most_failed=...): ... no reward model "
        "has answered in reward_model.patience=... s: ...",
        str(broke.value),
        1,
    )


def test_a_last_try_that_patience_cuts_short_does_not_hide_what_was_said_before(tmp_path):
    broken = Broken(web.Response(status=503, text="full"), 5.0)
    with pytest.raises(ScorerUnready, match="reward-model-0: status 503: full"):
        asyncio.run(asked(tmp_path, broken, timeout=4, patience=4))
    assert broken.asked == 2


def test_a_reward_model_that_never_listens_ends_the_wait_with_one_line(tmp_path):
    config = config_of(tmp_path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"start_timeout": 0.1})})
    with pytest.raises(TimeoutError) as raised:
        asyncio.run(RewardModels(config, tmp_path, Events()).ready())
    documented("no reward model was ready in run.start_timeout=... s", str(raised.value), 1)


def test_a_worker_that_waits_in_vain_closes_the_tasks_that_it_has_loaded(tmp_path, monkeypatch):
    closed: list[str] = []

    class Loaded:
        async def close(self) -> None:
            closed.append("task")

    class Started:
        async def start(self) -> None: ...

    async def load(tasks, config, run_folder) -> None:
        tasks["copy"] = Loaded()

    async def address(config, run_folder, stop) -> str:
        return "tcp://127.0.0.1:1"

    monkeypatch.setattr(worker_process, "_load", load)
    monkeypatch.setattr(worker_process, "_address", address)
    monkeypatch.setattr(worker_process.weighted, "check_turns", lambda config, tasks: None)
    config = config_of(tmp_path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"start_timeout": 0.1})})

    async def start() -> None:
        parts = {"stop": asyncio.Event(), "events": Events(), "evaluator": None}
        await worker_process._run_worker(config, tmp_path, 0, Started(), **parts)

    with pytest.raises(TimeoutError, match="no reward model was ready"):
        asyncio.run(start())
    assert closed == ["task"]


def test_a_call_that_is_not_answered_is_told_with_the_index_by_which_its_task_knows_the_prompt(folder, tmp_path):
    class Told(Events):
        def emit(self, event: str, /, **fields) -> None:
            told.append((event, fields))

    class Once(RewardModels):
        """Its first call is not answered."""

        async def _ask(self, *_):
            if not told:
                raise Unanswered("status 503")
            return [1.0]

    told: list[tuple[str, dict]] = []
    config = config_of(folder, retry=0.01)
    bearer_token(key_folder(config, tmp_path), "api")
    write_address(tmp_path, 0, "http://127.0.0.1:1")

    async def run() -> list[float | str]:
        models = Once(config, tmp_path, Told())
        try:
            return await models.scores(Prompt(index=7, text="1+1="), ["2"])
        finally:
            await models.close()

    assert asyncio.run(run()) == [1.0]
    assert told == [("reward_model.unanswered", {"index": 0, "task_prompt_index": 7, "reason": "status 503"})]
