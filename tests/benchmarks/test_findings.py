"""docs/staleness.md: the headline of each finding is a claim that the stored runs are asked for, and each number beside
its tables is one of the sweep's settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stored_sweeps import read_stored
from streamrl.config import file as config_file
from streamrl.config.replay import ReplayConfig
from streamrl.lab.sweep.differences import difference, ratio
from streamrl.lab.sweep.estimates import estimate
from streamrl.lab.sweep.plan import read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "staleness.md").read_text()
EXPERIMENTS = (ROOT / "docs" / "experiments.md").read_text()

OVERALL = "reward over the run"

_SECTION = re.compile(r"^#+ ", re.MULTILINE)
_BLOCK = re.compile(r"<!-- [\w.-]+ findings:.*?<!-- end of [\w.-]+ findings -->|```.*?```|`[^`]*`", re.DOTALL)
_FENCED = re.compile(r"```.*?```", re.DOTALL)
_TARGET = re.compile(r"\]\([^)]*\)|<!--.*?-->")
_HEADLINE = re.compile(r"^- \*(.+?)\*: ", re.MULTILINE)
_OF_TABLES = re.compile(r"`[^`]*`|[\d.e-]+±[\d.e-]+")  # what `benchmarks.stored_sweeps` compares with them
_NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)")

# What a page may say beside the settings: the level of an interval, the bars of a section.
LEVEL = 95
BARS: Mapping[str, set[float]] = {"freshness": {3.0, 0.8}, "reuse": {0.65}}

# Keys of its base whose values a section names.
BASE: Mapping[str, tuple[str, ...]] = {
    "staleness": ("learner.optimizer.lr",),
    "mixed_ages": ("learner.optimizer.lr",),
    "reuse": ("replay.groups_per_step",),
    "dither": ("learner.optimizer.lr",),
}


class Interval(tuple[float, float]):
    """Its ends, of 95 %."""

    def above(self, other: Interval) -> bool:
        return self[0] > other[1]

    def holds(self, value: float) -> bool:
        return self[0] <= value <= self[1]

    def overlaps(self, other: Interval) -> bool:
        return not (self.above(other) or other.above(self))

    def near(self, value: float) -> bool:
        """But for rounding."""
        return max(abs(value - end) for end in self) < 1e-6

    def within(self, bar: float) -> bool:
        return -bar < self[0] and self[1] < bar

    @property
    def middle(self) -> float:
        return sum(self) / 2


class Runs:
    """The figures of a stored sweep, by point."""

    def __init__(self, sweep: Mapping[str, Any]) -> None:
        self._points = {point["name"]: point for point in sweep["points"]}

    def only(self, seeds: Collection[int]) -> Runs:
        """Those of some seeds."""
        points = [
            {**point, "runs": {seed: run for seed, run in point["runs"].items() if int(seed) in seeds}}
            for point in self._points.values()
        ]
        return Runs({"points": points})

    @property
    def others(self) -> list[str]:
        """Than baselines."""
        return [name for name, point in self._points.items() if point["baseline"] != name]

    def values(self, point: str, figure: str) -> dict[int, float]:
        """By seed."""
        runs = self._points[point]["runs"].items()
        return {int(seed): run[figure] for seed, run in runs if figure in run}

    def of(self, point: str, figure: str) -> Interval:
        found = estimate(list(self.values(point, figure).values()))
        assert found is not None
        half = found.half_width or 0.0
        return Interval((found.mean - half, found.mean + half))

    def more(self, point: str, figure: str = OVERALL) -> Interval:
        """Than its baseline, seed by seed."""
        return self.against(point, self._points[point]["baseline"], figure)

    def against(self, point: str, other: str, figure: str = OVERALL) -> Interval:
        """What it has more than another one, seed by seed."""
        found = difference(self.values(point, figure), self.values(other, figure))
        assert found is not None
        half = found.estimate.half_width or 0.0
        return Interval((found.estimate.mean - half, found.estimate.mean + half))

    def times(self, point: str, figure: str) -> Interval:
        """Its baseline's figure."""
        found = ratio(self.values(point, figure), self.values(self._points[point]["baseline"], figure))
        assert found is not None
        assert found.student is not None
        return Interval(found.student)

    def first(self, figure: str, *, least: bool = False) -> str:
        """The point with the largest mean, or the least one."""
        return (min if least else max)(self._points, key=lambda point: self.of(point, figure).middle)


