"""The examples of the docstrings, `>>>`, are right: plain doctest, each module in this process."""

from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("streamrl", "launch", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_are_right(module):
    done = doctest.testmod(importlib.import_module(module))
    assert done.attempted > 0
    assert done.failed == 0


def test_a_wrong_example_fails(tmp_path, monkeypatch):
    (tmp_path / "wrong_example.py").write_text('"""\n>>> 1 + 1\n3\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_example", raising=False)
    with pytest.raises(AssertionError):
        test_the_examples_of_a_module_are_right("wrong_example")
