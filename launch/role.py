"""Runs one role of a run on a cluster: SIGTERM reaches who can end cleanly, the exit code says whether to come back.

python -m launch.role --run-folder RUN --grace 120 -- python -m streamrl.cli generator --run-folder RUN --index 3

exit code 0   the run is complete
          2   the configuration is refused
         75   the run goes on: signalled to end, or the run was interrupted; start this role again (EX_TEMPFAIL)
      other   it failed, more often than --restarts, or the run was given up: some role has said so, with the reason
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Set
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from streamrl.lifeline import end_tree
from streamrl.observe.tail import Records

from .folder import is_complete

log = logging.getLogger(__name__)

DONE, REFUSED, GOES_ON = 0, 2, 75

POLL = 0.1  # seconds between two looks at a signal's flag, or at a child that was signalled to end

PAUSE = 5.0  # seconds before a role that failed is started again: what it fell over may need as long to be back

# It kills its ranks 30 s after SIGTERM, which may be in the middle of a checkpoint. So the ranks are signalled instead.
LAUNCHER = "torch.distributed.run"


class Role:
    """One command, started again while it fails. A signal to stop reaches it while it starts, too."""

    def __init__(self, run_folder: Path, command: list[str], *, restarts: int, grace: float, gpus: str = "") -> None:
        """`gpus`: positions, such as "4,5", among the GPUs that this process may use; empty: all of them."""
        self._run_folder = run_folder
        self._command = [*command, "--lifeline", str(os.getpid())]
        self._restarts = restarts
        self._grace = grace
        self._environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": visible(gpus)} if gpus else {})}
        self._child: subprocess.Popen[bytes] | None = None
        self._told = self._ending = False
        self._records = Records(run_folder)

    def run(self) -> int:
        """Until it ends for good. Returns the exit code."""
        for restart in range(self._restarts + 1):
            code = self._once()
            if code == 0:
                return DONE if is_complete(self._run_folder) else GOES_ON
            if code == REFUSED:
                return REFUSED
            if self._told:
                return GOES_ON
            if (end := self._end_of_the_run()) is not None:
                log.error("not started again: %s", end["reason"])
                return REFUSED if end["event"] == "learner.refused" else max(code, 1)
            log.warning("it ended with %d; started again %d of %d times", code, restart, self._restarts)
            if restart < self._restarts:
                self._pause()
        return code if code > 0 else 1

    def stop(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: tell the role, and end it by force after the grace time."""
        self._told = True
        self._end()

    def _once(self) -> int:
        self._child = None  # so that a signal that comes while it starts does not go to the former one
        if self._told:
            return GOES_ON
        self._records.skip()
        self._child = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        if self._told:  # the signal came while it started
            self._end()
        return self._child.wait()

    def _end_of_the_run(self) -> dict[str, Any] | None:
        """The event since the start that says why this role, started again, would find nobody, or be refused again.

        The ranks' launcher ends with 1 whatever their exit code was.
        """
        ends = {"gave_up", "learner.refused"} if LAUNCHER in self._command else {"gave_up"}
        return next((event for event in self._records.read() if event["event"] in ends), None)

    def _end(self) -> None:
        if self._child is not None and not self._ending:
            self._ending = True
            threading.Thread(target=self._see_out, args=(self._child,), daemon=True).start()

    def _pause(self) -> None:
        deadline = time.monotonic() + PAUSE
        while time.monotonic() < deadline and not self._told:
            time.sleep(POLL)

    def _see_out(self, child: subprocess.Popen[bytes]) -> None:
        """Tell the role once. A rank that dies on its way is started again by its launcher: it is signalled as well."""
        signalled: set[int] = set()
        deadline = time.monotonic() + self._grace
        while child.returncode is None and time.monotonic() < deadline:
            signalled |= signal_tree(child.pid, to_children=LAUNCHER in self._command, but=signalled)
            time.sleep(POLL)
        if child.returncode is None:
            log.warning("it did not end in %g s and is killed", self._grace)
            end_tree(child.pid, timeout=0)


def signal_tree(pid: int, *, to_children: bool, but: Set[int] = frozenset()) -> set[int]:
    """SIGTERM to a process, or to its children where it has had any; `but` not to these. Returns who was signalled."""
    signalled = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        receivers = (process.children() if to_children else []) or ([] if but else [process])
        for receiver in receivers:
            if receiver.pid not in but:
                receiver.send_signal(signal.SIGTERM)
                signalled.add(receiver.pid)
    return signalled


def visible(positions: str) -> str:
    """The GPUs at `positions` of those that this process may use.

    Usage:
        visible("0,1")  # '4,5' with CUDA_VISIBLE_DEVICES=4,5,6,7
    """
    allowed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not allowed:
        return positions
    try:
        return ",".join(allowed[int(position)] for position in positions.split(","))
    except IndexError:
        raise SystemExit(f"GPUs {positions} are not there: this process may use {len(allowed)}") from None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.role", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--restarts", type=int, default=0, help="times that it is started again (default 0)")
    parser.add_argument("--grace", type=float, default=120, help="seconds that it may take to end (default 120)")
    parser.add_argument("--gpus", default="", help="positions among the GPUs of this process, such as 4,5")
    parser.add_argument("command", nargs="+", help="what follows --")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    role = Role(options.run_folder, options.command, restarts=options.restarts, grace=options.grace, gpus=options.gpus)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, role.stop)
    return role.run()


if __name__ == "__main__":
    sys.exit(main())
