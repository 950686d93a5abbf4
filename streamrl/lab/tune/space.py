"""Which settings there are to choose from: a few values on each axis, and by name what is no axis of this run.

| axis | keys | values |
|---|---|---|
| bound | replay.max_staleness | BOUNDS up to the oldest that is wanted |
| window | replay.order, replay.window | 1 (strict order), half a step, a step, two steps |
| in flight | generate.groups_in_flight, or requests_in_flight | doublings, each with its half more, up to the slots |
| interval | publish.every | EVERY |
| split | generate.workers, learner.ranks | for each number of ranks, as many workers as the rest holds |
| micro batch | learner.tokens_per_micro_batch | those whose speed was measured |

The configured value of each is among them, unless its bound is above the oldest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.choices import ORDERS
from streamrl.config import Config
from streamrl.config.file import ConfigError, value_at
from streamrl.config.in_flight import most_requests, of_lag, without_lag
from streamrl.lab.sweep.plan import override
from streamrl.lab.tune.search import Point

BOUNDS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 8)
EVERY = (1, 2, 3, 4)

# Times more groups in flight, for each server, than in any calibration run: what a server does beyond is not known.
BEYOND = 2

MOST_SPLITS = 16  # of the devices: numbers of ranks, evenly from the fewest to the most


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point. Example: bound 2, strict order, 16 groups in flight on one worker, each step published."""

    bound: float  # learner steps
    window: int  # group ids; 1: strict order
    in_flight: int  # groups over all workers
    every: int  # learner steps between two versions
    workers: int
    ranks: int
    micro_batch: int  # tokens


@dataclass(frozen=True, slots=True)
class Devices:
    """What a run has, in cores or GPUs. Of a machine with 8 GPUs: `Devices("GPUs", 8)`."""

    unit: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.unit}"


def used(config: Config, unit: str) -> tuple[int, int]:
    """(of one learner rank, of one worker with its servers) in `cores` or `GPUs`."""
    own = config.generate
    if unit == "cores":
        return config.learner.threads, own.servers * own.threads
    return 1, own.servers * own.tensor_parallel


def own_devices(config: Config, unit: str) -> Devices:
    """As many as the configuration uses itself."""
    rank, worker = used(config, unit)
    return Devices(unit, config.learner.ranks * rank + config.generate.workers * worker)


def groups_in_flight(config: Config) -> int:
    """Groups that one worker has in flight; requests are counted as whole groups."""
    own = without_lag(config, config.generate)
    return math.ceil(most_requests(config, own) / own.group_size) if own.by_sample else own.groups_in_flight


def _all_in_flight(config: Config) -> int:
    """Groups over all workers. Of a lag they have parts that may differ by one."""
    own = config.generate
    if own.lag is None:
        return groups_in_flight(config) * own.workers
    return math.ceil(of_lag(config) / (own.group_size if own.by_sample else 1))


