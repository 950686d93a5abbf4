"""Tasks of the user's in processes of their own: what they may do there, and what that costs whom."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np
import psutil
import pytest
from aiohttp.test_utils import TestServer

from streamrl.config import Config
from streamrl.config.task import TaskConfig
from streamrl.tasks import host_handle, host_pool
from streamrl.tasks.environment import FAILED, Rollout
from streamrl.tasks.failures import ScorerLate, ScorerLost, ScorerUnready
from streamrl.tasks.host_process import Host
from streamrl.tasks.host_wire import MARK, Ping, Reply, Task, frame
from streamrl.tasks.hosted import Hosted, check_tasks, host_tasks
from streamrl.tasks.serve import application
from tests.tasks.hosting import DEADLINE, TIMEOUT, Hosting, completion, go, processes, scored

TASKS = """
    import asyncio, ctypes, os, signal, time
    from fractions import Fraction
    from pathlib import Path

    from streamrl.tasks.environment import Branch, Environment, Prompt, Rollout, Score
    from streamrl.tasks.grouped import Grouped
    from streamrl.tasks.built_in.copy import Copy
    from streamrl.tasks.built_in.tools import Tools
    from streamrl.tasks.turns import TurnByTurn

    HERE = Path(__file__).parent
    (HERE / f"loaded.{os.getpid()}").touch()


    class Own(Environment):
        def __init__(self, arguments, seed, split):
            self.seed, self.split = seed, split

        def prompt(self, index):
            double = lambda number: 2 * number  # what no pickle takes
            return Prompt(index=index, text=f"{index}=", answer="a", metadata={"double": double})

        async def score(self, prompt, completion):
            match completion.text:
                case "loop":
                    while True: pass
                case "sleep": (HERE / "begun").touch(), time.sleep(1e9)
                case "wait":
                    (HERE / "begun").touch()
                    try: await asyncio.sleep(1e9)
                    finally: (HERE / "cancelled").touch()
                case "hang":
                    (HERE / "begun").touch()
                    await asyncio.to_thread(time.sleep, 1e9)
                case "until the other is late":
                    (HERE / "beside").touch()
                    while not (HERE / "late").exists(): await asyncio.sleep(0.02)
                case "hold": ctypes.PyDLL(None).sleep(10**9)  # no other thread runs meanwhile
                case "exit": os._exit(3)
                case "crash": ctypes.string_at(0)
                case "kill": os.kill(os.getpid(), signal.SIGKILL)
                case "real-time": os.kill(os.getpid(), 35)
                case "raise": raise KeyError("no such thing")
                case "later":
                    await asyncio.sleep(0.05)
                    time.sleep(1e9)
            return Score(reward=prompt.metadata["double"](prompt.index), parts={"pid": os.getpid()})

        async def close(self):
            (HERE / f"closed.{os.getpid()}").touch()


    class Strict(Own):
        infrastructure = ()
        lowest_reward = -1.0


    class Inline(Own):
        runs_inline = True


    class OfInline(Inline):
        pass


    class Together(Own):
        everybody = asyncio.Barrier(8)

        async def score(self, prompt, completion):
            await self.everybody.wait()
            return Score(reward=1.0)


    class Judge(Grouped):
        def __init__(self, arguments, seed, split): ...

        prompt = Own.prompt

        async def score_group(self, prompt, completions):
            best = max(len(each.text) for each in completions)
            return [Score(reward=float(len(each.text) == best)) for each in completions]


    class Counting(TurnByTurn):
        max_turns = 4

        def __init__(self, arguments, seed, split):
            self.said = {}

        def prompt(self, index):
            return Prompt(index=index, text="a=")

        async def observation(self, prompt, turns):
            said = self.said.setdefault(prompt.index, [])
            said.append((os.getpid(), turns[-1].text))
            return "a="

        async def trajectory_reward(self, prompt, turns):
            if turns[-1].text == "b":
                time.sleep(1e9)
            pids = {pid for pid, _ in self.said[prompt.index]}
            return Score(reward=len(self.said[prompt.index]), parts={"pids": len(pids), "pid": pids.pop()})


    class Asks(Own):
        async def rollout_group(self, inference, prompt, n):
            ids = inference.prompt_ids(prompt.content)
            added = inference.added_ids((), "b", None)
            completions = await inference.generate(ids, n, max_new_tokens=2)
            if prompt.index == 1:
                await asyncio.sleep(1e9)
            if prompt.index == 2:
                time.sleep(1e9)
            reward = Fraction(len(ids) + len(added))  # a number that does not travel
            note = (Branch(completion=completions[0], reward=Fraction(1, 2)),)
            return [Rollout(completion=each, reward=reward, branches=note) for each in completions]


    class Calculates(Tools):
        pass


    class Branches(Own):
        async def score(self, prompt, completion):
            return Score(reward=self.max_branches)


    class GivesUp(Own):
        async def rollout_group(self, inference, prompt, n):
            asking = asyncio.ensure_future(inference.generate("a", n))
            await asyncio.sleep(0)
            inference.prompt_ids("a")  # a reply that comes behind: the policy has been asked
            asking.cancel()
            await asyncio.wait((asking,))
            return [Rollout(completion=each, reward=1.0) for each in await inference.generate("b", n)]


    class BadPrompt(Own):
        def prompt(self, index):
            if index == 1:
                time.sleep(1e9)
            return Own.prompt(self, index)


    class Broken(Own):
        def __init__(self, arguments, seed, split):
            raise RuntimeError("no data here")


    class Slow(Own):
        def __init__(self, arguments, seed, split):
            time.sleep(1e9)
