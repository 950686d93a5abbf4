"""The task `copy`: "caf=" is answered by "caf"."""

from __future__ import annotations

from streamrl.tasks.strings import Strings


class Copy(Strings):
    """The string itself."""

    def answer(self, symbols: str) -> str:
        return symbols
