"""Figures of docs/figures.md that are written from what benchmarks have measured, on a machine that is named there.

    python -m benchmarks.stored_figures [--check]

`python -m benchmarks.NAME --json benchmarks/results/figures/NAME.json` keeps a measurement, and a sweep is kept by
`benchmarks/stored_sweeps.py`. The text of the page between

    <!-- NAME figures: from benchmarks/results -->
    <!-- end of NAME figures -->

is written from it again: for NAME each of MAKERS. `--check` writes nothing. Exit code 1 where the page differs, or has
a part of a NAME that is not kept.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import optimum, peers, release, repeats
from benchmarks.censored import at_least, exact, told
from benchmarks.optimum import SHARED, SYNC, all_sides, of_medians
from benchmarks.stored_sweeps import read_stored
from benchmarks.tune_grid import Overrides, judged
from streamrl.lab.sweep.differences import ratio

PAGE = Path(__file__).parents[1] / "docs" / "figures.md"
KEPT = Path(__file__).parent / "results" / "figures"
WIDTH = 120  # of a line of text

Row = Sequence[str]
Content = Mapping[str, Any]  # of a file in KEPT

_PART = re.compile(
    r"(?P<begin><!-- (?P<name>\w+) figures: from benchmarks/results -->\n)"
    r".*?"
    r"(?P<end><!-- end of (?P=name) figures -->)",
    re.DOTALL,
)

# How the settings that a tuned configuration may have are told.
TOLD = {
    "replay.max_staleness": "bound {}",
    "generate.groups_in_flight": "{} groups in flight",
    "replay.window": "windows of {} groups",
    "publish.every": "published every {} steps",
    "learner.tokens_per_micro_batch": "micro batches of {} tokens",
}


def markdown(head: Row, rows: Iterable[Row], left: int = 1) -> str:
    """A table; all columns but the first `left` are set to the right.

    >>> print(markdown(["", "tokens/s"], [["sync", "544"]]), end="")
    | | tokens/s |
    |---|---:|
    | sync | 544 |
    """
    line = "|" + "---|" * left + "---:|" * (len(head) - left)
    cells = ("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in (head, *rows))
    return "\n".join((next(cells), line, *cells)) + "\n"


def text(words: str) -> str:
    """Lines of it, behind an empty one."""
    return "\n" + textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    return _close(optimum.spread(values, form))


def _close(cell: str) -> str:
    return cell.replace(" .. ", "..")


# -- python -m benchmarks.end_to_end


def circle(content: Content) -> list[optimum.Repeat]:
    return [
        optimum.Repeat(
            generation=tuple(each["generation"]),
            training=tuple(each["training"]),
            runs={name: optimum.Run(**run) for name, run in each["runs"].items()},
        )
        for each in content["repeats"]
    ]


def of_circle(content: Content) -> Iterator[str]:
    found = circle(content)
    head = ["", "tokens/s trained", "of the optimum", "of sync", "of sync, shared", "the three, of medians"]
    yield markdown([*head, "staleness: mean, p95", "idle: learner, generators"], _circle_rows(found))
    sides = [[speed for each in found for speed in getattr(each, side)] for side in ("generation", "training")]
    generation, training = (spread(values, ".0f") for values in sides)
    yield text(
        f"{len(found)} repeats; generation alone {generation}, training alone {training} tokens/s: by these a run that "
        f"leaves no core idle has {all_sides(found).ceiling:.2f} times in turn at the most. "
        f"Bars of {optimum.JUDGED}, {optimum.OF_THE_OPTIMUM:g} of the optimum and {optimum.OF_SYNC:g} times sync: "
        f"{'; '.join(optimum.missed(found)) or 'both reached'}."
    )


def _circle_rows(found: Sequence[optimum.Repeat]) -> Iterator[Row]:
    paired, medians = optimum.ratios(found), of_medians(found)
    for name in found[0].runs:
        runs = [repeat.runs[name] for repeat in found]
        middle = {key: statistics.median(getattr(run, key) for run in runs) for key in optimum.Run.__slots__}
        compared = [f"{name} of {other}" for other in ("the optimum", SYNC.name, SHARED.name)]
        yield [
            name,
            spread([run.tokens_per_s for run in runs], ".0f"),
            *(spread(paired[each]) if each in paired else "1" for each in compared),
            ", ".join(f"{medians[each]:.2f}" if each in medians else "1" for each in compared),
            f"{middle['staleness_mean']:.2f}, {middle['staleness_p95']:.0f}",
            f"{middle['idle_learner']:.0%}, {middle['idle_generator']:.0%}",
        ]


# -- python -m benchmarks.peers


def of_peers(content: Content) -> Iterator[str]:
    found = [{name: peers.Run(**run) for name, run in each.items()} for each in content["repeats"]]
    target, steps = content["target"], content["steps"]
    of_reward = [] if target is None else [f"s to reward {target:g}", "steps"]
    yield markdown(["", "tokens/s", *of_reward, "waiting", "tokens of an answer"], _peer_rows(found, target, steps))
    rows = ([name, _close(told(values))] for name, values in peers.ratios(found).items())
    yield "\n" + markdown(["streamrl", ""], rows)
    until = f"{steps} steps" if target is None else f"until reward {target:g}, or {steps} steps"
    yield text(f"{len(found)} repeats, {until}, on {content['machine']}.")


def _peer_rows(found: Sequence[Mapping[str, peers.Run]], target: float | None, most: int) -> Iterator[Row]:
    for name in found[0]:
        runs = [each[name] for each in found]
        steps = [at_least(most) if run.steps_to_reward is None else exact(run.steps_to_reward) for run in runs]
        rewarded = [told([run.reward_time for run in runs], ".0f"), told(steps, ".0f")]
        yield [
            name,
            spread([run.tokens_per_s for run in runs], ".1f"),
            *([] if target is None else map(_close, rewarded)),
            spread([run.waiting for run in runs]),
            spread([run.length for run in runs], ".1f"),
        ]


# -- streamrl sweep configs/experiments/dither.yaml


def of_dither(sweep: Content) -> Iterator[str]:
    """Of the stored sweep."""
    runs = {point["name"]: point["runs"] for point in sweep["points"]}
    rows = (
        [told_as, *(to_float32(runs, name, figure) for figure in ("seconds to target", "tokens to target"))]
        for told_as, name in (("dithered master weights", "bfloat16"), ("copied ones", "bfloat16-copied"))
    )
    yield markdown(["bfloat16", "seconds", "generated tokens"], rows)


def to_float32(runs: Mapping[str, Mapping[str, Mapping[str, float]]], name: str, figure: str) -> str:
    """The figure of a point over float32's, with its interval."""
    sides = [
        {int(seed): run[figure] for seed, run in runs[point].items() if figure in run} for point in (name, "float32")
    ]
    found = ratio(*sides)
    assert found is not None, f"{name} has no {figure}"
    mean, ends, _ = found.cells()
    return f"{mean} ({_close(ends)})"


