"""The client against a real server, and against what is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

from streamrl.engine.answers import Answer, Piece
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.keys import EngineKeys

SAMPLING = {"temperature": 1.0, "max_new_tokens": 12}
PROMPT = [1, 4, 2, 8]
T = TypeVar("T")


def ask(address: str, question: Callable[[EngineClient], Awaitable[T]], timeout: float = 60.0) -> T:
    async def run() -> T:
        client = EngineClient(address, timeout)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(run())


def failure(address: str, question: Callable[[EngineClient], Awaitable[object]], timeout: float = 60.0) -> EngineError:
    with pytest.raises(EngineError) as caught:
        ask(address, question, timeout)
    return caught.value


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_log_probs_of_an_answer_are_those_of_a_plain_forward(
    fresh_server, model_folders, forward_logprobs, temperature
):
    sampling = {**SAMPLING, "temperature": temperature, "ignore_eos": True}
    answers: list[Answer] = ask(fresh_server.address, lambda client: client.generate(PROMPT, sampling, n=3))
    weights = load_file(model_folders[0] / "model.safetensors")
    assert len(answers) == 3
    for answer in answers:
        expected = forward_logprobs(weights, [*PROMPT, *answer.output_ids], temperature)[len(PROMPT) - 1 :]
        reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        assert (expected - reported).abs().max() < 1e-4
        assert [(span.version, span.start, span.end) for span in answer.meta_info.weight_versions] == [("0.0", 0, 12)]


def test_a_prefill_has_the_log_probs_of_a_plain_forward_and_names_the_weights(
    fresh_server, model_folders, forward_logprobs
):
    ids = [*PROMPT, 7, 9, 0, 3, 9]  # 9 is the last of the vocabulary
    weights = load_file(model_folders[0] / "model.safetensors")
    expected = forward_logprobs(weights, ids)
    for start in (1, len(PROMPT), len(ids) - 1):
        scores = ask(fresh_server.address, lambda client, start=start: client.score(ids, start))
        assert scores.version == "0.0"
        assert scores.logprobs == pytest.approx(expected[start - 1 :].tolist(), abs=1e-4)


def test_the_end_token_ends_an_answer_and_is_part_of_it(fresh_server):
    ends = [0, 2, 4, 6, 8]  # half of the vocabulary, and with it the model's own end, 0
    sampling = {**SAMPLING, "max_new_tokens": 200, "stop_token_ids": ends}
    answers = ask(fresh_server.address, lambda client: client.generate(PROMPT, sampling, n=8))
    for answer in answers:
        assert answer.meta_info.finish_reason.type == "stop"
        assert answer.output_ids[-1] in ends
        assert not set(ends) & set(answer.output_ids[:-1])


def test_where_no_token_is_to_end_an_answer_that_of_the_model_does_not(fresh_server):
    sampling = {**SAMPLING, "max_new_tokens": 100, "stop_token_ids": []}
    answers = ask(fresh_server.address, lambda client: client.generate(PROMPT, sampling, n=4))
    assert {(len(answer.output_ids), answer.meta_info.finish_reason.type) for answer in answers} == {(100, "length")}
    assert any(0 in answer.output_ids for answer in answers)


def test_a_refused_request_names_address_path_status_and_reason(fresh_server):
    error = failure(fresh_server.address, lambda client: client.generate([1] * 100_000, SAMPLING, n=2))
    assert (error.address, error.path, error.status, error.late) == (fresh_server.address, "/generate", 400, False)
    assert "\n" not in error.reason
    assert "length" in error.reason


def test_no_server_is_an_error_without_status():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        error = failure(address, lambda client: client.model_info())
    assert (error.status, error.late) == (None, False)
    assert error.path == "/model_info"


def test_a_server_that_does_not_answer_is_late():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error = failure(address, lambda client: client.generate(PROMPT, SAMPLING, n=1), timeout=0.2)
    assert (error.status, error.late) == (None, True)


def test_an_ipv6_address_and_a_host_name_reach_a_server_with_the_api_key():
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        body = b'{"model_path": "m", "weight_version": "3.0", "is_generation": true}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async def run() -> list[str]:
        versions = []
        for bound, host in (("::1", "[::1]"), ("127.0.0.1", "localhost")):
            server = await asyncio.start_server(answer, bound, 0)
            port = server.sockets[0].getsockname()[1]
            client = EngineClient(f"http://{host}:{port}", 10.0, EngineKeys(api="secret"))
            versions.append((await client.model_info()).weight_version)
            await client.close()
            server.close()
        return versions

    assert asyncio.run(run()) == ["3.0", "3.0"]
    assert all(b"authorization: bearer secret" in request.lower() for request in requests)


def streaming(*chunks: bytes) -> tuple[list[Piece], EngineError | None]:
    """What the client makes of a stream that a server sends in these chunks and then breaks off."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for chunk in chunks:
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.transport.abort()

    async def run() -> tuple[list[Piece], EngineError | None]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 30.0)
        pieces: list[Piece] = []
        try:
            await client.generate(PROMPT, SAMPLING, 2, pieces=pieces.append, every=4)
        except EngineError as error:
            return pieces, error
        finally:
            await client.close()
            server.close()
        return pieces, None

    return asyncio.run(run())


