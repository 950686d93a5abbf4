"""How a streamed answer is cut into its server-sent events. Pure."""

from __future__ import annotations

LINE_BREAK = b"\n"
EVENT_START, EVENT_END = b"data: ", 2 * LINE_BREAK


class EventSplitter:
    """The data of server-sent events, from chunks that end anywhere. However long an event is, each byte is read once.

    >>> splitter = EventSplitter()
    >>> splitter.split(b"data: one\\n"), splitter.split(b"\\ndata: two\\n\\ndata: th")
    ([], [b'one', b'two'])
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []  # of the event that has not ended, without a last line break
        self._line_break = b""  # with which the last chunk ended: half of an event's end, perhaps

    def split(self, chunk: bytes) -> list[bytes]:
        """The data of the events that end in the next chunk."""
        *ended, rest = (self._line_break + chunk).split(EVENT_END)
        events = []
        for last in ended:
            events.append(b"".join((*self._chunks, last)).removeprefix(EVENT_START))
            self._chunks = []
        self._line_break = LINE_BREAK if rest.endswith(LINE_BREAK) else b""
        self._chunks.append(rest.removesuffix(LINE_BREAK))
        return events
