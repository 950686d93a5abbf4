"""One life of one server of a worker, started here or attached to: its version, its health, its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.config.generate import KEY_ARGUMENTS, UNSEEN_SAMPLING
from streamrl.device_map import divide
from streamrl.engine.answers import Answer, PrefillScores
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.hardware import has_cuda, visible_gpus
from streamrl.engine.keys import EngineKeys
from streamrl.engine.nodes import FurtherNodes
from streamrl.engine.server import Server, ServerFailed
from streamrl.generate.adapters import AdapterPolicy, Adapters, load_adapter
from streamrl.generate.attached_drafts import check_drafts
from streamrl.generate.gate import GatedPolicy, RequestGate
from streamrl.generate.inference import ServerPolicy
from streamrl.generate.pauses import Pauses, Reason
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.transport import PublishError, Sink, end_open_update
from streamrl.stream.address import own_host
from streamrl.stream.keys import bearer_token, key_folder
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

# Share of run.start_timeout for a server: its failure is then reported with its own log, not as a late worker.
START_SHARE = 0.9

HEALTH_PERIOD = 5.0  # seconds between two questions whether a server still answers

# Health checks in a row that a server may leave unanswered: while it loads weights or a long prompt it answers late.
MISSES = 6

SEED_STRIDE = 10_000  # between the seeds of a worker's servers: more than there are workers

INITIAL = PolicyVersion(0)  # the version of the weights in model.path

UNNAMED = "default"  # SGLang's own name for the weights that a server was started with


def keeps_cache(config: Config) -> bool:
    """Whether servers keep over an update what the old weights computed. Adapters have caches of their own."""
    return config.publish.interruption == "in_place" and not config.learner.lora.by_adapter


class VersionedPolicy:
    """A `Policy` whose requests reuse what the server's present version has computed, and nothing older.

    A request that says by itself by which name (`cache`) goes as it is.
    """

    def __init__(self, policy: ServerPolicy, version: Callable[[], PolicyVersion]) -> None:
        self._policy = policy
        self._version = version

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        options.setdefault("cache", str(self._version()))
        return await self._policy.generate(*request, **options)

    async def score(self, *request: Any, **options: Any) -> PrefillScores:
        options.setdefault("cache", str(self._version()))
        return await self._policy.score(*request, **options)

    async def abort(self, request_id: str = "") -> None:
        await self._policy.abort(request_id)


class ServedModel:
    """An SGLang server with the run's model, from its start to its end. `close` it.

    Usage:
        served = ServedModel(config, run_folder, index=0)
        await served.start()
        served.state  # ServerState(name='server-0', version=PolicyVersion(step=0, incarnation=0), world_size=1)
    """

    def __init__(self, config: Config, run_folder: Path, index: int, place: int = 0) -> None:
        """Start server number `place` of worker `index`, or take its address. `config` as that worker sees it.

        Of a server over several nodes the replay service listens already.
        """
        attach = config.generate.attach
        label = server_label(config, index, place)
        self.name = f"server-{label}"
        self.version = INITIAL
        self._ranks = config.generate.tensor_parallel  # an attached server says how many it has when it is met
        self._failure: ServerFailed | None = None
        self._had_version = False  # it has said that it has `version`, or one published before
        self._config = config
        self._keys = key_folder(config, run_folder)
        keys = engine_keys(config, run_folder)
        seed = index + SEED_STRIDE * place
        gpus = divide(visible_gpus(), config.generate)[place] if has_cuda() and not attach else ()
        where: dict[str, Any] = {"label": label, "gpus": gpus}
        self._further = None
        if (nodes := config.generate.server_nodes) > 1:
            self._further = FurtherNodes(run_folder, self.name, nodes)
            where |= {"further": self._further, "host": own_host(config, run_folder)}
        self._process = None if attach else Server(config, run_folder, seed, keys, **where)
        self.address = self._process.address if self._process else attach[place]
        self.client = EngineClient(self.address, config.request_timeout, keys)
        self._gate = RequestGate()
        self._pauses = Pauses(self.client, config.publish.timeout)
        self._adapters = Adapters(INITIAL) if config.learner.lora.by_adapter else None
        self.policy: ServerPolicy = GatedPolicy(self.client, self._gate)  # of this server alone, by its newest version
        if keeps_cache(config):
            self.policy = VersionedPolicy(self.policy, lambda: self.version)
        if self._adapters is not None:
            self.policy = AdapterPolicy(self.client, self._adapters)

    @property
    def state(self) -> ServerState:
        return ServerState(name=self.name, version=self.version, world_size=self._ranks)

    def sink(self) -> Sink:
        """A new end of the publisher's way to this server."""
        pauses, keys, ranks = self._pauses, self._keys, self._ranks
        return make_sink(self._config, self.client, self._gate, self._adapters, pauses=pauses, keys=keys, ranks=ranks)

    async def start(self, *, patient: bool = False) -> None:
        """Wait until the server can generate with the run's initial weights. Raises ServerFailed.

        `patient`: an attached one may be starting just now.
        """
        timeout = START_SHARE * self._config.run.start_timeout
        if self._process is not None:
            await self._process.ready(self.client, timeout)
        else:
            try:
                if patient:
                    await self._answers(timeout)
                arguments, drafts = await self.client.server_info(timeout), self._config.generate.speculation
                self._ranks = joining_ranks(arguments, self.address)
                check_drafts(arguments, drafts, self.address)
                check_prefills(arguments, self._config.generate.score, self.address)
                check_draws(arguments, self._config.generate.sampling.min_p, self.address)
                await _reset(self.client, self._config.model.path, timeout, has_draft=drafts.has_model)
            except EngineError as error:
                raise ServerFailed(f"generate.attach: {self.address} is not usable: {error}") from error
        await self._load_initial_adapter(timeout)

    async def _answers(self, timeout: float) -> None:
        """Wait until an attached server answers. Raises EngineError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                await self.client.model_info()
                return
            except EngineError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(HEALTH_PERIOD)

    async def _load_initial_adapter(self, timeout: float) -> None:
        """Version 0 of a run that starts from an adapter has it; of any other it is the base weights alone."""
        folder = self._config.learner.lora.adapter
        if self._adapters is None or folder is None:
            return
        try:
            await load_adapter(self.client, INITIAL, str(folder.resolve()), timeout)
        except PublishError as error:
            raise ServerFailed(f"learner.lora.adapter: {error}") from error
        self._adapters.loaded(INITIAL)

    async def watch(self) -> None:
        """Never returns while the server lives. Raises ServerFailed when its process has ended, or it is silent."""
        misses, asked = 0, time.monotonic()
        while True:
            self.check()
            if time.monotonic() - asked >= HEALTH_PERIOD:
                misses = await self._ask(misses)
                asked = time.monotonic()
            await asyncio.sleep(min(self._config.generate.heartbeat, HEALTH_PERIOD))

    async def _ask(self, misses: int) -> int:
        """Whether the server answers: how many times in a row it did not.

        Raises ServerFailed for one that was started again meanwhile, by whoever keeps an attached one.
        """
        try:
            info = await self.client.model_info()
        except EngineError as error:
            log.warning("%s: question %d of %d unanswered", error, misses + 1, MISSES)
            if misses + 1 == MISSES:
                raise ServerFailed(f"{self.name} does not answer: {error}") from error
            return misses + 1
        is_published = self.version != INITIAL
        if is_published and self._had_version and info.weight_version in (UNNAMED, str(INITIAL)):
            raise ServerFailed(f"{self.name} was started again: it has weights of its start, not {self.version}")
        self._had_version = is_published and (self._had_version or info.weight_version == str(self.version))
        return 0

    async def sleep(self) -> None:
        """The learner is to have the device: requests give up their KV cache and wait, and its memory is free.

        A server that sleeps stays as it is: SGLang ends where memory is released twice.
        """
        if self._pauses.holds(Reason.ASLEEP):
            return
        try:
            await self._pauses.begin(Reason.ASLEEP, "retract")
            if has_cuda():
                await self.client.release_memory(self._config.publish.timeout)
        except EngineError as error:
            self.fail(f"does not fall asleep: {error}")

    async def wake(self) -> None:
        """Go on; from the weights that came meanwhile."""
        try:
            if has_cuda():
                await self.client.take_memory(self._config.publish.timeout)
            await self._pauses.end(Reason.ASLEEP)
        except EngineError as error:
            self.fail(f"does not wake up: {error}")

    def fail(self, reason: str) -> None:
        """The server is of no use any more, whatever it answers: `watch` ends."""
        self._failure = ServerFailed(f"{self.name} {reason}")

    def check(self) -> None:
        """Raise ServerFailed when the server's process has ended, or `fail` was called."""
        if self._failure is not None:
            raise self._failure
        if self._process is not None:
            self._process.check()

    def leave_nodes(self, code: int) -> None:
        """The worker ends with this exit code: so do the further nodes, which else wait for a new start of it."""
        if self._further is not None:
            self._further.leave(code)

    async def close(self) -> None:
        """Let go of an attached server, end one of our own."""
        await self.client.close()
        self._gate.open()  # who waits there shall look for another server
        if self._process is not None:
            await self._process.stop()


