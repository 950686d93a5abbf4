"""The events of a stream: the same ones however it is cut into chunks, and in time that grows with its bytes."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine.event_stream import EventSplitter


@given(st.lists(st.lists(st.sampled_from([b"\n", b"a", b"data: "]), max_size=4).map(b"".join)))
def test_the_events_of_a_stream_do_not_depend_on_its_chunks(chunks: list[bytes]):
    splitter = EventSplitter()
    events = [event for chunk in chunks for event in splitter.split(chunk)]
    assert events == [event.removeprefix(b"data: ") for event in b"".join(chunks).split(b"\n\n")[:-1]]


def test_the_chunks_of_a_long_event_are_read_once():
    """8 MiB, as with the experts of a long answer's tokens; read again for each chunk they are 8 GB to copy."""
    chunk, chunks, splitter = b"a" * 8192, 1024, EventSplitter()
    began = time.process_time()
    events = [event for each in (*[chunk] * chunks, b"\n\n") for event in splitter.split(each)]
    assert time.process_time() - began < 2.0
    assert [len(event) for event in events] == [8192 * chunks]
