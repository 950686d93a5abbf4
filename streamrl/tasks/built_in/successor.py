"""The task `successor`: "caf=" is answered by "dbg"."""

from __future__ import annotations

from streamrl.tasks.strings import Strings


class Successor(Strings):
    """Each symbol's follower in the alphabet; the last symbol is followed by the first."""

    def answer(self, symbols: str) -> str:
        following = dict(zip(self.alphabet, self.alphabet[1:] + self.alphabet[0], strict=True))
        return "".join(following[symbol] for symbol in symbols)
