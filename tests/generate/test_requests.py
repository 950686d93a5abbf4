"""Requests that updates and lost servers cut off: at a real SGLang server, every answer is whole, every token exact."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, Piece, PieceMeta, WeightVersionSpan
from streamrl.engine.client import EngineClient, EngineError
from streamrl.generate import requests
from streamrl.generate.gate import GatedPolicy, RequestGate
from streamrl.generate.inference import PartlyAnswered, Policy
from streamrl.generate.requests import STALLS, GroupPolicy, Place
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.sources import make_source
from streamrl.publish.staging import Staging
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

TIMEOUT = 60.0
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPTS = [[1, 4, 2, 8], [3, 3, 5], [7, 1, 0, 2, 5, 8]]
TOKENS = 300
SAMPLING = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
UPDATES = 2
ROUNDS = 20


class Some:
    """Servers by their names: policies that all have one version, unless they are told another."""

    def __init__(self, **policies: Policy) -> None:
        self.policies = policies
        self.versions = dict.fromkeys(policies, PolicyVersion(0))
        self.chosen: list[str] = []
        self._changed = asyncio.Event()

    def choose(self, group: Any, floor: PolicyVersion, avoid: str | None) -> Place | None:
        able = [name for name, version in self.versions.items() if version >= floor]
        if not able:
            return None
        name = next((name for name in able if name != avoid), able[0])
        self.chosen.append(name)
        return Place(name, self.versions[name], self.policies[name])

    def changed(self) -> Awaitable[object]:
        return self._changed.wait()

    def update(self, name: str, version: PolicyVersion) -> None:
        self.versions[name] = version
        self._changed.set()
        self._changed = asyncio.Event()


def assert_whole(
    prompt: list[int],
    answer: Answer,
    weights: list[dict[str, torch.Tensor]],
    forward_logprobs: Callable[..., torch.Tensor],
) -> None:
    """So many tokens, each with the log-prob of a plain forward by the version that is stamped on it."""
    assert len(answer.output_ids) == TOKENS
    assert answer.meta_info.finish_reason.type == "length"
    reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
    assert [entry[1] for entry in answer.meta_info.output_token_logprobs] == answer.output_ids
    spans = answer.meta_info.weight_versions
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == TOKENS
    assert list(spans) == sorted(spans, key=lambda span: PolicyVersion.parse(span.version))
    for span in spans:
        of = weights[PolicyVersion.parse(span.version).step % 2]
        expected = forward_logprobs(of, [*prompt, *answer.output_ids])[len(prompt) - 1 :]
        assert (expected - reported)[span.start : span.end].abs().max() < 1e-4


@pytest.mark.parametrize("mode", [("abort", 0), ("abort", 32), ("retract", 32)])
def test_answers_that_updates_cut_off_go_on_from_their_last_token(
    fresh_server, model_folders, forward_logprobs: Callable[..., torch.Tensor], tmp_path, mode: tuple[str, int]
):
    interruption, every = mode
    publishing = {"transport": "broadcast", "interruption": interruption, "timeout": TIMEOUT, "bucket": 1 << 16}
    config = Config.model_validate({"model": {"path": model_folders[0]}, "publish": publishing})
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]

    async def run() -> list[list[Answer]]:
        client, gate = EngineClient(fresh_server.address, TIMEOUT), RequestGate()
        servers, sink = Some(one=GatedPolicy(client, gate)), make_sink(config, client, gate)
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        policy = GroupPolicy(servers, "group", PolicyVersion(0), every)
        try:
            tasks = [asyncio.create_task(policy.generate(prompt, SAMPLING, n)) for n, prompt in enumerate(PROMPTS, 1)]
            for step in range(1, UPDATES + 1):
                await asyncio.sleep(0.3)
                staged = Staging(1 << 16).fill(PolicyVersion(step), weights[step % 2].items())
                manifest = source.manifest(STATE, staged)
                sending = asyncio.to_thread(source.send, STATE, staged, lambda: time.sleep(0.002))
                await asyncio.gather(sending, sink.apply(staged.version, manifest))
                servers.update("one", staged.version)
            return await asyncio.gather(*tasks)
        finally:
            source.close()
            await client.close()

    groups = asyncio.run(run())
    assert [len(answers) for answers in groups] == [1, 2, 3]
    versions = set()
    for prompt, answers in zip(PROMPTS, groups, strict=True):
        for answer in answers:
            assert_whole(prompt, answer, weights, forward_logprobs)
            versions |= {span.version for span in answer.meta_info.weight_versions}
    assert len(versions) > 1, "nothing was cut"


def test_an_answer_that_is_ended_in_the_step_of_its_end_token_is_not_gone_on_with(fresh_server):
    """Every second token is an end. All requests are ended again and again, some in the step of one."""
    ends = [0, 2, 4, 6, 8]
    sampling = {"temperature": 1.0, "max_new_tokens": TOKENS, "stop_token_ids": ends}

    async def run() -> tuple[list[Answer], int]:
        client = EngineClient(fresh_server.address, TIMEOUT)
        watched = Watched(client)

        async def ask() -> list[Answer]:
            policy = GroupPolicy(Some(one=watched), "group", PolicyVersion(0), 0)
            return [each for _ in range(ROUNDS) for each in await policy.generate(PROMPTS[0], sampling, 8)]

        asking = asyncio.create_task(ask())
        try:
            while not asking.done():
                await client.abort()
            return await asking, len(watched.asked)
        finally:
            await client.close()

    answers, asked = asyncio.run(run())
    assert asked > ROUNDS, "nothing was cut"
    for answer in answers:
        assert not set(ends) & set(answer.output_ids[:-1])
    whole = [answer for answer in answers if answer.output_ids and answer.output_ids[-1] in ends]
    assert {answer.meta_info.finish_reason.type for answer in whole} == {"stop"}


def test_a_request_that_is_ended_in_its_servers_queue_goes_on_from_the_last_token_that_was_sent(
    fresh_server, model_folders, forward_logprobs: Callable[..., torch.Tensor]
):
    async def run() -> tuple[list[Answer], list[tuple[int, int]]]:
        client = EngineClient(fresh_server.address, TIMEOUT)
        watched = Watched(client)
        policy = GroupPolicy(Some(one=watched), "group", PolicyVersion(0), 16)
        asking = asyncio.create_task(policy.generate(PROMPTS[0], SAMPLING, 1))
        try:
            await watched.pieces.wait()
            await client.pause("retract", TIMEOUT)  # what is running goes back to the queue
            await client.abort()
            await client.resume(TIMEOUT)
            return await asking, watched.asked
        finally:
            await client.close()

    (answer,), asked = asyncio.run(run())
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    assert_whole(PROMPTS[0], answer, weights, forward_logprobs)
    (first, _), (behind, missing) = asked
    assert behind + missing == first + TOKENS
    assert behind > first


class Cable:
    """A way to a server that is cut, with everything that is on it, once so many bytes have come back."""

    def __init__(self, address: str, most: int) -> None:
        self._host, _, port = address.removeprefix("http://").partition(":")
        self._port, self._left = int(port), most
        self._writers: list[asyncio.StreamWriter] = []

    async def lay(self) -> str:
        """The address of the near end."""
        self._near = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._near.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._near.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer, counts=True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False) -> None:
        try:
            while some := await reader.read(4096):
                self._left -= len(some) if counts else 0
                if self._left < 0:
                    self.cut()
                    return
                writer.write(some)
        except ConnectionError:
            return


def test_a_lost_servers_answers_go_on_at_another_from_their_last_received_token(
    fresh_server, model_folders, forward_logprobs: Callable[..., torch.Tensor]
):
    """The shared server twice: once by a cable that breaks in the middle of the answers."""
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]

    async def run() -> tuple[list[list[Answer]], Some, list[tuple[int, int]]]:
        cable = Cable(fresh_server.address, most=60_000)
        near = EngineClient(await cable.lay(), TIMEOUT)
        direct = Watched(EngineClient(fresh_server.address, TIMEOUT))
        servers = Some(near=near, other=direct)
        policy = GroupPolicy(servers, "group", PolicyVersion(0), 32)
        try:
            asked = (policy.generate(prompt, SAMPLING, n) for n, prompt in enumerate(PROMPTS, 1))
            return await asyncio.gather(*asked), servers, direct.asked
        finally:
            cable.cut()
            await near.close()
            await direct.client.close()

    groups, servers, asked = asyncio.run(run())
    for prompt, answers in zip(PROMPTS, groups, strict=True):
        for answer in answers:
            assert_whole(prompt, answer, weights, forward_logprobs)
    assert set(servers.chosen) == {"near", "other"}
    resumed = [(known, missing) for known, missing in asked if known > 6]
    assert resumed, "no answer was gone on with"
    assert all(missing < TOKENS for _, missing in resumed)


class Watched:
    """A client of which is known what it was asked for: (input ids, new tokens)."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.asked: list[tuple[int, int]] = []
        self.pieces = asyncio.Event()  # more than the first piece of an answer has come

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *rest: Any, **options: Any
    ) -> list[Answer]:
        self.asked.append((len(input_ids), sampling["max_new_tokens"]))
        if add := options.get("pieces"):
            options["pieces"] = lambda piece: self._told(add, piece)
        return await self.client.generate(input_ids, sampling, *rest, **options)

    def _told(self, add: Callable[[Piece], None], piece: Piece) -> None:
        add(piece)
        if piece.meta_info.completion_tokens > 1:
            self.pieces.set()

    async def abort(self, request_id: str = "") -> None:
        await self.client.abort(request_id)