"""


@pytest.fixture
def host(tmp_path: Path) -> Hosting:
    return Hosting(tmp_path, TASKS)


async def ticks(period: float = 0.02) -> None:
    """Fails when the event loop is blocked for as long as blocking code of the tasks would hold it.

    A thread counts the time: a machine that runs neither of the two blocks nothing.
    """
    rounds, ended = [0], threading.Event()

    def count() -> None:
        while not ended.wait(period):
            rounds[0] += 1

    threading.Thread(target=count, daemon=True).start()
    try:
        while True:
            before = rounds[0]
            await asyncio.sleep(period)
            assert period * (rounds[0] - before) < TIMEOUT, "the event loop was blocked"
    finally:
        ended.set()


async def there(path: Path) -> None:
    """Wait for a file."""
    async with asyncio.timeout(DEADLINE):
        while not path.exists():
            await asyncio.sleep(0.02)


def test_a_class_of_the_users_is_loaded_in_processes_of_its_own_and_never_here(host, tmp_path):
    async def play() -> tuple[int, float, float]:
        async with host("Own", timeout=DEADLINE) as task:
            assert isinstance(task, Hosted)
            (rollout,) = await scored(task, "fine")
            return len(task.pool.pids), rollout.reward, rollout.parts["pid"]

    processes, reward, pid = go(play())
    assert processes == 1  # one after the other: no second one is needed
    assert reward == 6.0  # its metadata, which does not travel, was there
    loaded = {int(path.suffix[1:]) for path in tmp_path.glob("loaded.*")}
    assert loaded == {int(pid)}
    assert os.getpid() not in loaded
    assert not psutil.pid_exists(int(pid))
    assert (tmp_path / f"closed.{int(pid)}").exists()  # the user's `close` was called


@pytest.mark.parametrize(
    "text", ["loop", pytest.param("sleep", marks=pytest.mark.slow), pytest.param("later", marks=pytest.mark.slow)]
)
def test_a_scorer_that_blocks_stops_nobody_and_costs_its_own_sample_alone(host, tmp_path, text):
    async def play() -> tuple[list[Rollout], list[int], list[int]]:
        async with host("Own", processes=1) as task:
            before = task.pool.pids
            ticking = asyncio.create_task(ticks())
            rollouts = await scored(task, "fine", text, "fine", "fine")
            assert not ticking.done()
            ticking.cancel()
            (after,) = await scored(task, "fine")
            assert after.failure is None
            return rollouts, before, task.pool.pids

    rollouts, before, after = go(play())
    assert [rollout.masked for rollout in rollouts] == [False, True, False, False]
    assert [rollout.reward for rollout in rollouts if not rollout.masked] == [6.0] * 3
    code = {"loop": "while True: pass", "sleep": 'case "sleep"', "later": "time.sleep(1e9)\n"}[text]
    told = rollouts[1].failure or ""
    assert told.startswith(f"ScorerLate: Own took more than task.scoring.timeout={TIMEOUT:g} s")
    assert f"{tmp_path}/mine.py:" in told
    if text != "later":
        assert host.line(code) in told
    assert before != after  # the process was ended, and replaced
    assert not psutil.pid_exists(before[0])


def test_a_scorer_that_waits_for_ever_is_ended_by_the_same_deadline_without_its_process(host):
    async def play() -> tuple[list[Rollout], list[int], list[int]]:
        async with host("Own", processes=1) as task:
            before = task.pool.pids
            return await scored(task, "wait", "fine"), before, task.pool.pids

    (late, fine), before, after = go(play())
    assert late.masked
    assert "task.scoring.timeout" in (late.failure or "")
    assert fine.reward == 6.0
    assert before == after


def test_a_process_in_which_a_late_call_has_left_a_thread_ends_the_calls_that_it_has_and_is_replaced(host, tmp_path):
    async def play() -> tuple[Rollout, list[Rollout]]:
        async with host("Own", processes=1, timeout=4.0) as task:
            hanging = asyncio.create_task(scored(task, "hang"))
            await there(tmp_path / "begun")
            await asyncio.sleep(2.0)
            beside = asyncio.create_task(scored(task, "until the other is late"))
            await there(tmp_path / "beside")
            assert not hanging.done()
            (late,) = await hanging
            (tmp_path / "late").touch()
            (after,) = await scored(task, "fine")
            (before,) = await beside
            async with asyncio.timeout(DEADLINE):
                while task.pool.pids != [after.parts["pid"]]:
                    await asyncio.sleep(0.1)
            return late, [before, after]

    late, judged = go(play())
    assert "score took more than task.scoring.timeout" in (late.failure or "")
    assert [rollout.reward for rollout in judged] == [6.0, 6.0]
    assert judged[0].parts["pid"] != judged[1].parts["pid"]
    assert not psutil.pid_exists(int(judged[0].parts["pid"]))


@pytest.mark.parametrize(
    ("text", "how"),
    [
        pytest.param("exit", "exit code 3", marks=pytest.mark.slow),
        pytest.param("crash", "SIGSEGV", marks=pytest.mark.slow),
        ("kill", "SIGKILL"),
        ("real-time", "signal 35"),  # it has no name
    ],
)
def test_a_process_that_dies_masks_the_answer_that_killed_it_and_is_replaced(host, text, how):
    async def play() -> tuple[list[Rollout], Rollout]:
        async with host("Own", processes=1, timeout=DEADLINE) as task:
            rollouts = await scored(task, "fine", text, "fine")
            (after,) = await scored(task, "fine")
            return rollouts, after

    rollouts, after = go(play())
    assert [rollout.masked for rollout in rollouts] == [False, True, False]
    assert f"ScorerLost: the process of Own has ended: {'signal ' if how.startswith('SIG') else ''}{how}" in (
        rollouts[1].failure or ""
    )
    assert (host.line("string_at(0)") in (rollouts[1].failure or "")) == (text == "crash")
    assert (after.reward, after.failure) == (6.0, None)


def test_a_lone_process_in_which_a_late_call_has_left_a_thread_gets_no_further_call(host, monkeypatch):
    monkeypatch.setattr(host_pool, "TRIES", 0)  # each call is made alone

    async def play() -> list[Rollout]:
        async with host("Own", processes=1) as task:
            return await scored(task, "fine", "hang", "fine")

    before, late, after = go(play())
    assert late.masked
    assert (before.reward, after.reward) == (6.0, 6.0)
    assert before.parts["pid"] != after.parts["pid"]


def test_where_descriptors_run_out_a_process_that_is_not_started_keeps_none(host, monkeypatch):
    def refuses(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def play() -> tuple[list[str], list[str]]:
        async with host("Own", processes=1) as task:
            before = os.listdir("/proc/self/fd")
            with monkeypatch.context() as patch:
                patch.setattr(host_handle.mmap, "mmap", refuses)
                with pytest.raises(ScorerUnready, match="Too many open files"):
                    task.pool._new()
            return before, os.listdir("/proc/self/fd")

    before, after = go(play())
    assert len(before) == len(after)


def test_what_the_class_raises_comes_with_its_line_and_a_task_may_say_that_a_late_or_lost_scorer_is_the_answers_fault(
    host, tmp_path
):
    async def play() -> tuple[list[Rollout], list[Rollout]]:
        async with host("Own", timeout=DEADLINE) as task:
            raised = await scored(task, "raise")
        async with host("Strict") as strict:
            return raised, await scored(strict, "raise", "wait", "sleep", "exit")

    (raised,), strict = go(play())
    assert (raised.parts, raised.masked) == ({FAILED: 1.0}, False)
    assert raised.failure == f"KeyError: 'no such thing' ({host.line('KeyError(')})"
    assert [(rollout.reward, rollout.masked) for rollout in strict] == [(-1.0, False)] * 4


def test_a_class_that_says_that_it_never_blocks_runs_here_and_one_made_of_it_does_not(host, tmp_path):
    async def play() -> list[float]:
        pids = []
        for name in ("Inline", "OfInline"):
            async with host(name, timeout=DEADLINE) as task:
                (rollout,) = await scored(task, "fine")
                pids.append(rollout.parts["pid"])
        return pids

    here, elsewhere = go(play())
    assert here == os.getpid() != elsewhere


def test_scorers_that_wait_run_together_in_the_event_loop_of_one_process(host):
    async def play() -> list[Rollout]:
        async with host("Together", processes=1, timeout=DEADLINE) as task:
            return await scored(task, *["x"] * 8)

    assert [rollout.reward for rollout in go(play())] == [1.0] * 8


def test_answers_that_are_judged_against_each_other_are_judged_in_one_call(host):
    async def play() -> list[Rollout]:
        async with host("Judge", timeout=DEADLINE) as task:
            return await scored(task, "a", "bbb", "cc")

    assert [rollout.reward for rollout in go(play())] == [0.0, 1.0, 0.0]


def test_a_subclass_of_a_built_in_task_is_told_of_the_parsers_and_branches_of_its_run(host, scripted):
    call = '[calculator(input="6*7")]'
    args = {"task": {"name": "copy"}, "tools": ["calculator"]}

    async def play() -> tuple[Rollout, float]:
        async with host("Calculates", {"args": args, "tool_parser": "llama_pythonic"}, timeout=DEADLINE) as task:
            inference = scripted([[call, "<|im_end|>"], ["42", "<|im_end|>"]])
            (played,) = await task.rollout_group(inference, await task.fetch(0), 1)
        async with host("Branches", {"max_branches": 3}, timeout=DEADLINE) as task:
            (judged,) = await scored(task, "fine")
            return played, judged.reward

    played, branches = go(play())
    assert played.parts["tool_calls"] == 1.0
    assert "<result>42</result>" in played.completion.text
    assert branches == 3.0


def test_an_environment_of_several_turns_keeps_its_state_in_one_process(host, scripted):
    async def play() -> list[list[Rollout]]:
        async with host("Counting", processes=2, timeout=DEADLINE) as task:
            prompts = [await task.fetch(index) for index in range(4)]
            groups = (task.rollout_group(scripted([["a"]] * 8), prompt, 2) for prompt in prompts)
            return await asyncio.gather(*groups)

    groups = go(play())
    for group in groups:
        assert [rollout.parts["pids"] for rollout in group] == [1.0, 1.0]
        assert max(rollout.reward for rollout in group) == 6.0  # three observations of each of its two samples
    assert len({rollout.parts["pid"] for group in groups for rollout in group}) == 2  # both were used
    first = groups[0][0].completion
    assert first.loss_mask is not None
    assert first.loss_mask.sum() == 4
    assert len(first.output_ids) == len(first.logprobs) == len(first.loss_mask) > 4


def test_turns_that_come_one_by_one_keep_their_state_in_the_process_of_their_prompt(host):
    async def play() -> tuple[float, float]:
        async with host("Counting", processes=2, timeout=DEADLINE) as task:
            prompt = await task.fetch(1)
            for _ in range(3):
                await task.observation(prompt, [completion("a")])
            score = await task.score_turns(prompt, [completion("a")])
            return score.reward, score.parts["pids"]

    assert go(play()) == (3.0, 1.0)


def test_a_group_of_several_turns_that_blocks_its_process_is_lost_and_the_next_one_is_not(host, scripted):
    async def play() -> list[Rollout]:
        async with host("Counting", processes=1) as task:
            prompt = await task.fetch(0)
            with pytest.raises(ScorerLate, match=r"Counting took more than .* \(.*mine\.py:\d+\)"):
                await task.rollout_group(scripted([["b"]] * 4), prompt, 1)
            return await task.rollout_group(scripted([["a"]] * 4), prompt, 1)

    (rollout,) = go(play())
    assert rollout.reward == 3.0  # its state began from the start


def test_a_course_of_its_own_asks_the_policy_and_its_tokenizer_over_the_pipe(host, scripted):
    async def play() -> tuple[list[Rollout], list[np.ndarray], int]:
        async with host("Asks", timeout=DEADLINE) as task:
            policy = scripted([["a", "b"], ["b"]])
            prompt = await task.fetch(0)
            ids = policy.prompt_ids(prompt.content)
            return await task.rollout_group(policy, prompt, 2), policy.asked, len(ids)

    rollouts, asked, length = go(play())
    assert [rollout.completion.text for rollout in rollouts] == ["ab", "b"]
    assert rollouts[0].reward == length + 1
    assert [(branch.completion.text, branch.reward) for branch in rollouts[1].branches] == [("ab", 0.5)]
    assert [len(ids) for ids in asked] == [length] * 2


def test_a_course_whose_process_ends_between_its_turns_is_lost_and_never_played_twice(host, scripted):
    asked = []

    async def play() -> None:
        async with host("Asks", processes=1, timeout=DEADLINE) as task:
            policy = scripted([["a"]])

            async def killing(*args: Any, **options: Any) -> None:
                asked.append(args)
                os.kill(task.pool.pids[0], signal.SIGKILL)
                await asyncio.sleep(DEADLINE)

            policy.generate = killing
            await task.rollout_group(policy, await task.fetch(0), 1)

    with pytest.raises(ScorerLost, match=r"^the process of Asks has ended: signal SIGKILL"):
        go(play())
    assert len(asked) == 1


@pytest.mark.parametrize("index", [1, 2])
def test_a_course_of_its_own_that_asks_nothing_for_too_long_is_ended(host, scripted, index):
    async def play() -> None:
        async with host("Asks", processes=1) as task:
            await task.rollout_group(scripted([["a"]]), await task.fetch(index), 1)

    with pytest.raises(ScorerLate, match=r"Asks took more than task\.scoring\.timeout"):
        go(play())


def test_an_error_of_the_policy_is_that_of_the_group_whatever_hosted_code_makes_of_it(host, scripted):
    async def play() -> None:
        policy = scripted([])

        async def lost(*args: Any, **options: Any) -> None:
            raise ConnectionError("server lost")

        policy.generate = lost
        async with host("Asks", timeout=DEADLINE) as task:
            await task.rollout_group(policy, await task.fetch(0), 1)

    with pytest.raises(ConnectionError, match=r"^server lost$"):
        go(play())


def test_a_request_to_the_policy_that_a_course_gives_up_is_cancelled_at_once(host, scripted):
    began = []

    async def play() -> list[Rollout]:
        policy = scripted([["b"]])
        answered = policy.generate

        async def generate(*args: Any, **options: Any) -> Any:
            began.append(args)
            if len(began) > 1:
                return await answered(*args, **options)
            try:
                await asyncio.sleep(10 * DEADLINE)
            finally:
                began.append("given up")

        policy.generate = generate
        async with host("GivesUp", timeout=DEADLINE) as task:
            return await task.rollout_group(policy, await task.fetch(0), 1)

    (rollout,) = go(play())
    assert rollout.completion.text == "b"
    assert began[1] == "given up"


def test_a_prompt_that_blocks_is_ended_too(host):
    async def play() -> None:
        async with host("BadPrompt", processes=1) as task:
            await task.fetch(0)
            with pytest.raises(ScorerLate, match=r"mine\.py:\d+"):
                await task.fetch(1)
            assert (await task.fetch(2)).text == "2="

    go(play())


def test_a_group_that_is_cancelled_at_its_deadline_leaves_a_process_that_is_replaced(host, tmp_path):
    async def play() -> None:
        async with host("Own", processes=1) as task:
            (first,) = task.pool.pids
            waiting = asyncio.create_task(scored(task, "sleep"))
            await there(tmp_path / "begun")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            (rollout,) = await scored(task, "fine")  # waits until the blocked process is ended
            assert rollout.reward == 6.0
            assert task.pool.pids != [first]

    go(play())


def test_an_answer_that_nobody_waits_for_any_more_is_cancelled_in_its_process(host, tmp_path):
    async def play() -> list[Rollout]:
        async with host("Own", processes=1, timeout=10 * DEADLINE) as task:
            waiting = asyncio.create_task(scored(task, "wait"))
            await there(tmp_path / "begun")
            waiting.cancel()
            await there(tmp_path / "cancelled")
            return await scored(task, "fine")

    assert [rollout.reward for rollout in go(play())] == [6.0]


def test_a_class_that_cannot_be_loaded_is_refused_by_one_line(host, tmp_path):
    share = TaskConfig(name=f"{tmp_path}/mine.py:Broken").shares
    told = r"^task\.name: .*mine\.py:Broken cannot be made: RuntimeError: no data here \(.*\)$"
    with pytest.raises(ValueError, match=told):
        check_tasks(share, 1, "train", TaskConfig())
    share = TaskConfig(name=f"{tmp_path}/mine.py:Nobody").shares
    with pytest.raises(ValueError, match=r"^task\.name: .* cannot be loaded: ValueError: .* has no class 'Nobody'$"):
        check_tasks(share, 1, "train", TaskConfig())
    assert not list(tmp_path.glob(f"loaded.{os.getpid()}"))


def test_a_task_that_is_refused_leaves_no_process_of_those_before_it(host):
    mix = [{"name": f"{host.file}:{name}"} for name in ("Own", "Broken")]

    async def play() -> list[int]:
        with pytest.raises(ValueError, match="no data here"):
            await host_tasks(TaskConfig.model_validate({"mix": mix}).shares, 1, "train", TaskConfig())
        return processes()

    assert not go(play())


def test_a_class_that_does_not_come_to_be_ready_is_given_up(host):
    async def play() -> None:
        async with host("Slow", start_timeout=2.0):
            raise AssertionError

    with pytest.raises(ScorerUnready, match=r"Slow was not ready in task\.scoring\.start_timeout=2 s"):
        go(play())


def test_a_process_that_cannot_be_started_is_told_with_the_systems_reason(host, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    reason = r"^no process could be started for Own: \[Errno 2\] No such file or directory: '/nowhere/python'$"
    with pytest.raises(ScorerUnready, match=reason):
        go(host("Own").__aenter__())


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_start_that_is_given_up_ends_its_process_at_once(host, seconds):
    async def play() -> None:
        starting = asyncio.create_task(host("Slow").__aenter__())
        await asyncio.sleep(seconds)
        starting.cancel()
        await asyncio.wait((starting,), timeout=0.5 * DEADLINE)  # less than the class may take
        assert starting.cancelled()

    go(play())
    assert not processes()


def test_a_process_that_nothing_can_replace_masks_what_waits_for_it(host, tmp_path):
    async def play() -> list[Rollout]:
        async with host("Own", processes=1, timeout=DEADLINE) as task:
            prompt = await task.fetch(0)
            (tmp_path / "mine.py").unlink()
            os.kill(task.pool.pids[0], signal.SIGKILL)
            return await task.score_all(prompt, [completion("fine")])

    (rollout,) = go(play())
    assert rollout.masked
    assert "ScorerUnready" in (rollout.failure or "")


def test_a_served_task_that_blocks_does_not_stop_its_server(host, tmp_path):
    tree = {"task": {"name": f"{tmp_path}/mine.py:Own", "scoring": {"timeout": 4.0}}}
    app = application(Config.model_validate(tree))

    async def play() -> dict[str, Any]:
        async with TestServer(app) as server, aiohttp.ClientSession() as client:

            async def call(name: str, body: Any = None) -> Any:
                method = "GET" if body is None else "POST"
                async with client.request(method, server.make_url(f"/Own/{name}"), json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    return await reply.json()

            prompt = await call("prompt", {"index": 3, "split": "train"})
            assert prompt["text"] == "3="
            assert not prompt["metadata"]
            answers = [[{"text": text, "finish_reason": "stop"}] for text in ("sleep", "raise")]
            judging = asyncio.create_task(call("score", {"prompt": prompt, "answers": answers}))
            await there(tmp_path / "begun")
            for _ in range(6):
                await call("about")
            assert not judging.done()
            return await judging

    judged = go(play())
    assert [score["masked"] for score in judged["scores"]] == [True, False]


WORKER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from streamrl.config.task import ScoringConfig, TaskConfig
from streamrl.tasks.hosted import host_task

async def main():
    task = await host_task(TaskConfig(name={name!r}), 1, "train", TaskConfig(scoring=ScoringConfig(timeout=100)))
    prompt = await task.fetch(0)
    print(*task.pool.pids, flush=True)
    await asyncio.sleep(1e9) if {idle} else await task.score(prompt, completion("hold"))

from test_hosted_parts import completion
asyncio.run(main())
"""


