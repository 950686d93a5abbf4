"""Starting a real server, failing to, and ending it in every way."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from streamrl.config import Config
from streamrl.engine import server
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.keys import NO_KEYS, EngineKeys, key_environment, take_keys
from streamrl.engine.server import (
    CPU_ARGUMENTS,
    CUDA_ARGUMENTS,
    Server,
    ServerFailed,
    command_line,
    reserved_port,
    server_arguments,
    server_environment,
)
from streamrl.engine.shutdown import SHARED_MEMORY, end_server

DEADLINE = 120.0  # seconds; what takes longer on any machine hangs


def config_of(model: Path, **server_args: object) -> Config:
    return Config.model_validate({"model": {"path": model}, "generate": {"server_args": server_args}})


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def gone(pids: set[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_the_users_arguments_win_over_all_others():
    arguments = server_arguments(
        config_of(Path("m"), **{"log-level": "debug", "dtype": "half", "host": "::1"}), index=0
    )
    assert (arguments["log_level"], arguments["dtype"], arguments["host"]) == ("debug", "half", "::1")
    assert arguments["model_path"] == "m"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"schedule-policy": "lof"}, True),
        ({"schedule-policy": "lpm"}, None),  # knows no priorities: SGLang would refuse the two together
        ({"enable-metrics": True}, None),  # a series of its own for each group of the run
        ({"enable-metrics": True, "enable-priority-scheduling": True}, True),
        ({"enable-priority-scheduling": False}, False),
    ],
)
def test_servers_take_the_oldest_group_first_where_they_can(given: dict[str, object], expected: bool | None):
    assert server_arguments(config_of(Path("m"), **given), 0).get("enable_priority_scheduling") is expected


def test_a_tiny_models_cache_has_a_ceiling_on_every_machine(monkeypatch: pytest.MonkeyPatch):
    """SGLang makes indices of all tokens of the cache, for which a GPU that the cache fills has no room."""
    ceilings = []
    for cuda in (False, True):
        monkeypatch.setattr(server, "has_cuda", lambda cuda=cuda: cuda)
        ceilings.append(server_arguments(config_of(Path("m")), 0)["max_total_tokens"])
        assert server_arguments(config_of(Path("m"), **{"max-total-tokens": 5}), 0)["max_total_tokens"] == 5
    assert ceilings == [CPU_ARGUMENTS["max_total_tokens"], CUDA_ARGUMENTS["max_total_tokens"]]


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_no_process_of_a_server_loads_megatron(name: str, tmp_path: Path):
    """Those that SGLang starts afresh load the module as `__mp_main__`."""
    program = f"""
import runpy, sys
from streamrl.engine import hardware
hardware.has_cuda = lambda: True
sys.argv = ["launch", "--model-path", {str(tmp_path)!r}, "--no-such-argument"]
try:
    runpy.run_module("streamrl.engine.launch", run_name={name!r})
except BaseException:  # it ends with the first thing that it needs of a GPU machine
    pass
import megatron
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE)
    assert "ModuleNotFoundError: import of megatron halted" in done.stderr, done.stderr


def test_log_probs_are_at_the_temperature_of_the_draw_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    environment = {**os.environ, **server_environment(Config())}
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_the_processes_of_a_server_on_a_cpu_are_copies_that_load_nothing_again(engine_server):
    """A fresh interpreter has its program at a random address of its own; a copy has it where the first one had."""
    launch = psutil.Process(engine_server.pid)
    named = [process for process in launch.children() if process.name().startswith("sglang::")]
    assert {_program_address(process.pid) for process in named} == {_program_address(launch.pid)}
    assert len(named) == 2  # the scheduler and the detokenizer


