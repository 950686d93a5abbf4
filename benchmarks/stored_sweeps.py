"""Sweeps whose figures are kept in the repository, and the parts of the pages that are written from them.

    python -m benchmarks.stored_sweeps [SWEEP ...] [--check]

A SWEEP is the folder of a `streamrl sweep`. The figures of each of its finished runs become
benchmarks/results/NAME.json; where that has runs with the same settings already, made elsewhere, before or with other
seeds, those that the folder lacks stay. Once no run of NAME is missing, the text in docs/*.md between

    <!-- NAME PART: from benchmarks/results -->
    <!-- end of NAME PART -->

is written again, and docs/pictures/NAME.svg is drawn. PART `table` has the mean figures of each point, `differences`
what each has more than the baseline, `ratios` figures over the baseline's, of what the target took too. The part
`findings` is prose, which is kept: each figure in it that has a decimal point or a ± must be in one of these tables, in
a row of the points that its sentence names in backticks, where it names any.

`--check` writes nothing. Exit code 1 where a page differs, or a finding has a figure that its tables do not have.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.suite import this_machine
from benchmarks.sweep_picture import HEADINGS, MOST, Line, picture
from streamrl.lab.sweep.results import cell, difference_cells, estimates, in_table, ratio_cells

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs"

DIGITS = 6  # significant ones of a stored figure

SETTINGS = ("base", "axis", "baseline", "target", "columns", "ratios", "common")  # of a sweep, but for its points
KEPT = (*SETTINGS, "seeds")

# Heads of columns, where they are not the figure's name.
HEADS = {
    "reward over the run": "over the run", "trained": "tokens/s", "KL": "KL, nats", "KL per step": "KL/step",
    "mismatch": "mismatch, nats", "staleness p95": "p95",
}  # fmt: skip

_PART = re.compile(
    r"(?P<begin><!-- (?P<name>[\w.-]+) (?P<part>table|differences|ratios|findings): from benchmarks/results -->\n)"
    r"(?P<text>.*?)"
    r"(?P<end><!-- end of (?P=name) (?P=part) -->)",
    re.DOTALL,
)
_SENTENCE = re.compile(r"(?<=[.;:])\s+|^- ", re.MULTILINE)
_CODE = re.compile(r"`([^`]*)`")
_ABSOLUTE = re.compile(r"(?<![\w.:/~])/\w")  # a path, also in a list or in quotes
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_FIGURE = re.compile(rf"-?{_NUMBER}±{_NUMBER}|-?\d+\.\d+(?:e-?\d+)?|-?\d+e-?\d+")

Stored = Mapping[str, Any]  # the content of a file in RESULTS
Rows = list[list[str]]  # of a table, its head first


def stored(results: Mapping[str, Any], commits: Mapping[str, str], machine: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of results.json. Raises ValueError for an absolute path in a setting, code of no commit, and for a
    file that lacks something.

    `commits`: run: of the code that it was made with. `machine`: fields of `benchmarks.suite.Machine`.
    """
    name, points = results["sweep"], results["points"]
    of_points = ("name", "column", "series", "settings", "baseline")
    lacking = [key for key in KEPT if key not in results]
    lacking += [f"points.{key}" for key in of_points for point in points[:1] if key not in point]
    if lacking:
        raise ValueError(f"{name}: results.json has no {lacking[0]}; allowed: that of `streamrl sweep FILE --results`")
    settings = [
        f"base={results['base']}",
        *results["common"],
        *(f"{key}={value}" for point in points for key, value in point["settings"].items()),
    ]
    if absolute := [setting for setting in settings if _ABSOLUTE.search(setting)]:
        raise ValueError(f"{name}: {absolute[0]} is a path of one machine; allowed: one relative to the clone")
    runs = [_run(point["name"], seed) for point in points for seed in point["runs"]]
    own = {run: commits.get(run, "") for run in runs}
    if changed := [commit or "unknown" for commit in own.values() if not commit or commit.endswith("-dirty")]:
        raise ValueError(f"{name}: {changed[0]}, its code is of no commit; allowed: runs of a clone without changes")
    return {
        "sweep": name,
        "machines": [dict(machine)],
        "commits": _by_commit(own),
        **{key: results[key] for key in KEPT},
        "points": [{**{key: point[key] for key in of_points}, "runs": _rounded(point["runs"])} for point in points],
    }


def joined(before: Stored, now: Stored) -> dict[str, Any]:
    """All seeds and runs of two parts of one sweep, the runs of `now` where both have one. Raises ValueError for other
    settings.
    """
    differ = [key for key in SETTINGS if before[key] != now[key]]
    if _settings(before) != _settings(now):
        differ.append("points")
    if differ:
        raise ValueError(f"{now['sweep']}: other {', '.join(differ)} than the stored runs have; allowed: the same")
    points = [
        {**new, "runs": dict(sorted({**old["runs"], **new["runs"]}.items(), key=lambda run: int(run[0])))}
        for old, new in zip(before["points"], now["points"], strict=True)
    ]
    machines = [*before["machines"], *(each for each in now["machines"] if each not in before["machines"])]
    commits = {run: commit for part in (before, now) for commit, runs in part["commits"].items() for run in runs}
    seeds = sorted({*before["seeds"], *now["seeds"]})
    return {**now, "machines": machines, "commits": _by_commit(commits), "seeds": seeds, "points": points}


