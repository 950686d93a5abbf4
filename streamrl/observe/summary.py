"""The end of a run in words: answers before and after, and the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from streamrl.config import Config
from streamrl.observe.events import events_by_time
from streamrl.observe.failed import failed_samples
from streamrl.observe.live import shares
from streamrl.observe.metrics import read_metrics
from streamrl.observe.remarks import print_remarks
from streamrl.observe.roofline import held_up, roofline
from streamrl.observe.terminal import Terminal
from streamrl.observe.timeline import Timeline

# Steps at the start and at the end whose mean reward is compared.
_ENDS = 5

# Characters of a prompt or an answer that are shown.
_ANSWER = 60


def print_summary(config: Config, run_folder: Path, terminal: Terminal | None = None) -> None:
    """Print it; of a run without a step, nothing."""
    terminal = terminal or Terminal()
    rows, answers = list(read_metrics(run_folder)), probes(run_folder)
    if answers:
        terminal.print(_answers(answers))
    if rows:
        terminal.print(_figures_of_rows(rows) if config.trains_rows else _figures(rows))
        terminal.print(where_time_went(run_folder, rows))
    print_remarks(run_folder, rows, terminal)


def probes(run_folder: Path) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """The held-out prompts: pairs of the first `probe` event at the start and the last one at the end.

    A `probe` event has the fields `moment` (start | end), `index`, `prompt`, `expected`, `answer`, `reward`.
    """
    moments: dict[str, dict[int, dict[str, Any]]] = {"start": {}, "end": {}}
    for record in events_by_time(run_folder):
        if record["event"] != "probe":
            continue
        if record["moment"] == "start":
            moments["start"].setdefault(record["index"], record)
        else:
            moments["end"][record["index"]] = record
    return [(before, moments["end"].get(index)) for index, before in sorted(moments["start"].items())]


def _answers(answers: list[tuple[dict[str, Any], dict[str, Any] | None]]) -> Table:
    table = Table("prompt", "right", "answer before", "answer after", title="Held-out prompts", title_justify="left")
    for before, after in answers:
        texts = (before["prompt"], before["expected"], before["answer"], after["answer"] if after else "-")
        table.add_row(*(escape(_short(text)) for text in texts))
    return table


def _figures(rows: list[dict[str, Any]]) -> Table:
    first, last = rows[:_ENDS], rows[-_ENDS:]
    seconds = sum(row.get("time/step") or 0.0 for row in rows)
    trained = sum(row.get("tokens/trained") or 0 for row in rows)
    generated = sum(row.get("tokens/generated") or 0 for row in rows)
    table = Table(title="Figures", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row(
        "mean reward", f"{_mean(first, 'reward/mean'):.3f} at the start, {_mean(last, 'reward/mean'):.3f} at the end"
    )
    table.add_row(
        "pass rate", f"{_mean(first, 'pass_rate'):.3f} at the start, {_mean(last, 'pass_rate'):.3f} at the end"
    )
    table.add_row("steps", f"{len(rows)} in {seconds:.0f} s")
    rate = max(seconds, 1e-9)
    table.add_row(
        "tokens",
        f"{generated:,.0f} generated ({generated / rate:,.0f}/s), {trained:,.0f} trained ({trained / rate:,.0f}/s)",
    )
    if any(row.get("learner/mfu") is not None for row in rows):
        mean, share = _mean(rows, "learner/tflops"), _mean(rows, "learner/mfu")
        table.add_row("learner", f"{mean:.3g} TFLOP/s a rank, MFU {share:.1%}")
    oldest = max(row.get("staleness/max") or 0 for row in rows)
    table.add_row("staleness", f"mean {_mean(rows, 'staleness/mean'):.2f}, max {oldest:g} learner steps")
    if (failed := failed_samples(rows)) is not None:
        table.add_row("failed", failed)
    for name, text in _selection(rows):
        table.add_row(name, text)
    table.add_row("idle", f"learner {_mean(rows, 'idle/learner'):.0%}, generators {_mean(rows, 'idle/generator'):.0%}")
    return table


def _figures_of_rows(rows: list[dict[str, Any]]) -> Table:
    """The figures of a run of `streamrl sft`."""
    seconds, trained = _total(rows, "time/step"), _total(rows, "tokens/trained")
    table = Table(title="Figures", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for title, name, ends in (("loss", "loss/total", _ENDS), ("held-out loss", "loss/held_out", 1)):
        if having := [row for row in rows if row.get(name) is not None]:
            first, last = (_mean(each, name) for each in (having[:ends], having[-ends:]))
            table.add_row(title, f"{first:.4f} at the start, {last:.4f} at the end, nats/token")
    table.add_row("steps", f"{len(rows)} in {seconds:.0f} s, {rows[-1].get('rows/epoch') or 0.0:.2f} epochs")
    table.add_row("tokens", f"{trained:,.0f} trained ({trained / max(seconds, 1e-9):,.0f}/s)")
    return table


def where_time_went(run_folder: Path, rows: list[dict[str, Any]]) -> Table:
    """What each role did, from the end of the first step to that of the last, and how fast each side alone is."""
    timeline = Timeline.read(run_folder)
    rows = [row for row in rows if "time" in row]
    begin, end = (rows[0]["time"], rows[-1]["time"]) if rows else (0.0, 0.0)
    table = Table(title="Where the time went", title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for role, track in sorted(timeline.tracks.items()):
        if phases := track.seconds(begin, end):
            table.add_row(role, shares(phases))
    held = {holder: part for holder, part in held_up(timeline, begin, end).items() if part > 0}
    if held and timeline.generators:
        table.add_row("held up by", shares({str(holder): part for holder, part in held.items()}))
    if (limits := roofline(timeline, rows)) is not None:
        table.add_row("roofline", str(limits))
    return table


def _selection(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What became of groups that were not trained as they came, where there are any: is the selection biased?"""
    generated, dropped = (_total(rows, f"selection/{which}/groups") for which in ("generated", "dropped"))
    if dropped:
        length, pass_rate = (
            f"{_over_groups(rows, 'dropped', name):.3g}, of the trained {_over_groups(rows, 'trained', name):.3g}"
            for name in ("length", "pass_rate")
        )
        yield "dropped", f"{dropped:,.0f} of {generated:,.0f} groups; mean length {length}; pass rate {pass_rate}"
    if given_up := _total(rows, "selection/placeholders"):
        yield "given up", f"{given_up:,.0f} groups became placeholders: lost too often, or for too long"
    if over_age := _total(rows, "selection/over_age"):
        yield "over age", f"{over_age:,.0f} groups were generated again"
    if reused := _total(rows, "replay/reused"):
        generated, trained = _total(rows, "tokens/generated"), _total(rows, "tokens/trained")
        yield "trained again", f"{reused:,.0f} groups; {trained:,.0f} tokens trained of {generated:,.0f} generated"


def _over_groups(rows: list[dict[str, Any]], which: str, name: str) -> float:
    """The mean of a figure over all groups of the run that were `which`."""
    counts = [row.get(f"selection/{which}/groups") or 0 for row in rows]
    values = [row.get(f"selection/{which}/{name}") or 0.0 for row in rows]
    return sum(count * value for count, value in zip(counts, values, strict=True)) / max(1, sum(counts))


def _total(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row.get(name) or 0 for row in rows)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else 0.0


def _short(text: Any) -> str:
    """One line of at most 60 characters; chat messages are shown by their last turn."""
    if isinstance(text, list):
        text = text[-1]["content"]
    line = " ".join(str(text).split()) or "(nothing)"
    return line if len(line) <= _ANSWER else line[: _ANSWER - 1] + "…"