class Script:
    """A policy that answers as it is told, and notes what it was asked for."""

    def __init__(self, *said: Answer | EngineError | None) -> None:
        """None: it says nothing until it is aborted."""
        self.said = list(said)
        self.asked: list[tuple[list[int], int]] = []
        self.ended: list[str] = []
        self._ended = asyncio.Event()

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], n: int, request_id: str | None = None, **options: Any
    ) -> list[Answer]:
        self.asked.append((list(input_ids), sampling["max_new_tokens"]))
        said = self.said.pop(0)
        if said is None:
            await self._ended.wait()
            return [answer([7], "abort")] * n
        if isinstance(said, EngineError):
            raise said
        return [said] * n

    async def abort(self, request_id: str = "") -> None:
        self.ended.append(request_id)
        self._ended.set()


LOST = EngineError("http://s", "/generate", None, "refused")
LATE = EngineError("http://s", "/generate", None, "none in 600 s", late=True)
REFUSED = EngineError("http://s", "/generate", 400, "too long")


def answer(ids: list[int], finish: str, version: str = "1.0") -> Answer:
    spans = (WeightVersionSpan(version, 0, len(ids)),)
    logprobs: list[tuple[float, int, str | None]] = [(-1.0, token, None) for token in ids]
    meta = AnswerMeta(id="a", finish_reason=FinishReason(finish), weight_versions=spans, output_token_logprobs=logprobs)
    return Answer(output_ids=ids, meta_info=meta)


