"""What is committed is complete: a fresh clone has all of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_committed_link_leads_out_of_the_repository():
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--stage"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    links = [ROOT / entry.partition("\t")[2] for entry in listed if entry.startswith("120000 ")]
    assert [link.name for link in links if not link.resolve().is_relative_to(ROOT)] == []