def at(bound: int, point: str = "default") -> str:
    return f"max_staleness_{bound}-{point}"


BOUNDS = (2, 8, 16)  # under which data is old
SECOND_PASS = "recompute-passes-2"

Claims = Mapping[str, Callable[[Runs], bool]]

STALENESS: Claims = {
    "The bound is what the age is": lambda runs: all(
        0.85 * bound < runs.of(at(bound), "staleness").middle <= bound for bound in BOUNDS
    ),
    "Two steps of staleness cost `default` nothing that five seeds show": lambda runs: (
        runs.against(at(2), at(0)).holds(0)
        and runs.against(at(2), at(0))[0] > -runs.of(at(0), OVERALL).middle / 4
        and all(runs.against(at(2, again), at(0, again))[1] < 0 for again in ("recompute", SECOND_PASS))
        and runs.of(at(2), "trained").above(runs.of(at(0), "trained"))
    ),
    "Eight cost most of it, sixteen more": lambda runs: (
        runs.of(at(8), OVERALL).middle < runs.of(at(2), OVERALL).middle / 2
        and runs.of(at(8), OVERALL).above(runs.of(at(16), OVERALL))
        and not any(runs.of(at(bound), "trained").above(runs.of(at(2), "trained")) for bound in (8, 16))
    ),
    "The older the data, the more is clipped": lambda runs: (
        runs.of(at(16), "clipped").above(runs.of(at(8), "clipped"))
        and runs.of(at(8), "clipped").above(runs.of(at(2), "clipped"))
        and runs.of(at(16, "recompute"), "KL").above(runs.of(at(16), "KL"))
        and runs.of(at(16, "recompute"), "clipped") == (0, 0)
    ),
    "A large effective sample size is no good sign by itself": lambda runs: (
        runs.of(at(16), "ESS").above(runs.of(at(16, SECOND_PASS), "ESS"))
        and runs.of(at(16, SECOND_PASS), OVERALL).above(runs.of(at(16), OVERALL))
    ),
    "`recompute` alone loses at a small bound and wins at a large one": lambda runs: (
        runs.more(at(2, "recompute"))[1] < 0
        and runs.more(at(8, "recompute")).holds(0)
        and runs.more(at(16, "recompute"))[0] > 0
    ),
    "With a second pass a step teaches most under every bound, and takes longer": lambda runs: all(
        runs.more(at(bound, SECOND_PASS))[0] > 0
        and _learns_most(runs, at(bound))
        and runs.of(at(bound), "trained").above(runs.of(at(bound, SECOND_PASS), "trained"))
        for bound in (0, *BOUNDS)
    ),
    "At 8 and 16 it has more than `recompute` at steps whose size five seeds do not tell apart": lambda runs: (
        all(
            runs.against(at(bound, SECOND_PASS), at(bound, "recompute"), "KL per step").holds(0)
            and runs.against(at(bound, SECOND_PASS), at(bound, "recompute"))[0] > 0
            for bound in (8, 16)
        )
        and runs.of(at(2, SECOND_PASS), "KL per step").above(runs.of(at(2, "recompute"), "KL per step"))
    ),
    "It also keeps more of its reward": lambda runs: (
        _kept(runs, SECOND_PASS).above(_kept(runs, "default"))
        and _kept(runs, SECOND_PASS).holds(1 / 2)
        and _kept(runs, "default").holds(1 / 4)
    ),
    "`cap-1.2` gives nothing that five seeds show": lambda runs: all(
        runs.more(at(bound, "cap-1.2")).holds(0)
        and runs.more(at(bound, "cap-1.2")).within(runs.of(at(bound), OVERALL).middle / 4)
        for bound in BOUNDS
    ),
    "At bound `0` the first three points are one algorithm": lambda runs: all(
        runs.of(at(0, point), figure).near(value)
        for point in ("default", "cap-1.2", "recompute")
        for figure, value in (("ESS", 1), ("KL", 0), ("clipped", 0), ("masked", 0))
    ),
}


