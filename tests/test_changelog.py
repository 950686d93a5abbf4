"""The changelog has dated sections with versions, and the package is the newest of them."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

from streamrl import __version__

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_newest_section_is_the_version_of_the_package():
    headings = re.findall(r"^## (.*)$", CHANGELOG.read_text(), re.MULTILINE)
    assert headings.pop(0) == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings]
    assert all(releases), headings
    versions = [tuple(map(int, found.groups()[:3])) for found in releases if found]
    dates = [date.fromisoformat(found[4]) for found in releases if found]
    assert ".".join(map(str, versions[0])) == __version__
    assert versions == sorted(set(versions), reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_every_entry_is_of_a_kind():
    sections = re.split(r"^### (.*)\n", CHANGELOG.read_text(), flags=re.MULTILINE)
    assert set(sections[1::2]) <= KINDS
    assert not re.search(r"^- ", sections[0], re.MULTILINE)
