"""Submission by group and by sample on the same engine: rows G/B and R/B of `benchmarks/pressure.py`.

Each of the workers' engines runs SLOTS requests at once, and draws a token of each in the same time, whatever runs
beside it: a decoding step that is bound by memory, the best case for filling slots. By group (G/B) a worker has as many
groups as fill them; by sample (R/B) `generate.requests_in_flight` of them, by the product's own rules
(streamrl/generate/submission.py). *G/B, queued* has three times as many groups, whose requests queue in the engine:
what R/B gains over it is what a longer queue does not give. Batches are consumed in order, within the same bound, by a
learner that is fast.

Two figures have a second definition that flatters one form, and both are printed:

    tokens/s   of batches that were trained: by sample more groups are open at any time, and what is generated of them
               counts only once they are whole; *generated* counts every token as it is drawn
    idle       share of all slots in which no request ran; of the slots that are not *taken*, by group those of answers
               count that were done before their group's last, and the form looks as if it wasted nothing
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pressure_roles import Load, Slots, slots_path
from benchmarks.pressure_run import WORKERS, Run, read
from benchmarks.repeats import spread
from streamrl.config import Config
from streamrl.replay.orders import make_order

SLOTS = 32  # of an engine: four groups of eight
LONG_TAIL = Load(group=0.0, step=0.02, slots=SLOTS, median=40, sigma=1.0, longest=400, token=0.004)
WARM_UP = 8  # steps that are not timed
REPLAY = {"groups_per_step": 8, "max_staleness": 5, "release": "eager"}
FORMS: dict[str, dict[str, Any]] = {
    "G/B": {"submission": "group", "groups_in_flight": SLOTS // 8},
    "R/B": {"submission": "sample", "requests_in_flight": SLOTS},
    "G/B, queued": {"submission": "group", "groups_in_flight": 3 * SLOTS // 8},
}


@dataclass(frozen=True)
class Share:
    """One run in one form."""

    trained_per_s: float  # tokens
    generated_per_s: float
    idle: float  # share of the slots in which no request ran
    untaken: float  # share of the slots that nobody held
    staleness: int  # largest, in learner steps
    mean_staleness: float
    charged: int  # slots of the bound in use, at most


@dataclass(frozen=True)
class Submitted:
    """One form, over all repeats."""

    name: str
    slots: int  # N
    bound: int  # learner steps
    shares: tuple[Share, ...]
    ratios: tuple[float, ...]  # trained tokens/s to those of the first form in the same repeat

    def middle(self, field: str) -> float:
        return statistics.median(vars(share)[field] for share in self.shares)

    def broken(self) -> list[str]:
        """The promises that were not kept."""
        found = []
        for share in self.shares:
            if share.charged > self.slots:
                found.append(f"{self.name}: {share.charged} slots in use, {self.slots} allowed")
            if share.staleness > self.bound:
                found.append(f"{self.name}: a token {share.staleness} steps old, {self.bound} allowed")
        return found


def submit(folder: Path, form: dict[str, Any], steps: int, load: Load = LONG_TAIL) -> tuple[Config, Share]:
    """`steps` learner steps in one form."""
    run = Run(folder, load, {"generate": form, "replay": REPLAY})
    record = run.go(lambda record: len(record) >= steps)[:steps]
    timed = record[WARM_UP:]
    begin, end = record[WARM_UP - 1].ended, timed[-1].ended
    seconds = end - begin
    engines = [grown(read(slots_path(folder, index), Slots), begin, end) for index in range(WORKERS)]
    used, held, tokens = (sum(engine[place] for engine in engines) for place in range(3))
    there = WORKERS * load.slots * seconds
    return run.config, Share(
        trained_per_s=sum(line.tokens for line in timed) / seconds,
        generated_per_s=tokens / seconds,
        idle=1.0 - used / there,
        untaken=1.0 - held / there,
        staleness=max(age for line in record for age in line.ages),
        mean_staleness=statistics.mean(age for line in timed for age in line.ages),
        charged=run.slots(),
    )


def grown(lines: Sequence[Slots], begin: float, end: float) -> tuple[float, float, float]:
    """What `used`, `held` and `tokens` grew by between two times, in a straight line between two looks."""
    clock = [line.clock for line in lines]

    def growth(values: list[float]) -> float:
        first, last = np.interp([begin, end], clock, values)
        return float(last - first)

    return (
        growth([line.used for line in lines]),
        growth([line.held for line in lines]),
        growth([line.tokens for line in lines]),
    )


def forms(folder: Path, repeats: int, steps: int) -> list[Submitted]:
    """Both forms in every repeat, so that what the machine does besides meets both."""
    configs: dict[str, Config] = {}
    shares: dict[str, list[Share]] = {name: [] for name in FORMS}
    for repeat in range(repeats):
        for index, (name, form) in enumerate(FORMS.items()):
            configs[name], share = submit(folder / f"submission-{index}-{repeat}", form, steps)
            shares[name].append(share)
    first, rows = shares[next(iter(FORMS))], []
    for name, config in configs.items():
        order = make_order(config.replay)
        assert order.worst_staleness is not None
        ratios = tuple(
            share.trained_per_s / other.trained_per_s for share, other in zip(shares[name], first, strict=True)
        )
        rows.append(Submitted(name, order.capacity, order.worst_staleness, tuple(shares[name]), ratios))
    return rows


def show_forms(rows: Sequence[Submitted]) -> None:
    print(
        f"\nsubmission: log-normal answers (median {LONG_TAIL.median:g}, sigma {LONG_TAIL.sigma:g}, at most "
        f"{LONG_TAIL.longest} tokens), {WORKERS} engines of {SLOTS} slots; {len(rows[0].shares)} repeats\n"
        f"{'':13}tokens/s                              idle share of slots     staleness         slots of\n"
        f"{'form':13}trained (spread)   to G/B  generated  no request  not taken   most  bound  mean  the bound"
    )
    for row in rows:
        trained = [share.trained_per_s for share in row.shares]
        print(
            f"{row.name:13}{row.middle('trained_per_s'):7.0f} ({spread(trained):4.0%})"
            f"{statistics.median(row.ratios):10.2f}{row.middle('generated_per_s'):11.0f}"
            f"{row.middle('idle'):12.0%}{row.middle('untaken'):11.0%}"
            f"{max(share.staleness for share in row.shares):7d}{row.bound:7d}{row.middle('mean_staleness'):6.2f}"
            f"{max(share.charged for share in row.shares):5d} of {row.slots}"
        )
    group, sample, queued = rows
    generated = sample.middle("generated_per_s") / group.middle("generated_per_s")
    longer = sample.middle("trained_per_s") / queued.middle("trained_per_s")
    older = sample.middle("mean_staleness") - group.middle("mean_staleness")
    print(
        f"{sample.name} looks worse by trained tokens/s; by generated ones it is {generated:.2f} times {group.name}, "
        f"and {longer:.2f} times {queued.name} by trained ones\n"
        f"{group.name} looks worse by slots without a request; by slots that are not taken it is "
        f"{group.middle('untaken'):.0%} idle instead of {group.middle('idle'):.0%}\n"
        f"{sample.name} trains tokens that are {older:+.2f} steps older than those of {group.name}"
    )
