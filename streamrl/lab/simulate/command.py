"""`streamrl simulate RUN [key=value ...]`: what a run would have been with other settings, and how sure that is."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.engine.server import ServerFailed
from streamrl.lab.output import check_file
from streamrl.lab.simulate.calibration import ALONE, calibrate, cuts, recorded_groups, saves
from streamrl.lab.simulate.circle import expected
from streamrl.lab.simulate.figures import Figures, figures
from streamrl.lab.simulate.fleet import plan, read_fleet
from streamrl.lab.simulate.model import Model
from streamrl.lab.simulate.modelled import check_modelled
from streamrl.lab.simulate.on_cores import RunEndedError
from streamrl.lab.simulate.pools import check_pools
from streamrl.lab.simulate.server import RECOMPUTING
from streamrl.lab.simulate.validation import RATE_BAR, STALENESS_BAR, Compared, validate
from streamrl.observe.bars import Bar
from streamrl.observe.events import events_by_time
from streamrl.observe.metrics import read_metrics
from streamrl.places import load_run
from streamrl.types import Sample

WIDTH = 140  # columns of the table


def main(
    run_folder: Path,
    overrides: Sequence[str],
    *,
    vary: Sequence[str] = (),
    others: Sequence[Path] = (),
    output: Path | None = None,
) -> int:
    """Calibrate, by `others` besides, simulate every setting, print one row for each. Returns 0."""
    check_file("--json", output)
    choices = [tuple(overrides) + each for each in varied(vary)]
    recorded = list(read_metrics(run_folder))
    length = ("run.epochs=null", f"run.steps={max(1, len(recorded))}")  # of all rows, also of a run that has not ended
    own = load_run(run_folder, [*ALONE, *length])
    settings = [checked(run_folder, own, (*length, *choice)) for choice in choices if choice]
    check_lengths(run_folder, own, settings)
    check_saves([run_folder, *others], own, settings)
    with Bar("simulate", "settings", 1 + len(settings)) as bar:
        model = calibrate([run_folder, *others])
        results = {"as recorded": _as_recorded(run_folder, recorded), "the model of it": simulated(own, model)}
        bar.advance()
        for choice, config in bar.over(zip([choice for choice in choices if choice], settings, strict=True)):
            results[" ".join(choice)] = simulated(config, model)
    Console(width=WIDTH).print(_table(f"{run_folder}: what was, and what would have been", results))
    print_model(model)
    _write(output, {name: result.as_json() for name, result in results.items()})
    return 0


def main_validate(
    config_path: Path, overrides: Sequence[str], count: int, steps: int, output: Path | None = None
) -> int:
    """Run settings for real and compare. Returns 1 where a bar is missed, or a run fails."""
    check_file("--json", output)
    try:
        model, compared = validate(config_path, overrides, count, steps)
    except (ServerFailed, RunEndedError) as failure:
        print(f"streamrl: {failure}", file=sys.stderr)
        return 1
    Console(width=WIDTH).print(_compared_table(compared))
    print_model(model)
    judged = compared[1:]
    held = sum(each.holds for each in judged)
    print(
        f"{held} of {len(judged)} settings within {RATE_BAR:.0%} of the measured tokens/s and "
        f"{STALENESS_BAR:g} of the mean staleness: {'held' if held == len(judged) else 'MISSED'}"
    )
    _write(
        output,
        [
            {
                "setting": each.setting,
                "machine": each.speed,
                "predicted": each.predicted.as_json(),
                "measured": each.measured.as_json(),
            }
            for each in compared
        ],
    )
    return 0 if held == len(judged) else 1


def main_fleet(path: Path, overrides: Sequence[str], output: Path | None = None) -> int:
    """Plan a fleet from the figures in a file. Returns 0."""
    check_file("--json", output)
    rows = plan(read_fleet(path), overrides)
    table = Table(title=f"{path}: the best split of each fleet is marked", title_justify="left")
    for column in ("GPUs", "generate", "learn", "servers", "trained tokens/s", "a GPU", "s/step", *_SHARED):
        table.add_column(column, justify="right")
    for row in rows:
        figure = row.figures
        table.add_row(
            f"{row.gpus}{' *' if row.best else ''}", f"{row.generating}", f"{row.gpus - row.generating}",
            f"{row.servers}", f"{figure.trained:,.0f}", f"{figure.trained / row.gpus:,.0f}", f"{row.step_seconds:.1f}",
            *_shared(figure),
        )  # fmt: skip
    Console(width=WIDTH).print(table)
    _write(output, [row.as_json() for row in rows])
    return 0


def simulated(config: Config, model: Model) -> Figures:
    """What is expected of a run. Raises ConfigError for one that fails, or is too short for figures."""
    try:
        return expected(config, model)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"run.steps: {config.run.steps}: {error}") from error


def _as_recorded(run_folder: Path, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Raises ConfigError for a run that is too short for figures."""
    try:
        return figures(rows)
    except ValueError as error:
        raise ConfigError(f"{run_folder}: {error}") from error