def _by_commit(commits: Mapping[str, str]) -> dict[str, list[str]]:
    """The runs of each, in their order."""
    runs: dict[str, list[str]] = {}
    for run, commit in commits.items():
        runs.setdefault(commit, []).append(run)
    return runs


def _settings(sweep: Stored) -> list[tuple[str, Any]]:
    return [(point["name"], point["settings"]) for point in sweep["points"]]


def missing(sweep: Stored) -> list[str]:
    """POINT-seedSEED of the runs that are not stored."""
    return [
        _run(point["name"], seed)
        for point in sweep["points"]
        for seed in sweep["seeds"]
        if str(seed) not in point["runs"]
    ]


def _run(point: str, seed: int | str) -> str:
    """The name of a run, as the sweep gives it."""
    return f"{point}-seed{seed}"


def _rounded(runs: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {seed: {name: float(f"{value:.{DIGITS}g}") for name, value in each.items()} for seed, each in runs.items()}


def table(sweep: Stored) -> Rows:
    """The mean figures of each point."""
    by_series = any(point["series"] for point in sweep["points"])
    heads = [sweep["axis"].rpartition(".")[2], "point"] if by_series else ["point"]
    names = in_table(sweep["columns"], sweep["target"])
    rows = [[*heads, *(HEADS.get(name, name) for name in names)]]
    for point in sweep["points"]:
        found = estimates(_runs(point), sweep["target"])
        places = [point["column"], point["series"]] if by_series else [point["column"]]
        rows.append([*places, *(_close(cell(found.get(name), len(point["runs"]))) for name in names)])
    return rows


def differences(sweep: Stored) -> Rows:
    """What each other point has more than the baseline; empty where there is none."""
    runs = {point["name"]: _runs(point) for point in sweep["points"]}
    return [[_close(each) for each in row] for row in difference_cells(_baselines(sweep), runs)]


def ratios(sweep: Stored) -> Rows:
    """Figures of each other point to the baseline's; empty where none is compared so, or no two runs have it."""
    runs = {point["name"]: _runs(point) for point in sweep["points"]}
    cells = ratio_cells(_baselines(sweep), runs, in_table(sweep["ratios"], sweep["target"]))
    return [[_close(each) for each in row] for row in cells]


def unsupported(sweep: Stored, findings: str) -> list[str]:
    """`FIGURE: SENTENCE` for each figure of the prose that is in no row of the points that its sentence names."""
    cells = {point["name"]: _figures(row) for point, row in zip(sweep["points"], table(sweep)[1:], strict=True)}
    for name, *row in (*differences(sweep)[1:], *ratios(sweep)[1:]):
        cells[name] |= _figures(row)
    wrong = []
    for sentence in _SENTENCE.split(findings):
        words = set(_CODE.findall(sentence))
        allowed = set().union(*(cells[name] for name in _named(sweep, words)))
        figures = _FIGURE.findall(_CODE.sub("", sentence))
        wrong += [f"{figure}: {' '.join(sentence.split())}" for figure in figures if figure not in allowed]
    return wrong


def _named(sweep: Stored, words: Set[str]) -> list[str]:
    """The points that these words name, all where they name none: by name, column, series, or column and series."""
    points = sweep["points"]
    names, columns, series = ({point[key] for point in points} & words for key in ("name", "column", "series"))

    def has_them(point: Mapping[str, Any]) -> bool:
        in_column, in_series = point["column"] in columns, point["series"] in series
        return in_column and in_series if columns and series else in_column or in_series

    none = not (names or columns or series)
    return [point["name"] for point in points if none or point["name"] in names or has_them(point)]


def drawn(sweep: Stored) -> str:
    """The picture of the points and their seeds, SVG."""
    panels = [figure for figure in HEADINGS if figure in sweep["columns"]][:MOST]
    lines = [
        Line(
            point["name"],
            {figure: [run[figure] for run in point["runs"].values() if figure in run] for figure in panels},
            is_baseline=point["name"] == point["baseline"],
        )
        for point in sweep["points"]
    ]
    title = f"{sweep['sweep']}: a dot a run, a bar the mean over {len(sweep['seeds'])} seeds, its 95 % interval"
    return picture(title, lines)


def written(page: str, sweeps: Mapping[str, Stored]) -> str:
    """The page with its tables from the stored sweeps. Raises KeyError for a sweep that is not stored."""
    makers: dict[str, Callable[[Stored], Rows]] = {"table": table, "differences": differences, "ratios": ratios}

    def part(found: re.Match[str]) -> str:
        if found["part"] == "findings":
            return found[0]
        rows = makers[found["part"]](sweeps[found["name"]])
        return f"{found['begin']}```text\n{aligned(rows)}```\n{found['end']}"

    return _PART.sub(part, page)


def wrong_findings(page: str, sweeps: Mapping[str, Stored]) -> list[str]:
    """The figures of all findings of a page that are not in the tables of their sweeps."""
    findings = [part for part in _PART.finditer(page) if part["part"] == "findings"]
    return [line for part in findings for line in unsupported(sweeps[part["name"]], part["text"])]


def shown(page: str) -> set[str]:
    """The sweeps that a page has a part of."""
    return {part["name"] for part in _PART.finditer(page)}


def aligned(rows: Rows) -> str:
    """Lines of text whose columns begin below one another, two spaces apart.

    >>> print(aligned([["point", "reward"], ["a", "0.9±0.2"]]), end="")
    point  reward
    a      0.9±0.2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def read_stored() -> dict[str, Stored]:
    """All stored sweeps by name; some may have missing runs."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def store(sweep: Path) -> Path:
    """Keep the figures of a sweep's folder. Raises ValueError as `stored` and `joined` do."""
    content = stored(json.loads((sweep / "results.json").read_text()), dict(_commits(sweep)), asdict(this_machine()))
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{content['sweep']}.json"
    if target.exists():
        content = joined(json.loads(target.read_text()), content)
    target.write_text(json.dumps(content, indent=1) + "\n")
    return target


def _commits(sweep: Path) -> Iterator[tuple[str, str]]:
    """Of each run, that of the code that it was made with, as it recorded it."""
    for file in sorted(sweep.glob("runs/*/environment.json")):
        yield file.parent.name, json.loads(file.read_text())["commit"]


def _runs(point: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    return {int(seed): figures for seed, figures in point["runs"].items()}


def _baselines(sweep: Stored) -> dict[str, str]:
    return {point["name"]: point["baseline"] for point in sweep["points"]}


def _close(cell: str) -> str:
    """Without spaces inside: the columns are told apart by them."""
    return cell.replace(" ± ", "±").replace(" .. ", "..").replace(" (", "(")


def _figures(row: Sequence[str]) -> set[str]:
    """What prose may say of a row: each figure, and a mean without its interval."""
    found = {figure for cell in row for figure in _FIGURE.findall(cell)}
    return found | {figure.partition("±")[0] for figure in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", nargs="*", type=Path, help="folder of a sweep, whose figures are to be kept")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page differs")
    options = parser.parse_args()
    if options.check and options.sweep:
        parser.error("--check writes nothing: no SWEEP")
    try:
        for sweep in options.sweep:
            file = store(sweep)
            absent = missing(json.loads(file.read_text()))
            print(f"stored in {file}" + (f"; missing: {', '.join(absent)}" if absent else ""))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    sweeps = read_stored()
    pages = sorted(PAGES.glob("*.md"))
    wrong = [line for page in pages for line in _bring_up_to_date(page, sweeps, check=options.check)]
    wrong += [line for sweep in sweeps.values() for line in _draw(sweep, check=options.check)]
    print("\n".join(wrong) if wrong else f"{len(sweeps)} stored sweeps; the pages agree with them")
    return 1 if wrong else 0


def _bring_up_to_date(page: Path, sweeps: Mapping[str, Stored], *, check: bool) -> list[str]:
    """Write the page's tables, unless it is only checked. Returns a line for each thing that is wrong with it."""
    text = page.read_text()
    if unknown := sorted(shown(text) - sweeps.keys()):
        return [f"{page.name}: {name} is not stored" for name in unknown]
    if unfinished := [name for name in sorted(shown(text)) if missing(sweeps[name])]:
        return [f"{page.name}: {name} lacks {len(missing(sweeps[name]))} runs" for name in unfinished]
    new, wrong = written(text, sweeps), list[str]()
    if new != text and check:
        wrong.append(
            f"{page.name}: its tables are not the stored ones; `python -m benchmarks.stored_sweeps` writes them"
        )
    elif new != text:
        page.write_text(new)
    return wrong + [f"{page.name}: {line}" for line in wrong_findings(new, sweeps)]


def _draw(sweep: Stored, *, check: bool) -> list[str]:
    """Draw its picture again, unless it is only checked or has missing runs. Returns a line where it is wrong."""
    if missing(sweep):
        return []
    file, new = PAGES / "pictures" / f"{sweep['sweep']}.svg", drawn(sweep)
    if file.exists() and file.read_text() == new:
        return []
    if check:
        return [f"pictures/{file.name}: not that of the stored sweep; `python -m benchmarks.stored_sweeps` draws it"]
    file.parent.mkdir(exist_ok=True)
    file.write_text(new)
    return []


if __name__ == "__main__":
    raise SystemExit(main())
