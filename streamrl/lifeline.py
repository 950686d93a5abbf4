"""Processes that never outlive the ones that need them, and process trees that end as a whole.

A role watches the process that started it through a pidfd: the kernel reports its end even after
kill -9, to any descendant, with nothing inherited and nothing polled.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import psutil

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

log = logging.getLogger(__name__)


def watch(pids: Iterable[int], on_death: Callable[[int], None]) -> None:
    """Call `on_death(pid)` once, from a daemon thread, when the first of `pids` has ended.

    A process that has already ended counts as ended now. Linux only (pidfd_open, kernel 5.3).
    """
    fds: dict[int, int] = {}
    for pid in set(pids):
        try:
            fds[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            on_death(pid)
            return

    def wait() -> None:
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        fd, _ = poller.poll()[0]
        on_death(fds[fd])

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def end_with(pids: Iterable[int], grace: float) -> None:
    """End this process when one of `pids` ends: SIGTERM to itself, and after `grace` seconds its whole tree.

    The process's own SIGTERM handler is its way to end cleanly; the second stage needs none.
    """

    def on_death(pid: int) -> None:
        log.warning("process %d, which started this one, has ended: ending too", pid)
        os.kill(os.getpid(), signal.SIGTERM)
        if not threading.Event().wait(grace):
            end_tree(os.getpid(), timeout=0, include_root=False)
            os._exit(1)

    watch(pids, on_death)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process at once when `parent`, which started it, ends: also in the middle of a C call.

    What runs code of the user's can be ended in no other way; `number` SIGTERM lets it end cleanly. `parent`: its main
    thread is what counts.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


@contextmanager
def unwinding_at_sigterm(
    exception: Callable[[int], BaseException] = lambda number: SystemExit(128 + number),
) -> Iterator[None]:
    """SIGTERM raises an exception within, so that what was begun is ended on the way out. Main thread only."""

    def handle(number: int, frame: object) -> None:
        raise exception(number)

    former = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def sigterm_afterwards() -> Iterator[None]:
    """SIGTERM that comes within is handled at the end: what is begun within has its name by then. Main thread only."""
    came: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def kill_group(leader: int) -> None:
    """End the process group that process `leader`, started in a session of its own, leads or has led."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nobody is left in it; it is another user's by now
        return


def exit_text(code: int) -> str:
    """How a process has ended, in words. `code`: its exit code, or minus the number of a signal.

    >>> exit_text(5), exit_text(-9), exit_text(-35)
    ('exit code 5', 'signal SIGKILL', 'signal 35')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has a number alone
        return f"signal {-code}"


def end_tree(pid: int, timeout: float, *, include_root: bool = True) -> None:
    """End process `pid` and all its descendants: SIGTERM to the root, `timeout` seconds, SIGKILL to what is left."""
    try:
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root] if include_root else root.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if timeout > 0 and include_root:
        _signal(root, signal.SIGTERM)
        _, tree = psutil.wait_procs(_with_new_children(tree), timeout)
    for process in _with_new_children(tree):
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(tree, timeout=10)


def _with_new_children(tree: list[psutil.Process]) -> list[psutil.Process]:
    """`tree` and whatever its members have started since it was listed."""
    found = {process.pid: process for process in tree}
    for process in tree:
        try:
            found.update({child.pid: child for child in process.children(recursive=True)})
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
