"""The events of a stream: the same ones however it is cut into chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine.event_stream import EventSplitter


@given(st.lists(st.lists(st.sampled_from([b"\n", b"a", b"data: "]), max_size=4).map(b"".join)))
def test_the_events_of_a_stream_do_not_depend_on_its_chunks(chunks: list[bytes]):
    splitter = EventSplitter()
    events = [event for chunk in chunks for event in splitter.split(chunk)]
    assert events == [event.removeprefix(b"data: ") for event in b"".join(chunks).split(b"\n\n")[:-1]]
