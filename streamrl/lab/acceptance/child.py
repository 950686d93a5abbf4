"""The process of one check: what goes wrong in it, an end by a signal included, is a finding and takes nothing along.

python -m streamrl.lab.acceptance.child FOLDER PARENT NAME MODULE:FUNCTION [ARGUMENT...]
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.lab.acceptance.check import Bench, Failed, Measured, Result, Skipped, Verdict
from streamrl.lifeline import die_with

BENCH = "bench.json"


def result_file(folder: Path, name: str) -> Path:
    return folder / "results" / f"{name}.json"


def main() -> int:
    folder, (parent, name, run, *arguments) = Path(sys.argv[1]), sys.argv[2:]
    die_with(int(parent))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a run is ended, not left behind
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    bench = msgspec.json.decode((folder / BENCH).read_bytes(), type=Bench, dec_hook=lambda kind, value: kind(value))
    result = judged(name, run, arguments, bench)
    file = result_file(folder, name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(msgspec.json.encode(result))
    return 0


def judged(name: str, run: str, arguments: Sequence[str], bench: Bench) -> Result:
    """Call a check here and put what it says into a row."""
    began = time.monotonic()
    reason, measured = "", Measured("")
    result: Verdict
    try:
        module, _, function = run.partition(":")
        measured = getattr(importlib.import_module(module), function)(bench, *arguments)
        result = "ok"
    except Skipped as skipped:
        result, reason = "skipped", str(skipped)
    except Failed as failed:
        result, reason = "failed", str(failed)
    except Exception as error:
        traceback.print_exc()
        result, reason = "failed", f"{type(error).__name__}: {error}"
    return Result(
        check=name,
        result=result,
        seconds=time.monotonic() - began,
        reason=reason,
        figure=measured.figure,
        expected=measured.expected,
    )


if __name__ == "__main__":
    raise SystemExit(main())
