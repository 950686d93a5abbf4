"""The tools: what a call is, what the calculator calculates, and what code of a policy can do."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import tempfile
import time

import psutil
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from streamrl.tasks.arithmetic import LONGEST, calculate
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.process_pipes import exchange
from streamrl.tasks.python_tool import Limits, PythonTool, missing_walls
from streamrl.tasks.tool_calls import ToolCall, describe_tools, named_calls, parse_calls, split_calls

walled = pytest.mark.skipif(missing_walls() is not None, reason="the kernel gives no namespaces here")


def test_both_forms_of_a_call_are_read_in_their_order():
    text = (
        'a <tool_call>{"name": "python", "arguments": {"code": "print(\\"<tool>\\")"}}</tool_call> b\n'
        '<tool name="calculator"> 6*7\n</tool> c <tool name="x">unfinished'
    )
    assert parse_calls(text) == [ToolCall("python", 'print("<tool>")'), ToolCall("calculator", "6*7")]
    assert parse_calls('<tool_call>unfinished <tool name="calculator">6*7</tool>') == [ToolCall("calculator", "6*7")]
    (call,) = parse_calls(describe_tools([("calculator", "adds")]))
    assert call == ToolCall("NAME", "ARGUMENT")


@pytest.mark.parametrize(
    "body", ["{", "[]", '{"name": "x"}', '{"name": "x", "arguments": {"a": 1}}', "[" * 100_000, '{"name": 1}']
)
def test_a_call_that_cannot_be_read_says_why(body):
    (call,) = parse_calls(f"<tool_call>{body}</tool_call>")
    assert call.error


@pytest.mark.parametrize("opening", ["<tool_call>", '<tool name="x">', '<tool name="x"><tool_call>'])
def test_a_text_is_read_once_however_many_calls_it_opens(opening):
    text = opening * 200_000  # to look for the close of each would take longer than a test may
    assert parse_calls(text) == named_calls(text) == []
    assert split_calls(text) == (text, [])


@given(st.text())
def test_no_text_breaks_the_reading_of_calls(text):
    parse_calls(text)
    parse_calls(f"<tool_call>{text}</tool_call>")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * (3 + 4) ** 2", "98"), ("0.1+0.2", "0.3"), ("1/3", "0.333333333333"), ("7//2", "3"), ("-7 % 3", "2"),
     ("2^10", "1024"), ("2**-2", "0.25"), ("10/4", "2.5"), ("1e3 − 1", "999"),
     ("6 × 7", "42"), ("12 ÷ 8", "1.5")],
)  # fmt: skip
def test_the_calculator_calculates(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "9**9**9", "1/0", "True", "'a'*9", "x", "1e400", "(" * 190, "10**60", "a.b", "[1]", "", "1;2",
     "0**-1", "1" * (LONGEST + 1), "2**0.5", "99999999**60"],
)  # fmt: skip
def test_the_calculator_refuses_all_else(expression):
    with pytest.raises(ValueError, match=r"allowed|too large|exponent|divides by zero"):
        calculate(expression)


@given(st.text(alphabet="0123456789+-*/%.()e ^", max_size=40))
def test_no_expression_breaks_the_calculator(expression):
    try:
        float(calculate(expression))
    except ValueError:
        pass


def run(*codes: str, **limits) -> list[str]:
    async def go() -> list[str]:
        tool = PythonTool(Limits(**limits), parallel=2)
        return list(await asyncio.gather(*(tool.run(code) for code in codes)))

    return asyncio.run(go())


@walled
def test_code_prints_and_its_errors_are_told():
    assert run("print(6 * 7)", "import sys; sys.exit(3)") == ["42", "[ended with code 3]"]
    assert "ZeroDivisionError" in run("1/0")[0]


@walled
def test_code_has_no_network_no_files_of_others_and_no_processes_but_its_own():
    network, files, written, processes, environment = run(
        "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
        f"open({__file__!r})",
        "open('/usr/x', 'w')",
        "import os; print(os.getpid())",
        "import os; print(sorted(os.environ))",
        seconds=20.0,
    )
    assert "OSError" in network or "ConnectionRefused" in network or "unreachable" in network
    assert "FileNotFoundError" in files or "PermissionError" in files
    assert "OSError" in written or "PermissionError" in written
    assert int(processes) < 10
    assert "HOME" not in environment


@walled
def test_code_is_held_to_its_memory_its_files_and_its_processes():
    memory, file, forks = run(
        "x = 'a' * 10 ** 10",
        "open('/tmp/x', 'w').write('a' * 10 ** 8)",
        "import os, signal\nfor _ in range(1000):\n  if os.fork() == 0: signal.pause()",
        seconds=20.0,
    )
    assert "MemoryError" in memory
    assert "too large" in file
    assert "BlockingIOError" in forks


@walled
def test_code_that_does_not_end_is_killed_with_all_that_it_started():
    before = set(psutil.pids())
    (told,) = run("import os, time\nif os.fork() == 0: os.setsid()\nwhile True: time.sleep(1)", seconds=1.5)
    assert told == "[stopped after 1.5 seconds]"
    deadline = time.monotonic() + 20
    while left := [pid for pid in set(psutil.pids()) - before if _is_sandbox(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@walled
def test_code_that_does_not_end_is_told_with_what_it_printed_before():
    (told,) = run("print('six', 7)\nwhile True: pass", seconds=4.0)
    assert told == "six 7\n[stopped after 4 seconds]"


@walled
@pytest.mark.skipif(os.getuid() != 0, reason="only root's sandboxes are of one user")
def test_the_processes_of_one_run_are_no_limit_to_another_beside_it():
    code = "import threading, time\nfor _ in range(6): threading.Thread(target=time.sleep, args=(3,)).start()"

    async def go() -> list[str]:
        tool = PythonTool(Limits(processes=8, seconds=30.0), parallel=4)
        return await asyncio.gather(*(tool.run(code) for _ in range(4)))

    assert asyncio.run(go()) == [""] * 4


@walled
def test_what_code_prints_is_cut():
    assert len(run("print('x' * 10 ** 7)", output=100, seconds=20.0)[0]) == 100


def test_code_for_which_there_is_no_descriptor_left_is_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def go() -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        try:
            await PythonTool(Limits(), parallel=1).run("print(1)")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    with pytest.raises(ScorerUnready, match=r"no process could be started for code: .*Too many open files"):
        asyncio.run(go())


def _is_sandbox(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "streamrl-tool-" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_full_disk_is_nothing_that_the_code_has_done(monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ScorerUnready, match=r"no directory could be made for code: .*No space left on device"):
        asyncio.run(PythonTool(Limits(), parallel=1).run("print(1)"))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_a_process_printed_is_kept_where_it_had_ended_before_it_was_given_anything(run):
    async def ended():
        process = await asyncio.create_subprocess_exec(
            "echo", "42", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        await process.wait()
        await asyncio.sleep(0.1)  # the loop sees that its input is closed
        return await exchange(process, b"x" * 100, 100)

    assert run(ended()) == b"42\n"
