"""What the publisher knows of a server: every order of messages and failures, and what follows from each."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.publish.server_weights import FIRST_PAUSE, FORGOTTEN, Servers, ServerWeights, State
from streamrl.stream.messages import Applied, PublishFailed, ServerState
from streamrl.types import PolicyVersion

TIMEOUT = 8.0
V0, V1, V2 = (PolicyVersion(step) for step in range(3))
NAMES = ("a", "b")


def fleet(*names: str, at: PolicyVersion = V0) -> Servers:
    servers = Servers(TIMEOUT)
    servers.handle_roster([ServerState(name=name, version=at) for name in names], 0.0)
    return servers


def sent(servers: Servers, version: PolicyVersion = V1, now: float = 0.0) -> ServerWeights:
    """The first server that is due, with everything sent to it."""
    server = servers.due(version, now)[0]
    servers.begin(server, version)
    server.prepared(now)
    server.sent()
    return server


def test_a_version_is_applied_when_the_server_says_so():
    servers = fleet("a")
    server = sent(servers)
    assert (server.state, servers.have(V1), server.problem(TIMEOUT)) == (State.WAITING, False, None)
    servers.handle_applied(Applied(server="a", version=V1))
    assert (server.state, servers.have(V1), servers.due(V1, 1.0)) == (State.IDLE, True, [])


def test_a_server_may_report_the_version_before_the_transport_has_ended():
    servers = fleet("a")
    (server,) = servers.due(V1, 0.0)
    servers.begin(server, V1)
    server.prepared(0.0)
    servers.handle_applied(Applied(server="a", version=V1))
    assert server.state is State.SENDING
    server.sent()
    assert server.state is State.IDLE


def test_the_time_of_a_server_begins_when_the_source_has_prepared_the_version():
    servers = fleet("a")
    (server,) = servers.due(V1, 0.0)
    servers.begin(server, V1)
    assert (server.problem(9 * TIMEOUT), servers.have_time) == (None, False)
    server.prepared(2 * TIMEOUT)
    assert servers.have_time
    assert server.problem(3 * TIMEOUT) is None
    assert server.problem(3 * TIMEOUT + 0.1) == "a did not finish in publish.timeout=8 s"


def test_the_pause_doubles_up_to_the_timeout_whatever_newer_versions_there_are():
    servers, now, pauses = fleet("a"), 0.0, []
    for _ in range(5):
        server = sent(servers, now=now)
        server.fail(now)
        if pauses:
            servers.announced()
        assert servers.due(V1, now + server.pause - 0.01) == []
        now += server.pause
        pauses.append(server.pause)
    assert pauses == [FIRST_PAUSE, 2.0, 4.0, TIMEOUT, TIMEOUT]


def test_a_newer_version_ends_the_first_pause():
    servers = fleet("a")
    server = sent(servers)
    server.fail(0.0)
    assert servers.due(V2, 0.0) == []
    servers.announced()
    assert servers.due(V2, 0.0) == [server]
    assert server.pause == 0.0


def test_what_the_source_cannot_do_is_tried_again_with_a_newer_version_however_often_it_failed():
    servers, now = fleet("a"), 0.0
    for _ in range(5):
        (server,) = servers.due(V1, now)
        servers.begin(server, V1)
        server.fail(now)
        now += server.pause
    assert servers.due(V2, now - 0.1) == []
    servers.announced()
    assert servers.due(V2, now - 0.1) == [server]


def test_a_server_that_hangs_holds_fewer_and_fewer_versions():
    servers, now, waited, steps = fleet("a"), 0.0, 0.0, 100
    for step in range(1, steps + 1):
        servers.announced()
        trained = now + 1.0
        while now < trained:
            if servers.due(PolicyVersion(step), now):
                server = sent(servers, PolicyVersion(step), now)
                now += TIMEOUT
                server.fail(now)
            else:
                now = min(trained, server.retry_at)
        waited += now - trained
    assert waited < steps * TIMEOUT / 6


def test_servers_that_failed_come_last_until_they_succeed():
    servers = fleet("a", "b")
    sent(servers).fail(0.0)
    servers.announced()
    assert [server.name for server in servers.due(V2, 0.0)] == ["b", "a"]
    for name in ("b", "a"):
        assert sent(servers, V2).name == name
        servers.handle_applied(Applied(server=name, version=V2))
    assert [server.name for server in servers.due(PolicyVersion(3), 0.0)] == ["a", "b"]


def test_a_server_that_a_round_left_out_comes_first_in_the_next():
    servers = fleet("a", "b")
    assert sent(servers).name == "a"
    servers.handle_applied(Applied(server="a", version=V1))
    servers.announced()
    assert [server.name for server in servers.due(V2, 0.0)] == ["b", "a"]


def test_a_success_ends_the_doubling():
    servers = fleet("a")
    sent(servers).fail(0.0)
    server = sent(servers, now=1.0)
    servers.handle_applied(Applied(server="a", version=V1))
    sent(servers, V2, 2.0).fail(2.0)
    assert server.pause == FIRST_PAUSE


def test_only_the_failure_of_the_newest_attempt_counts():
    servers = fleet("a")
    server = sent(servers)
    former = server.attempt
    server.fail(0.0)
    sent(servers, now=1.0)
    servers.handle_failed(PublishFailed(server="a", version=V1, reason="late", attempt=former))
    assert server.problem(1.0) is None
    servers.handle_failed(PublishFailed(server="a", version=V1, reason="not today", attempt=server.attempt))
    assert server.problem(1.0) == "a: not today"


@pytest.mark.parametrize("returns", [False, True])
def test_a_server_that_leaves_has_failed_and_shares_nothing_with_the_next_process(returns: bool):
    servers = fleet("a", "b")
    server = sent(servers)
    servers.handle_roster([ServerState(name="b", version=V1)], 0.0)
    if returns:
        servers.handle_roster([ServerState(name=name, version=V1) for name in NAMES], 0.0)
    assert server.problem(0.0) == "a has left"
    server.fail(0.0)
    assert server.state is (State.BACKING_OFF if returns else State.GONE)
    assert servers.have(V1)
    servers.handle_roster([ServerState(name=name, version=V0) for name in NAMES], 0.5)
    assert server not in servers.due(V1, 0.5), "its pause has been forgotten"
    assert server in servers.due(V1, FIRST_PAUSE)
    assert servers.begin(server, V1), "what the transport shares with it is kept"


def test_another_process_of_the_same_name_has_older_weights():
    servers = fleet("a", at=V1)
    servers.handle_roster([ServerState(name="a", version=V0)], 0.0)
    (server,) = servers.due(V1, 0.0)
    assert servers.begin(server, V1)
    server.fail(0.0)
    assert not servers.begin(servers.due(V1, FIRST_PAUSE)[0], V1), "dropped twice"


def test_an_evaluated_server_keeps_its_weights():
    servers = Servers(TIMEOUT)
    servers.handle_roster([ServerState(name="a", version=V0, pinned=True)], 0.0)
    assert servers.due(V1, 0.0) == []
    servers.handle_roster([ServerState(name="a", version=V0)], 0.0)
    server = sent(servers)
    servers.handle_applied(Applied(server="a", version=V0, pinned=True))
    assert server.problem(0.0) == "a is being evaluated"
    servers.handle_applied(Applied(server="a", version=V1, pinned=True))
    assert server.problem(0.0) is None


def test_an_attempt_ends_with_its_time_and_with_the_service_that_knew_of_it():
    servers = fleet("a")
    server = sent(servers)
    assert server.problem(TIMEOUT) is None
    assert server.problem(TIMEOUT + 0.1) == "a did not finish in publish.timeout=8 s"
    servers.forgotten()
    assert server.problem(0.0) == f"a: {FORGOTTEN}"
    servers.handle_applied(Applied(server="a", version=V1))
    assert not servers.have(V1), "the present service has told of no servers"
    servers.handle_roster([ServerState(name="a", version=V1)], 0.0)
    assert servers.have(V1)


class Machine(RuleBasedStateMachine):
    """Two servers, a publisher that always wants the newest version everywhere, and everything that may go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.servers = Servers(TIMEOUT)
        self.newest = V0
        self.true: dict[str, ServerState] = {}  # what is there
        self.open: dict[str, ServerWeights] = {}  # attempts that the publisher has not ended
        self.failures: dict[str, list[float]] = {}  # of each server since its last success, or a newer version: when
        self.own: dict[str, int] = {}  # those of them in which the server had its time, in a row

    def _tell(self) -> None:
        self.servers.handle_roster(tuple(self.true.values()), self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES))
    def joins_again(self, name: str) -> None:
        """Comes, or is started again with its first weights."""
        self.true[name] = ServerState(name=name, version=V0)
        self._tell()

    @rule(name=st.sampled_from(NAMES))
    def leaves(self, name: str) -> None:
        """Its attempt has failed now, whenever the publisher looks at it."""
        self._fails(name)
        self.true.pop(name, None)
        self._tell()

    def _fails(self, name: str) -> None:
        if name in self.open and self.open[name].is_open:
            self.failures.setdefault(name, []).append(self.now)
            self.own[name] = self.own.get(name, 0) + self.open[name].has_time

    @precondition(lambda self: not self.open)
    @rule()
    def announces(self) -> None:
        self.newest = PolicyVersion(self.newest.step + 1)
        self.servers.announced()
        self.failures = {name: times for name, times in self.failures.items() if self.own[name] > 1}

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pins(self, name: str, pinned: bool) -> None:
        if name in self.true:
            self.true[name] = ServerState(name=name, version=self.true[name].version, pinned=pinned)
            self.servers.handle_applied(Applied(server=name, version=self.true[name].version, pinned=pinned))

    @rule()
    def begins(self) -> None:
        for server in self.servers.due(self.newest, self.now):
            if server.name in self.open:  # applied, and not ended yet
                continue
            true = self.true[server.name]
            assert true.version < self.newest
            assert not true.pinned
            last = self.failures.get(server.name)
            assert last is None or self.now - last[-1] >= min(FIRST_PAUSE * 2 ** (len(last) - 1), TIMEOUT)
            self.servers.begin(server, self.newest)
            self.open[server.name] = server

    @rule(name=st.sampled_from(NAMES))
    def everything_is_prepared(self, name: str) -> None:
        if name in self.open:
            self.open[name].prepared(self.now)

    @rule(name=st.sampled_from(NAMES))
    def everything_is_sent(self, name: str) -> None:
        if name in self.open and self.open[name].problem(self.now) is None:
            self.open[name].sent()

    @rule(name=st.sampled_from(NAMES))
    def applies(self, name: str) -> None:
        if name in self.true and name in self.open:
            self.true[name] = ServerState(name=name, version=self.newest)
            self.servers.handle_applied(Applied(server=name, version=self.newest))

    @rule(name=st.sampled_from(NAMES), late=st.booleans())
    def refuses(self, name: str, late: bool) -> None:
        if name in self.open:
            attempt = (self.open[name].attempt or 0) - late
            self.servers.handle_failed(PublishFailed(server=name, version=self.newest, reason="no", attempt=attempt))

    @rule()
    def service_starts_again(self) -> None:
        self.servers.forgotten()
        assert all(server.problem(self.now) for server in self.open.values() if server.state is not State.IDLE)
        self._tell()

    @rule(name=st.sampled_from(NAMES))
    def publisher_checks(self, name: str) -> None:
        """It gives an attempt up when there is a problem, and ends it when the version is there."""
        server = self.open.get(name)
        if server is None:
            return
        if server.problem(self.now) is not None:
            self._fails(name)
            server.fail(self.now)
            server.fail(self.now)  # what has failed has failed
        elif server.state is not State.IDLE:
            return
        else:
            self.failures.pop(name, None)
            self.own.pop(name, None)
        del self.open[name]

    @invariant()
    def only_a_server_that_is_there_is_waited_for(self) -> None:
        known = self.servers._by_name
        assert {name for name, server in known.items() if server.state is not State.GONE} == self.true.keys()
        assert {name for name, server in known.items() if server.is_open} <= self.open.keys()
        assert self.servers.have(self.newest) <= all(state.version >= self.newest for state in self.true.values())


TestMachine = Machine.TestCase
