"""What a run prints. Where nobody reads that any more, as behind `| head`, the run goes on in silence; a line for which
the disk has no room is lost, and the next one is tried.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

from streamrl.observe.unwritten import bear, silence


class Terminal(Console):
    """rich's, without the end of the process where nothing can be written."""

    def on_broken_pipe(self) -> None:
        silence(self.file)

    def _check_buffer(self) -> None:  # where rich writes
        try:
            super()._check_buffer()
        except OSError as error:
            del self._buffer[:]
            bear(error, self.file)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, on stderr unless `stream` says otherwise."""
    stream = stream or sys.stderr
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        bear(error, stream)
