"""The plan of a learner step: how evenly sequences of very uneven length fill the rows, and what the plan costs.

    python -m benchmarks.packing [--quick] [--json PATH]

    planned  streamrl's: longest first into data-parallel x K rows under the token budget
    arrival  the next sequence into the row at hand, a new row where it does not fit
    padded   rows of 8 sequences in order of arrival, each padded to the longest of its row

Lengths are log-normal, clipped: prompt and answer of one sample each. The figures are of tokens, not of seconds:

    waste      share of empty places if every row of the step had the length of its longest row
    lock step  what ranks lose that wait for each other after every row: sum of the longest over sum of the mean, - 1
    whole step what they lose that wait once a step: largest over mean of the ranks' tokens, - 1
    unused     share of the budget that the rows leave: rows are computed as long as they are, so it costs nothing

Each is the worst over the seeds. The three take turns in each repeat; milliseconds are of the thread's CPU time, so
that a busy machine hardly counts, medians over repeats and seeds, the spread is (max - min) / median. The quick form
does not judge them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from streamrl.lab.output import output_file
from streamrl.learner.bins import plan

SIGMAS = (0.5, 0.8, 1.3)
SEQUENCES = 1024
MEDIAN, LEAST, MOST = 1500, 64, 12288  # tokens of an answer; the prompt adds PROMPT
PROMPT = 256
RANKS = 8
BUDGETS = (16384, 32768)
PADDED_ROW = 8  # sequences
BARS = {"waste": 0.01, "lock_step": 0.002, "milliseconds": 2.0}  # of `planned`

Rows = list[list[list[int]]]  # [ranks][K][indices]
Planner = Callable[[Sequence[int], int], Rows]


@dataclass(frozen=True)
class Evenness:
    """Figures of one plan; see the module's docstring."""

    rows_of_a_rank: int
    waste: float
    lock_step: float
    whole_step: float
    unused: float


def draw(sigma: float, seed: int) -> list[int]:
    """Tokens of each sequence."""
    random = np.random.default_rng(seed)
    answers = np.clip(MEDIAN * np.exp(sigma * random.standard_normal(SEQUENCES)), LEAST, MOST)
    return (answers.astype(int) + PROMPT).tolist()


def planned(lengths: Sequence[int], budget: int) -> Rows:
    return plan(lengths, RANKS, budget)


def arrival(lengths: Sequence[int], budget: int) -> Rows:
    rows: list[list[int]] = [[]]
    room = budget
    for index, length in enumerate(lengths):
        if length > room:
            rows.append([])
            room = budget
        rows[-1].append(index)
        room -= length
    return deal(rows)


def padded(lengths: Sequence[int], budget: int) -> Rows:
    return deal([list(range(start, start + PADDED_ROW)) for start in range(0, len(lengths), PADDED_ROW)])


def deal(rows: list[list[int]]) -> Rows:
    """Rows in order to the ranks, empty ones at the end, so that every rank has as many."""
    rows = rows + [[] for _ in range(-len(rows) % RANKS)]
    return [rows[rank::RANKS] for rank in range(RANKS)]


PLANNERS: dict[str, Planner] = {"planned": planned, "arrival": arrival, "padded": padded}


def evenness(name: str, rows: Rows, lengths: Sequence[int], budget: int) -> Evenness:
    def places(row: list[int]) -> int:
        if name == "padded":
            return PADDED_ROW * max((lengths[index] for index in row), default=0)
        return sum(lengths[index] for index in row)

    sizes = np.array([[places(row) for row in of_rank] for of_rank in rows], float)  # [ranks, K]
    tokens = sum(lengths)
    return Evenness(
        rows_of_a_rank=sizes.shape[1],
        waste=1 - tokens / (sizes.size * sizes.max()) if name != "padded" else 1 - tokens / sizes.sum(),
        lock_step=sizes.max(0).sum() / sizes.mean(0).sum() - 1,
        whole_step=sizes.sum(1).max() / sizes.sum(1).mean() - 1,
        unused=1 - tokens / (sizes.size * budget) if name != "padded" else 0.0,
    )


def measure(sigma: float, budget: int, seeds: int, repeats: int) -> dict[str, dict[str, float]]:
    """The figures of every planner for one distribution of lengths."""
    found: dict[str, list[Evenness]] = {name: [] for name in PLANNERS}
    seconds: dict[str, list[float]] = {name: [] for name in PLANNERS}
    for seed in range(seeds):
        lengths = draw(sigma, seed)
        for repeat, (name, planner) in itertools.product(range(repeats), PLANNERS.items()):
            began = time.thread_time()
            rows = planner(lengths, budget)
            seconds[name].append(time.thread_time() - began)
            if repeat == 0:
                found[name].append(evenness(name, rows, lengths, budget))
    figures: dict[str, dict[str, float]] = {}
    for name in PLANNERS:
        plans = [asdict(one) for one in found[name]]
        median = statistics.median(seconds[name])
        figures[name] = {
            **{key: max(one[key] for one in plans) for key in plans[0]},
            "milliseconds": 1e3 * median,
            "spread": (max(seconds[name]) - min(seconds[name])) / median,
        }
    return figures


def show(sigma: float, budget: int, figures: dict[str, dict[str, float]]) -> None:
    for name, row in figures.items():
        print(
            f"{sigma:5.1f} {budget:7d}  {name:8s} {row['rows_of_a_rank']:4.0f} {row['waste']:8.3%}"
            f" {row['lock_step']:10.3%} {row['whole_step']:11.3%} {row['unused']:8.2%}"
            f" {row['milliseconds']:8.2f} ({row['spread']:4.0%})",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one budget, few seeds")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    budgets, seeds, repeats = ((32768,), 2, 5) if options.quick else (BUDGETS, 10, 7)
    print(f"{SEQUENCES} sequences, {RANKS} data-parallel ranks, worst of {seeds} seeds")
    print("sigma  budget  rows       K    waste  lock step  whole step   unused  ms (spread)")
    rows: list[dict[str, Any]] = []
    for sigma in SIGMAS:
        for budget in budgets:
            figures = measure(sigma, budget, seeds, repeats)
            show(sigma, budget, figures)
            rows.append({"sigma": sigma, "budget": budget, **figures})
    over = {name: max(row["planned"][name] for row in rows) for name in BARS}
    judged = {name: bar for name, bar in BARS.items() if name != "milliseconds" or not options.quick}
    for name, bar in judged.items():
        print(f"{name}: at most {over[name]:.5g}, bar {bar:g}: {'held' if over[name] <= bar else 'MISSED'}")
    if options.json:
        text = json.dumps({"benchmark": "packing", "seeds": seeds, "repeats": repeats, "bars": BARS, "rows": rows})
        options.json.write_text(text + "\n")
    return 0 if all(over[name] <= bar for name, bar in judged.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
