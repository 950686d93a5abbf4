"""The client against a real server, and against what is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

from streamrl.engine.client import Answer, EngineClient, EngineError
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


def test_the_end_token_ends_an_answer_and_is_part_of_it(fresh_server):
    sampling = {**SAMPLING, "max_new_tokens": 200, "stop_token_ids": [9]}
    (answer,) = ask(fresh_server.address, lambda client: client.generate(PROMPT, sampling, n=1))
    assert answer.meta_info.finish_reason.type == "stop"
    assert answer.output_ids[-1] == 9
    assert 9 not in answer.output_ids[:-1]


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
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
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
    assert all(b"authorization: bearer secret" in request.lower() for request in heard)