def server_label(config: Config, index: int, place: int = 0) -> str:
    """What tells server number `place` of worker `index` from the others of a run. `config` as that worker sees it."""
    return str(index) if config.generate.servers == 1 else f"{index}-{place}"


def engine_keys(config: Config, run_folder: Path) -> EngineKeys:
    """The tokens of the run's servers, made when the first of them starts; those in `generate.server_args` win.

    A server to attach to is started with the same ones (`--api-key`, `--admin-api-key`), or with none.
    """
    arguments = config.generate.sglang_arguments
    if arguments.keys() & set(KEY_ARGUMENTS):
        return EngineKeys(*(arguments.get(name) for name in KEY_ARGUMENTS))
    folder = key_folder(config, run_folder)
    return EngineKeys(bearer_token(folder, "api"), bearer_token(folder, "admin"))


def joining_ranks(arguments: dict[str, Any], address: str) -> int:
    """Ranks of an attached server that take part in a weight update, by what it was started with.

    SGLang 0.5.23 numbers them by their tensor-parallel rank: over nodes, and of attention's data parallelism, each has
    a number of its own. Pipeline stages and replicas share one. Raises ServerFailed for a server with those.
    """
    attention = arguments.get("enable_dp_attention", False)
    for name, allowed in (("pp_size", False), ("dp_size", attention)):
        if (size := arguments.get(name) or 1) != 1 and not allowed:
            raise ServerFailed(
                f"generate.attach: {address} runs with {name}={size}, whose parts would all take the numbers of one in "
                "a weight update; allowed: tp_size alone, over as many nodes as it needs"
            )
    return int(arguments.get("tp_size") or 1)