def _learns_most(runs: Runs, default: str) -> bool:
    others = [default, *(name for name in runs.others if name.startswith(default.removesuffix("default")))]
    return max(others, key=lambda name: runs.of(name, OVERALL).middle).endswith(SECOND_PASS)


def _kept(runs: Runs, point: str) -> Interval:
    """Share of the reward over the run at bound 0 that it has at 16."""
    found = ratio(runs.values(at(16, point), OVERALL), runs.values(at(0, point), OVERALL))
    assert found is not None
    assert found.student is not None
    return Interval(found.student)


HARDLY = ("weight-none", "weight-sequence", "gamma-0.7", "cap-5", "discount-0.9")

CORRECTIONS: Claims = {
    "Beside the clip, weights hardly act": lambda runs: all(
        runs.more(point, "reward").within(0.1)
        and runs.more(point, "reward").holds(0)
        and abs(0.1 / runs.of("default", "reward").middle - 1 / 6) < 0.01
        for point in HARDLY
    ),
    "A tight cap may give a little": lambda runs: (
        runs.more("cap-1.2")[0] > 0
        and runs.more("cap-1.2").within(runs.of("default", OVERALL).middle / 4)
        and all(
            runs.more("cap-1.2").middle >= runs.more(point).middle
            for point in (*HARDLY, "gamma-0.9", "passes-2")  # at the behaviour policy, too
        )
        and 1.2 < 1 + 0.7 ** runs.of("gamma-0.7", "staleness").middle < 1.3  # the cap of its tokens
        and runs.more("gamma-0.7").holds(0)
        and runs.against("cap-1.2", "gamma-0.7")[0] > 0
        and _misses_as_much(runs.more("cap-1.2").middle / runs.of("default", OVERALL).middle)
    ),
    "A proximal policy that is computed again costs reward": lambda runs: all(
        runs.more(point, "reward")[1] < 0
        and runs.of(point, "clipped") == (0, 0)
        and runs.of(point, "KL").above(runs.of("default", "KL"))
        for point in ("recompute", "recompute-weight-none")
    ),
    "What bounds the weight of old tokens gives a part back, in the mean": lambda runs: (
        all(
            runs.of(point, "reward").middle > runs.of("recompute", "reward").middle
            and runs.of(point, "reward").overlaps(runs.of("recompute", "reward"))
            for point in ("recompute-gamma-0.7", "recompute-second_moment")
        )
        and runs.against("recompute-cap-5", "recompute", "reward").holds(0)
    ),
    "With a second pass it learns most from a step": lambda runs: (
        runs.first(OVERALL) == SECOND_PASS
        and runs.more(SECOND_PASS)[0] > 0
        and runs.of("default", "trained").above(runs.of(SECOND_PASS, "trained"))
        and runs.more("passes-2").holds(0)
        and not runs.more("passes-2").within(runs.of("default", OVERALL).middle / 4)
    ),
    "`interpolate` is farther from its data, and not ahead as far as five seeds show": lambda runs: (
        runs.of("interpolate", "KL").above(runs.of("default", "KL"))
        and runs.of("default", "clipped").above(runs.of("interpolate", "clipped"))
        and runs.more("interpolate").holds(0)
        and not runs.more("interpolate").within(runs.of("default", OVERALL).middle / 3)
    ),
    "The effective sample size does not say who learns": lambda runs: (
        runs.first("ESS", least=True) == runs.first(OVERALL) == SECOND_PASS
    ),
}


def _misses_as_much(share: float) -> bool:
    """Of a gain of `cap-1.2` by that share, under every bound of the first sweep."""
    others = Runs(read_stored()["staleness"])
    return all(
        others.more(at(bound, "cap-1.2")).holds(0)
        and others.more(at(bound, "cap-1.2"))[1] > share * others.of(at(bound), OVERALL).middle
        for bound in BOUNDS
    )


def _new(runs: Runs, point: str) -> float:
    """Generated tokens of a trained one."""
    return runs.of(point, "generated").middle / runs.of(point, "trained").middle