def ask(servers: Some, *, end: str = "", n: int = 1, at_least: PolicyVersion | None = None) -> Answer:
    async def run() -> Answer:
        policy = GroupPolicy(servers, "group", PolicyVersion(0), 0)
        asking = asyncio.create_task(policy.generate([1, 2], {"max_new_tokens": 6}, n, "request", at_least=at_least))
        await asyncio.sleep(0)
        if end:
            await policy.abort(end)
        async with asyncio.timeout(20):
            answers = await asking
        return answers[0]

    return asyncio.run(run())


def test_a_request_that_was_ended_by_its_id_is_not_asked_for_again():
    script = Script(None)
    whole = ask(Some(one=script), end="request")
    assert (whole.output_ids, whole.meta_info.finish_reason.type) == ([7], "abort")
    assert (script.ended, len(script.asked)) == (["request"], 1)


class Closing(Script):
    """A policy whose gate closes as soon as it is asked."""

    def __init__(self, gate: RequestGate, *said: Answer) -> None:
        super().__init__(*said)
        self._gate = gate
        self.closed = asyncio.Event()

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        closing = asyncio.ensure_future(self._gate.close(TIMEOUT))
        closing.add_done_callback(lambda _: self.closed.set())
        return await super().generate(*request, **options)


def test_an_answer_that_waits_at_a_closed_gate_keeps_its_tokens_when_it_is_ended():
    gate = RequestGate()
    script = Closing(gate, answer([7, 8], "abort", "0.0"))

    async def run() -> list[Answer]:
        policy = GroupPolicy(Some(one=GatedPolicy(script, gate)), "group", PolicyVersion(0), 0)
        asking = asyncio.create_task(policy.generate([1, 2], {"max_new_tokens": 6}, 1, "request"))
        async with asyncio.timeout(20):
            await script.closed.wait()
            await asyncio.sleep(0.1)  # it comes to the gate with what is missing
            await policy.abort("request")
            return await asking

    (whole,) = asyncio.run(run())
    assert (whole.output_ids, whole.meta_info.finish_reason.type, len(script.asked)) == ([7, 8], "abort", 1)


class Pieces(Script):
    """A policy that gives pieces of several answers and then says nothing, whatever ends it."""

    def __init__(self, *pieces: Piece) -> None:
        super().__init__()
        self.pieces = pieces
        self.left = asyncio.Event()  # nobody listens any more

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        for piece in self.pieces:
            options["pieces"](piece)
        try:
            await asyncio.sleep(600)
        finally:
            self.left.set()
        return []


