"""A server over several nodes: what its worker and its further nodes say to each other by their files."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.engine.nodes import (
    BEAT,
    FURTHER_PORTS,
    NODE_SILENCE,
    FurtherNodes,
    NodeLost,
    NodeOf,
    NodeRole,
    State,
    has_joined,
    meeting_path,
    reserved_meeting,
)
from streamrl.engine.server import reserved_port


def begun(folder: Path, now: float = 0.0, count: int = 2) -> FurtherNodes:
    nodes = FurtherNodes(folder, "server-3", count)
    nodes.begin("10.0.0.3", 4000, now)
    return nodes


def joined(folder: Path, rank: int = 1, now: float = 0.0) -> NodeRole:
    node = NodeRole(folder, "server-3", rank, now)
    meeting = node.to_join(now)
    assert meeting is not None
    node.joined(meeting, now)
    return node


def test_a_node_joins_each_start_of_its_server_once(tmp_path):
    node = NodeRole(tmp_path, "server-3", 1, 0.0)
    assert node.to_join(0.0) is None, "its worker has not begun"
    nodes = begun(tmp_path)
    meeting = node.to_join(1.0)
    assert meeting is not None
    assert (meeting.address, node.state) == ("10.0.0.3:4000", State.WAITING)
    node.joined(meeting, 1.0)
    assert (node.to_join(2.0), node.state) == (None, State.JOINED)
    assert nodes.begin("10.0.0.3", 5000, 3.0) == NodeOf(0, 2, "10.0.0.3:5000")
    again = node.to_join(3.0)
    assert again is not None
    assert (again.address, again.start != meeting.start) == ("10.0.0.3:5000", True)


def test_the_address_of_a_meeting_may_be_of_ipv6(tmp_path):
    assert FurtherNodes(tmp_path, "s", 2).begin("fd00::7", 4000, 0.0).address == "[fd00::7]:4000"


def test_the_part_of_a_node_is_what_sglang_calls_it():
    assert NodeOf(1, 2, "h:1").arguments == {"nnodes": 2, "node_rank": 1, "dist_init_addr": "h:1"}


def test_a_node_that_ends_is_lost_to_its_worker_with_its_reason(tmp_path):
    nodes = begun(tmp_path, count=3)
    first, second = joined(tmp_path, 1), joined(tmp_path, 2)
    nodes.check(BEAT)
    second.ended("exit code -9", BEAT)
    assert second.state is State.ENDED
    with pytest.raises(NodeLost, match="node 2 of server-3: exit code -9"):
        nodes.check(2 * BEAT)
    nodes.begin("10.0.0.3", 4000, 3 * BEAT)
    nodes.check(4 * BEAT)  # what it said of the former start counts no more
    assert first.to_join(4 * BEAT) is not None


def test_a_node_that_is_silent_is_lost_but_one_that_has_not_joined_is_waited_for(tmp_path):
    nodes = begun(tmp_path)
    late = 10 * NODE_SILENCE
    nodes.check(late)
    node = joined(tmp_path, now=late)
    nodes.check(late + BEAT)
    for beat in range(1, 20):  # each side's clock is its own
        node.beat(1e6 + beat * BEAT)
        nodes.check(late + BEAT + beat * NODE_SILENCE)
    end = late + BEAT + 19 * NODE_SILENCE
    nodes.check(end + NODE_SILENCE - BEAT)
    with pytest.raises(NodeLost, match="it has reported nothing for 30 s"):
        nodes.check(end + NODE_SILENCE + BEAT)


def test_a_process_of_a_node_that_was_started_again_has_lost_what_the_former_one_ran(tmp_path):
    nodes = begun(tmp_path)
    joined(tmp_path)
    nodes.check(BEAT)
    node = NodeRole(tmp_path, "server-3", 1, 0.0)
    assert node.to_join(0.0) is None, "it cannot come back into a server that runs"
    node.beat(0.0)
    with pytest.raises(NodeLost, match="its process was started again"):
        nodes.check(2 * BEAT)


def test_a_node_sees_its_worker_as_long_as_that_lives(tmp_path):
    nodes = begun(tmp_path)
    node = joined(tmp_path)
    nodes.check(50.0)
    node.over(60.0)
    assert node.silence(100.0) == 40.0
    assert node.over(100.0) is None


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_node_ends_as_its_worker_has(tmp_path, code):
    nodes = begun(tmp_path)
    node = joined(tmp_path)
    nodes.leave(code)
    assert node.over(1.0) == code
    assert node.to_join(1.0) is None
    resumed = NodeRole(tmp_path, "server-3", 1, 0.0)
    assert resumed.over(1.0) is None, "of a worker that left before this node began"
    begun(tmp_path)
    assert resumed.to_join(1.0) is not None


def test_a_node_that_leaves_says_so_where_it_was_part_of_a_server(tmp_path):
    waits = NodeRole(tmp_path, "server-3", 2, 0.0)
    waits.leave(0.0)
    nodes = begun(tmp_path)
    joined(tmp_path).leave(1.0)
    assert waits.state is State.LEFT
    with pytest.raises(NodeLost, match="node 1 of server-3: it was ended"):
        nodes.check(BEAT)


class Server(RuleBasedStateMachine):
    """One worker and two further nodes; whichever fails, the server is whole again once nobody fails any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.folder = 0.0, Path(tempfile.mkdtemp())
        self.runs: dict[int, str] = {}  # which start the ranks of a node are part of, as long as they live
        self.nodes = {rank: NodeRole(self.folder, "s", rank, 0.0) for rank in (1, 2)}
        self.worker: FurtherNodes | None = None

    @precondition(lambda self: self.worker is None)
    @rule()
    def the_worker_begins(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.worker = FurtherNodes(self.folder, "s", 3)
        self.worker.begin("h", 1, self.now)

    @precondition(lambda self: self.worker is not None)
    @rule()
    def the_worker_dies(self) -> None:
        self.worker = None

    @rule()
    def the_worker_looks(self) -> None:
        if self.worker is not None:
            try:
                self.worker.check(self.now)
            except NodeLost:
                self.begin()

    @rule(rank=st.sampled_from([1, 2]))
    def a_node_looks(self, rank: int) -> None:
        node = self.nodes[rank]
        if (meeting := node.to_join(self.now)) is not None:
            self.runs[rank] = meeting.start
            node.joined(meeting, self.now)
        elif node.state is State.JOINED and rank not in self.runs:
            node.ended("its ranks have ended", self.now)
        node.beat(self.now)

    @rule(rank=st.sampled_from([1, 2]))
    def the_ranks_of_a_node_end(self, rank: int) -> None:
        self.runs.pop(rank, None)

    @rule(rank=st.sampled_from([1, 2]))
    def a_node_is_killed_and_started_again(self, rank: int) -> None:
        self.runs.pop(rank, None)
        self.nodes[rank] = NodeRole(self.folder, "s", rank, self.now)

    @rule(seconds=st.sampled_from([0.1, BEAT, NODE_SILENCE + 2 * BEAT]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def a_node_that_says_that_it_takes_part_knows_in_which_start(self) -> None:
        for rank, node in self.nodes.items():
            if rank in self.runs:
                assert node.state is State.JOINED

    def teardown(self) -> None:
        if self.worker is None:
            self.begin()
        for _ in range(6):
            self.time_passes(BEAT)
            for look in (lambda: self.a_node_looks(1), lambda: self.a_node_looks(2), self.the_worker_looks):
                look()
        assert self.worker is not None
        assert self.runs == dict.fromkeys((1, 2), self.worker._meeting.start)
        shutil.rmtree(self.folder)


TestServer = Server.TestCase
TestServer.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_worker_that_never_began_leaves_nothing(tmp_path):
    FurtherNodes(tmp_path, "server-3", 2).leave(0)
    assert not meeting_path(tmp_path, "server-3").exists()


def test_what_nobody_here_wrote_is_as_if_it_were_not_there(tmp_path):
    path = meeting_path(tmp_path, "server-3")
    path.parent.mkdir()
    path.write_text('{"start": 7}')
    assert NodeRole(tmp_path, "server-3", 1, 0.0).to_join(0.0) is None


def test_what_cannot_be_written_is_said_with_a_later_beat_and_ends_nobody(tmp_path, caplog):
    blocked = tmp_path / "servers"
    blocked.touch()
    nodes, node = begun(tmp_path), NodeRole(tmp_path, "server-3", 1, 0.0)
    nodes.check(BEAT)
    node.beat(BEAT)
    assert node.to_join(BEAT) is None
    assert "server-3.json cannot be written now: " in caplog.text
    blocked.unlink()
    nodes.check(2 * BEAT)
    assert node.to_join(2 * BEAT) is not None


def test_a_node_is_ready_once_it_has_joined(tmp_path):
    begun(tmp_path)
    assert not has_joined(tmp_path, "server-3", 1, since=0.0)
    node = joined(tmp_path)
    assert has_joined(tmp_path, "server-3", 1, since=0.0)
    assert not has_joined(tmp_path, "server-3", 1, since=9e9)
    node.ended("exit code 1", 1.0)
    assert not has_joined(tmp_path, "server-3", 1, since=0.0)


def test_behind_the_port_of_a_meeting_are_those_that_sglang_takes_beside_it():
    with reserved_meeting(lambda: reserved_port("127.0.0.1")) as held:
        port = held.getsockname()[1]
        for further in range(1, FURTHER_PORTS + 1):
            with socket.socket() as probe:
                probe.bind(("", port + further))
    with socket.socket() as taken:
        taken.bind(("", port + 3))
        with pytest.raises(OSError, match="no 7 free ports in a row"):
            reserved_meeting(lambda: _at(port))


def _at(port: int) -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held
