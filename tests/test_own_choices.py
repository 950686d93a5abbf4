"""Choices of a user's own, as the how-to pages show them, in a folder outside of streamrl: no file of it is touched.

The blocks of a page that begin with the name of a file are written into one folder, and the page's commands are run
there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from msgspec.structs import replace

from docs import reference
from streamrl import choices
from streamrl.choices import KINDS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.senseless import warnings
from streamrl.lab.audit import Findings, History
from streamrl.lab.simulate.circle import Circle
from streamrl.lab.simulate.model import Line
from streamrl.places import absolute
from streamrl.replay.orders import make_order
from streamrl.types import Batch, PolicyVersion
from tests.documented_commands import ROOT, blocks
from tests.lab.plan_recipes import H100, QWEN, planned
from tests.lab.test_simulate_circle import model

PAGES = ("howto-order.md",)
OWN = (
    "replay.order=by_age.py:ByAge",
    "replay.order_options.oldest_first=true",
    "replay.curriculum=halves.py:Halves",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files of all pages, in the working folder."""
    for page in PAGES:
        for language, text in blocks(ROOT / "docs" / page):
            if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
                (tmp_path / name[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_passes_the_tests_that_it_shows(page, folder):
    written = [text for language, text in blocks(ROOT / "docs" / page) if language == "bash"]
    (command,) = [line for text in written for line in text.splitlines() if "pytest" in line]
    words = command.replace("python", sys.executable, 1).split()
    done = subprocess.run(
        [*words, "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_a_configuration_names_them_and_its_record_has_their_absolute_paths(folder):
    config = config_file.load(None, OWN)
    assert warnings(config) == []
    placed = absolute(config)
    for section, key, kind in chosen(placed):
        path = getattr(placed.__getattribute__(section), key)
        if ":" in path:
            assert path.startswith(str(folder)), path
            assert kind.load(path) is kind.load(getattr(config.__getattribute__(section), key))
    os.chdir("/")
    assert Config.model_validate(placed.model_dump(mode="json")) == placed


def chosen(config: Config):
    """(section, key, kind) of every choice of the tree's first level."""
    for section in Config.model_fields:
        yield from ((section, key, kind) for key, kind in config.__getattribute__(section).choices())


def test_an_option_that_its_class_does_not_declare_is_refused_in_one_line(folder):
    with pytest.raises(ConfigError) as refused:
        config_file.load(None, [*OWN, "replay.order_options.oldest=true"])
    assert str(refused.value) == (
        "replay.order_options.oldest: unknown key (given True); allowed: oldest_first; "
        "nearest known key: replay.order_options.oldest_first"
    )


def test_the_reference_describes_them(folder):
    page = reference.choices(choices.ORDERS, ["by_age.py:ByAge"])
    assert "| `by_age.py:ByAge` | Of the complete groups those with the youngest tokens" in page
    assert "`over_age`" in page
    assert "`oldest_first`: the oldest groups first, before they are too old (true or false)" in page


def test_an_order_takes_its_options(folder):
    completed = {7: 1, 5: 3, 6: 2}
    for words, ids in (([], (5, 6)), (["replay.order_options.oldest_first=true"], (7, 6))):
        keys = ["replay.order=by_age.py:ByAge", "replay.groups_per_step=2", *words]
        order = make_order(config_file.load(None, keys).replay)
        assert order.select(3, completed, below=5, above=()) == ids
        assert order.over_age(4, oldest=1)


def test_a_plan_has_their_bound(folder):
    os.chdir(ROOT)
    own = [word.replace("=", f"={folder}/", 1) if ".py:" in word else word for word in OWN]
    plan = planned(QWEN, *own, machines=H100)
    assert plan.bound == 1


@pytest.mark.parametrize("staleness", [1.0, 2.5])
def test_a_simulation_goes_to_its_end_with_them(folder, staleness):
    config = config_file.load(None, [*OWN, "run.steps=20", f"replay.max_staleness={staleness}", "generate.workers=2"])
    circle = Circle(config, model(learner=Line(0.2, 0.0), update=Line(0.1, 0.0)))
    assert len(circle.run()) == 20
    assert max(row["staleness/max"] for row in circle.rows) <= make_order(config.replay).worst_staleness


def test_the_audit_asks_them(folder, make_group):
    def audit(*overrides: str) -> list[str]:
        config = config_file.load(None, [*overrides, "replay.groups_per_step=2", "journal.keep=all"])
        findings, history = Findings(bound=make_order(config.replay).worst_staleness), History(config, {})
        for step, ids in enumerate([(5, 3), (1, 0)]):
            groups = tuple(replace(make_group(i, version=PolicyVersion(step)), prompt_index=7) for i in ids)
            history.check(Batch(step=step, groups=groups), findings)
        return findings.problems

    assert audit(*OWN) == []
    assert any("before group 0" in problem for problem in audit("replay.curriculum=halves.py:Halves"))
    assert any("a second time" in problem for problem in audit("replay.order=by_age.py:ByAge"))


def test_every_declaration_is_loaded_without_torch():
    code = (
        "import sys; from streamrl.choices import KINDS\n"
        "for kind in KINDS:\n"
        "    for name in kind.names: kind.load(name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert all(len(kind.names) >= 1 for kind in KINDS)