def piece(index: int, ids: list[int], finish: str | None = None) -> Piece:
    """The first one of an answer by version 0.0, and its last one with `finish`."""
    spans = (WeightVersionSpan("0.0", 0, len(ids)),) if finish else ()
    logprobs: list[tuple[float, int, str | None]] = [(-1.0, token, None) for token in ids]
    reason = FinishReason(finish) if finish else None
    meta = PieceMeta(f"a{index}", reason, spans, logprobs, completion_tokens=len(ids), weight_version="0.0")
    return Piece(output_ids=ids, meta_info=meta, index=index)


def test_of_a_request_for_several_answers_those_that_came_to_their_end_are_whole_when_it_is_ended():
    script = Pieces(piece(0, [7, 8]), piece(2, [5, 9], "stop"))

    async def run() -> list[Answer]:
        policy = GroupPolicy(Some(one=script), "group", PolicyVersion(0), 2)
        asking = asyncio.create_task(policy.generate([1, 2], {"max_new_tokens": 6}, 3, "request"))
        await asyncio.sleep(0.05)
        await policy.abort("request")
        async with asyncio.timeout(20):
            return await asking

    answers = asyncio.run(run())
    told = [(each.output_ids, each.meta_info.finish_reason.type, each.meta_info.weight_versions) for each in answers]
    both = (WeightVersionSpan("0.0", 0, 2),)
    assert told == [([7, 8], "abort", both), ([], "abort", ()), ([5, 9], "stop", both)]
    assert script.left.is_set()  # so that a server ends what is left of it
    assert script.ended == []


class Parts(Script):
    """A policy that gives the first parts of several answers, and then what `further` does."""

    def __init__(self, *parts: Answer, further: Callable[[int], Awaitable[Answer]] | None = None) -> None:
        super().__init__()
        self.parts, self.further = parts, further

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        self.asked.append(request)
        return (
            list(self.parts) if self.further is None or len(self.asked) == 1 else [await self.further(len(self.asked))]
        )


def test_a_server_that_contradicts_itself_in_one_answer_costs_that_one():
    right = answer([7, 8], "stop")
    wrong = replace(right, meta_info=replace(right.meta_info, routed_experts=base64.b64encode(bytes(20)).decode()))

    async def run() -> list[Answer]:
        policy = GroupPolicy(Some(one=Parts(wrong, right)), "group", PolicyVersion(0), 0)
        with pytest.raises(PartlyAnswered, match="5 routed experts for 3 tokens that were read") as raised:
            await policy.generate([1, 2], {"max_new_tokens": 6}, 2, "request")
        return list(raised.value.answers)

    found = asyncio.run(run())
    assert [(each.output_ids, each.meta_info.finish_reason.type) for each in found] == [
        ([7, 8], "abort"),
        ([7, 8], "stop"),
    ]
    assert found[1] == right


def test_nothing_is_drawn_for_a_request_that_has_failed():
    left = asyncio.Event()

    async def further(asked: int) -> Answer:
        if asked == 2:
            await asyncio.sleep(0)
            raise RuntimeError("a defect")
        try:
            await asyncio.sleep(600)
        finally:
            left.set()
        raise AssertionError

    async def run() -> None:
        cut = answer([7, 8], "abort", "0.0")
        policy = GroupPolicy(Some(one=Parts(cut, cut, further=further)), "group", PolicyVersion(0), 0)
        with pytest.raises(RuntimeError, match="a defect"):
            await policy.generate([1, 2], {"max_new_tokens": 6}, 2, "request")
        assert left.is_set()

    asyncio.run(run())


def test_a_request_that_waits_for_a_server_can_be_ended():
    script = Script()
    whole = ask(Some(one=script), end="request", at_least=PolicyVersion(3))
    assert (whole.output_ids, whole.meta_info.finish_reason.type, script.asked) == ([], "abort", [])


def test_a_request_that_was_ended_before_it_began_is_not_sent():
    script = Script()

    async def run() -> Answer:
        policy = GroupPolicy(Some(one=script), "group", PolicyVersion(0), 0)
        await policy.abort("request")
        return (await policy.generate([1, 2], {"max_new_tokens": 6}, 1, "request"))[0]

    ended = asyncio.run(run())
    assert (ended.output_ids, ended.meta_info.finish_reason.type, script.asked) == ([], "abort", [])


