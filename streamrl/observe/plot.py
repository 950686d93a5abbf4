"""The reward curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from streamrl.observe.metrics import read_metrics

_WINDOW = 5  # steps of the running mean


def reward_curve(run_folder: Path) -> Path | None:
    """Draw `RUN/reward.png`: mean reward and pass rate by learner step. None for a run without a step."""
    rows = list(read_metrics(run_folder))
    if not rows:
        return None
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, colour in (("reward/mean", "tab:blue"), ("pass_rate", "tab:green")):
        values = [row[name] for row in rows]
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, running_mean(values), color=colour, label=f"{name}, mean of {_WINDOW} steps")
    axes.set(xlabel="learner step", ylim=(min(0.0, *axes.get_ylim()), None), title=run_folder.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    target = run_folder / "reward.png"
    figure.savefig(target)
    return target


def running_mean(values: list[float]) -> list[float]:
    """The mean of each value and the up to four before it."""
    windows = (values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
