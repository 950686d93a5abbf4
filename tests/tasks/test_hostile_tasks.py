"""Tasks of the user's that do what nobody should: what it costs whom, and what is told of it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.environment import Rollout
from streamrl.tasks.failures import INFRASTRUCTURE, ScorerRaised, ScorerUnready, describe, is_masked
from streamrl.tasks.host_wire import LARGEST
from streamrl.tasks.hosted import check_tasks
from streamrl.tasks.user_reward import UserReward
from tests.tasks.hosting import DEADLINE, TIMEOUT, Hosting, completion, go, scored

TASKS = f"""
    from __future__ import annotations

    import asyncio, dataclasses, os, shutil, subprocess, sys, tempfile, time
    from pathlib import Path

    from streamrl.tasks.environment import Environment, Prompt, Rollout, Score

    HERE = Path(__file__).parent


    class Odd(BaseException): ...


    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no words")


    @dataclasses.dataclass
    class Words:
        text: str


    def sleeper(elsewhere=False):
        process = subprocess.Popen(["sleep", "1000"], start_new_session=elsewhere)
        (HERE / "started").write_text(str(process.pid))


    class Own(Environment):
        def __init__(self, arguments, seed, split): ...

        def prompt(self, index):
            match index:
                case 10: return Prompt(index=index, text="a=", answer=42)
                case 11: return Prompt(index=index, messages=({{"role": "assistant", "content": None}},))
                case 12: return None
            return Prompt(index=index, text="a=")

        async def score(self, prompt, completion):
            return await self.judge(completion.text)

        async def judge(self, text):
            match text:
                case "soon": await asyncio.sleep(0.3)
                case "step": time.sleep({0.3 * TIMEOUT})
                case "wait": await asyncio.sleep(1e9)
                case "stubborn":
                    while True:
                        try: await asyncio.sleep(0.1)
                        except asyncio.CancelledError: pass
                case "odd": raise Odd("odd")
                case "inner": await asyncio.create_task(self.judge("odd"))
                case "cancelled": raise asyncio.CancelledError("so")
                case "silent": raise Silent
                case "surrogate": raise ValueError("half \\ud800 a letter")
                case "exit": sys.exit(3)
                case "inner exit": await asyncio.create_task(self.judge("exit"))
                case "interrupt": raise KeyboardInterrupt
                case "nothing": return None
                case "none": return Score(reward=None)
                case "nan": return Score(reward=float("nan"))
                case "nan part": return Score(reward=1.0, parts={{"x": float("nan")}})
                case "large": return Score(reward=1.0, parts={{"x" * {LARGEST}: 1.0}})
                case "fork" if os.fork() == 0: return Score(reward=-7.0)
                case "prints":
                    print("what is no frame", flush=True)
                    os.write(1, b"\\xff" * 64)
                case "thread": await asyncio.to_thread(os._exit, 9)
                case "closes": os.closerange(3, 256)
                case "writes":
                    for descriptor in range(3, 32):
                        try: os.write(descriptor, b"\\xff" * 64)
                        except OSError: pass
                case "forks and exits":
                    if os.fork() == 0:
                        os.setsid()
                        (HERE / "started").write_text(str(os.getpid()))
                        time.sleep(1e9)
                    while not (HERE / "started").exists(): pass
                    os._exit(5)
                case "a daemon, and blocks":
                    if (child := os.fork()) == 0:
                        os.setsid()
                        if os.fork(): os._exit(0)
                        (HERE / "started").write_text(str(os.getpid()))
                        time.sleep(1e9)
                    os.waitpid(child, 0)
                    while not (HERE / "started").exists(): pass
                    time.sleep(1e9)
                case "starts": sleeper()
                case "starts elsewhere": sleeper(elsewhere=True)
                case "starts elsewhere and blocks":
                    sleeper(elsewhere=True)
                    time.sleep(1e9)
                case "starts and exits":
                    sleeper()
                    os._exit(5)
                case "nowhere":
                    os.chdir(tempfile.mkdtemp(dir=HERE))
                    shutil.rmtree(os.getcwd())
                    raise KeyError("nowhere")
            return Score(reward=1.0, parts={{"group": os.getpgrp()}})


    class Lists(Own):
        async def rollout_group(self, inference, prompt, n):
            completions = await inference.generate(prompt.content, n)
            return [
                Rollout(completion=dataclasses.replace(each, output_ids=each.output_ids.tolist()), reward=1.0)
                for each in completions
            ]


    class Exits(Own):
        def __init__(self, *given):
            sys.exit("no data")


    class Sized(Own):
        size = "large"


    class Unmade(Own):
        def __init__(self, *, size): ...


    class Argued(Own):
        Arguments = dict


    class Lowest(Own):
        lowest_reward = float("nan")


    def reward(text, answer, row, finish_reason):
        match Words(text).text:
            case "odd": raise Odd("odd")  # fails = Odd
            case "exit": sys.exit(3)  # fails = SystemExit
            case "silent": raise Silent  # fails = Silent
            case "surrogate": raise ValueError("half \\ud800 a letter")  # fails = ValueError
            case "name": return {{"reward": 1.0, "\\ud800": 1.0}}
            case "large": return {{"reward": 1.0, "x" * (1 << 20): 1.0}}
            case "fork" if os.fork() == 0: return -7.0
            case "reads": return float(len(sys.stdin.read()))
            case "starts":
                sleeper()
                time.sleep(1e9)
        return 1.0
