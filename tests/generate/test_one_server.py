"""An evaluation's answers end at their stop strings: by a server that would draw for ever."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, Piece, PieceMeta, WeightVersionSpan
from streamrl.engine.client import EngineError
from streamrl.generate import served
from streamrl.generate.engines.sglang import Sglang
from streamrl.generate.inference import EngineInference, PartlyAnswered
from streamrl.generate.one_server import OneServer
from streamrl.generate.pinning import Pinning
from streamrl.generate.stop_strings import EVERY, StopStrings
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.events import EventLog
from streamrl.stream.messages import Message
from streamrl.types import PolicyVersion

WRITES = "caf=" * 100  # what it draws, token by token
STOP = "=caf=c"
V7 = PolicyVersion(7)


class Endless:
    """A server that draws what it is to write until it is told to end, or has drawn so many tokens."""

    def __init__(self, tokenizer: Tokenizer, version: PolicyVersion, *, deaf: bool = False) -> None:
        """`deaf`: it cannot be told to end."""
        self.name, self.address, self.version, self.policy = "server-0", "http://s", version, self
        self.drawn: list[int] = []  # tokens of each request
        self._ids = tokenizer.plain_ids(WRITES).tolist()
        self._deaf = deaf
        self._ended: set[str] = set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], n: int, request_id: str | None = None, **options: Any
    ) -> list[Answer]:
        assert n == 1
        ids = self._ids[: sampling["max_new_tokens"]]
        every = options.get("every", len(ids))
        for end in range(every, len(ids) + every, every):
            ended = request_id in self._ended
            finish = FinishReason("abort" if ended else "length") if ended or end >= len(ids) else None
            if "pieces" in options:
                options["pieces"](self._piece([] if ended else ids[end - every : end], min(end, len(ids)), finish))
            if ended:
                break
            self.drawn.append(len(ids[end - every : end]))
            await asyncio.sleep(0)
        return [] if "pieces" in options else [self._answer(ids)]

    async def abort(self, request_id: str = "") -> None:
        assert request_id
        if self._deaf:
            raise EngineError(self.address, "/abort_request", 500, "no")
        self._ended.add(request_id)

    def _piece(self, ids: list[int], end: int, finish: FinishReason | None) -> Piece:
        end = sum(self.drawn) if finish is not None and finish.type == "abort" else end
        spans = (WeightVersionSpan(str(self.version), 0, end),) if finish else ()
        logprobs: list[tuple[float, int, str | None]] = [(-1.0, token, None) for token in ids]
        meta = PieceMeta("a", finish, spans, logprobs, completion_tokens=end, weight_version=str(self.version))
        return Piece(output_ids=ids, meta_info=meta)

    def _answer(self, ids: list[int]) -> Answer:
        spans = (WeightVersionSpan(str(self.version), 0, len(ids)),)
        logprobs: list[tuple[float, int, str | None]] = [(-1.0, token, None) for token in ids]
        return Answer(output_ids=ids, meta_info=AnswerMeta("a", FinishReason("length"), spans, logprobs))


@pytest.fixture
def tokenizer(model_folders: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer(model_folders[0])


def configured(model: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model},
            "generate": {"heartbeat": 0.01, "sampling": {"max_new_tokens": 200}},
            "evaluate": {"every": 1},
        }
    )


async def ask(handles: partial[EngineInference]) -> tuple[str, str]:
    """The text of an answer, and why it ended."""
    (answer,) = await handles(greedy=False, deadline=None).generate("caf=", 1, stop=[STOP])
    return answer.text, answer.finish_reason


def assert_ended(server: Endless, said: tuple[str, str]) -> None:
    text, reason = said
    assert (text, reason) == (WRITES[: WRITES.index(STOP) + len(STOP)], "stop")
    assert sum(server.drawn) == EVERY


def test_the_server_of_an_evaluation_command_is_told_where_an_answer_ends(
    tokenizer: Tokenizer, model_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Endless(tokenizer, PolicyVersion(0))
    monkeypatch.setattr(served, "ServedModel", lambda *_args, **_options: server)

    async def run() -> tuple[str, str]:
        async with Sglang(Sglang.Options()).handles(configured(model_folders[0]), tmp_path) as handles:
            return await ask(handles)

    assert_ended(server, asyncio.run(run()))


class Asking:
    """An evaluator that asks once."""

    said: tuple[str, str]

    def is_due(self, version: PolicyVersion) -> bool:
        return True

    async def run(self, version: PolicyVersion, handles: partial[EngineInference]) -> dict[str, float]:
        self.said = await ask(handles)
        return {"eval/step": 7.0}

    async def close(self) -> None: ...


def test_the_pinned_server_of_a_run_is_told_where_an_answer_ends(
    tokenizer: Tokenizer, model_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    server, evaluator = Endless(tokenizer, V7), Asking()

    async def run() -> None:
        evaluated = asyncio.Event()
        events = EventLog(tmp_path / "events.jsonl", "generator-0")
        config = configured(model_folders[0])
        pinning = Pinning(config, tmp_path, lambda *_: evaluator, tokenizer=tokenizer, events=events)

        async def send(message: Message) -> bool:
            evaluated.set()
            return True

        serving = asyncio.create_task(pinning.serve(lambda name: OneServer.of(server), tuple, send))
        assert pinning.begin(server.name, V7)
        async with asyncio.timeout(20):
            await evaluated.wait()
        serving.cancel()
        await pinning.close()
        events.close()

    asyncio.run(run())
    assert_ended(server, evaluator.said)


def test_an_answer_that_the_server_cannot_be_told_to_end_is_whole_and_cut_by_who_asked(tokenizer: Tokenizer) -> None:
    server = Endless(tokenizer, V7, deaf=True)
    ends = StopStrings([STOP], tokenizer)
    (answer,) = asyncio.run(OneServer.of(server).generate([1], {"max_new_tokens": 40}, 1, ends=ends))
    assert len(answer.output_ids) == 40
    assert tokenizer.text([ends.cut(answer, 1).output_ids]) == [WRITES[: WRITES.index(STOP) + len(STOP)]]


def test_a_server_that_contradicts_itself_costs_the_answer_alone(tokenizer):
    class Skips(Endless):
        """It leaves pieces out."""

        def _piece(self, ids: list[int], end: int, finish: FinishReason | None) -> Piece:
            return super()._piece(ids, end + (end > EVERY), finish)

    server = Skips(tokenizer, V7)
    policy = OneServer(server, V7)

    async def run() -> None:
        with pytest.raises(PartlyAnswered, match="a piece begins at token"):
            await policy.generate([1, 2], {"max_new_tokens": 60}, 1, ends=StopStrings(["never"], tokenizer))

    asyncio.run(run())