def _new_to_target(runs: Runs, point: str) -> float:
    """The same of those until the target."""
    return runs.of(point, "tokens to target").middle / runs.of(point, "trained to target").middle


def _replay(name: str, point: str) -> ReplayConfig:
    """Of a point of the sweep."""
    return next(job.config.replay for job in read(_file(name)).jobs(fresh=True) if job.point.name == point)


MIXED_AGES: Claims = {
    "Ages differ as they are meant to": lambda runs: (
        runs.of("default", "staleness p95").middle > 1.5 * runs.of("default", "staleness").middle
    ),
    "Discounts by age give nothing that five seeds show": lambda runs: all(
        runs.more(point, figure).holds(0) and runs.more(point, figure)[1] < runs.of("default", figure).middle / 4
        for point in ("discount-0.9", "discount-0.7")
        for figure in (OVERALL, "reward")
    ),
    "A proximal policy that is computed again costs reward here, too": lambda runs: (
        runs.more("recompute", "reward")[1] < 0
        and runs.of("recompute", "clipped") == (0, 0)
        and runs.of("recompute", "KL").above(runs.of("default", "KL"))
    ),
    "Weights of sequences are ahead of that, with more new data; five seeds show it of no other": lambda runs: (
        all(
            runs.of("recompute", OVERALL).middle < runs.of(point, OVERALL).middle
            and runs.more(point)[1] < 0
            and runs.of(point, OVERALL).middle <= runs.of("recompute-sequence", OVERALL).middle
            and _new(runs, "default") < _new(runs, "recompute") < _new(runs, point)
            for point in ("recompute-gamma-0.7", "recompute-discount-0.9", "recompute-sequence")
        )
        and runs.against("recompute-sequence", "recompute")[0] > 0
        and all(
            runs.against(point, "recompute").holds(0) for point in ("recompute-gamma-0.7", "recompute-discount-0.9")
        )
        and runs.of("recompute-sequence", "staleness").middle < runs.of("recompute", "staleness").middle
    ),
}

PRETRAINED: Claims = {
    "At steps of equal size five seeds show no difference": lambda runs: all(
        runs.times(point, "KL per step").holds(1)
        and runs.more(point).holds(0)
        and runs.more(point, "reward").holds(0)
        and runs.more(point)[1] < runs.of("default", OVERALL).middle / 4 < runs.more(point, "reward")[1]
        for point in ("cap-1.2", SECOND_PASS)
    ),
    "Ages are equal but for a hundredth": lambda runs: all(
        runs.more(point, "staleness").within(runs.of("default", "staleness").middle / 100)
        for point in ("cap-1.2", SECOND_PASS)
    ),
}

FIRST_TEN, SECOND_TEN = range(11, 21), range(21, 31)  # seeds, on two machines
ADAPTIVE = ("adaptive-16", "eager-adaptive-16")

FRESHNESS: Claims = {
    "Under one bound it is old data that costs the reward": lambda runs: (
        runs.of("just_in_time-16", "reward").above(runs.of("fixed-16", "reward"))
        and runs.of("fixed-16", "staleness").above(runs.of("just_in_time-16", "staleness"))
    ),
    "Tickets just in time cost less than a tenth of reward in the end, and a little over the run": lambda runs: (
        runs.more("just_in_time-16", "reward").holds(0)
        and runs.more("just_in_time-16", "reward").within(0.1)
        and runs.more("just_in_time-16")[1] < 0
        and runs.more("just_in_time-16").within(0.1)
        and runs.of("just_in_time-16", "staleness")[1] <= 3
        and all(6 <= oldest <= 7 for oldest in runs.values("just_in_time-16", "oldest").values())  # what it begins with
    ),
    "The learner is fed all the same": lambda runs: (
        runs.of("just_in_time-16", "idle learner")[1] < 0.02 and runs.of("fixed-2", "idle learner")[1] < 0.02
    ),
    "The adaptive bound reaches its bar, and not quite bound 2": lambda runs: (
        all(
            runs.of(point, "reward")[0] > 0.8
            and runs.of(point, "reward").above(runs.of("fixed-16", "reward"))
            and runs.only(FIRST_TEN).more(point, "reward").holds(0)
            and abs(runs.only(FIRST_TEN).more(point, "reward").middle) < 0.03
            and runs.only(SECOND_TEN).more(point, "reward")[1] < 0
            and abs(runs.only(SECOND_TEN).more(point, "reward").middle + 0.1) < 0.03
            and runs.only(SECOND_TEN).of(point, "reward").middle < runs.only(FIRST_TEN).of(point, "reward").middle
            for point in ADAPTIVE
        )
        and runs.only(SECOND_TEN).of("fixed-2", "reward").middle > runs.only(FIRST_TEN).of("fixed-2", "reward").middle
        and runs.against("adaptive-16", "just_in_time-16", "reward").holds(0)
        and runs.more("eager-adaptive-16")[1] < runs.more("adaptive-16")[1] < 0
    ),
}

