"""The documentation site builds without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in [*ROOT.glob("docs/*.md"), *map(Path, ("configuration.md", "commands.md", "metrics.md"))]:
        html = (site / page.with_suffix(".html").name).read_text()
        assert not [part for part in html.split("<link ")[1:] if 'href="http' in part.partition(">")[0]], page
        assert '<script src="http' not in html
