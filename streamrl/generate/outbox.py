"""Finished groups that the replay service has not answered for: none is forgotten before its Accepted or Refused.

    put ──▶ unsent ──sent──▶ waiting ──answered──▶ gone
               ▲──────again──────┘        (the service was started again, or a word of ours was lost)

Pure: it holds groups and their state; the tickets of the worker bound how many.
"""

from __future__ import annotations

from streamrl.stream.messages import TicketKey
from streamrl.types import Group


class Outbox:
    """Groups by (group_id, attempt), in the order in which they were finished.

    >>> outbox = Outbox()
    >>> outbox.put(group)
    >>> while (group := outbox.unsent()) is not None:
    ...     await dealer.send_group(group)
    ...     outbox.sent(group)
    >>> outbox.answered((group.group_id, group.attempt))
    True
    """

    def __init__(self) -> None:
        self._groups: dict[TicketKey, Group] = {}
        self._unsent: dict[TicketKey, None] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: TicketKey) -> bool:
        return key in self._groups

    @property
    def keys(self) -> tuple[TicketKey, ...]:
        return tuple(self._groups)

    def put(self, group: Group) -> None:
        key = (group.group_id, group.attempt)
        self._groups[key] = group
        self._unsent[key] = None

    def unsent(self) -> Group | None:
        """The first group that waits to be sent."""
        return next((self._groups[key] for key in self._unsent), None)

    def sent(self, group: Group) -> None:
        """The group is on its way; it stays here until it is answered for."""
        self._unsent.pop((group.group_id, group.attempt), None)

    def again(self) -> None:
        """What was sent may be lost: everything is to be sent once more."""
        self._unsent = dict.fromkeys(self._groups)

    def answered(self, key: TicketKey) -> bool:
        """The service has accepted or refused the group. False where that was known."""
        self._unsent.pop(key, None)
        return self._groups.pop(key, None) is not None