def event(*ids: int, index: int = 0) -> bytes:
    logprobs = ",".join(f"[-0.5,{token},null]" for token in ids)
    return (
        b'data: {"output_ids":%s,"index":%d,"meta_info":{"id":"a","finish_reason":null,"completion_tokens":%d,'
        b'"weight_version":"1.0","output_token_logprobs":[%s]}}\n\n'
        % (str(list(ids)).encode(), index, len(ids), logprobs.encode())
    )


def test_the_pieces_of_a_stream_are_told_however_it_is_cut_into_chunks():
    whole = event(5, 6) + event(7, index=1) + b"data: [DONE]\n\n"
    for size in (7, 64, len(whole)):
        pieces, error = streaming(*(whole[start : start + size] for start in range(0, len(whole), size)))
        assert error is None
        assert [(piece.index, piece.output_ids) for piece in pieces] == [(0, [5, 6]), (1, [7])]


def test_a_stream_that_breaks_off_is_a_lost_server_and_what_came_before_is_told():
    pieces, error = streaming(event(5, 6), event(7)[:20])
    assert [piece.output_ids for piece in pieces] == [[5, 6]]
    assert error is not None
    assert (error.status, error.late) == (None, False)


def test_an_error_in_a_stream_has_its_status_and_its_words():
    _, error = streaming(b'data: {"error":{"message":"too long","type":"x","code":400}}\n\n', b"data: [DONE]\n\n")
    assert error is not None
    assert (error.status, error.reason) == (400, "too long")


def test_a_streamed_answer_is_that_of_a_plain_forward_and_comes_in_pieces(
    fresh_server, model_folders, forward_logprobs
):
    pieces: list[Piece] = []
    sampling = {**SAMPLING, "max_new_tokens": 40, "ignore_eos": True}
    ask(fresh_server.address, lambda client: client.generate(PROMPT, sampling, 2, pieces=pieces.append, every=8))
    weights = load_file(model_folders[0] / "model.safetensors")
    for index in (0, 1):
        mine = [piece for piece in pieces if piece.index == index]
        assert len(mine) >= 5
        assert [piece.meta_info.finish_reason is not None for piece in mine] == [False] * (len(mine) - 1) + [True]
        ids = [token for piece in mine for token in piece.output_ids]
        expected = forward_logprobs(weights, [*PROMPT, *ids])[len(PROMPT) - 1 :]
        told = [entry for piece in mine for entry in piece.meta_info.output_token_logprobs]
        assert [entry[1] for entry in told] == ids
        assert (expected - torch.tensor([entry[0] for entry in told])).abs().max() < 1e-4


def test_the_pressure_on_a_server_is_told(fresh_server):
    pressure = ask(fresh_server.address, lambda client: client.pressure(timeout=60.0))
    assert 0 <= pressure.token_usage < 1
    assert pressure.num_waiting_reqs == 0
