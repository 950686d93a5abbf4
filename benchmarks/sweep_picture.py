"""The picture of a stored sweep: a row a point, for some figures a panel with each seed, the mean and its interval.

Plain SVG, the same bytes for the same figures, so that a test can hold what is in the pages against what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from streamrl.lab.sweep.estimates import estimate

# Names of `streamrl.lab.sweep.figures`, each with its heading. A picture has the first MOST of its tables' ones.
HEADINGS: Mapping[str, str] = {
    "reward": "reward", "trained": "tokens/s", "staleness": "staleness, steps", "mismatch": "mismatch, nats",
}  # fmt: skip
MOST = 3

LABELS, LETTER, PANEL, GAP = 190, 7, 200, 24  # widths: the least of the names, of a letter, of a panel and between two
ROW, HEAD, FOOT = 22, 34, 12  # heights

GREY, BLUE, RED = "#80868f", "#3f6fb5", "#c0392b"  # the last of the baseline


@dataclass(frozen=True, slots=True)
class Line:
    """One point: its name and each figure's values, one a seed."""

    name: str
    values: Mapping[str, Sequence[float]]
    is_baseline: bool = False


def picture(title: str, lines: Sequence[Line]) -> str:
    """SVG of these points, from top to bottom; a panel reaches from 0 to its largest value, and below to its least.

    The panels are the figures of the first point, in its order.
    """
    panels = list(lines[0].values)
    labels = max(LABELS, GAP + LETTER * max(len(line.name) for line in lines))
    width = labels + len(panels) * (PANEL + GAP)
    height = HEAD + ROW * len(lines) + FOOT
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        *(_text(0, _middle(row) + 4, line.name, _colour(line)) for row, line in enumerate(lines)),
    ]
    for column, figure in enumerate(panels):
        drawn += _panel(labels + column * (PANEL + GAP), figure, HEADINGS[figure], lines)
    return "\n".join([*drawn, "</svg>\n"])


def _panel(left: float, figure: str, heading: str, lines: Sequence[Line]) -> list[str]:
    shown = [value for line in lines for value in line.values.get(figure, ())]
    least, largest = min([0.0, *shown]), max([0.0, *shown])
    width = largest - least or 1.0
    bottom = HEAD + ROW * len(lines)
    drawn = [
        _text(left, 16, f"{heading}, {least:.3g} to {least + width:.3g}", GREY),
        f'<path d="M{left} {HEAD - 8}V{bottom}H{left + PANEL}" fill="none" stroke="{GREY}" stroke-width="0.5"/>',
    ]
    for row, line in enumerate(lines):
        values, middle = line.values.get(figure, ()), _middle(row)
        if (found := estimate(list(values))) is None:
            continue

        def place(value: float) -> float:
            return round(left + PANEL * min(max((value - least) / width, 0.0), 1.0), 1)

        if found.half_width is not None:
            ends = place(found.mean - found.half_width), place(found.mean + found.half_width)
            drawn.append(f'<path d="M{ends[0]} {middle}H{ends[1]}" stroke="{_colour(line)}" stroke-width="1.5"/>')
        drawn += [
            f'<circle cx="{place(value)}" cy="{middle}" r="3" fill="{_colour(line)}" fill-opacity="0.35"/>'
            for value in values
        ]
        drawn.append(f'<path d="M{place(found.mean)} {middle - 7}v14" stroke="{_colour(line)}" stroke-width="2"/>')
    return drawn


def _middle(row: int) -> int:
    return HEAD + ROW * row + ROW // 2


def _colour(line: Line) -> str:
    return RED if line.is_baseline else BLUE


def _text(x: float, y: float, text: str, colour: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{escape(text)}</text>'
