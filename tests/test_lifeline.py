"""Processes end with the one that they watch, and trees end as a whole."""

import os
import signal
import subprocess
import sys
import time

import psutil

from streamrl.lifeline import end_tree, watch

WATCHER = """
import sys, time
from streamrl.lifeline import end_with
end_with([int(sys.argv[1])], grace=float(sys.argv[2]))
print("watching", flush=True)
time.sleep(600)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
)
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_ends_after_kill_9_of_the_one_it_watches():
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    watcher = _start(WATCHER, str(watched.pid), "5")
    watched.kill()
    watched.wait()
    assert watcher.wait(timeout=10) == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_ends_after_the_grace_time():
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WATCHER
    watcher = _start(ignoring, str(watched.pid), "0.2")
    watched.kill()
    watched.wait()
    assert watcher.wait(timeout=10) == 1


def test_watching_a_process_that_has_ended_reports_it_at_once():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    seen: list[int] = []
    watch([ended.pid], seen.append)
    assert seen == [ended.pid]


def test_a_tree_ends_as_a_whole_even_where_a_child_ignores_sigterm():
    parent = _start(PARENT, lines=0)
    child = int(parent.stdout.readline())
    end_tree(parent.pid, timeout=0.5)
    parent.wait(timeout=10)
    _gone(child)


def _start(code: str, *arguments: str, lines: int = 1) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    for _ in range(lines):
        assert process.stdout.readline()
    return process


def _gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} lives"
        os.sched_yield()