def test_a_request_that_is_ended_at_the_moment_a_server_can_take_it_is_not_sent():
    script = Script()

    async def run() -> Answer:
        servers = Some(one=script)
        policy = GroupPolicy(servers, "group", PolicyVersion(1), 0)
        asking = asyncio.create_task(policy.generate([1, 2], {"max_new_tokens": 6}, 1, "request"))
        await asyncio.sleep(0.01)
        servers.update("one", PolicyVersion(1))
        await policy.abort("request")
        return (await asking)[0]

    assert (asyncio.run(run()).output_ids, script.asked) == ([], [])


def test_a_request_is_sent_again_however_often_its_server_was_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "LONGEST_PAUSE", 0.0)
    assert ask(Some(one=Script(*[LOST] * 1100, answer([7], "stop")))).output_ids == [7]


def test_a_request_that_never_brings_a_token_is_given_up():
    script = Script(answer([7], "abort", "0.0"), *[answer([], "abort")] * (STALLS + 5))
    assert ask(Some(one=script)).meta_info.finish_reason.type == "abort"
    assert script.asked == [([1, 2], 6), *[([1, 2, 7], 5)] * STALLS]


def test_a_rest_that_the_server_refuses_leaves_an_abort_and_a_refused_request_is_told():
    with pytest.raises(PartlyAnswered, match="too long") as partly:
        ask(Some(one=Script(answer([7, 8], "abort", "0.0"), REFUSED)))
    assert [(each.output_ids, each.meta_info.finish_reason.type) for each in partly.value.answers] == [
        ([7, 8], "abort")
    ]
    with pytest.raises(EngineError, match="too long"):
        ask(Some(one=Script(REFUSED)))


def test_a_lost_server_is_avoided_and_a_request_without_a_token_is_sent_as_it_was():
    first, second = Script(LOST, LOST), Script(LOST, answer([7], "stop"))
    servers = Some(first=first, second=second)
    assert ask(servers, n=4).output_ids == [7]
    assert servers.chosen == ["first", "second", "first", "second"]
    assert second.asked == [([1, 2], 6)] * 2


class Slow(Script):
    """A policy that draws two tokens in the time of a request."""

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], n: int, request_id: str | None = None, **options: Any
    ) -> list[Answer]:
        missing = sampling["max_new_tokens"]
        self.asked.append((list(input_ids), missing))
        for index in range(n):
            options["pieces"](piece(index, [7, 7], "length" if missing == 2 else None))
        if missing > 2:
            raise LATE
        return []


@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_that_takes_longer_than_a_request_may_goes_on_from_its_last_token(n: int):
    first, second = Slow(), Slow()

    async def run() -> list[Answer]:
        policy = GroupPolicy(Some(first=first, second=second), "group", PolicyVersion(0), 1)
        async with asyncio.timeout(20):
            return await policy.generate([1, 2], {"max_new_tokens": 6}, n, "request")

    answers = asyncio.run(run())
    assert [(each.output_ids, each.meta_info.finish_reason.type) for each in answers] == [([7] * 6, "length")] * n
    assert [(len(ids), missing) for ids, missing in first.asked[:1]] == [(2, 6)]
    assert (4, 4) in [(len(ids), missing) for ids, missing in second.asked]


def test_a_request_that_is_late_without_a_token_is_sent_again_to_another_server():
    first, second = Script(LATE, LATE), Script(LATE, answer([7], "stop"))
    servers = Some(first=first, second=second)
    assert ask(servers, n=4).output_ids == [7]
    assert servers.chosen == ["first", "second", "first", "second"]


def test_an_answer_goes_on_at_no_server_with_older_weights_than_its_last_token():
    old, new = Script(answer([9], "stop", "5.0")), Script(answer([7], "abort", "4.0"), LOST, LOST, answer([8], "stop"))
    servers = Some(old=old, new=new)
    servers.versions["new"] = PolicyVersion(4)

    async def run() -> Answer:
        policy = GroupPolicy(servers, "group", PolicyVersion(3), 0)
        asking = asyncio.create_task(policy.generate([1, 2], {"max_new_tokens": 6}, 1))
        await asyncio.sleep(0.05)
        assert set(servers.chosen) == {"new"}  # it is asked again and again, the other one is too old
        servers.update("old", PolicyVersion(5))
        async with asyncio.timeout(20):
            return (await asking)[0]

    whole = asyncio.run(run())
    assert whole.output_ids == [7, 9]
    assert [(span.version, span.end) for span in whole.meta_info.weight_versions] == [("4.0", 1), ("5.0", 2)]
