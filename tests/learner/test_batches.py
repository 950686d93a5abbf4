"""The learner's line to a replay service that forgets: what it says again, and what its checkpoints contain."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest

from streamrl.config import Config
from streamrl.learner.batches import ServiceBatches
from streamrl.stream.codec import encode_group
from streamrl.stream.messages import (
    BatchHeader,
    BatchStats,
    Bye,
    Evaluated,
    Exited,
    Finished,
    Hello,
    Introduce,
    Lost,
    Next,
    Progress,
    Saved,
    Stop,
    Welcome,
)
from streamrl.stream.sockets import StreamTimeout
from streamrl.types import Ledger, PolicyVersion
from tests.operations_table import documented
from tests.scripted_service import WAIT, Answer, ScriptedService, Word

TICK = 0.05
START = PolicyVersion(4, incarnation=1)
BEFORE = Ledger(below=8, pending={8: ("copy", 8)}, cursors={"copy": 9})
AFTER = Ledger(below=10, cursors={"copy": 11})


class Service(ScriptedService):
    """A service that answers as it is told: it says `welcome`, and gives every step a batch while `generous`."""

    def __init__(self, config: Config, folder, make_group) -> None:
        self.make_group = make_group
        self.welcome: Welcome | None = Welcome(published=PolicyVersion(7))
        self.generous = True
        super().__init__(folder, config.stream, script=self._script)

    def _script(self, word: Word) -> Iterator[Answer]:
        if isinstance(word, Hello) and self.welcome is not None:
            yield self.welcome
        elif isinstance(word, Next) and self.generous:
            stats = BatchStats(
                tokens_generated=10,
                generator_busy=0.25,
                groups=3,
                bytes=99,
                verified=4,
                drafts=6,
                selection={"selection/dropped/groups": 2.0},
                evaluation={"eval/copy/pass@1": 0.5},
                bound="16 -> 2: clipped",
            )
            header = BatchHeader(step=word.step, groups=1, stats=stats, ledger=AFTER)
            yield header, encode_group(self.make_group(word.step), 1 << 20)


@pytest.fixture
def deadlines() -> dict[str, float]:
    """Keys of `run`, in seconds, for a test that waits for one of them."""
    return {}


@pytest.fixture
def config(deadlines) -> Config:
    return Config.model_validate(
        {
            "run": {"id": "r", "silence_timeout": WAIT, "start_timeout": WAIT, **deadlines},
            "learner": {"tick": TICK},
            "publish": {"timeout": 0.2},
            "replay": {"adaptive": {"enabled": True}},
            "stream": {"reply_timeout": 5.0, "curve": "off"},
        }
    )


@pytest.fixture
def service(config, tmp_path, make_group) -> Iterator[Service]:
    running = Service(config, tmp_path, make_group)
    yield running
    running.close()


@pytest.fixture
def source(config, service, tmp_path) -> Iterator[ServiceBatches]:
    running = ServiceBatches(config, tmp_path, START, BEFORE)
    yield running
    running.close()


def begin(source: ServiceBatches) -> None:
    while not source.begun(TICK):
        continue


def take(source: ServiceBatches, step: int):
    deadline = time.monotonic() + WAIT
    while (delivery := source.next(step, TICK)).kind == "nothing":
        assert time.monotonic() < deadline
    return delivery


def test_the_learner_says_what_its_checkpoint_contains_and_is_told_what_was_published(service, source):
    begin(source)
    assert service.wait_for(Hello)[0] == Hello(run="r", role="learner", name="learner-0", version=START, ledger=BEFORE)
    assert source.published == PolicyVersion(7)
    source._peer.receive = lambda timeout: Welcome(published=None)  # of a service that was started again
    source._handle(TICK)
    assert source.published == PolicyVersion(7)


def test_a_batch_brings_its_figures_and_its_ledger_counts_once_it_is_trained(service, source):
    begin(source)
    delivery = take(source, 4)
    assert delivery.batch.step == 4
    assert delivery.stats["selection/dropped/groups"] == 2.0
    assert delivery.stats["eval/copy/pass@1"] == 0.5
    assert delivery.stats["idle/generator"] == 0.75
    assert delivery.stats["speculation/accept_length"] == 2.5
    assert delivery.stats["staleness/reason"] == "16 -> 2: clipped"
    assert source.ledger == BEFORE  # it is not in the weights yet
    source.trained(PolicyVersion(5, 1), {"offpolicy/ess": 0.5, "offpolicy/clipped": math.nan, "loss/total": 1.0})
    assert source.ledger == AFTER
    source.saved(PolicyVersion(5, 1), oldest=2)
    received = service.wait_for(Progress, Saved)
    assert Progress(version=PolicyVersion(5, 1), signals={"offpolicy/ess": 0.5}) in received
    assert Saved(version=PolicyVersion(5, 1), oldest=2) in received


def test_a_service_that_was_started_again_gets_the_present_version_its_ledger_and_the_open_question(service, source):
    begin(source)
    take(source, 4)
    source.trained(PolicyVersion(5, 1), {})
    service.generous = False
    service.wait_for(Progress)
    source.next(5, TICK)
    service.wait_for(Next)
    service.send(Introduce())
    time.sleep(2 * TICK)
    service.wait_until(lambda: source.next(5, TICK).kind == "nothing" and Next(step=5) in service.received)
    received = service.wait_for(Hello, Next)
    assert received[-2:] == [
        Hello(run="r", role="learner", name="learner-0", version=PolicyVersion(5, 1), ledger=AFTER),
        Next(step=5),
    ]
    service.generous = True
    service.send(Introduce())
    time.sleep(2 * TICK)
    assert take(source, 5).batch.step == 5


def test_a_step_that_is_generated_again_is_another_one_than_a_batch_that_takes_its_time(service, source):
    begin(source)
    service.generous = False
    assert source.next(4, TICK).kind == "nothing"
    service.send(Lost(step=3))
    assert source.next(4, WAIT).kind == "nothing"
    service.send(Lost(step=4))
    assert source.next(4, WAIT).kind == "lost"
    assert source.next(4, TICK).kind == "lost"
    service.generous = True
    service.send(Introduce())
    deadline = time.monotonic() + WAIT
    while (delivery := source.next(4, TICK)).kind == "lost":
        assert time.monotonic() < deadline
    assert delivery.batch.step == 4


@pytest.mark.parametrize("deadlines", [{"silence_timeout": 0.6}])
def test_a_service_that_stays_silent_ends_the_learner_at_its_deadline(service, source):
    begin(source)
    service.generous = False
    with pytest.raises(StreamTimeout) as failed:
        take(source, 4)
    documented("no message from the replay service in run.silence_timeout=... seconds", str(failed.value), 1)


@pytest.mark.parametrize("deadlines", [{"start_timeout": 0.6}])
def test_a_service_that_does_not_answer_the_hello_ends_the_learner_at_its_deadline(config, service, tmp_path):
    service.welcome = None
    source = ServiceBatches(config, tmp_path, START)
    try:
        with pytest.raises(StreamTimeout, match=r"run\.start_timeout"):
            begin(source)
    finally:
        source.close()


def test_stop_ends_the_wait(service, source):
    begin(source)
    service.generous = False
    service.send(Stop(reason="the run is over"))
    assert take(source, 4).kind == "stop"


def test_the_end_of_a_run_is_sent_until_the_service_has_received_it(service, source):
    begin(source)
    service.wait_for(Hello)
    ending = threading.Thread(target=source.end, args=(PolicyVersion(5, 1),))
    ending.start()
    service.wait_for(Finished)
    time.sleep(2 * TICK)
    service.send(Introduce())  # it was killed before it could note that
    received = service.wait_for(Hello, Finished)
    assert received[-1] == Finished(version=PolicyVersion(5, 1))
    service.send(Stop(reason="complete"))
    ending.join(WAIT)
    assert not ending.is_alive()


def test_an_exit_is_sent_until_the_service_has_received_it(service, source):
    begin(source)
    service.wait_for(Hello)
    ending = threading.Thread(target=source.exit, args=(PolicyVersion(5, 1), "half an hour is over"))
    ending.start()
    service.wait_for(Exited)
    time.sleep(2 * TICK)
    service.send(Introduce())  # it was killed before it could note that
    assert service.wait_for(Hello, Exited)[-1] == Exited(version=PolicyVersion(5, 1), reason="half an hour is over")
    service.send(Stop(reason="half an hour is over"))
    ending.join(WAIT)
    assert not ending.is_alive()


def test_an_evaluation_that_ends_behind_the_last_batch_is_received_at_the_end(service, source):
    begin(source)
    service.wait_for(Hello)
    late = [Evaluated(version=PolicyVersion(step, 1), metrics={"eval/copy/pass@1": 0.75}) for step in (4, 5)]
    for message in late:
        service.send(message)
    service.send(Stop(reason="complete"))
    assert source.end(PolicyVersion(5, 1)) == late


def test_a_learner_that_stops_early_says_bye(service, source):
    begin(source)
    source.end(None)
    service.wait_for(Bye)
