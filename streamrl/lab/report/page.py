"""The page: one HTML file with its style, its script and its data. Nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

_PARTS = Path(__file__).parent
_UPLOT = _PARTS / "third_party" / "uplot"
# Each uses what those before it define.
_SCRIPTS = ("elements.js", "diagrams.js", "sections.js", "samples.js", "page.js")

# What could end the data's element, or a line of a script, inside a text of the data.
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}

# The browser itself refuses whatever the page would load.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(data: Mapping[str, Any]) -> str:
    """The page. Texts of the data are shown as they are: none can become a part of the page."""
    title = f"Report of {', '.join(run['name'] for run in data['runs'])}"
    style = "".join(part.read_text() for part in (_UPLOT / "uPlot.min.css", _PARTS / "page.css"))
    library = f"/*\n{(_UPLOT / 'LICENSE').read_text()}*/\n{(_UPLOT / 'uPlot.iife.min.js').read_text()}"
    script = "\n".join((library, *((_PARTS / name).read_text() for name in _SCRIPTS)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style></head>\n'
        "<body><main><noscript>The diagrams of this page are drawn by its script.</noscript></main>\n"
        f'<script type="application/json" id="data">{embed(data)}</script>\n<script>\n{script}</script>\n'
        "</body></html>\n"
    )


def embed(data: Mapping[str, Any]) -> str:
    """JSON that can be put into an HTML script element; what is not a number in JSON is null."""
    return json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False).translate(_ESCAPES)


def _finite(value: Any) -> Any:
    """The same tree, with null for every number that is not finite."""
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value