# -- python -m benchmarks.release


def of_release(content: Content) -> Iterator[str]:
    head = ["load", "[`replay.release`](replay.md#when-tickets-go-out-replayrelease)", "steps/s to eager", "all"]
    yield markdown([*head, "mean age", "p95", "all", "learner waits"], _release_rows(content["rows"]), left=2)


def _release_rows(rows: Sequence[Content]) -> Iterator[Row]:
    for fields in rows:
        row = release.Row(**{**fields, "courses": tuple(release.Course(**each) for each in fields["courses"])})
        first = row.policy == release.POLICIES[0]
        yield [
            row.load,
            row.policy,
            "1" if first else f"{statistics.median(row.ratios):.3f} ({repeats.spread(row.ratios):.1%})",
            "1" if first else f"{statistics.median(row.ratios_all):.3f}",
            f"{row.middle('mean_age'):.2f}",
            f"{row.middle('p95_age'):.0f}",
            f"{row.middle('mean_age_all'):.2f}",
            f"{row.middle('waiting'):.1%}",
        ]


# -- python -m benchmarks.tune


def of_tune(content: Content) -> Iterator[str]:
    for row in content["rows"]:
        head = [f"`{row['name']}`, in turns", "tokens/s", "mean age", "choice / it", "in rounds"]
        yield markdown(head, _tuned_rows(row))
        runs, predicted = len(row["turns"][0]["rates"]), row["predicted"]
        yield text(
            f"{len(row['grid'])} settings, then {runs} rounds, on {row['machine']}; of the choice "
            f"{predicted['rate']:.0f} tokens/s and an age of {predicted['age']:.2f} were predicted."
        )
        yield "\n"