def _program_address(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text().partition("-")[0]


@pytest.mark.slow
def test_what_an_update_interrupts_goes_on_before_what_waits(model_folders, tmp_path):
    """One place: group 0 is interrupted while 2 and 1 wait, and they end in their order; so does what has no group."""
    server = Server(config_of(model_folders[0], max_running_requests=1), tmp_path, index=6)
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    ended: list[int | None] = []

    async def ask(client: EngineClient, group: int | None, **options: object) -> None:
        options |= {} if group is None else {"priority": group}
        await client.generate([5, 6], sampling, n=1, **options)
        ended.append(group)

    async def run() -> None:
        client = EngineClient(server.address, DEADLINE)
        try:
            await server.ready(client, DEADLINE)
            async with asyncio.TaskGroup() as together:
                drawing = asyncio.Event()
                together.create_task(ask(client, 0, every=1, pieces=lambda piece: drawing.set()))
                await drawing.wait()
                for group in (2, None, 1):
                    together.create_task(ask(client, group))
                while (await client.pressure()).num_waiting_reqs < 3:
                    await asyncio.sleep(0.01)
                await client.pause("retract", DEADLINE)
                assert not ended
                await client.resume(DEADLINE)
        finally:
            await client.close()
            await server.stop()

    asyncio.run(run())
    assert ended == [None, 0, 1, 2]


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_the_port_of_a_server_is_nobody_elses_until_it_listens(host: str, family: socket.AddressFamily):
    held = reserved_port(host)
    port = held.getsockname()[1]
    with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen()
        held.close()
        socket.create_connection((host, port), DEADLINE).close()


def test_arguments_become_a_command_line():
    arguments = {"tp_size": 2, "sleep_on_idle": True, "a": False, "b": None, "c": [1, 2], "d": {"x": 1}}
    assert command_line(arguments) == ["--tp-size", "2", "--sleep-on-idle", "--c", "1", "2", "--d", '{"x": 1}']


def test_keys_go_by_the_environment_and_leave_it():
    environment = {"HOME": "/", **key_environment(EngineKeys("api-secret", "admin-secret"))}
    assert "api-secret" in environment.values()
    assert take_keys(environment) == ["--api-key", "api-secret", "--admin-api-key", "admin-secret"]
    assert environment == {"HOME": "/"}
    assert take_keys({**key_environment(EngineKeys(admin="x"))}) == ["--admin-api-key", "x"]
    assert key_environment(NO_KEYS) == {}


def test_a_server_obeys_its_keys_and_shows_them_to_no_other_user(model_folders, tmp_path):
    keys = EngineKeys("api-secret", "admin-secret")
    server = Server(config_of(model_folders[0], api_key="of the user"), tmp_path, index=5, keys=keys)

    async def status(call: Callable[[EngineClient], Awaitable[object]], keys: EngineKeys) -> int | None:
        client = EngineClient(server.address, DEADLINE, keys)
        try:
            await call(client)
        except EngineError as error:
            return error.status
        finally:
            await client.close()
        return 200

    def generate(client: EngineClient) -> Awaitable[object]:
        return client.generate([5, 6], {"max_new_tokens": 1}, n=1)

    def command(client: EngineClient) -> Awaitable[object]:
        return client.update_weight_version("9.0", DEADLINE)

    async def run() -> list[tuple[int | None, ...]]:
        client = EngineClient(server.address, DEADLINE, keys)
        try:
            await server.ready(client, DEADLINE)
        finally:
            await client.close()
        return [
            tuple([await status(call, held) for held in (keys, EngineKeys("api-secret"), NO_KEYS)])
            for call in (generate, command)
        ]

    try:
        assert asyncio.run(run()) == [(200, 200, 401), (200, 401, 401)]
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        shown = " ".join(word for process in tree for word in process.cmdline())
        assert "secret" not in shown
        assert "of the user" not in shown
        assert server.log.stat().st_mode & 0o077 == 0
    finally:
        asyncio.run(server.stop())


@pytest.mark.slow
def test_a_server_that_cannot_start_is_reported_with_the_last_lines_of_its_log(model_folders, tmp_path):
    async def run() -> None:
        server = Server(config_of(model_folders[0], no_such_option=3), tmp_path, index=4)
        client = EngineClient(server.address, 10)
        try:
            await server.ready(client, DEADLINE)
        finally:
            await client.close()
            await server.stop()

    with pytest.raises(ServerFailed, match=r"(?s)exit code 2; last lines of .*server-4\.log.*--no-such-option"):
        asyncio.run(run())


def test_a_server_that_is_late_is_reported_and_stopped_with_its_whole_tree(model_folders, tmp_path):
    async def run() -> tuple[set[int], Path]:
        server = Server(config_of(model_folders[0]), tmp_path, index=0)
        client = EngineClient(server.address, 10)
        try:
            with pytest.raises(ServerFailed, match=r"not ready in 1 s; last lines of"):
                await server.ready(client, 1.0)
            tree = {child.pid for child in psutil.Process(server.pid).children(recursive=True)} | {server.pid}
        finally:
            await client.close()
            await server.stop()
        return tree, server.scratch

    tree, scratch = asyncio.run(run())
    assert gone(tree)
    assert not scratch.exists()


def test_a_server_ends_when_its_parent_is_killed(model_folders, tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from streamrl.config import Config\n"
        "from streamrl.engine.server import Server\n"
        "config = Config.model_validate({'model': {'path': sys.argv[1]}})\n"
        "print(Server(config, pathlib.Path(sys.argv[2]), 0).scratch, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(model_folders[0]), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            scratch = Path(parent.stdout.readline().strip())
            process = psutil.Process(parent.pid)
            wait_until(lambda: len(process.children(recursive=True)) >= 3)  # the launch process and SGLang's own
            tree = {child.pid for child in process.children(recursive=True)}
        finally:
            parent.send_signal(signal.SIGKILL)
    wait_until(lambda: gone(tree) and not scratch.exists())


STARTER = """
import sys
import time
from multiprocessing import shared_memory

print("up", flush=True)
segments = []
for index in range(100000):
    segments.append(shared_memory.SharedMemory(f"sgl_shm_test_{sys.argv[1]}_{index}", create=True, size=64))
    time.sleep(0.0005)
"""


def test_what_has_ended_and_nobody_has_waited_for_hinders_no_end(monkeypatch: pytest.MonkeyPatch):
    """Who is not root may not look at what a dead process held."""
    code = "import subprocess, sys, time; kept = subprocess.Popen(['true']); print('on', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        (dead,) = psutil.Process(leader.pid).children()
        wait_until(lambda: dead.status() == psutil.STATUS_ZOMBIE)
        iterdir = Path.iterdir

        def forbidden(path: Path) -> object:
            if path == Path(f"/proc/{dead.pid}/fd"):
                raise PermissionError(13, "Permission denied")
            return iterdir(path)

        monkeypatch.setattr(Path, "iterdir", forbidden)
        end_server(leader.pid, 0.0, None)
        leader.wait(DEADLINE)
        assert gone({leader.pid})


def test_a_server_is_ended_once_as_its_number_may_be_another_process_later(tmp_path, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(server, "command_line", lambda _: [])
    monkeypatch.setattr(server, "end_server", lambda pid, *_, **__: (ended.append(pid), os.kill(pid, signal.SIGKILL)))
    started = Server(config_of(Path("m")), tmp_path, 0)
    asyncio.run(started.stop())
    asyncio.run(started.stop())
    assert ended == [started.pid]


def test_a_server_for_which_there_is_no_process_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuses)
    with pytest.raises(ServerFailed, match=r"could not be started: .*Resource temporarily unavailable"):
        Server(config_of(Path("m")), tmp_path, 0)
    assert not list(tmp_path.glob("streamrl-server-*"))


def made(mark: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"sgl_shm_test_{mark}_*"))


def test_a_process_that_makes_segments_up_to_the_kill_leaves_none(tmp_path):
    mark = tmp_path.name + str(time.monotonic_ns())
    command = [sys.executable, "-c", STARTER, mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as starter:
        try:
            wait_until(lambda: made(mark))
        finally:
            end_server(starter.pid, 0.0, None)
    assert not made(mark)
