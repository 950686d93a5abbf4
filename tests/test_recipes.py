"""Every recipe says what its script says: each number is compared with the table that was read out of the sources."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.recipes import table
from benchmarks.recipes.differences import DIFFERENT, OURS, is_different, said, value_of
from benchmarks.recipes.scripts import COMMITS, NOT_BUILT, ORIGINS, OWN, WITHOUT_RECIPE, Script
from streamrl.choices import FAMILIES
from streamrl.config import Config
from streamrl.config.file import load
from streamrl.observe.mismatch import LEAST_ANSWERS

RECIPES = Path("configs/recipes")
SCREEN = 40  # lines
FACTS = table.read_facts()
NAMES = sorted(f"{file.parent.name}/{file.stem}" for file in RECIPES.glob("[!ps]*/*.yaml"))


@cache
def recipe(name: str) -> Config:
    return load(RECIPES / f"{name}.yaml")


def differing(name: str) -> set[str]:
    """The keys about which a recipe says something else than its script."""
    return {key for key, fact in FACTS[name].items() if value_of(recipe(name), key) != fact.value}


def test_every_recipe_has_its_script_or_says_that_it_has_none():
    assert set(NAMES) == ORIGINS.keys() | OWN
    assert ORIGINS.keys() == FACTS.keys()
    heads = {name: (RECIPES / f"{name}.yaml").read_text().partition("\nbase")[0] for name in NAMES}
    assert {name for name, head in heads.items() if "No script" in head} == OWN


@pytest.mark.parametrize("name", FACTS)
def test_a_recipe_says_what_its_script_says(name):
    found = {key: value_of(recipe(name), key) for key in FACTS[name] if not is_different(key, name)}
    assert found == {key: FACTS[name][key].value for key in found}


@pytest.mark.parametrize("name", FACTS)
def test_what_a_recipe_says_is_in_its_script_or_has_a_reason(name):
    assert said(recipe(name)) - FACTS[name].keys() - OURS.keys() == set()


def test_no_reason_is_left_over():
    for each in DIFFERENT:
        assert [name for name in FACTS if is_different(each.key, name) and each.key in differing(name)], each
    unsaid = {key for name in FACTS for key in said(recipe(name)) - FACTS[name].keys()}
    assert OURS.keys() - unsaid == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_reads_in_one_screen_and_fits_its_ranks(name):
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) <= SCREEN
    config = recipe(name)
    layout = config.learner.layout
    assert config.run.name == Path(name).name
    assert config.learner.ranks % (layout.tensor * layout.pipeline * layout.context) == 0
    assert config.generate.sampling.max_new_tokens < config.learner.tokens_per_micro_batch


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_in_bfloat16_compares_its_servers_with_the_learner(name):
    config = recipe(name)
    assert config.model.dtype == "bfloat16"
    assert config.publish.mismatch >= LEAST_ANSWERS


def test_the_math_mix_asks_gsm8k_and_math_in_proportion_to_their_prompts():
    assert {share.name: share.weight for share in recipe("verl/qwen2-7b-math").task.shares} == {
        "gsm8k": 7473,
        "math": 7500,
    }


# -- the scripts


def listed() -> list[Script]:
    return table.read_scripts()


def test_every_script_has_a_recipe_or_a_reason():
    found = listed()
    assert {script.source for script in found} == COMMITS.keys()
    assert {name for script in found for name in script.recipes} == ORIGINS.keys()
    assert {script.reason for script in found} == {"", *WITHOUT_RECIPE.values()}
    assert all(bool(script.recipes) is not bool(script.reason) for script in found)


def test_the_page_has_every_script():
    page = table.PAGE.read_text()
    assert table.page_with(listed(), page) == page


def test_a_model_that_a_family_builds_has_its_recipe():
    built = {name for family in FAMILIES.names for name in FAMILIES.load(family).architectures}
    assert built.isdisjoint(NOT_BUILT.values())
