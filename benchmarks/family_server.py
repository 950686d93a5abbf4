"""A real SGLang server with a tiny model of one family: what it answers by its folder, and after updates.

An update brings the weights of a second folder by one transport, and the first folder's are back before the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from benchmarks.random_models import make_batch, with_images
from streamrl.choices import TRANSPORTS
from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient, SentImage
from streamrl.engine.server import serving
from streamrl.generate.gate import RequestGate
from streamrl.generate.prompt_images import PromptImages
from streamrl.generate.weight_sinks import make_sink
from streamrl.images import data_url
from streamrl.publish.sources import make_source, make_staging
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

START = 540.0  # seconds that the server may take to start
TIMEOUT = 240.0  # seconds of one call
STATE = ServerState(name="server-0", version=PolicyVersion(0))
SAMPLING = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
PROMPTS = ([7], [7, 9, 30], list(range(20, 40)), [*range(20, 40), *range(5, 25)])  # the last one begins as the third

MOST_IMAGE_BYTES = 1 << 24

FOLDER = "folder"  # what is answered with the weights that the server started with


@dataclass(frozen=True, slots=True)
class Question:
    """What a server is asked. Example: `Question([7, 9, 30])`."""

    ids: list[int]  # with all tokens of the images
    images: tuple[bytes, ...] = ()  # encoded files


Asked = tuple[Question, Answer]


def questions_of(model: Path) -> list[Question]:
    """Prompts of text, and for a model that reads images some with two of them, of which two differ in pixels alone."""
    shown = [group for group in with_images(make_batch(), model).groups if group.images]
    return [
        *(Question(list(prompt)) for prompt in PROMPTS),
        *(Question(group.samples[0].prompt_ids.tolist(), group.images) for group in shown),
    ]


def answers_of(first: Path, second: Path, arguments: Mapping[str, Any], work: Path) -> dict[str, list[Asked]]:
    """By FOLDER and by the name of each transport: prompts with their answers, by the second folder's weights there.

    arguments: the family's, of `generate.server_args`. Raises ServerFailed.
    """
    config = _config(first, arguments)
    with serving(config, work) as server:
        return asyncio.run(_ask_all(server.address, first, second, work))


def _config(model: Path, arguments: Mapping[str, Any], transport: str | None = None) -> Config:
    publish = {"timeout": TIMEOUT} | ({} if transport is None else {"transport": transport})
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "generate": {"server_args": dict(arguments), "request_timeout": TIMEOUT},
            "publish": publish,
            "run": {"start_timeout": START},
            "stream": {"curve": "off"},
        }
    )


async def _ask_all(address: str, first: Path, second: Path, work: Path) -> dict[str, list[Asked]]:
    client = EngineClient(address, TIMEOUT)
    try:
        questions, known = questions_of(first), PromptImages.of(first, MOST_IMAGE_BYTES)
        answers = {FOLDER: await _ask_each(client, questions, known)}
        for transport in TRANSPORTS.names:
            await client.pause("retract", TIMEOUT)  # what is answered may not be over in the server yet
            await client.update_from_disk(str(first), "0.0")
            await client.resume(TIMEOUT)
            await _publish(client, transport, (first, second), work / transport)
            answers[transport] = await _ask_each(client, questions, known)
        return answers
    finally:
        await client.close()


async def _publish(client: EngineClient, transport: str, models: tuple[Path, Path], work: Path) -> None:
    """Versions 1 and 2 of the second folder's weights, after the first's: a chain, for a transport that has one."""
    work.mkdir(parents=True)
    config = _config(models[0], {}, transport)
    sink, staging = make_sink(config, client, RequestGate()), make_staging(config)
    source = make_source(config, work, "tcp://127.0.0.1:1")
    try:
        for step, model in enumerate((models[0], models[1]), start=1):
            staged = staging.fill(PolicyVersion(step), load_file(model / "model.safetensors").items())
            manifest = source.manifest(STATE, staged)
            sending = asyncio.to_thread(source.send, STATE, staged, lambda: time.sleep(0.002))
            await asyncio.gather(sending, sink.apply(staged.version, manifest))
    finally:
        source.close()


async def _ask_each(client: EngineClient, questions: Sequence[Question], known: PromptImages | None) -> list[Asked]:
    answers = await asyncio.gather(*(_ask(client, question, known) for question in questions))
    return list(zip(questions, answers, strict=True))


async def _ask(client: EngineClient, question: Question, known: PromptImages | None) -> Answer:
    ids, sent = question.ids, []
    if question.images:
        assert known is not None
        found = await known.load([data_url(file) for file in question.images])
        ids = known.collapsed(np.array(ids, np.int32), found).tolist()
        sent = [SentImage(image.url, image.tokens) for image in found]
    (answer,) = await client.generate(ids, SAMPLING, 1, images=sent)
    return answer