"""


@pytest.fixture
def host(tmp_path: Path) -> Hosting:
    return Hosting(tmp_path, TASKS)


def outcomes(texts: list[str], rollouts: list[Rollout]) -> dict[str, tuple[str, bool]]:
    """Of each text that was not judged: why, and whether it is masked."""
    judged = zip(texts, rollouts, strict=True)
    return {text: (each.failure, each.masked) for text, each in judged if each.failure is not None}


def test_whatever_a_scorer_raises_or_returns_costs_its_own_answer_and_is_told_with_its_line(host):
    told = {
        "odd": (f"Odd: odd ({host.line('raise Odd')})", False),
        "inner": (f"Odd: odd ({host.line('raise Odd')})", False),
        "cancelled": (f"CancelledError: so ({host.line('raise asyncio.CancelledError')})", False),
        "silent": (f"Silent: its text cannot be made (RuntimeError) ({host.line('raise Silent')})", False),
        "surrogate": (f"ValueError: half ? a letter ({host.line('raise ValueError')})", False),
        "exit": (f"ScorerLost: SystemExit(3) ({host.line('sys.exit(3)')})", True),
        "inner exit": (f"ScorerLost: SystemExit(3) ({host.line('sys.exit(3)')})", True),
        "interrupt": (f"ScorerLost: KeyboardInterrupt() ({host.line('raise KeyboardInterrupt')})", True),
        "nothing": ("TypeError: the scorer gave a value of type NoneType, a Score is needed", False),
        "none": ("TypeError: must be real number, not NoneType", False),
        "nan": ("ValueError: reward is nan, a finite number is needed", False),
        "nan part": ("ValueError: part 'x' is nan, a finite number is needed", False),
        "nowhere": (f"KeyError: 'nowhere' ({host.line('KeyError(')})", False),
    }
    texts = ["soon", "fork", "prints", *told, "soon"]

    async def play() -> tuple[list[Rollout], bool]:
        async with host("Own", processes=1, timeout=DEADLINE) as task:
            before = task.pool.pids
            return await scored(task, *texts), before == task.pool.pids

    rollouts, is_the_same = go(play())
    assert outcomes(texts, rollouts) == told
    assert [rollouts[number].reward for number in (0, 1, 2, -1)] == [1.0] * 4
    assert is_the_same


def test_a_judgement_that_is_too_large_is_the_answers_fault(host):
    async def play() -> list[Rollout]:
        async with host("Own", processes=1, timeout=DEADLINE) as task:
            return await scored(task, "large", "soon")

    large, beside = go(play())
    assert not large.masked
    assert f"bytes are too many between a task and its worker; allowed: {LARGEST}" in (large.failure or "")
    assert beside.reward == 1.0


def test_answers_that_are_each_judged_in_time_are_not_late_however_many_wait_for_one_process(host):
    async def play() -> list[Rollout]:
        async with host("Own", processes=1) as task:
            return await scored(task, *["step"] * 6)

    assert [rollout.failure for rollout in go(play())] == [None] * 6  # 1.8 times as long as one may take


def test_a_scorer_that_waits_too_long_is_told_with_its_line_and_one_that_cannot_be_cancelled_is_given_up(host):
    async def play() -> tuple[list[Rollout], bool]:
        async with host("Own", processes=1) as task:
            before = task.pool.pids
            return await scored(task, "wait", "stubborn", "soon"), before == task.pool.pids

    (wait, stubborn, soon), is_the_same = go(play())
    late = f"ScorerLate: score took more than task.scoring.timeout={TIMEOUT:g} s"
    assert (wait.failure, wait.masked) == (f"{late} ({host.line('sleep(1e9)')})", True)
    assert (stubborn.failure, stubborn.masked) == (late, True)
    assert soon.reward == 1.0
    assert is_the_same


def test_where_nobody_knows_which_answer_ended_the_process_each_is_judged_alone(host):
    texts = ["soon", "thread", "closes", "writes", "soon"]

    async def play() -> list[Rollout]:
        async with host("Own", processes=1, timeout=DEADLINE) as task:
            return await scored(task, *texts)

    rollouts = go(play())
    assert [rollout.masked for rollout in rollouts] == [False, True, True, True, False]
    assert "the process of Own has ended: exit code 9" in (rollouts[1].failure or "")
    assert "the process of Own has ended" in (rollouts[2].failure or "")
    assert "the process of Own sent what cannot be read" in (rollouts[3].failure or "")


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)
    return True


def test_the_end_of_a_process_is_noticed_while_its_fork_holds_its_pipes(host, tmp_path):
    async def play() -> list[Rollout]:
        async with host("Own", processes=1, timeout=8 * TIMEOUT) as task:
            try:
                return await scored(task, "forks and exits", "soon")
            finally:
                os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)

    ended, soon = go(play())
    assert ended.masked
    assert "the process of Own has ended: exit code 5" in (ended.failure or "")
    assert soon.reward == 1.0


def test_a_process_that_blocks_is_replaced_while_a_daemon_of_it_holds_its_pipes(host, tmp_path):
    """The daemon is nobody's child and in no group of the process's: it is not found, and lives on."""

    async def play() -> list[Rollout]:
        async with host("Own", processes=1) as task:
            try:
                return [*await scored(task, "a daemon, and blocks"), *await scored(task, "soon")]
            finally:
                os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)

    late, soon = go(play())
    assert "ScorerLate: Own took more than task.scoring.timeout" in (late.failure or "")
    assert soon.reward == 1.0


@pytest.mark.parametrize("text", ["starts", "starts and exits", "starts elsewhere", "starts elsewhere and blocks"])
def test_what_a_scorer_has_started_ends_with_its_process(host, tmp_path, text):
    async def play() -> None:
        async with host("Own", processes=1, timeout=TIMEOUT if text.endswith("blocks") else DEADLINE) as task:
            rollout, _ = await scored(task, text, "soon")
            assert rollout.parts.get("group") != os.getpgrp()  # a signal to its group reaches nobody here

    go(play())
    assert is_gone(int((tmp_path / "started").read_text()))


def test_prompts_and_rollouts_that_do_not_travel_are_told_and_cost_no_process(host, scripted):
    async def refusal(work: Callable[[], object]) -> str:
        with pytest.raises(ScorerRaised) as raised:
            await work()  # type: ignore[misc]
        return str(raised.value)

    async def play() -> tuple[list[str], bool]:
        async with host("Lists", processes=1, timeout=DEADLINE) as task:
            before, prompt = task.pool.pids, await task.fetch(0)
            refusals = [await refusal(lambda index=index: task.fetch(index)) for index in (10, 11, 12)]
            refusals.append(await refusal(lambda: task.rollout_group(scripted([["a"]]), prompt, 1)))
            return refusals, before == task.pool.pids

    refusals, is_the_same = go(play())
    assert [text.rpartition("`")[0].rpartition("`")[2] or text for text in refusals] == [
        "$.prompt.answer",
        "$.prompt.messages[0].content",
        "AttributeError: 'NoneType' object has no attribute 'metadata'",
        "$.rollouts[0].completion.output_ids",
    ]
    assert is_the_same


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Exits", r"SystemExit: no data \(.*mine\.py:\d+\)"),
        ("Unmade", r"task\.name: .*mine\.py:Unmade cannot be made: TypeError: .* takes 1 positional argument .*"),
        ("Argued", r"task\.name: Argued\.Arguments is no model; allowed: a subclass of .*\.TaskArguments"),
        ("Sized", r"ValidationError: Expected `int \| null`, got `str` - at `\$\.about\.size`"),
        ("Lowest", r"task\.name: Lowest\.lowest_reward is nan, a finite number is needed"),
    ],
)
def test_a_class_that_misbehaves_while_it_is_made_is_refused_by_one_line(host, name, told):
    with pytest.raises(ValueError, match=rf"^{told}$"):
        check_tasks(TaskConfig(name=f"{host.file}:{name}").shares, 1, "train", TaskConfig())


def test_a_worker_that_can_open_no_more_files_masks_what_it_cannot_have_judged(host, exhaust):
    async def play() -> Rollout:
        async with host("Own", processes=1, timeout=DEADLINE) as task:
            prompt = await task.fetch(0)
            os.kill(task.pool.pids[0], signal.SIGKILL)
            while task.pool.pids:
                await asyncio.sleep(0.01)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            exhaust()
            (rollout,) = await task.score_all(prompt, [completion("soon")])
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            return rollout

    rollout = go(play())
    assert rollout.masked
    assert "ScorerUnready: no process could be started for Own: [Errno 24] Too many open files" in (
        rollout.failure or ""
    )


def test_a_worker_without_a_descriptor_for_a_judge_masks_the_answer(host):
    async def ask() -> None:
        async with UserReward(f"{host.file}:reward", processes=1, timeout=DEADLINE, start_timeout=DEADLINE) as rewards:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
            try:
                await rewards.score("fine", "", {}, "stop")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    with pytest.raises(ScorerUnready, match=r"no judge could be started: .*Too many open files"):
        go(ask())


def test_a_reward_function_that_does_what_nobody_should_costs_its_own_answer(host, tmp_path):
    told = {
        "odd": f"Odd: odd ({host.line('fails = Odd')})",
        "exit": f"SystemExit: 3 ({host.line('fails = SystemExit')})",
        "silent": f"Silent: its text cannot be made (RuntimeError) ({host.line('fails = Silent')})",
        "surrogate": f"ValueError: half ? a letter ({host.line('fails = ValueError')})",
        "name": "UnicodeEncodeError: 'utf-8' codec can't encode character",
        "large": "the reply has more than 1048576 bytes",
        "starts": f"ScorerLate: judging took more than {TIMEOUT:g} s",
    }

    async def judge(rewards: UserReward, text: str) -> float | tuple[str, bool]:
        try:
            return (await rewards.score(text, "", {}, "stop")).reward
        except Exception as error:
            return describe(error), is_masked(error, INFRASTRUCTURE)

    async def play() -> tuple[dict[str, tuple[str, bool]], list[float]]:
        rewards = UserReward(f"{host.file}:reward", processes=1, timeout=TIMEOUT, start_timeout=DEADLINE)
        async with rewards:
            failed = {text: await judge(rewards, text) for text in told}
            return failed, [await judge(rewards, text) for text in ("fine", "fork", "reads", "fine", "fine")]

    failed, fine = go(play())
    assert {text: failure[: len(told[text])] for text, (failure, _) in failed.items()} == told
    assert [text for text, (_, masked) in failed.items() if masked] == ["exit", "starts"]
    assert fine == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert is_gone(int((tmp_path / "started").read_text()))
