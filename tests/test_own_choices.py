"""Choices of a user's own, as the how-to pages show them, in a folder outside of streamrl: no file of it is touched.

The blocks of a page that begin with the name of a file are written into one folder, and the page's commands are run
there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from docs import reference
from streamrl import choices
from streamrl.choices import FAMILIES, KINDS, REASONING_PARSERS, REWARDS, SINKS, TOOL_PARSERS, TOOLS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.senseless import warnings
from streamrl.lab.audit.findings import Findings
from streamrl.lab.audit.history import History
from streamrl.lab.simulate.circle import Circle
from streamrl.lab.simulate.model import Line
from streamrl.places import absolute
from streamrl.replay.orders import make_order
from streamrl.types import Batch, PolicyVersion
from tests.documented_commands import ROOT, blocks
from tests.lab.plan_recipes import H100, QWEN, planned
from tests.lab.test_simulate_circle import model
from tests.own_choices import OWN, PAGES, path_of, write_files

SHORT = "howto-order.md"  # the page whose tests are done in seconds


@pytest.fixture
def folder(tmp_path, monkeypatch, model_folders):
    """The files of all pages and a small model, in the working folder."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(model_folders[0])
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page == SHORT else pytest.mark.slow) for page in PAGES],
)
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
    assert placed.publish.transport_options == {"local": f"{folder}/fetched"}
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
        "override replay.order_options.oldest: unknown key (given True); allowed: oldest_first; "
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
    (used,) = [each for each in plan.publishing if each.used]
    assert used.transport == f"{folder}/fetched.py:Fetched"
    assert used.pause < next(each.pause for each in plan.publishing if each.transport == "disk")


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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.key)
def test_every_built_in_choice_has_a_path(kind):
    for name in kind.names:
        assert kind.load(path_of(kind, name)) is kind.load(name)
        assert kind.is_built_in(path_of(kind, name))


def test_what_is_built_in_may_be_given_by_its_path_and_is_the_same():
    # Tools are arguments of one task; the family is found by the model; there is no sink, no parser and no part.
    without = (TOOLS, FAMILIES, SINKS, REWARDS, TOOL_PARSERS, REASONING_PARSERS)
    keys = [kind for kind in KINDS if kind not in without]
    chosen = {kind: config_file.value_at(Config(), kind.key) for kind in keys}
    names = [f"{kind.key}={name}" for kind, name in chosen.items()]
    paths = [f"{kind.key}={path_of(kind, name)}" for kind, name in chosen.items()]
    assert "replay.order=streamrl.replay.orders.fifo:Fifo" in paths
    plans = [planned(QWEN, *words, machines=H100) for words in (names, paths)]
    assert [plan.first_host for plan in plans] == [plans[0].first_host] * 2
    assert [plan.bound for plan in plans] == [plans[0].bound] * 2
    rows = []
    for words in (names, paths):
        config = config_file.load(None, [*words, "run.steps=8"])
        assert warnings(config) == []
        rows.append(Circle(config, model(learner=Line(0.2, 0.0))).run())
    assert rows[0] == rows[1]