def _tuned_rows(row: Content) -> Iterator[Row]:
    """The choice, then the others, the fastest first."""
    choice, (rates, found) = tuple(row["choice"]), judged(row)
    ages = {tuple(each["overrides"]): each["age"] for each in row["turns"]}
    of_choice = {choice: ["1", "1"], found.best: [_close(str(each)) for each in (found.of_medians, found.in_rounds)]}
    for setting in sorted(rates, key=lambda each: (each != choice, -statistics.median(rates[each]))):
        yield [
            f"the choice: {in_words(choice)}" if setting == choice else in_words(setting),
            spread(rates[setting], ".0f"),
            f"{ages[setting]:.2f}",
            *of_choice.get(setting, ["", ""]),
        ]


# -- python -m benchmarks.mismatch


def of_mismatch(content: Content) -> Iterator[str]:
    head = ["dtype", "`generate.score`", "tokens", "equal", "mean, nats", "largest", "server's speed", "learner's"]
    yield markdown(head, _mismatch_rows(content["rows"]), left=2)
    (apart,) = (row["decode - prefill"] for row in content["rows"] if row["dtype"] == "bfloat16")
    yield text(
        f"{content['repeats']} repeats, on {content['machine']}. In bfloat16 decode and prefill of one answer by the "
        f"same server differ by {apart['mean']:.3g} in the mean, at most by {apart['largest']:.3g}."
    )


def _mismatch_rows(rows: Sequence[Content]) -> Iterator[Row]:
    for row in rows:
        of_server = {"decode": "1"} | {way: _ends(found) for way, found in row["speed"].items()}
        of_learner = {"full_prefill": _ends(row["learner"])}
        for way, speed in of_server.items():
            found = row[way]
            distances = f"{found['equal']:.2%}", f"{found['mean']:.3g}", f"{found['largest']:.3g}"
            yield [row["dtype"], way, str(found["tokens"]), *distances, speed, of_learner.get(way, "1")]


def _ends(found: Content) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f}..{found['high']:.3f})"


def in_words(overrides: Overrides) -> str:
    """What a setting of the grid differs in.

    >>> in_words(("replay.max_staleness=2", "generate.groups_in_flight=6"))
    'bound 2, 6 groups in flight'
    """
    pairs = (each.split("=") for each in overrides if each != "replay.order=windowed")  # its window is told
    return ", ".join(TOLD[key].format(value) for key, value in pairs) or "as configured"


MAKERS: dict[str, Callable[[Content], Iterable[str]]] = {
    "end_to_end": of_circle,
    "peers": of_peers,
    "peers_long": of_peers,
    "dither": of_dither,
    "release": of_release,
    "tune": of_tune,
    "mismatch": of_mismatch,
}


def read_kept() -> dict[str, Content]:
    """What is kept, by its name."""
    of_benchmarks = {file.stem: json.loads(file.read_text()) for file in sorted(KEPT.glob("*.json"))}
    return {**read_stored(), **of_benchmarks}


def shown(page: str) -> list[str]:
    """The names of its parts."""
    return [part["name"] for part in _PART.finditer(page)]


def written(page: str, kept: Mapping[str, Content]) -> str:
    """The page with its parts from what is kept. Raises KeyError for one that is not."""
    return _PART.sub(lambda part: part["begin"] + "".join(MAKERS[part["name"]](kept[part["name"]])) + part["end"], page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page differs")
    options = parser.parse_args()
    page, kept = PAGE.read_text(), read_kept()
    if unknown := [name for name in shown(page) if name not in MAKERS or name not in kept]:
        print(f"{PAGE.name}: {', '.join(unknown)}: not kept in {KEPT}; allowed: {', '.join(sorted(MAKERS))}")
        return 1
    new = written(page, kept)
    if new != page and options.check:
        print(f"{PAGE.name}: not as measured; `python -m benchmarks.stored_figures` writes it")
        return 1
    if new != page:
        PAGE.write_text(new)
    print(f"{PAGE.name} has the figures of {', '.join(shown(new))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
