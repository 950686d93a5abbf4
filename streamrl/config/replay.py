"""The wire, the buffer between generation and training, and its journal."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from streamrl.choices import CONTROLLERS, CURRICULA, ORDERS, RELEASES
from streamrl.config import reuse
from streamrl.config.section import Section, rule

# Groups of a step at the most: the batch is one message of two frames a group, and its header names all of them.
MOST_GROUPS = 1 << 16

_ENDPOINT = re.compile(r"tcp://(?:\[[\w:.%]+\]|[\w.*-]+):(?P<port>\d{1,5})|ipc://.+")
_WILDCARD = re.compile(r"tcp://(0\.0\.0\.0|\*|\[::\]):")
_LOOPBACK = re.compile(r"(127\.[\d.]+|localhost)$")


class StreamConfig(Section):
    """The wire between workers, replay service and learner."""

    max_message: int = Field(
        1 << 28, ge=1 << 12, description="bytes of the largest message that is accepted, all of its frames together"
    )
    max_unread: int | None = Field(
        None,
        ge=1 << 13,
        description="bytes that all peers together may have sent and nobody has read; null: 4 of the largest messages",
    )
    reply_timeout: float = Field(30.0, gt=0, description="seconds that a reply of the replay service may take")
    curve: Literal["auto", "on", "off"] = Field(
        "auto", description="CURVE authentication and encryption; auto: on unless the address is a socket file (ipc)"
    )
    keys: Path | None = Field(None, description="folder of the run's CURVE keys; null: RUN/keys")

    @property
    def unread(self) -> int:
        """`max_unread`, in bytes, also where it is null."""
        return 4 * self.max_message if self.max_unread is None else self.max_unread

    @rule
    def _two_messages_fit(self) -> None:
        if self.unread < 2 * self.max_message:
            raise ValueError(
                f"max_unread: {self.max_unread} is not enough for one message that is read and one that comes, of "
                f"max_message={self.max_message} each; allowed: at least {2 * self.max_message}"
            )


class FilterConfig(Section):
    """Which groups are dropped and replaced by another prompt's of the same task, before they are trained."""

    signal: bool = Field(False, description="drop groups whose rewards are all equal (std <= 1e-6)")
    placeholders: bool = Field(False, description="drop groups with a failed sample")
    min_pass_rate: float = Field(0.0, ge=0, le=1, description="drop groups below this share of right answers")
    max_pass_rate: float = Field(1.0, ge=0, le=1, description="drop groups above this share of right answers")
    tries: int = Field(4, ge=1, description="prompts for one place; the last one's group is taken as it is")

    @property
    def active(self) -> bool:
        return self.signal or self.placeholders or self.min_pass_rate > 0 or self.max_pass_rate < 1

    @rule
    def _keeps_something(self) -> None:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate: {self.min_pass_rate:g} is above max_pass_rate={self.max_pass_rate:g}; "
                "allowed: up to max_pass_rate"
            )


class AdaptiveConfig(Section):
    """How much of the staleness is admitted now: less where the data teaches no more, more where it does."""

    enabled: bool = Field(False, description="adapt the admitted staleness, up to replay.max_staleness")
    controller: Annotated[str, CONTROLLERS] = Field(
        "teaching", description="what moves it, by the metrics of each step"
    )
    controller_options: dict[str, Any] = Field(default_factory=dict, description="options of a controller of your own")
    clipped_low: float = Field(0.08, ge=0, lt=1, description="share of clipped tokens up to which it is raised")
    clipped_high: float = Field(0.15, gt=0, le=1, description="share of clipped tokens above which it is lowered")
    masked_low: float = Field(0.1, ge=0, lt=1, description="share of masked tokens up to which it is raised")
    masked_high: float = Field(0.2, gt=0, le=1, description="share of masked tokens above which it is lowered")
    ess_low: float = Field(0.5, gt=0, lt=1, description="off-policy effective sample size under which it is lowered")
    ess_high: float = Field(0.8, gt=0, le=1, description="effective sample size from which it is raised")
    least_signal: float = Field(
        0.05, ge=0, description="gradient signal to noise under which a share between low and high lowers it; 0: never"
    )
    change: float = Field(0.5, gt=0, description="learner steps of staleness by which it is raised at once")
    patience: int = Field(4, ge=1, description="learner steps whose mean is judged")

    @rule
    def _has_dead_bands(self) -> None:
        ends = [
            (key, getattr(self, f"{key}_low"), getattr(self, f"{key}_high")) for key in ("clipped", "masked", "ess")
        ]
        if wrong := [f"{key}_low: {low:g} is not below {key}_high={high:g}" for key, low, high in ends if low >= high]:
            raise ValueError("\n".join(wrong))

    @property
    def signals(self) -> tuple[str, ...]:
        """Metrics of each step that the learner reports to the service; none where the bound is fixed."""
        return tuple(self.chosen("controller").signals) if self.enabled else ()