def test_ctrl_c_is_the_workers_matter_and_the_kernel_ends_a_task_before_its_worker(host):
    async def play() -> tuple[Rollout, str]:
        async with host("Own", processes=1, timeout=DEADLINE) as task:
            (pid,) = task.pool.pids
            os.kill(pid, signal.SIGINT)
            (rollout,) = await scored(task, "fine")
            assert task.pool.pids == [pid]
            return rollout, Path(f"/proc/{pid}/oom_score_adj").read_text()

    rollout, score = go(play())
    assert rollout.failure is None
    assert int(score) > int(Path("/proc/self/oom_score_adj").read_text())


def test_a_process_ends_with_its_pipe(host):
    memory = os.memfd_create("mark")
    os.ftruncate(memory, MARK.size)
    share = TaskConfig(name=f"{host.file}:Own").shares[0].model_dump()
    command = [sys.executable, "-m", "streamrl.tasks.host_process", str(os.getpid()), str(memory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(memory,))
    process.stdin.write(frame(Task(share=share, seed=1, split="train", timeout=TIMEOUT)))
    assert process.communicate(timeout=DEADLINE)[0]  # it was ready
    assert process.returncode == 0


@pytest.mark.parametrize("idle", [True, False])
def test_processes_end_when_their_worker_is_killed(tmp_path, idle):
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASKS))
    (tmp_path / "test_hosted_parts.py").write_text(
        "import numpy as np\nfrom streamrl.tasks.environment import Completion\n"
        "def completion(text):\n    ids = np.zeros(1, np.int32)\n"
        "    return Completion(text=text, prompt_ids=ids, output_ids=ids, logprobs=ids.astype(np.float32), spans=(), "
        "finish_reason='stop')\n"
    )
    code = WORKER.format(tests=str(tmp_path), name=f"{tmp_path}/mine.py:Own", idle=idle)
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        (pid,) = map(int, worker.stdout.readline().split())
        time.sleep(0.5)  # into the loop
        assert psutil.Process(pid).is_running()
    finally:
        worker.kill()
        worker.wait()
    deadline = time.monotonic() + DEADLINE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_lost_process_is_what_a_dead_connection_is(host):
    assert issubclass(ScorerLost, ConnectionError)  # so that a task that declares nothing masks both
    assert issubclass(ScorerLate, TimeoutError)


def test_a_reply_to_a_request_that_is_being_cancelled_does_not_end_the_reader_of_replies():
    class Cancelled(concurrent.futures.Future):
        def cancelled(self) -> bool:  # the loop cancels it between this question and what follows from the answer
            return not self.cancel()

    class Channel:
        said: ClassVar = [Reply(request=1), Ping()]

        def receive(self):
            if not self.said:
                raise EOFError
            return self.said.pop(0)

    class Loop:
        handled: ClassVar = []

        def call_soon_threadsafe(self, handle, message):
            self.handled.append(message)

    host = object.__new__(Host)
    host._channel, host._replies = Channel(), {1: Cancelled()}
    with pytest.raises(EOFError):
        host._listen(Loop())
    assert Loop.handled == [Ping()]
