"""The README's pictures of a run: its console and its report, each as a browser draws it.

python -m launch.pictures runs/quickstart docs/pictures
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from pathlib import Path

from rich.terminal_theme import DIMMED_MONOKAI

from streamrl.lab.report import command as report
from streamrl.observe.console import Console
from streamrl.observe.terminal import Terminal
from streamrl.places import load_run

from .screenshot import Browser

COLUMNS = 104  # of the console's terminal
CONSOLE_WIDTH, REPORT_WIDTH, REPORT_HEIGHT = 900, 1400, 1500  # pixels

PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>console</title>
<style>{stylesheet} body {{ margin: 0; padding: 14px; background: {background}; color: {foreground} }}
pre {{ margin: 0; font: 14px/1.25 monospace }}</style><pre>{code}</pre>
"""


def console_page(run_folder: Path) -> str:
    """What the console shows of a run, as a page."""
    terminal = Terminal(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    config = load_run(run_folder)
    terminal.print(Console(config, run_folder, Terminal(file=io.StringIO())).table())
    return terminal.export_html(theme=DIMMED_MONOKAI, code_format=PAGE)


async def capture(run_folder: Path, folder: Path) -> None:
    """Write `console.png` and `report.png` to `folder`. Raises NoBrowser."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        console, page = Path(scratch) / "console.html", Path(scratch) / "report.html"
        console.write_text(console_page(run_folder))
        report.main([run_folder], page)
        async with Browser() as browser:
            await browser.open(console, width=CONSOLE_WIDTH, height=100)
            (folder / "console.png").write_bytes(await browser.picture())
            await browser.open(page, width=REPORT_WIDTH)
            (folder / "report.png").write_bytes(await browser.picture(REPORT_HEIGHT))


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.pictures", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    options = parser.parse_args()
    asyncio.run(capture(options.run, options.folder))


if __name__ == "__main__":
    main()
