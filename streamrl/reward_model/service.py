"""A reward model as a process: it loads, listens, scores in batches until a signal comes or the run is over.

    POST /score ─▶ token ids (a thread) ─▶ Batches ─▶ forward pass (a thread) ─▶ the reply
                └▶ 503 where too many wait: the worker asks again, here or elsewhere

Who gives a call up leaves the queue. It may be killed at any time: whatever it held, a worker asks for again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import web

from streamrl.config import Config
from streamrl.observe.ending import is_over
from streamrl.observe.events import EventLog, event_path
from streamrl.observe.starting import begin_part
from streamrl.reward_model.batches import Batches, Waiting
from streamrl.reward_model.wire import LARGEST, PATH, Ask, Score, Scores, address_path, write_address
from streamrl.stream.keys import bearer_token, key_folder

log = logging.getLogger(__name__)

ROLE = "reward-model"

# Seconds between two looks at whether the run is over, where no supervisor ends the process.
POLL = 5.0

# Seconds that a reply may still take when the process ends: what waits for a score is asked again elsewhere.
SHUTDOWN_TIMEOUT = 1.0

# What a forward pass raises for its input: the answer has no score. Anything else ends the process.
OF_THE_INPUT = (IndexError, ValueError, MemoryError)


class Model(Protocol):
    """What `Classifier` is."""

    longest: int  # tokens of one sequence

    @property
    def most(self) -> int | None: ...

    def ids(self, ask: Ask) -> list[list[int]]: ...

    def scores(self, batch: list[list[int]]) -> list[float]: ...


def main(config: Config, run_folder: Path, index: int, *, alone: bool) -> int:
    """Run the role. Returns the exit code. `alone`: no supervisor ends it, so it looks whether the run is over."""
    from streamrl.reward_model.classifier import Classifier

    events = EventLog(event_path(run_folder, ROLE, index), f"{ROLE}-{index}")
    try:
        begin_part(events, "loads the reward model")
        model = Classifier(config.reward_model)
        return asyncio.run(_run(config, run_folder, index, model, events, alone=alone))
    except OSError as error:
        print(f"{ROLE}-{index}: {error}", file=sys.stderr)
        return 1
    finally:
        events.close()


async def _run(config: Config, run_folder: Path, index: int, model: Model, events: EventLog, *, alone: bool) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    service = Service(config, model, bearer_token(key_folder(config, run_folder), "api"), events)
    address = await service.start()
    write_address(run_folder, index, address)
    events.emit("ready", address=address)
    stopping = asyncio.create_task(_until_over(config, run_folder, stop) if alone else stop.wait())
    failed = asyncio.create_task(service.failed.wait())
    await asyncio.wait((stopping, failed), return_when=asyncio.FIRST_COMPLETED)
    code = 1 if service.failed.is_set() else 0
    if not code:
        address_path(run_folder, index).unlink(missing_ok=True)
    for task in (stopping, failed):
        task.cancel()
    await service.close()
    return code


async def _until_over(config: Config, run_folder: Path, stop: asyncio.Event) -> None:
    while not stop.is_set() and not await asyncio.to_thread(is_over, run_folder, config.run.steps):
        try:
            await asyncio.wait_for(stop.wait(), POLL)
        except TimeoutError:
            continue


class Service:
    """The endpoint and its queue. `close` it.

    Usage:
        service = Service(config, model, token, events)
        address = await service.start()  # http://127.0.0.1:41234
    """

    def __init__(self, config: Config, model: Model, token: str, events: EventLog) -> None:
        settings = config.reward_model
        self._host = settings.host
        self._model = model
        self._token = f"Bearer {token}"
        self._events = events
        tokens, most = settings.tokens_per_batch, settings.most_waiting
        self._batches = Batches(tokens=tokens, wait=settings.batch_wait, most=most)
        self._arrival = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._scoring: asyncio.Task[None] | None = None
        self.failed = asyncio.Event()  # the model has failed: the process cannot go on

    async def start(self) -> str:
        """Listen at a free port. Returns the address. Raises OSError."""
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post(PATH, self._answering)
        # Who gives up leaves the queue.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT)
        await runner.setup()
        self._runner = runner
        await web.TCPSite(runner, self._host, 0).start()
        self._scoring = asyncio.create_task(self._score())
        host = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._scoring is not None:
            self._scoring.cancel()
            await asyncio.gather(self._scoring, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answering(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return _refused(401, "another run's key")
        try:
            ask = msgspec.json.decode(await request.read(), type=Ask)
            if (ask.text is None) == (ask.messages is None):
                raise ValueError("a call has either a text or messages")
            ids = await asyncio.to_thread(self._model.ids, ask)
        except (msgspec.MsgspecError, ValueError) as error:
            return _refused(400, str(error))
        scores: list[Score | None] = [_unfit(each, self._model.longest) for each in ids]
        now, loop = time.monotonic(), asyncio.get_running_loop()
        places = [place for place, score in enumerate(scores) if score is None]
        items = [Waiting(ids[place], now, loop.create_future()) for place in places]
        if not self._batches.add(items):
            return _refused(503, f"{len(self._batches.waiting)} answers wait")
        self._arrival.set()
        try:
            for place, item in zip(places, items, strict=True):
                scores[place] = await item.whose
        finally:
            for item in items:
                item.whose.cancel()
        return web.Response(
            body=msgspec.json.encode(Scores([score for score in scores if score is not None])),
            content_type="application/json",
        )

    async def _score(self) -> None:
        """Batch after batch, one at a time."""
        while True:
            wait = self._batches.due(time.monotonic())
            if wait != 0.0:
                self._arrival.clear()
                try:
                    await asyncio.wait_for(self._arrival.wait(), wait)
                except TimeoutError:
                    pass
                continue
            batch = [item for item in self._batches.take(self._model.most) if not item.whose.done()]
            if batch and not await self._pass(batch):
                return

    async def _pass(self, batch: list[Waiting]) -> bool:
        """Score a batch; one that fails is tried answer by answer. False where the model has failed."""
        ids = [item.ids for item in batch]
        try:
            with self._events.span("reward_model.batch", answers=len(ids), tokens=sum(map(len, ids))):
                found = await asyncio.to_thread(self._model.scores, ids)
        except OF_THE_INPUT as error:
            if len(batch) > 1:
                return all([await self._pass([item]) for item in batch])
            _tell(batch[0], Score(error=f"the reward model failed on it: {type(error).__name__}: {error}"))
            return True
        except Exception as error:  # of torch, CUDA, or a mistake: nothing may wait behind a queue that is stuck
            log.exception("the reward model failed")
            print(f"{ROLE}: the model failed: {error}", file=sys.stderr)
            self.failed.set()
            return False
        for item, score in zip(batch, found, strict=True):
            _tell(item, Score(score) if math.isfinite(score) else Score(error=f"the reward model gave {score}"))
        return True


def _unfit(ids: list[int], longest: int) -> Score | None:
    if not ids:
        return Score(error="the reward model's tokenizer makes no token of it")
    if len(ids) > longest:
        return Score(error=f"{len(ids)} tokens of prompt and answer, the reward model takes {longest}")
    return None


def _tell(item: Waiting, score: Score) -> None:
    if not item.whose.done():
        item.whose.set_result(score)


def _refused(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=reason[:1000])
