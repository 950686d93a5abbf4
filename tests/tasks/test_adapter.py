"""The adapter's process and server, in an interpreter without any library: what it refuses, how it ends, its HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.adapter_process import ADAPTER, AdapterProcess
from streamrl.tasks.environment import FAILED
from streamrl.tasks.registry import build_task

END = "<|im_end|>"
# An environment of no library: it asks once, and knows what to do for some answers.
PLAYER = """
    import argparse, asyncio, sys
    from streamrl.tasks.foreign import server
    from streamrl.tasks.foreign.player import Played, Player
    from streamrl.tasks.foreign.policy import Policy

    class Once(Player):
        size, probes, grouped = 5, 2, False

        async def play(self, index, split, base_urls):
            assert len(base_urls) == 1
            policy = Policy(base_urls[0], chat=True, system="s")
            said = await asyncio.to_thread(policy.answer, f"{split} {index}")
            if said == "again":
                said = await asyncio.to_thread(policy.answer, "more")
            if said == "hang":
                await asyncio.sleep(600)
            if said == "raise":
                raise KeyError("answer")
            return [Played(float("nan") if said == "nan" else len(said), {"length": len(said)})]

    options = argparse.Namespace(host="127.0.0.1", port=0, token_file=None, with_parent=True)
    server.run(lambda _: Once(), options)
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of an adapter that plays `Once`."""
    (tmp_path / "once.py").write_text(textwrap.dedent(PLAYER))
    command = [sys.executable, str(tmp_path / "once.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"]
        process.stdin.close()
        assert process.wait(timeout=20) == 0  # its input has ended, and so has it
    finally:
        process.kill()
        process.wait(timeout=20)
        process.stdout.close()


def play(inference: Any, n: int, **args: Any):
    async def go():
        task = build_task(TaskConfig(name="gymnasium", args=args), 1, "train")
        try:
            return await task.rollout_group(inference, task.prompt(3), n), task.size
        finally:
            await task.close()

    return asyncio.run(go())


def ids_of(inference: Any, pieces: tuple[str, ...]) -> int:
    """How many tokens an answer of these pieces has."""
    return sum(len(inference.tokenizer.plain_ids(piece)) for piece in pieces)


def test_an_episode_is_a_sample_whose_tokens_are_the_sessions(scripted, address):
    inference = scripted([["again", END], ["abc", END]])
    (rollout,), size = play(inference, 1, url=address)
    assert (rollout.reward, rollout.parts) == (3.0, {"length": 3.0, "calls": 2.0})
    assert size == 5
    assert "train 3" in inference.tokenizer.text([inference.asked[0].tolist()])[0]
    ids, mask = rollout.completion.output_ids, rollout.completion.loss_mask
    drawn = [number for piece in ("again", END, "abc", END) for number in inference.tokenizer.plain_ids(piece).tolist()]
    assert ids[mask].tolist() == drawn
    numbers = [-(1 + place) for piece in (("again", END), ("abc", END)) for place in range(ids_of(inference, piece))]
    assert rollout.completion.logprobs[mask].tolist() == numbers


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("raise", "KeyError: 'answer'"),
        ("hang", "the episode was not over in 2 seconds"),
        ("nan", "reward is nan, a finite number is needed"),
        ("again", "PolicyGone: status 503"),
    ],
)
def test_an_episode_that_fails_costs_its_own_sample_alone(scripted, address, said, reason):
    rollouts, _ = play(scripted([[said, END]]), 1, url=address, timeout=2.0 if said == "hang" else 60.0)
    (rollout,) = rollouts
    assert rollout.reward == 0.0
    assert rollout.parts == {FAILED: 1.0} or rollout.masked
    assert any(part in rollout.failure for part in reason.split("|")), rollout.failure


def test_an_episode_whose_first_call_the_policy_does_not_answer_has_asked_and_lacks_a_servers_answer(scripted, address):
    inference = scripted([])

    async def generate(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    inference.generate = generate
    rollouts, _ = play(inference, 2, url=address, timeout=2.0)
    assert [(rollout.is_answered, rollout.completion.failure) for rollout in rollouts] == [(False, "server")] * 2
    assert all("the episode was not over in 2 seconds" in rollout.failure for rollout in rollouts)


def test_the_endpoint_is_there_until_the_adapter_has_ended(address, monkeypatch):
    ended = []
    task = build_task(TaskConfig(name="gymnasium", args={"url": address}), 1, "train")

    class Closing:
        def __init__(self, name: str) -> None:
            self._name = name

        async def close(self) -> None:
            ended.append(self._name)

    monkeypatch.setattr(task, "_adapter", Closing("adapter"))
    monkeypatch.setattr(task, "_server", Closing("endpoint"))
    asyncio.run(task.close())
    assert ended == ["adapter", "endpoint"]


def test_calls_that_do_not_fit_are_refused(address):
    for path, body in (("/play", b"[]"), ("/play", b"{"), ("/nothing", b"{}")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address + path, body, timeout=20)
        assert refused.value.code == 400
        refused.value.close()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            {"python": sys.executable, "environment": "a.py:A"},
            r"task\.args\.python: .*gymnasium.*; allowed: an interpreter",
        ),
        ({"python": "/bin/true", "environment": "a"}, r"task\.args\.python: /bin/true ended with code 0"),
        ({"python": "/bin/echo", "environment": "a"}, r"task\.args\.python: /bin/echo is no interpreter"),
        ({"python": "/nowhere/python", "environment": "a"}, r"task\.args\.python: /nowhere/python: No such file"),
        ({"python": sys.executable}, r"environment: is needed with python"),
        ({"url": "http://127.0.0.1:1"}, r"task\.args\.url: http://127\.0\.0\.1:1/about: .*refused.*; allowed: "),
        ({}, r"either python or url is needed"),
    ],
)
def test_what_cannot_start_is_refused_in_one_line(args, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        build_task(TaskConfig(name="gymnasium", args=args), 1, "train")
    assert "\n" not in str(refused.value)


def test_one_starts_in_a_process_with_more_than_1024_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard > 2048
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(ValueError, match=r"/bin/echo is no interpreter"):
            build_task(TaskConfig(name="gymnasium", args={"python": "/bin/echo", "environment": "a"}), 1, "train")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_adapter_needs_nothing_but_the_standard_library():
    code = (
        "import sys; sys.argv[0] = sys.argv[1]; sys.path[0] = ''\n"
        "import runpy; names = runpy.run_path(sys.argv[1]); names['_find_streamrl']()\n"
        "import importlib\n"
        "for each in ('player', 'server', 'policy', 'gymnasium', 'verifiers'):\n"
        "    importlib.import_module(f'streamrl.tasks.foreign.{each}')\n"
        "print(sorted(name for name in sys.modules if name.startswith('streamrl')))\n"
        "outside = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(outside - {'streamrl', '__main__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ADAPTER)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    streamrl, others = done.stdout.splitlines()
    assert others == "[]"
    assert "streamrl.tasks.order" in streamrl
    assert "config" not in streamrl


def test_an_address_that_is_open_to_others_needs_a_token(tmp_path):
    command = [sys.executable, str(ADAPTER), "gymnasium", "a", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert json.loads(done.stdout)["refused"].startswith("--host: 0.0.0.0 is open to others")


async def ended(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        async with asyncio.timeout(20):
            while process.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)


STARTS = f"""
import subprocess
from pathlib import Path
Path(__file__).with_name("started").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
{textwrap.dedent(PLAYER)}
"""


def test_an_adapter_that_has_ended_is_started_again_and_ends_with_its_task(tmp_path):
    (tmp_path / "once.py").write_text(STARTS)

    async def go() -> None:
        adapter = AdapterProcess(Path(sys.executable), [], start_timeout=60)
        adapter._command = [sys.executable, str(tmp_path / "once.py")]
        adapter.start()
        first = adapter._process
        first.kill()
        first.wait(20)
        started = psutil.Process(int((tmp_path / "started").read_text()))
        assert (await adapter.address()).startswith("http://127.0.0.1:")
        assert first.stdin.closed
        assert first.stdout.closed
        await ended(started)
        second = psutil.Process(adapter._process.pid)
        await adapter.close()
        await ended(second)

    asyncio.run(go())
