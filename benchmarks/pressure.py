"""A learner that is too slow, a group that takes too long: what stops, what goes on, and how old the data becomes.

    python -m benchmarks.pressure [--quick] [--json PATH]

    slow learner   the learner's step becomes many times longer than generation needs: the generators have to stop
                   at the N slots of the bound, and the memory of service and workers has to stay where it is
    straggler      one group in SLOW_EVERY takes many times as long, in different orders of consumption: which
                   wait, and how old the trained tokens become
    submission     answers of long-tailed lengths, capacity counted in groups and in requests (G/B and R/B, as
                   Megatron-RL calls them) on the same engine: what of it stays idle (benchmarks/pressure_submission.py)

The replay service is the real one, with its journal; workers and learner speak the real protocol and only let time
pass (benchmarks/pressure_roles.py). Orders and forms take turns in every repeat; a speed is a ratio to the first one's
in the same repeat. Figures are medians over the repeats, with (max - min) / median where a spread is given.
Exit code 1 where slots, the staleness bound or the memory go beyond what is promised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fault_roles import make_group
from benchmarks.pressure_roles import Load, Trained
from benchmarks.pressure_run import Run
from benchmarks.pressure_submission import Submitted, forms, show_forms
from benchmarks.repeats import spread
from streamrl.config import Config
from streamrl.lab.output import output_file
from streamrl.replay.orders import make_order
from streamrl.stream.codec import encode_group
from streamrl.types import PolicyVersion, Ticket

# -- slow learner
FREE = Load(group=0.08, step=0.01, pressed_step=0.5, pressed_after=5.0)
MARK = 10.0  # seconds after the first batch at which memory is read first
SETTLING = 4  # steps after a change of speed that are not looked at
GROWTH = 0.10  # share by which resident memory may grow after the mark; without a bound it would be a multiple

# -- straggler
SLOW_EVERY = 32  # groups
SLOW = Load(group=0.01, step=0.05, slow_every=SLOW_EVERY, slow_group=0.25)
WARM_UP = 8  # steps that are not timed
ORDERS: dict[str, dict[str, Any]] = {
    "fifo": {"order": "fifo", "max_staleness": 2},
    "windowed, same bound": {"order": "windowed", "window": 9, "max_staleness": 2},
    "windowed, same slots": {"order": "windowed", "window": 33, "max_staleness": 6},
    "fifo, more slots": {"order": "fifo", "max_staleness": 6},
    "ready": {"order": "ready", "max_staleness": 2},
}


def group_bytes(config: Config) -> int:
    """Bytes of the largest group that the configuration allows the scripted workers."""
    ticket = Ticket(
        group_id=10**9,
        task="copy",
        prompt_index=10**9,
        seed=0,
        issued_version=PolicyVersion(10**9),
        deadline=0.0,
    )
    size, tokens = config.generate.group_size, config.generate.sampling.max_new_tokens
    group = make_group(ticket, PolicyVersion(10**9), size, "generator-0", tokens)
    return sum(len(frame) for frame in encode_group(group, config.stream.max_message))


@dataclass(frozen=True)
class Phase:
    """The time in which the learner had one speed, without its first steps."""

    step_seconds: float
    groups_per_s: float
    busy: float  # share of the time in which the generators generated, mean
    held: int  # groups, at most


@dataclass(frozen=True)
class Squeeze:
    """What became of a run whose learner slowed down."""

    slots: int  # N, from the configuration
    bound: int  # learner steps
    group_bytes: int
    free: Phase
    pressed: Phase
    charged: int  # slots in use, at most
    staleness: int
    mark_seconds: float
    end_seconds: float
    resident_mark: dict[str, int]  # bytes, by process
    resident_end: dict[str, int]

    @property
    def unbounded(self) -> float:
        """Bytes that would have come between the two looks at the memory, had generation gone on."""
        rate = self.free.groups_per_s - self.pressed.groups_per_s
        return rate * (self.end_seconds - self.mark_seconds) * self.group_bytes

    def broken(self) -> list[str]:
        """The promises that were not kept."""
        held = max(self.charged, self.free.held, self.pressed.held)
        found = [f"{held} slots in use, {self.slots} allowed"] if held > self.slots else []
        if self.staleness > self.bound:
            found.append(f"a token {self.staleness} steps old, {self.bound} allowed")
        for name, before in self.resident_mark.items():
            if self.resident_end[name] > (1 + GROWTH) * before:
                found.append(
                    f"the memory of {name} grew from {before / 1e6:.1f} to {self.resident_end[name] / 1e6:.1f} MB"
                )
        return found


def squeeze(folder: Path, seconds: float, mark: float = MARK, load: Load = FREE) -> Squeeze:
    """A learner that is fast first and slow then, `seconds` from its first batch on."""
    run = Run(
        folder,
        load,
        {
            "generate": {"groups_in_flight": 8, "sampling": {"max_new_tokens": 1024}},
            "replay": {"groups_per_step": 16, "max_staleness": 2, "release": "eager"},
        },
    )
    looks: list[tuple[float, dict[str, int]]] = []

    def until(record: list[Trained]) -> bool:
        passed = time.monotonic() - record[0].received if record else 0.0
        if passed >= (mark if not looks else seconds):
            looks.append((passed, run.resident()))
        return len(looks) == 2

    record = run.go(until)
    order = make_order(run.config.replay)
    assert order.worst_staleness is not None
    return Squeeze(
        slots=order.capacity,
        bound=order.worst_staleness,
        group_bytes=group_bytes(run.config),
        free=_phase([line for line in record if not line.pressed], load.step),
        pressed=_phase([line for line in record if line.pressed], load.pressed_step),
        charged=run.slots(),
        staleness=max(age for line in record for age in line.ages),
        mark_seconds=looks[0][0],
        end_seconds=looks[1][0],
        resident_mark=looks[0][1],
        resident_end=looks[1][1],
    )


def _phase(record: Sequence[Trained], step_seconds: float) -> Phase:
    settled = record[SETTLING:]
    seconds = settled[-1].ended - settled[0].asked
    return Phase(
        step_seconds=step_seconds,
        groups_per_s=sum(len(line.ages) for line in settled) / seconds,
        busy=sum(line.busy * (line.ended - line.asked) for line in settled) / seconds,
        held=max(line.held for line in record),
    )


@dataclass(frozen=True)
class Course:
    """One run with stragglers."""

    steps_per_s: float
    waiting: float  # share of the time in which the learner waited for a batch
    staleness: int  # largest
    mean_staleness: float
    slow_trained: float  # slow groups that were trained, of those that there were among as many groups
    placeholders: int  # groups that were given up
    charged: int  # slots in use, at most


def straggle(folder: Path, replay: dict[str, Any], steps: int, load: Load = SLOW) -> tuple[Config, Course]:
    """`steps` learner steps in one order."""
    run = Run(folder, load, {"replay": {"groups_per_step": 8, **replay}})
    record = run.go(lambda record: len(record) >= steps)[:steps]
    timed = record[WARM_UP:]
    seconds = timed[-1].ended - timed[0].asked
    ages = [age for line in record for age in line.ages]
    return run.config, Course(
        steps_per_s=len(timed) / seconds,
        waiting=sum(line.received - line.asked for line in timed) / seconds,
        staleness=max(ages),
        mean_staleness=statistics.mean(age for line in timed for age in line.ages),
        slow_trained=sum(line.slow for line in record) / (steps * run.config.replay.groups_per_step / load.slow_every),
        placeholders=sum(line.placeholders for line in record),
        charged=run.slots(),
    )


@dataclass(frozen=True)
class Row:
    """One order, over all repeats."""

    name: str
    order: str
    window: int
    slots: int  # N
    bound: int  # proved, in learner steps
    courses: tuple[Course, ...]
    ratios: tuple[float, ...]  # steps/s to those of the first order in the same repeat

    def middle(self, field: str) -> float:
        return statistics.median(vars(course)[field] for course in self.courses)

    def most(self, field: str) -> int:
        return max(vars(course)[field] for course in self.courses)

    def broken(self) -> list[str]:
        """The promises that were not kept."""
        charged, staleness = self.most("charged"), self.most("staleness")
        found = [f"{self.name}: {charged} slots in use, {self.slots} allowed"] if charged > self.slots else []
        if staleness > self.bound:
            found.append(f"{self.name}: a token {staleness} steps old, {self.bound} allowed")
        return found


def stragglers(folder: Path, repeats: int, steps: int) -> list[Row]:
    """Every order in every repeat, so that what the machine does besides meets all of them."""
    configs: dict[str, Config] = {}
    courses: dict[str, list[Course]] = {name: [] for name in ORDERS}
    for repeat in range(repeats):
        for index, (name, replay) in enumerate(ORDERS.items()):
            configs[name], course = straggle(folder / f"straggler-{index}-{repeat}", replay, steps)
            courses[name].append(course)
    first = courses[next(iter(ORDERS))]
    rows = []
    for name, config in configs.items():
        order = make_order(config.replay)
        assert order.worst_staleness is not None
        pairs = zip(courses[name], first, strict=True)
        ratios = tuple(course.steps_per_s / other.steps_per_s for course, other in pairs)
        rows.append(
            Row(
                name,
                config.replay.order,
                config.replay.window,
                order.capacity,
                order.worst_staleness,
                tuple(courses[name]),
                ratios,
            )
        )
    return rows


def show_squeeze(found: Squeeze) -> None:
    limit = found.slots * found.group_bytes / 1e6
    print(
        f"slow learner: limit {found.slots} slots x {found.group_bytes / 1e3:.0f} KB = {limit:.1f} MB of groups, "
        f"from the configuration\n{'':26}      free   pressed"
    )
    rows: list[tuple[str, str, float, float]] = [
        ("learner step, s", ".2f", found.free.step_seconds, found.pressed.step_seconds),
        ("groups/s trained", ".0f", found.free.groups_per_s, found.pressed.groups_per_s),
        ("generators busy", ".0%", found.free.busy, found.pressed.busy),
        ("groups held, most", ".0f", found.free.held, found.pressed.held),
    ]
    for what, form, free, pressed in rows:
        print(f"{what:26}{free:10{form}}{pressed:10{form}}")
    print(f"slots in use, most {found.charged} of {found.slots}; largest staleness {found.staleness} of {found.bound}")
    print(f"{'resident MB':26}{f'at {found.mark_seconds:.0f} s':>10}{f'at {found.end_seconds:.0f} s':>10}    growth")
    for name, before in found.resident_mark.items():
        after = found.resident_end[name]
        print(f"{name:26}{before / 1e6:10.1f}{after / 1e6:10.1f}{after / before - 1:+10.1%}")
    print(f"between the two, generation at its free speed would have brought {found.unbounded / 1e6:.0f} MB more\n")


def show_stragglers(rows: Sequence[Row]) -> None:
    print(
        f"straggler: one group in {SLOW_EVERY} takes {SLOW.slow_group / SLOW.group:.0f} times as long, "
        f"{SLOW.slow_group / SLOW.step:.0f} learner steps; {len(rows[0].courses)} repeats\n"
        f"{'':22}                steps/s   to fifo          learner     staleness           slow  given\n"
        f"{'order':22}   W   N   (spread)         (spread)    waits   most  bound  mean  trained   up"
    )
    for row in rows:
        speeds = [course.steps_per_s for course in row.courses]
        print(
            f"{row.name:22}{row.window:4d}{row.slots:4d}"
            f"{row.middle('steps_per_s'):6.1f} ({spread(speeds):4.0%})"
            f"{statistics.median(row.ratios):8.2f} ({spread(row.ratios):4.0%})"
            f"{row.middle('waiting'):8.0%}{row.most('staleness'):7d}{row.bound:7d}{row.middle('mean_staleness'):6.2f}"
            f"{row.middle('slow_trained'):9.0%}{row.middle('placeholders'):5.0f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="20 s of the slow learner, 40 steps of each order and 24 of each form, each once",
    )
    parser.add_argument("--seconds", type=float, help="of the slow learner's run (default: 60, quick: 20)")
    parser.add_argument("--repeats", type=int, help="of every order (default: 5, quick: 1)")
    parser.add_argument("--steps", type=int, help="of one run with stragglers (default: 160, quick: 40)")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slow = squeeze(folder / "slow", options.seconds or (20.0 if options.quick else 60.0))
        show_squeeze(slow)
        repeats = options.repeats or (1 if options.quick else 5)
        rows = stragglers(folder, repeats, options.steps or (40 if options.quick else 160))
        show_stragglers(rows)
        submitted: list[Submitted] = forms(folder, repeats, 24 if options.quick else 120)
        show_forms(submitted)
    broken = [line for row in rows for line in row.broken()] + [line for row in submitted for line in row.broken()]
    broken = [*slow.broken(), *broken]
    print("\nbroken: " + ("; ".join(broken) or "nothing"))
    if options.json:
        figures = {"slow_learner": asdict(slow), "straggler": [asdict(row) for row in rows]}
        figures |= {"submission": [asdict(row) for row in submitted], "broken": broken}
        options.json.write_text(json.dumps({"benchmark": "pressure", **figures}, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
