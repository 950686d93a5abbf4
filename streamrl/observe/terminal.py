"""What a run prints. Where nobody reads that any more, as behind `| head`, the run goes on in silence."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, TextIO

from rich.console import Console


class Terminal(Console):
    """rich's, without the end of the process where its pipe is broken."""

    def on_broken_pipe(self) -> None:
        _silence(self.file)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, on stderr unless `stream` says otherwise."""
    stream = stream or sys.stderr
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: IO[str]) -> None:
    """What is written to it from now on goes nowhere, what it holds back for the end of the process too."""
    with suppress(OSError, ValueError):  # it is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