class Space:
    """The axes of a configuration.

    `load` gives the configuration of overrides, and raises ConfigError for one that is not possible; `seen`: groups
    in flight, for each worker, of the calibration runs; `micro_batches`: whose speed is known.
    """

    def __init__(
        self,
        load: Callable[[Sequence[str]], Config],
        devices: Devices,
        *,
        oldest: float,
        seen: int,
        micro_batches: Iterable[int] = (),
    ) -> None:
        self._load = load
        self.config = config = load(())
        self.left_out: list[str] = []  # a line each
        self.divided: Devices | None = devices  # None: the split stays as it is
        self._strict, self._wide = _orders(config)
        self._is_strict = self._strict is not None and config.replay.chosen("order") is ORDERS.load(self._strict)
        self._most = BEYOND * seen  # groups in flight of one worker
        bounds = self._bounds(oldest)
        splits = self._splits(devices)
        self._axes: dict[str, tuple[Any, ...]] = {
            "bound": bounds,
            "window": self._windows(),
            "in_flight": self._in_flight(max(bounds), [workers for workers, _ in splits]),
            "every": _sorted({*EVERY, config.publish.every}),
            "split": splits,
            "micro_batch": _sorted({config.learner.tokens_per_micro_batch, *micro_batches}),
        }

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values on each axis."""
        return tuple(len(values) for values in self._axes.values())

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        """(workers, ranks)."""
        return self._axes["split"]

    def setting(self, point: Point) -> Setting:
        bound, window, in_flight, every, (workers, ranks), micro_batch = (
            values[place] for values, place in zip(self._axes.values(), point, strict=True)
        )
        return Setting(
            bound=bound, window=window, in_flight=in_flight, every=every, workers=workers, ranks=ranks,
            micro_batch=micro_batch,
        )  # fmt: skip

    @property
    def configured(self) -> Setting:
        """The setting of the configuration itself."""
        config = self.config
        return Setting(
            bound=config.replay.max_staleness,
            window=1 if self._is_strict else config.replay.window,
            in_flight=_all_in_flight(config),
            every=config.publish.every,
            workers=config.generate.workers,
            ranks=config.learner.ranks,
            micro_batch=config.learner.tokens_per_micro_batch,
        )

    def begins(self) -> list[Point]:
        """Where a search begins: the configured setting, and with half the slots in flight each bound and split."""
        own = self.configured
        at = {name: self._nearest(name, getattr(own, name)) for name in ("window", "in_flight", "every", "micro_batch")}
        splits, own_split = self._axes["split"], (own.workers, own.ranks)
        split = splits.index(own_split) if own_split in splits else 0
        bound = self._nearest("bound", own.bound)
        begins: list[Point] = [(bound, at["window"], at["in_flight"], at["every"], split, at["micro_batch"])]
        strict, often = self._nearest("window", 1), self._nearest("every", 1)
        for bound, value in enumerate(self._axes["bound"]):
            half = (value + 1) * self.config.replay.groups_per_step / 2
            for place in range(len(splits)) if value == own.bound else (split,):
                in_flight = self._nearest("in_flight", half, most=self._most * splits[place][0])
                begins.append((bound, strict, in_flight, often, place, at["micro_batch"]))
        return begins

    def overrides(self, setting: Setting) -> tuple[str, ...]:
        """`key=value` of what differs from the configuration; nothing for the configured setting."""
        if setting == self.configured:
            return ()
        keys: dict[str, Any] = {
            "replay.max_staleness": setting.bound,
            "publish.every": setting.every,
            "generate.workers": setting.workers,
            "learner.ranks": setting.ranks,
            "learner.tokens_per_micro_batch": setting.micro_batch,
            **self._order_keys(setting.window),
            **self._in_flight_keys(setting),
        }
        return tuple(override(key, value) for key, value in keys.items() if value_at(self.config, key) != value)

    def loaded(self, setting: Setting, further: Sequence[str] = ()) -> Config | None:
        """The configuration of a setting; None for one that cannot run, with too much in flight, or like another one.

        The configured one may be like another one, and have any number in flight.
        """
        try:
            config = self._load((*self.overrides(setting), *further))
        except ConfigError:
            return None
        if setting == self.configured:
            return config
        below = [value for value in self._axes["in_flight"] if value < setting.in_flight]
        like_another = bool(below) and below[-1] >= config.replay.slots
        known = self._takes_all or math.ceil(setting.in_flight / setting.workers) <= self._most
        return config if known and setting.in_flight >= setting.workers and not like_another else None

    # -- axes

    def _bounds(self, oldest: float) -> tuple[float, ...]:
        config = self.config
        other = config.replay.model_copy(update={"max_staleness": config.replay.max_staleness + 1})
        if other.bound == config.replay.bound:
            self._leave("replay.max_staleness", f"replay.order={config.replay.order} has a bound of its own")
            return (config.replay.max_staleness,)
        return _sorted(bound for bound in (*BOUNDS, config.replay.max_staleness) if bound <= oldest)

    def _windows(self) -> tuple[int, ...]:
        config, step = self.config, self.config.replay.groups_per_step
        if self._strict is None:
            self._leave("replay.window", f"replay.order={config.replay.order} is neither strict nor windowed")
            return (config.replay.window,)
        return _sorted({1, max(1, step // 2), step, 2 * step, self.configured.window})

    @property
    def _takes_all(self) -> bool:
        """As many requests are in flight as a server has room for."""
        return self.config.generate.requests_in_flight == "auto"

    def _in_flight(self, bound: float, workers: Sequence[int]) -> tuple[int, ...]:
        """`workers`: of each split."""
        config, configured = self.config, self.configured.in_flight
        if self._takes_all:
            self._leave("generate.requests_in_flight", "auto takes as many as the KV cache allows")
            return (configured,)
        slots = math.floor((bound + 1) * config.replay.groups_per_step)
        most = min(slots, self._most * max(workers))
        if slots > self._most * min(workers):
            key = "requests_in_flight" if config.generate.by_sample else "groups_in_flight"
            reason = f"more than {self._most} groups a worker are beyond {BEYOND} times those of the calibration"
            self._leave(f"generate.{key}", reason)
        values = {2**power for power in range(most.bit_length())} | {3 * 2**power for power in range(most.bit_length())}
        return _sorted({configured, most, *(value for value in values if value <= most)})

    def _splits(self, devices: Devices) -> tuple[tuple[int, int], ...]:
        """(workers, ranks): for each number of ranks, as many workers as the rest of the devices holds."""
        config = self.config
        own = (config.generate.workers, config.learner.ranks)
        if config.generate.attach:
            return self._only_own(own, f"generate.attach: {len(config.generate.attach)} running servers")
        if config.run.shares_devices:
            return self._only_own(own, f"run.placement={config.run.placement}: both sides have the same devices")
        rank, worker = used(config, devices.unit)
        copy = config.learner.layout.model_ranks  # of the model
        if devices.count < copy * rank + worker:
            raise ConfigError(
                f"--{devices.unit.lower()}: {devices.count} hold no worker of {worker} and {copy} learner ranks of "
                f"{rank}; allowed: {copy * rank + worker} and more"
            )
        most: dict[int, tuple[int, int]] = {}  # by the workers: more ranks with as many of them
        for ranks in _spread(range(copy, (devices.count - worker) // rank + 1, copy)):
            workers = (devices.count - ranks * rank) // worker
            try:
                self._load((f"learner.ranks={ranks}", f"generate.workers={workers}", "generate.lag=null"))
            except ConfigError:
                continue
            most[workers] = (workers, ranks)
        splits = {*most.values()}
        if own[0] * worker + own[1] * rank <= devices.count:
            splits.add(own)
        if not splits:
            raise ConfigError(f"learner.layout: no number of ranks fits it on {devices.count} {devices.unit}")
        return _sorted(splits)

    def _only_own(self, own: tuple[int, int], reason: str) -> tuple[tuple[int, int], ...]:
        self._leave("generate.workers, learner.ranks", reason)
        self.divided = None
        return (own,)

    def _leave(self, key: str, reason: str) -> None:
        self.left_out.append(f"{key}: {reason}")

    # -- keys

    def _order_keys(self, window: int) -> dict[str, Any]:
        if self._strict is None:
            return {}
        if window == 1 and self._is_strict:  # whatever `window` says there
            return {"replay.order": self.config.replay.order}
        return {"replay.order": self._strict if window == 1 else self._wide, "replay.window": window}

    def _in_flight_keys(self, setting: Setting) -> dict[str, Any]:
        own = self.config.generate
        if self._takes_all:
            return {}
        groups = math.ceil(setting.in_flight / setting.workers)
        lag = {"generate.lag": None}
        if own.by_sample:
            return {**lag, "generate.requests_in_flight": groups * own.group_size}
        least = min(own.least_in_flight, groups)
        return {**lag, "generate.groups_in_flight": groups, "generate.least_in_flight": least}

    def _nearest(self, axis: str, value: float, most: float = math.inf) -> int:
        """The place of the nearest value up to `most`; of the first one where all are above it."""
        values = self._axes[axis]
        places = [place for place, known in enumerate(values) if known <= most] or [0]
        return min(places, key=lambda place: abs(values[place] - value))


def _orders(config: Config) -> tuple[str | None, str]:
    """Names of the strict and the windowed order; None for the first where the configured order is another one."""
    wide = ORDERS.users_of("window")[0]
    strict = "fifo"
    known = (ORDERS.load(strict), ORDERS.load(wide))
    return (strict if config.replay.chosen("order") in known else None), wide


def _spread(values: Sequence[int]) -> list[int]:
    """At most MOST_SPLITS of them, from the first to the last.

    >>> len(_spread(range(1, 1000))), _spread(range(1, 4))
    (16, [1, 2, 3])
    """
    if len(values) <= MOST_SPLITS:
        return list(values)
    last = len(values) - 1
    return [values[round(place * last / (MOST_SPLITS - 1))] for place in range(MOST_SPLITS)]


def _sorted(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(set(values)))
