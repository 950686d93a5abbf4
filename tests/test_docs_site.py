"""The documentation site builds without a warning, and works from the disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.screenshot import Browser, installed

ROOT = Path(__file__).parents[1]
DEADLINE = 60.0  # seconds until the search has answered


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return site


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site):
    for page in [*ROOT.glob("docs/*.md"), *map(Path, ("configuration.md", "commands.md", "metrics.md"))]:
        html = (site / page.with_suffix(".html").name).read_text()
        assert not [part for part in html.split("<link ")[1:] if 'href="http' in part.partition(">")[0]], page
        assert '<script src="http' not in html
    assert 'href="configuration.html"' in (site / "start.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="needs Debian's chromium: apt-get install chromium")
def test_the_site_is_searched_from_the_disk(site):
    async def search() -> tuple[str, list[str], list[str]]:
        async with Browser() as browser:
            await browser.open(site / "index.html")
            await browser.evaluate(
                "(() => { document.querySelector('#__search').click();"  # as a click on the field does
                "const field = document.querySelector('[data-md-component=search-query]'); field.focus();"
                "field.value = 'staleness'; field.dispatchEvent(new Event('keyup')); field.dispatchEvent(new"
                " Event('input', {bubbles: true})); })()"
            )
            found = "document.querySelector('.md-search-result__link')?.href ?? ''"
            deadline = time.monotonic() + DEADLINE
            while not (link := await browser.evaluate(found)) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            return link, browser.errors, browser.requests

    link, errors, requests = asyncio.run(search())
    assert link.startswith(site.as_uri())
    assert errors == []
    assert [address for address in requests if not address.startswith(("file:", "data:", "about:"))] == []
