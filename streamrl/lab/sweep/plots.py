"""The pictures of a sweep, each as SVG and PNG: reward curves, figures by point, staleness distributions.

Where a sweep has many points, each value of the first grid key has a panel of its own, and a colour means the same
in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from streamrl.lab.sweep.estimates import band
from streamrl.lab.sweep.figures import BUCKETS, FIGURES, reward_curves
from streamrl.lab.sweep.plan import Sweep
from streamrl.lab.sweep.results import Outcome

# The palette of Okabe and Ito, for colour-blind eyes too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000")

ONE_PANEL = len(COLOURS)  # points that fit into one panel

PLACES = {"steps": "learner steps", "tokens": "trained tokens", "seconds": "seconds from the first step on"}

SHOWN = (
    "reward", "reward over the run", "trained", "idle learner", "staleness",
    "ESS", "KL", "clipped", "masked", "entropy",
)  # fmt: skip

_AGES = {bucket: bucket[1:].replace("_", " to ") for bucket in BUCKETS}  # "s3_4" -> "3 to 4"


def draw(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Path]:
    """Draw all of it into the sweep's folder, of the points with a finished run. Returns the SVG files."""
    done = [outcome for outcome in outcomes if outcome.rows]
    if not done:
        return []
    pictures: dict[str, Callable[[Sweep, Sequence[Outcome]], Figure]] = {
        "reward": reward_figure,
        "figures": point_figure,
        "staleness": staleness_figure,
    }
    files = []
    for name, picture in pictures.items():
        figure = picture(sweep, done)
        FigureCanvasAgg(figure)
        for kind in ("png", "svg"):
            figure.savefig(sweep.folder / f"{name}.{kind}")
        files.append(sweep.folder / f"{name}.svg")
    return files


def reward_figure(sweep: Sweep, outcomes: Sequence[Outcome]) -> Figure:
    """Reward against steps, tokens and wall-clock: the mean over seeds and its 95 % interval.

    A column for each panel; where there is one panel alone, its three pictures are side by side.
    """
    panels = _panels(outcomes)
    alone = len(panels) == 1
    figure = Figure(figsize=(12, 4) if alone else (1.5 + 3.6 * len(panels), 8.5), dpi=120, layout="constrained")
    shape = (1, len(PLACES)) if alone else (len(PLACES), len(panels))
    grid = figure.subplots(*shape, sharey=True, sharex=False if alone else "row", squeeze=False)
    for column, (title, members) in enumerate(panels.items()):
        for row, (place, label) in enumerate(PLACES.items()):
            axes = grid[0][row] if alone else grid[row][column]
            _draw_curves(axes, members, place)
            axes.set_xlabel(label, fontsize=9)
            if (row if alone else column) == 0:
                axes.set_ylabel("reward", fontsize=9)
        if title:
            grid[0][column].set_title(f"{sweep.axis} = {title}", fontsize=10)
    _legend(figure, grid[0][0])
    return figure


def _draw_curves(axes: Axes, members: Sequence[tuple[str, str, Outcome]], place: str) -> None:
    """The reward of some points against one kind of place."""
    for name, colour, outcome in members:
        curve = band([reward_curves(rows)[place] for rows in outcome.rows.values()])
        axes.plot(curve.places, curve.mean, color=colour, linewidth=1.4, label=name)
        axes.fill_between(curve.places, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    _calm(axes)


def point_figure(sweep: Sweep, outcomes: Sequence[Outcome]) -> Figure:
    """Every figure by point, with its interval."""
    columns = list(dict.fromkeys(outcome.point.column for outcome in outcomes))
    figure = Figure(figsize=(16, 6.5), dpi=120, layout="constrained")
    grid = figure.subplots(2, len(SHOWN) // 2)
    units = {each.name: each.unit for each in FIGURES}
    series = _series(outcomes)
    for axes, name in zip(grid.flat, SHOWN, strict=True):
        for number, (label, colour) in enumerate(series.items()):
            found = [
                (columns.index(outcome.point.column), estimate)
                for outcome in outcomes
                if outcome.point.series == label and (estimate := outcome.figures.get(name)) is not None
            ]
            shift = 0.09 * (number - (len(series) - 1) / 2)  # so that intervals do not lie upon each other
            axes.errorbar(
                [place + shift for place, _ in found],
                [round(estimate.mean, 9) for _, estimate in found],
                [estimate.half_width or 0.0 for _, estimate in found],
                color=colour, label=label, marker="o", markersize=4, linewidth=1, capsize=2,
                linestyle="-" if sweep.axis != "point" else "none",
            )  # fmt: skip
        axes.set_title(f"{name}, {units[name]}" if units[name] else name, fontsize=10)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_xticks(range(len(columns)), columns, rotation=0 if _fit(columns) else 30, fontsize=8)
        _calm(axes)
    for axes in grid[-1]:
        axes.set_xlabel(sweep.axis, fontsize=9)
    if any(series):
        _legend(figure, grid.flat[0])
    return figure


def staleness_figure(sweep: Sweep, outcomes: Sequence[Outcome]) -> Figure:
    """How old the trained tokens of each point were, as shares."""
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(outcomes)), dpi=120, layout="constrained")
    axes = figure.subplots()
    shades = colormaps["viridis_r"]
    ahead = [0.0] * len(outcomes)
    for number, bucket in enumerate(BUCKETS):
        shares = [outcome.staleness[bucket] for outcome in outcomes]
        axes.barh(
            range(len(outcomes)), shares, left=ahead, height=0.7, label=_AGES[bucket],
            color=shades(0.08 + 0.88 * number / (len(BUCKETS) - 1)),
        )  # fmt: skip
        ahead = [begin + share for begin, share in zip(ahead, shares, strict=True)]
    axes.set_yticks(range(len(outcomes)), [outcome.point.name for outcome in outcomes], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the trained tokens")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        loc="outside upper center", ncols=len(BUCKETS), title="age in learner steps", fontsize=8, frameon=False
    )
    return figure


def _panels(outcomes: Sequence[Outcome]) -> dict[str, list[tuple[str, str, Outcome]]]:
    """Title of each panel: (label, colour, outcome) of its curves."""
    series = _series(outcomes)
    if len(outcomes) <= ONE_PANEL or len(series) == 1:
        shades = [_shade(number, len(outcomes)) for number in range(len(outcomes))]
        return {"": [(each.point.name, shade, each) for shade, each in zip(shades, outcomes, strict=True)]}
    panels: dict[str, list[tuple[str, str, Outcome]]] = {}
    for outcome in outcomes:
        label = outcome.point.series
        panels.setdefault(outcome.point.column, []).append((label, series[label], outcome))
    return panels


def _series(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Every series and its colour."""
    labels = list(dict.fromkeys(outcome.point.series for outcome in outcomes))
    return {label: _shade(number, len(labels)) for number, label in enumerate(labels)}


def _shade(number: int, count: int) -> str:
    if count <= len(COLOURS):
        return COLOURS[number]
    red, green, blue, _ = colormaps["viridis"](number / (count - 1), bytes=True)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _fit(labels: Sequence[str]) -> bool:
    """Whether they fit side by side under one small panel."""
    return sum(len(label) + 2 for label in labels) <= 34


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False)


def _calm(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