NEW_GROUPS = (("four-times", "once-8"), ("twice", "once-16"), ("twice-8", "once-4"))  # as many a step, at the least

REUSE: Claims = {
    "At steps of 32 groups four uses need less than half of the generated tokens, two need more": lambda runs: (
        runs.times("four-times", "tokens to target")[1] < 0.5
        and runs.times("twice", "tokens to target").middle < 0.65
        and runs.times("twice", "tokens to target").holds(0.65)
        and runs.times("twice", "tokens to target")[0] > 0.5
        and all(runs.more(point, "reward").holds(0) for point in ("twice", "four-times"))
    ),
    "So do steps of 8 groups without it, and train less": lambda runs: (
        all(
            runs.times(once, "tokens to target").overlaps(runs.times(again, "tokens to target"))
            and runs.times(again, "trained to target").above(runs.times(once, "trained to target"))
            for again, once in NEW_GROUPS
        )
        and runs.times("once-8", "tokens to target")[1] < 0.5
    ),
    "A step with reuse has more reward, and more new data": lambda runs: (
        runs.against("four-times", "once-8")[0] > 0
        and all(runs.against(again, once).middle > 0 for again, once in NEW_GROUPS)
        and all(runs.against(again, once).holds(0) for again, once in NEW_GROUPS[1:])
        and all(
            _replay("reuse", again).fresh == _replay("reuse", once).groups_per_step
            and _new_to_target(runs, again) > _replay("reuse", again).fresh / _replay("reuse", again).groups_per_step
            for again, once in NEW_GROUPS
        )
        and _replay("reuse", "four-times").fresh * 4 == _replay("reuse", "four-times").groups_per_step
    ),
    "Either takes about half of the time, as generation is the slower side": lambda runs: (
        all(0.35 < runs.times(point, "seconds to target").middle < 0.55 for point in ("four-times", "once-8"))
        and runs.of("four-times", "trained").above(runs.of("once", "trained"))
        and all(runs.of(point, "idle learner")[0] > 0.5 for point in ("once", "four-times", "once-8"))
    ),
}

IN_BFLOAT16 = tuple(f"dtype_bfloat16-{who}" for who in ("decode", "prefill", "full_prefill"))

SCORING: Claims = {
    "In float32 the mismatch can be made exactly 0": lambda runs: (
        runs.of("dtype_float32-full_prefill", "largest mismatch") == (0, 0)
        and runs.of("dtype_float32-decode", "mismatch").above(runs.of("dtype_float32-prefill", "mismatch"))
    ),
    "In bfloat16 nobody who scores makes it smaller": lambda runs: all(
        runs.of(point, "mismatch").overlaps(runs.of(IN_BFLOAT16[0], "mismatch")) for point in IN_BFLOAT16[1:]
    ),
    "None of it costs reward that five seeds show": lambda runs: all(
        runs.more(point).holds(0)
        and runs.more(point).within(0.1)
        and abs(0.1 / runs.of(point, OVERALL).middle - 1 / 4) < 0.03
        for point in (*IN_BFLOAT16[1:], "dtype_float32-prefill", "dtype_float32-full_prefill")
    ),
    "Between the dtypes no difference shows, and one as large could have been missed": lambda runs: (
        runs.against(IN_BFLOAT16[0], "dtype_float32-decode").holds(0)
        and not runs.against(IN_BFLOAT16[0], "dtype_float32-decode").within(0.1)
    ),
}

