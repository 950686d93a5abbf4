"""One SGLang server as a child process: its arguments, its start, when it is ready, its end.

    start ──▶ (imports, loads the model) ──▶ ready: /model_info answers ──▶ stop: the whole process tree ends

The server runs in a session of its own, writes RUN/logs/server-N.log, and ends by itself when the
worker that started it has ended in any way (`engine/launch.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.config.generate import KEY_ARGUMENTS
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.hardware import CPU_ENVIRONMENT, cuda_libraries, has_cuda, nccl_environment
from streamrl.engine.keys import NO_KEYS, EngineKeys, key_environment
from streamrl.engine.load_plan import LOADER
from streamrl.engine.nodes import FurtherNodes, NodeLost, NodeOf, reserved_meeting
from streamrl.engine.quantised_loading import FLAG, OVERRIDE
from streamrl.engine.shutdown import end_server, segments_of

log = logging.getLogger(__name__)

# A server takes commands (weights, pause) from all who reach it, so it is not reachable from elsewhere by default.
HOST = "127.0.0.1"

POLL = 0.2  # seconds between two looks at a starting server; a start takes 14 s at least

# Seconds between SIGTERM and SIGKILL on a GPU machine: SGLang looks for the signal every 5 s, and frees device memory
# on that way. On a CPU machine there is nothing in a server that is worth the wait.
CUDA_GRACE = 10.0

REAP = 10.0  # seconds that the kernel may take to end a killed process

LOG_LINES = 20  # last lines of the log in an error; SGLang's own message comes after a traceback of this size

# Adapters in a batch of a server, SGLang's own default: each takes device memory; requests for further ones wait.
MAX_ADAPTERS = 8

CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",  # intel_amx needs kernels of which no CPU build is published
    "sampling_backend": "pytorch",  # the other one is a CUDA library
    "max_total_tokens": 65536,  # else the KV cache is sized by the memory that happens to be free at the start
    "mem_fraction_static": 0.3,  # leaves memory of the machine to the learner beside it
    "sleep_on_idle": True,  # else an idle scheduler polls at 97% of a core, which the learner needs
}

# A ceiling that no run needs: SGLang takes what fits where that is less. Without it a tiny model gets a cache of
# hundreds of millions of tokens, and SGLang no room for its indices of them.
CUDA_ARGUMENTS: dict[str, Any] = {"max_total_tokens": 1 << 23}

# The tokens behind a cut prefill's cut are rounded otherwise. A batch has as many tokens as SGLang's chunk on a CPU,
# unless a single prompt has more.
WHOLE_PREFILLS: dict[str, Any] = {"chunked_prefill_size": -1, "max_prefill_tokens": 4096}

# SGLang keeps what a vision tower made of an image, by the image alone, and does not forget it when weights change.
NO_IMAGE_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}

# With drafts, SGLang could be told to keep so many of them whatever the policy says of them, for benchmarks.
NO_SIMULATED_DRAFTS = {"SGLANG_SIMULATE_ACC_LEN": "-1"}

# SGLang could be told to leave the temperature out of the log-probs of what it draws.
LOG_PROBS_AS_DRAWN = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}

# An update puts what it interrupts behind all that waits in the server; the learner waits for the oldest groups.
OLDEST_FIRST: dict[str, Any] = {
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,  # a request's priority is the number of its group (generate/worker.py)
    "default_priority_value": -1,  # what belongs to no group, as the evaluation's requests, goes before
    "disable_priority_preemption": True,  # what is being drawn is not thrown back
}

BY_PRIORITY = ("fcfs", "lof")  # SGLang's schedule policies that know priorities; the first is its default


class ServerFailed(RuntimeError):
    """A server that did not start, or that ended by itself; the text has the last lines of its log."""


class Server:
    """A started server. `stop` it, whatever happens.

    Usage:
        server = Server(config, run_folder, index=0)
        await server.ready(client, timeout=270)
        await server.stop()
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        index: int,
        keys: EngineKeys = NO_KEYS,
        *,
        label: str = "",
        gpus: Sequence[str] = (),
        node: NodeOf | None = None,
        further: FurtherNodes | None = None,
        host: str = HOST,
    ) -> None:
        """Start the process, which then asks for `keys`; `ready` waits for it. Raises ServerFailed.

        `index` is added to the run's seed; `label` names the log, as the index does without one. `gpus` by the names
        that CUDA_VISIBLE_DEVICES takes: without any it sees those that this process sees. Of a server over several
        nodes: `node` on a further one; `further` on the first, which these reach at `host`.
        """
        self.log = run_folder / "logs" / f"server-{label or index}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = server_arguments(config, index)
        if keys != NO_KEYS:
            arguments = {name: value for name, value in arguments.items() if name not in KEY_ARGUMENTS}
        self._reserved = reserved_port(str(arguments["host"]))
        port = int(self._reserved.getsockname()[1])
        self._further, self._meeting = further, None
        if further is not None:
            self._meeting = reserved_meeting(lambda: reserved_port(host))
            node = further.begin(host, int(self._meeting.getsockname()[1]), time.monotonic())
        arguments |= node.arguments if node is not None else {}
        self.address = f"http://{_bracketed(str(arguments['host']))}:{port}"
        self._segments: set[Path] = set()
        self._is_ended = False
        self.scratch = Path(tempfile.mkdtemp(prefix="streamrl-server-"))  # SGLang leaves its sockets where it can
        command = [sys.executable, "-m", "streamrl.engine.launch"]
        command += ["--lifeline", str(os.getpid()), "--scratch", str(self.scratch)]
        command += [FLAG] if config.generate.quantization is not None else []
        try:
            with open(self.log, "ab", opener=_private) as output:  # SGLang logs its arguments, keys included
                self._process = subprocess.Popen(
                    [*command, *command_line({**arguments, "port": port})],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={
                        **os.environ,
                        **server_environment(config),
                        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
                        **key_environment(keys),
                        "TMPDIR": str(self.scratch),
                    },
                )
        except OSError as error:
            self._release()
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise ServerFailed(f"{self.address} could not be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    async def ready(self, client: EngineClient, timeout: float) -> None:
        """Wait until the server answers. Raises ServerFailed when it ends first, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check()
            try:
                await client.model_info()  # /health would generate a token, a second each time
                self._segments = segments_of(self.pid)
                self._release()
                return
            except EngineError:
                await asyncio.sleep(POLL)
        raise ServerFailed(f"{self.address} was not ready in {timeout:g} s; {self._last_lines()}")

    def check(self) -> None:
        """Raise ServerFailed when the process has ended, or the part of a further node."""
        if self.exit_code is not None:
            raise ServerFailed(f"{self.address} ended with exit code {self.exit_code}; {self._last_lines()}")
        if self._further is not None:
            try:
                self._further.check(time.monotonic())
            except NodeLost as lost:
                raise ServerFailed(str(lost)) from None

    async def stop(self) -> None:
        """End the whole process tree, within CUDA_GRACE and REAP; may be called twice.

        A process that the kernel does not end, as one that waits for a device, is left behind, and the log says so.
        """
        self._release()
        if self._is_ended:  # its number may be another process's by now
            return
        grace = CUDA_GRACE if has_cuda() else 0.0
        await asyncio.to_thread(end_server, self.pid, grace, self.scratch, known=self._segments)
        try:
            await asyncio.to_thread(self._process.wait, REAP)
            self._is_ended = True
        except subprocess.TimeoutExpired:
            log.warning("process %d was killed and has not ended in %g s: its log is %s", self.pid, REAP, self.log)

    def _release(self) -> None:
        self._reserved.close()
        if self._meeting is not None:
            self._meeting.close()

    def _last_lines(self) -> str:
        with self.log.open(errors="replace") as lines:
            text = "".join(f"  {line.rstrip()}\n" for line in deque(lines, LOG_LINES))
        return f"last lines of {self.log}:\n{text}"


@contextlib.contextmanager
def serving(config: Config, folder: Path) -> Iterator[Server]:
    """A server without keys that is ready, and is ended behind the block: for a caller without an event loop.

    Raises ServerFailed.
    """
    server = Server(config, folder, index=0)
    try:
        asyncio.run(_ready(server, config))
        yield server
    finally:
        asyncio.run(server.stop())


async def _ready(server: Server, config: Config) -> None:
    client = EngineClient(server.address, config.request_timeout)
    try:
        await server.ready(client, config.run.start_timeout)
    finally:
        await client.close()


def server_arguments(config: Config, index: int) -> dict[str, Any]:
    """SGLang's arguments by name, without the port: `generate.server_args` win over all that is set here."""
    chosen: dict[str, Any] = {
        "model_path": str(config.model.path),
        "dtype": config.model.dtype,
        "host": HOST,
        "tp_size": config.generate.tensor_parallel,
        "random_seed": config.run.seed + index,
        "weight_version": "0.0",  # the weights of model.path
        "skip_server_warmup": True,  # the warm-up asks for a token over HTTP and delays the first request
        "skip_tokenizer_init": True,  # the worker tokenises; saves the detokeniser's share of every short answer
        "incremental_streaming_output": True,  # a piece of an answer is what is new, not all of it again
        "custom_weight_loader": [LOADER],  # named, not imported, until a version comes through memory
        "log_level_http": "warning",  # else one line a request
    }
    if not has_cuda():
        chosen |= CPU_ARGUMENTS
        if config.generate.score == "full_prefill":
            chosen |= WHOLE_PREFILLS
    else:
        chosen |= CUDA_ARGUMENTS
    if config.run.shares_devices and has_cuda():
        chosen["enable_memory_saver"] = True  # a sleeping server gives the memory of its KV cache back
    if config.learner.lora.by_adapter:
        chosen |= _adapter_arguments(config)
    if config.generate.quantization is not None:
        chosen["json_model_override_args"] = OVERRIDE
    if config.learner.router_replay:
        chosen["enable_return_routed_experts"] = True
    chosen |= config.generate.speculation.arguments
    given = config.generate.sglang_arguments
    # SGLang keeps a series of its own metrics for every priority that it has seen: a run's groups would be too many.
    if given.get("schedule_policy", BY_PRIORITY[0]) in BY_PRIORITY and not given.get("enable_metrics"):
        chosen |= OLDEST_FIRST
    return chosen | given


def adapter_places(config: Config) -> int:
    """Adapters that a server has in memory: one for each version that requests may use at once, one for the base."""
    return min(MAX_ADAPTERS, math.ceil(config.replay.bound) + 2)


def _adapter_arguments(config: Config) -> dict[str, Any]:
    """What a server needs to take the run's adapters in while it generates."""
    chosen = {
        "enable_lora": True,
        "max_lora_rank": config.learner.lora.rank,
        "lora_target_modules": list(config.learner.lora.modules),
        "max_loras_per_batch": adapter_places(config),
    }
    if not has_cuda():
        chosen["lora_backend"] = "torch_native"  # the others are kernels for GPUs
    return chosen


def command_line(arguments: dict[str, Any]) -> list[str]:
    """`{"tp_size": 2, "sleep_on_idle": True}` -> `["--tp-size", "2", "--sleep-on-idle"]`, without False and None."""
    words: list[str] = []
    for key, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + key.replace("_", "-"))
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def server_environment(config: Config) -> dict[str, str]:
    """What SGLang takes from the environment alone."""
    chosen = dict(LOG_PROBS_AS_DRAWN)
    chosen["HF_HUB_OFFLINE"] = "1"  # the model is a folder; without it, a lookup that times out on a closed network
    if not config.learner.keeps_vision:
        chosen |= NO_IMAGE_CACHE
    if config.generate.speculation.algorithm is not None:
        chosen |= NO_SIMULATED_DRAFTS
    if has_cuda():
        if config.run.shares_devices and (libraries := cuda_libraries()):  # for what gives the cache's memory back
            chosen["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [libraries, os.environ.get("LD_LIBRARY_PATH")]))
        return chosen | nccl_environment()
    threads, ranks = config.generate.threads, config.generate.tensor_parallel
    chosen |= {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    if ranks > 1:  # SGLang asks for the cores of each rank; they wrap round on a small machine
        cores = os.cpu_count() or 1
        spans = [[str((rank * threads + thread) % cores) for thread in range(threads)] for rank in range(ranks)]
        chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(span) for span in spans)
    return chosen


def reserved_port(host: str) -> socket.socket:
    """A socket that holds a free port of `host` for the server.

    Nobody else is given the port meanwhile, and SGLang may still bind it: both sides allow it (SO_REUSEADDR), as long
    as only one listens. A number alone could be taken in the seconds until SGLang listens.
    """
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    held = socket.socket(family, kind, protocol)
    try:
        held.bind(address)  # without SO_REUSEADDR, so that the kernel looks for a port that nobody holds
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held


def _bracketed(host: str) -> str:
    """An IPv6 address as it is written in a URL."""
    return f"[{host}]" if ":" in host else host
