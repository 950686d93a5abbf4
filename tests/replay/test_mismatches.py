"""Mismatches at the service: the learner's next row has that of the server furthest from it."""

from __future__ import annotations

import time
from collections.abc import Callable

from service_parts import V0, V1, WAIT, MakeGroup, Running, answer, receive, receive_tickets

from streamrl.replay.mismatches import Mismatches
from streamrl.stream.messages import Mismatch, Next, Progress
from streamrl.stream.sockets import ReceivedBatch
from streamrl.types import PolicyVersion

NEAR = {"mismatch/mean": 0.001, "mismatch/limit": 0.01}
FAR = {"mismatch/mean": 0.02, "mismatch/limit": 0.01}
OTHER_WEIGHTS = {**NEAR, "mismatch/slope": 1.0, "mismatch/slope_error": 0.01}


def test_the_furthest_server_is_told_once_and_again_with_a_redelivery() -> None:
    mismatches = Mismatches()
    assert mismatches.metrics(1) == {}
    for server, metrics in enumerate((NEAR, FAR, OTHER_WEIGHTS, NEAR)):
        mismatches.record(Mismatch(server=f"server-{server}", version=V1, metrics=metrics))
    told = {**OTHER_WEIGHTS, "mismatch/servers": 4.0}
    assert mismatches.metrics(2) == mismatches.metrics(2) == told
    mismatches.record(Mismatch(server="server-0", version=V1, metrics=NEAR))
    assert mismatches.metrics(2) == told
    assert mismatches.metrics(3) == {**NEAR, "mismatch/servers": 1.0}
    assert mismatches.metrics(4) == {}


def test_what_a_server_tells_goes_with_the_next_batch_and_into_the_events(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(run={"steps": 9})
    worker, learner = running.worker("w"), running.learner()
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    worker.send(Mismatch(server="w-server", version=V0, metrics=FAR))
    deadline = time.monotonic() + WAIT
    while not (told := running.events_of("mismatch.measured")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert (told[0]["server"], told[0]["version"], told[0]["metrics"]) == ("w-server", "0.0", FAR)
    for step, expected in ((0, {**FAR, "mismatch/servers": 1.0}), (1, {})):
        learner.send(Next(step=step))
        assert receive(learner, ReceivedBatch).stats["mismatch"] == expected
        learner.send(Progress(version=PolicyVersion(step + 1)))