def varied(vary: Sequence[str]) -> list[tuple[str, ...]]:
    """`["a=1,2", "b=3,4"]` -> `[("a=1", "b=3"), ("a=1", "b=4"), ("a=2", "b=3"), ("a=2", "b=4")]`; `[()]` for nothing.

    Raises ConfigError for one without values.
    """
    axes = []
    for each in vary:
        key, found, values = each.partition("=")
        if not found or not values:
            raise ConfigError(f"--vary: {each!r} gives no values; allowed: KEY=VALUE,VALUE,...")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return list(itertools.product(*axes))


def checked(run_folder: Path, own: Config, overrides: Sequence[str]) -> Config:
    """The configuration of a setting. Raises ConfigError for what the model does not know."""
    config = load_run(run_folder, [*ALONE, *overrides])
    check_modelled(own, config)
    check_pools(config, own)
    was, now = own.publish.interruption, config.publish.interruption
    if now in RECOMPUTING and was not in RECOMPUTING:
        raise ConfigError(
            f"publish.interruption: {now} computes caches again, and {run_folder} with {was} has not shown how long "
            "that takes; allowed: in_place, drain"
        )
    return config


def check_lengths(run_folder: Path, own: Config, settings: Sequence[Config]) -> None:
    """Nobody knows how an answer would have gone on that was cut, or where turns would be. Raises ConfigError."""
    recorded, given = cuts(own), [cut for config in settings for cut in cuts(config)]
    longest, most, least = max(recorded), max(given, default=0), min(given, default=sys.maxsize)
    if most > longest and any(len(sample.output_ids) >= longest for sample in _samples(run_folder)):
        raise ConfigError(
            f"generate.sampling.max_new_tokens: {most} is above the recorded {longest}, at which answers were cut; "
            f"allowed: up to {longest}"
        )
    if least < min(recorded) and any(map(_has_turns, _samples(run_folder))):
        raise ConfigError(
            f"generate.sampling.max_new_tokens: {least} would cut turns, and {run_folder} has recorded answers of "
            f"several as wholes; allowed: {min(recorded)}"
        )


def _samples(run_folder: Path) -> Iterator[Sample]:
    for group in recorded_groups(run_folder):
        yield from group.samples


def _has_turns(sample: Sample) -> bool:
    """Has the policy written one part, and somebody else what came between its turns?"""
    return bool(sample.loss_mask.any()) and not sample.loss_mask.all()


def check_saves(run_folders: Sequence[Path], own: Config, settings: Sequence[Config]) -> None:
    """Without a checkpoint nobody knows what one takes. Raises ConfigError."""
    given = [each.checkpoint.every for each in settings if each.checkpoint.every not in (0, own.checkpoint.every)]
    if given and not any(saves(events_by_time(folder)) for folder in run_folders):
        raise ConfigError(
            f"checkpoint.every: {given[0]} saves checkpoints, and {run_folders[0]}, which has saved none, has not "
            "shown how long that takes; allowed: 0"
        )


# -- tables

_SHARED = ("learner idle", "generators idle", "staleness mean", "p95", "max")


def _shared(figure: Figures) -> list[str]:
    return [
        f"{figure.idle_learner:.0%}", f"{figure.idle_generator:.0%}", f"{figure.staleness_mean:.2f}",
        f"{figure.staleness_p95:.1f}", f"{figure.staleness_max:g}",
    ]  # fmt: skip


def _table(title: str, results: dict[str, Figures]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("setting")
    for column in ("trained tokens/s", "generated tokens/s", *_SHARED):
        table.add_column(column, justify="right")
    for name, figure in results.items():
        table.add_row(name, f"{figure.trained:,.0f}", f"{figure.generated:,.0f}", *_shared(figure))
    return table


def _compared_table(compared: Sequence[Compared]) -> Table:
    table = Table(title="predicted against measured: trained tokens/s, mean staleness", title_justify="left")
    columns = (
        "setting",
        "tokens/s predicted",
        "machine",
        "measured",
        "off",
        "staleness predicted",
        "measured",
        "off",
        "",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("setting", "") else "right")
    for each in compared:
        table.add_row(
            each.setting, f"{each.predicted.trained:,.0f}", "" if each.speed is None else f"x {each.speed:.2f}",
            f"{each.measured.trained:,.0f}", f"{each.rate_error:+.1%}",
            f"{each.predicted.staleness_mean:.2f}", f"{each.measured.staleness_mean:.2f}",
            f"{each.staleness_error:+.2f}", _verdict(each),
        )  # fmt: skip
    return table


def _verdict(compared: Compared) -> str:
    if compared.speed is None:
        return ""
    return "held" if compared.holds else "MISSED"


def print_model(model: Model) -> None:
    """What was fitted, so that a reader can judge it."""
    server, learner, update = model.server, model.learner, model.update
    print(
        f"server: {server.step * 1e3:.3g} ms a decoding step + {server.sample * 1e3:.3g} ms a running sample, "
        f"{server.prefill * 1e3:.3g} ms a prefill, "
        f"{(server.start + server.end) * 1e3:.3g} ms of other work a sample, "
        f"{server.latency * 1e3:.3g} ms behind a group\n"
        f"learner: {learner.fixed:.3g} s a step + {learner.each * 1e6:.3g} s a million tokens; "
        f"update: {update.fixed:.3g} s + {update.each * 1e3:.3g} ms a sample"
    )


def _write(output: Path | None, value: Any) -> None:
    if output is not None:
        output.write_text(json.dumps(value, indent=1) + "\n")