DITHER: Claims = {
    "With copied masters a model in bfloat16 learns half as much": lambda runs: (
        abs(runs.of("bfloat16-copied", OVERALL).middle / runs.of("float32", OVERALL).middle - 0.5) < 0.05
        and runs.times("bfloat16-copied", "tokens to target")[0] > 1
        and runs.times("bfloat16-copied", "seconds to target").holds(1)
        and runs.of("bfloat16-copied", "trained").above(runs.of("float32", "trained"))
    ),
    "With dithered ones it learns as in float32": lambda runs: (
        all(
            runs.more("bfloat16", figure).holds(0) and runs.more("bfloat16", figure).within(0.1)
            for figure in (OVERALL, "reward")
        )
        and runs.more("bfloat16", "staleness")[1] < 0
    ),
    "So bfloat16 is worth its faster steps": lambda runs: (
        runs.of("bfloat16", "trained").above(runs.of("float32", "trained"))
        and runs.times("bfloat16", "seconds to target")[1] < 1
    ),
    "Copied masters hold the policy back": lambda runs: (
        runs.of("bfloat16", "KL").above(runs.of("bfloat16-copied", "KL"))
        and runs.of("bfloat16", "staleness").overlaps(runs.of("bfloat16-copied", "staleness"))
    ),
}

# What the prose beside the tables claims of them.
BESIDE: Mapping[str, Claims] = {
    "staleness": {
        "a fifth more steps of `default` under bound 2, which take less time, [end as high]": lambda runs: (
            _steps("freshness") / _steps("staleness") == 1.2
            and Runs(read_stored()["freshness"]).of("fixed-2", "reward").overlaps(runs.of(at(2, SECOND_PASS), "reward"))
            and 1.2 * runs.of(at(2), "seconds").middle < runs.of(at(2, SECOND_PASS), "seconds").middle
        ),
    },
    "corrections": {
        "Only `cap-1.2` and `recompute-passes-2` have Student's interval above 0": lambda runs: (
            {point for point in runs.others for figure in ("reward", OVERALL) if runs.more(point, figure)[0] > 0}
            == {"cap-1.2", SECOND_PASS}
            and all(runs.more(point, "reward").holds(0) for point in ("cap-1.2", SECOND_PASS))
        ),
    },
    "corrections_pretrained": {
        "all points with an effective sample size close to one": lambda runs: all(
            runs.of(point, "ESS")[0] > 0.97 for point in ("default", *runs.others)
        ),
    },
    "freshness": {
        "Neither adaptive point would hold the first one.": lambda runs: all(
            runs.more(point, "reward")[0] < -0.1 < runs.more("just_in_time-16", "reward")[0] for point in ADAPTIVE
        ),
        "neither ten excludes a tenth alone": lambda runs: all(
            runs.only(ten).more("just_in_time-16", "reward")[0] < -0.1 for ten in (FIRST_TEN, SECOND_TEN)
        ),
        "The second ten ran later, on a faster machine of the same description: tokens/s differ by that, and ages.": (
            lambda runs: (
                runs.only(SECOND_TEN).of("fixed-2", "trained").above(runs.only(FIRST_TEN).of("fixed-2", "trained"))
                and runs.only(SECOND_TEN)
                .of("just_in_time-16", "staleness")
                .above(runs.only(FIRST_TEN).of("just_in_time-16", "staleness"))
            )
        ),
    },
}

CLAIMS: Mapping[str, Claims] = {
    "staleness": STALENESS,
    "corrections": CORRECTIONS,
    "mixed_ages": MIXED_AGES,
    "corrections_pretrained": PRETRAINED,
    "freshness": FRESHNESS,
    "reuse": REUSE,
    "scoring": SCORING,
    "dither": DITHER,
}


def _sections() -> dict[str, str]:
    """The text of each section by the sweep whose table it has."""
    found = {}
    for section in _SECTION.split(PAGE):
        if tables := re.findall(r"<!-- ([\w.-]+) table", section):
            (found[tables[0]],) = [section]
    return found