class ReplayConfig(Section):
    """The buffer between generation and training."""

    address: str = Field("tcp://127.0.0.1:0", description="where the replay service listens; port 0 takes a free one")
    order: Annotated[str, ORDERS] = Field(
        "fifo", description="in which order groups are consumed; synchronous is fifo with the bound 0"
    )
    order_options: dict[str, Any] = Field(default_factory=dict, description="options of an order of your own")
    window: int = Field(1, ge=1, description="W, ids from the oldest unconsumed group on that `windowed` may consume")
    over_age: Literal["drop", "pass"] = Field(
        "drop", description="what `ready` does with a group older than the bound: generate it again, or train it"
    )
    groups_per_step: int = Field(8, ge=1, le=MOST_GROUPS, description="P, groups of one learner step")
    max_staleness: float = Field(
        2.0, ge=0, description="S, learner steps that a trained token may be old, rounded up; 0 is synchronous"
    )
    release: Annotated[str, RELEASES] = Field(
        "just_in_time",
        description="when tickets go out that the bound allows: as late as keeps the learner fed, or at once",
    )
    release_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the release policy: `quantile` and `margin` of `just_in_time`"
    )
    reuse: int = Field(1, ge=1, description="times that a group may be trained; 1: once")
    reuse_share: float = Field(0.5, gt=0, lt=1, description="part of a step's groups that may have been trained before")
    reuse_min_ess: float = Field(
        0.5, gt=0, le=1, description="effective sample size of a group at its last use, below which it has no further"
    )
    reuse_max_age: int | None = Field(
        None,
        ge=1,
        description="learner steps that a token may be old when it is trained again; null: `max_staleness`, rounded up",
    )
    host: str | None = Field(
        None,
        pattern=r"^[\w.-]+$",
        description="name of the machine for others where `address` is tcp://0.0.0.0:PORT; null: its own",
    )
    lease: float = Field(30.0, gt=0, description="seconds without a heartbeat after which a ticket is issued again")
    group_timeout: float = Field(
        900.0, gt=0, description="seconds after which a group ends with placeholders for its missing samples"
    )
    max_attempts: int = Field(3, ge=1, description="times that one ticket is issued before its group is a placeholder")
    curriculum: Annotated[str, CURRICULA] = Field("sequential", description="which prompt is asked next")
    curriculum_options: dict[str, Any] = Field(default_factory=dict, description="options of a curriculum of your own")
    filter: FilterConfig = Field(default_factory=FilterConfig, description="groups that are dropped and replaced")
    adaptive: AdaptiveConfig = Field(default_factory=AdaptiveConfig, description="the adaptive bound")

    @rule
    def _can_be_reached(self) -> None:
        """A wildcard is encrypted, and told to others by the host's name: who is told loopback does not encrypt."""
        if self.host is not None and _WILDCARD.match(self.address) and _LOOPBACK.match(self.host):
            raise ValueError(
                f"host: {self.host} is this machine alone, and address={self.address} is for others: nobody could "
                "connect; allowed: a name that the others reach, or address=tcp://127.0.0.1:0"
            )

    @rule
    def _address_can_be_bound(self) -> None:
        form = _ENDPOINT.fullmatch(self.address)
        if form is None or int(form["port"] or 0) > 65535:
            raise ValueError(
                f"address: {self.address!r} is no address; allowed: tcp://HOST:PORT (port 0: a free one), or ipc://PATH"
            )

    @rule
    def _can_be_reused(self) -> None:
        reuse.check(self)

    @property
    def fresh(self) -> int:
        """F, groups of every step that no step had before, at least."""
        return self.groups_per_step - reuse.most(self)

    @property
    def reuse_bound(self) -> int:
        """A, learner steps that a token may be old when its group is trained again."""
        return math.ceil(self.bound) if self.reuse_max_age is None else self.reuse_max_age

    @property
    def bound(self) -> float:
        """S of the order, which may bound it otherwise than `max_staleness`."""
        return float(self.chosen("order").staleness(self))

    @property
    def slots(self) -> int:
        """N of the order: groups that may be issued and not yet be part of acknowledged weights."""
        return int(self.chosen("order").slots(self))


class JournalConfig(Section):
    """The record of every group and batch, from which a run is recovered and trained again."""

    keep: Literal["none", "resume", "all"] = Field(
        "resume", description="segments: none written; those behind the oldest checkpoint deleted; all, for `retrain`"
    )
    commit_groups: int = Field(64, ge=1, description="groups after which a commit is made (one fsync for all)")
    commit_seconds: float = Field(0.02, ge=0, description="seconds that an accepted group waits for its commit at most")
    segment: int = Field(256 << 20, ge=1 << 12, description="bytes after which a new segment is begun")