def check_prefills(arguments: dict[str, Any], score: str, address: str) -> None:
    """Refuse a server on a CPU that cuts prefills, where they are to be the learner's pass to the bit.

    Raises ServerFailed.
    """
    size = arguments.get("chunked_prefill_size") or -1
    if score == "full_prefill" and arguments.get("device") == "cpu" and size > 0:
        raise ServerFailed(
            f"generate.attach: {address} runs with chunked_prefill_size={size}, and what is behind a cut is rounded "
            "otherwise; allowed with generate.score=full_prefill on a CPU: chunked_prefill_size=-1"
        )


def check_draws(arguments: dict[str, Any], min_p: float, address: str) -> None:
    """Refuse a server that draws otherwise than the learner computes it: by sampling of its own, or without `min_p`.

    Raises ServerFailed.
    """
    if given := arguments.get(UNSEEN_SAMPLING):
        raise ServerFailed(
            f"generate.attach: {address} runs with {UNSEEN_SAMPLING}={given}, and draws as no learner computes it; "
            "allowed: generate.sampling, and a server without"
        )
    if min_p and arguments.get("enable_deterministic_inference"):
        raise ServerFailed(
            f"generate.attach: {address} runs with enable_deterministic_inference, which leaves out "
            f"generate.sampling.min_p={min_p:g}; allowed: 0"
        )


async def _reset(client: EngineClient, model: Path, timeout: float, *, has_draft: bool) -> None:
    """Bring an attached server to the model's initial weights, whatever a former worker left it with.

    One that ended in the middle of an update leaves the server paused, or its weights in parts: nothing is drawn before
    they are whole, and the cache can be emptied, because its requests are back in the queue.

    `model`: the run's own path of it. `timeout`: seconds that one call may take. Raises ServerFailed where a draft
    would have to load them, too.
    """
    await client.pause("retract", timeout)
    await end_open_update(client, timeout)  # behind a load that goes on: what it leaves counts
    info = await client.model_info()
    unnamed = info.weight_version == UNNAMED
    published = not unnamed and info.weight_version != str(INITIAL)
    # The disk transport leaves the server with the path of a version's folder in place of its first one.
    initial = str(model.resolve()) if _is_published(info.model_path) else info.model_path
    if published and has_draft:
        await client.resume(timeout)
        raise ServerFailed(
            f"generate.attach: {client.address} has version {info.weight_version} of a former run, and its draft would "
            f"load {initial} as well; allowed: a server that was started again"
        )
    if published:
        log.info("%s has version %s: loading %s again", client.address, info.weight_version, initial)
        await client.update_from_disk(initial, str(INITIAL), timeout=timeout)
    elif unnamed:
        await client.update_weight_version(str(INITIAL), timeout)
    await client.resume(timeout)


def _is_published(folder: str) -> bool:
    """Whether a model's folder is named as a version."""
    try:
        PolicyVersion.parse(Path(folder).name)
    except ValueError:
        return False
    return True