def test_each_finding_has_a_claim_and_each_claim_its_finding() -> None:
    found = {name: _HEADLINE.findall(section) for name, section in _sections().items()}
    assert found == {name: list(claims) for name, claims in CLAIMS.items()}


@pytest.mark.parametrize(
    ("name", "headline"), [(name, headline) for name, claims in CLAIMS.items() for headline in claims]
)
def test_what_a_finding_claims_is_so(name: str, headline: str) -> None:
    assert CLAIMS[name][headline](Runs(read_stored()[name]))


@pytest.mark.parametrize(("name", "sentence"), [(name, each) for name, claims in BESIDE.items() for each in claims])
def test_what_is_said_beside_the_tables_is_so(name: str, sentence: str) -> None:
    assert sentence in " ".join(_sections()[name].split())
    assert BESIDE[name][sentence](Runs(read_stored()[name]))


def test_who_quotes_a_figure_of_some_of_the_runs_says_of_how_many() -> None:
    counts = {4: "four", 5: "five"}
    quoted = 0
    for section in _sections().values():
        sentences = [" ".join(each.split()) for each in re.split(r"\.\s", _FENCED.sub("", section))]
        for point, row in re.findall(r"^([\w.-]+)  (.*)$", section, re.MULTILINE):
            for figure, some, all_ in re.findall(r"(\S+)\((\d+)/(\d+)\)", row):
                found = [each for each in sentences if f"`{point}` {figure}" in each]
                said = f"{counts[int(some)]} of {counts[int(all_)]}"
                assert [each for each in found if said not in each] == []
                quoted += len(found)
    assert quoted


def test_where_generation_is_slower_tokens_stay_younger_than_the_bound() -> None:
    assert "where generation is slower, tokens stay younger than the bound" in " ".join(EXPERIMENTS.split())
    runs = Runs(read_stored()["reuse"])
    for point in ("once", "once-16", "once-8", "once-4"):
        assert runs.of(point, "idle learner")[0] > 0.5
        assert runs.of(point, "staleness")[1] < 0.6 * _replay("reuse", point).max_staleness


@pytest.mark.parametrize("name", CLAIMS)
def test_the_numbers_beside_the_tables_are_those_of_the_sweep(name: str) -> None:
    prose = _TARGET.sub("", _BLOCK.sub("", _sections()[name]))
    assert [each for each in _NUMBER.findall(prose) if float(each) not in _settings(name)] == []


@pytest.mark.parametrize("name", CLAIMS)
def test_the_whole_numbers_of_findings_are_those_of_the_sweep(name: str) -> None:
    (findings,) = re.findall(rf"<!-- {name} findings.*?-->(.*?)<!--", PAGE, re.DOTALL)
    numbers = _NUMBER.findall(_TARGET.sub("", _OF_TABLES.sub("", findings)))
    whole = [float(each) for each in numbers if each.isdigit()]
    comparisons = 2.0 * len(Runs(read_stored()[name]).others)  # of two figures each
    assert [each for each in whole if each not in _settings(name) | {comparisons}] == []


def _steps(name: str) -> int:
    """Of a run of the sweep."""
    return read(_file(name)).jobs(fresh=True)[0].config.run.steps


def _file(name: str) -> Path:
    return ROOT / "configs" / "experiments" / f"{name}.yaml"


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_sweep_sets_of_algorithm_and_optimizer_is_named(name: str) -> None:
    keys = [word.split("=")[0] for word in read(_file(name)).common if word.startswith(("algo.", "learner.optimizer."))]
    assert [key for key in keys if f"`{key}" not in _sections()[name]] == []


def _settings(name: str) -> set[float]:
    """What its file has, what it takes over of its base by name, and how much there is of it."""
    sweep = read(_file(name))
    jobs = sweep.jobs(fresh=True)
    words = [*sweep.common, *(str(value) for point in sweep.points for value in point.settings.values())]
    counts = {0.0, 1.0, LEVEL, len(jobs), len(sweep.points), len(sweep.seeds), sweep.target or 0.0}
    base = {float(config_file.value_at(jobs[0].config, key)) for key in BASE.get(name, ())}
    return counts | base | BARS.get(name, set()) | {float(each) for word in words for each in _NUMBER.findall(word)}
