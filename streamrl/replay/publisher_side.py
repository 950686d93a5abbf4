"""The service's side towards the publisher: which servers there are, and what passes between it and their workers."""

from __future__ import annotations

from streamrl.replay.run_parts import RunParts
from streamrl.stream.messages import (
    Announce,
    Bye,
    Heartbeat,
    MalformedMessage,
    Message,
    Publish,
    PublishFailed,
    Roster,
)


class PublisherSide:
    """The publisher of a run."""

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._roster: Roster | None = None  # as the publisher knows it

    def handle_hello(self, identity: bytes) -> None:
        """It learns of the servers from the next roster."""
        self._run.peers.introduced(identity)
        self._run.peers.publisher, self._roster = identity, None

    def handle(self, message: Message) -> None:
        """Any message but a Hello. Raises MalformedMessage."""
        run = self._run
        match message:
            case Heartbeat():
                pass
            case Announce(version=version):
                run.evaluations.announce(version)
                run.admission.announce(version)
                run.events.emit("publish.announced", version=version)
            case Publish(server=server, version=version, attempt=attempt):
                owner = run.workers.owner(server)
                if owner is None or not run.send_worker(owner, message):
                    reason = "no live worker owns this server"
                    run.send_publisher(PublishFailed(server=server, version=version, reason=reason, attempt=attempt))
            case Bye():
                run.peers.publisher = None
            case _:
                raise MalformedMessage(f"{type(message).__name__} from a publisher")

    def send_roster(self) -> None:
        """Where it has changed."""
        roster = Roster(servers=self._run.workers.servers)
        if roster != self._roster and self._run.send_publisher(roster):
            self._roster = roster
