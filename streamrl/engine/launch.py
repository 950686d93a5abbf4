"""`python -m streamrl.engine.launch ARGS`: SGLang's own launch_server, made to run and to end where it should.

Two things are added to `python -m sglang.launch_server ARGS`. On a machine without CUDA the stand-ins
are installed when this module is imported: multiprocessing imports the main module again in every
process that SGLang spawns, so they get them too. And with `--lifeline PID` before ARGS the server
ends, with all its processes, when process PID has ended, even by kill -9.
"""

from __future__ import annotations

import os
import sys

from streamrl.engine import stand_ins
from streamrl.engine.hardware import has_cuda
from streamrl.lifeline import end_tree, watch

if not has_cuda():
    stand_ins.install()


def main(arguments: list[str]) -> None:
    """Run the server in this process until it ends. `arguments` are SGLang's, after an optional lifeline."""
    if arguments[:1] == ["--lifeline"]:
        watch([int(arguments[1])], on_death=_end)
        arguments = arguments[2:]

    from sglang.launch_server import run_server  # noqa: PLC0415 (seconds of imports, after the lifeline is watched)
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        end_tree(os.getpid(), timeout=0, include_root=False)


def _end(pid: int) -> None:
    """The process that needs this server has ended: nobody is left to wait for a polite end."""
    end_tree(os.getpid(), timeout=0, include_root=False)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
