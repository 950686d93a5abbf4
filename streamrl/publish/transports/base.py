"""What a publish transport is: how weights get from the learner to the servers, and what that costs.

`source` and `sink` make its two ends; everything else is for those who plan, check or launch a run. The two ends import
what they need when they are made, so that any process can load a transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.choices import TRANSPORTS, Choice, Options

if TYPE_CHECKING:
    from streamrl.config.publish import PublishConfig
    from streamrl.publish.staging import Memory
    from streamrl.publish.transport import LearnerEnd, ServerEnd, Sink, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What one version costs on the machines of a plan, in seconds, and who gets it."""

    copy: float  # until the learner goes on, which begins the copy of its weights
    move: float  # out of the learner's memory, or into a server's: between a GPU and pinned memory
    pageable: float  # into a server's memory from memory that is not pinned
    network: float  # from one host to another
    across: float  # the same, 0 where learner and servers are on one host
    read: float  # from the shared file system
    scan: float  # once through host memory, by one process
    hash: float  # the checksums of all of it, by one process
    verify: float  # the same where `publish.verify_every` asks for it, else 0
    changed: float  # share of the bytes that differ from the version before
    servers: int
    at_once: int  # `publish.at_once`
    beside: bool  # a device takes one part while the network carries another


@dataclass(frozen=True, slots=True)
class Times:
    """What a plan says of one version, in seconds."""

    copy: float  # the learner waits
    pause: float  # one server is paused
    round: float  # until the last server has it


class Transport(Choice, ABC):
    """A transport of a run. The class says what others ask of it; an instance has the run's options."""

    several_at_once = False  # whether more than one server may get a version at the same time
    one_host = False  # whether learner, workers and servers must be on one host
    over_nodes = False  # whether it reaches a server whose ranks are on several hosts
    spares_drafts = True  # whether a draft model that a server has beside the policy keeps its own weights
    one_device = True  # whether it reaches a server on a GPU that the learner has, too
    staged_copies = 1  # of the weights, in the memory of the learner's first host
    server_copies = 0  # of the weights, kept for each server in the memory of its host
    verifies = ""  # what it compares of every version, in words, whatever `publish.verify_every` says

    def __init__(self, options: Options) -> None:
        """`options`: those of `publish.transport_options`, of the class's own Options."""
        self.options = options

    @classmethod
    def check(cls, section: PublishConfig) -> None:
        if section.at_once > 1 and not cls.several_at_once:
            others = [name for name in TRANSPORTS.names if TRANSPORTS.load(name).several_at_once]
            raise ValueError(
                f"at_once: {section.at_once} is not possible with transport={section.transport}, whose bytes go to one "
                f"server after another; allowed: 1, or transport={' or '.join(others)}"
            )
        for key, value, nothing in (
            ("verify_every", section.verify_every, 0),
            ("folder", section.folder, None),
        ):
            if value != nothing and key not in cls.uses:
                compared = f" (it compares {cls.verifies})" if cls.verifies and key == "verify_every" else ""
                raise ValueError(
                    f"{key}: {value} is not used by transport={section.transport}{compared}; allowed: "
                    f"{'null' if nothing is None else nothing}, or transport={' or '.join(TRANSPORTS.users_of(key))}"
                )

    @abstractmethod
    def source(self, at: LearnerEnd) -> Source:
        """The end in the learner."""

    @abstractmethod
    def sink(self, at: ServerEnd) -> Sink:
        """A new end in a worker, for one server. The worker has no torch."""

    def memory(self) -> Memory | None:
        """Where versions are staged; None: in memory of the learner's process alone."""
        return None

    def times(self, costs: Costs) -> Times:
        """How long one version takes: here, straight into one server after another."""
        each = costs.move + costs.across
        return Times(costs.copy, each, costs.servers * each)
