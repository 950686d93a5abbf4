"""Which server of a worker takes a group: the one where it already is, else the one with the most free slots.

    group 7 ─▶ server-0-0      all its requests: the prompt that its samples share is in that server's cache
    group 8 ─▶ server-0-1      the one with the fewest groups; the servers of a worker are alike
    server-0-0 is lost: group 7 ─▶ server-0-1, and stays there

Pure: which servers can take the group is an argument; it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable


class Placement:
    """Groups on servers.

    >>> placement = Placement()
    >>> placement.choose("group 7", ["server-0", "server-1"]), placement.choose("group 8", ["server-0", "server-1"])
    ('server-0', 'server-1')
    >>> placement.choose("group 7", ["server-0", "server-1"])
    'server-0'
    """

    def __init__(self) -> None:
        self._place: dict[Hashable, str] = {}
        self._groups: Counter[str] = Counter()

    def groups(self, server: str) -> int:
        """How many groups are on a server."""
        return self._groups[server]

    def choose(self, group: Hashable, able: Collection[str], avoid: str | None = None) -> str:
        """The server for the next request of `group`, of those that are `able` to take it.

        `avoid`: one that just failed it, where there is another. Raises ValueError when none is able.
        """
        if not able:
            raise ValueError(f"no server is able to take {group}")
        choice = [name for name in able if name != avoid] or list(able)
        if (at := self._place.get(group)) in choice:
            return at
        self.end(group)
        chosen = min(choice, key=lambda name: (self._groups[name], name))
        self._place[group] = chosen
        self._groups[chosen] += 1
        return chosen

    def end(self, group: Hashable) -> None:
        """The group has no further request."""
        if (at := self._place.pop(group, None)) is not None:
            self._groups[at] -= 1
