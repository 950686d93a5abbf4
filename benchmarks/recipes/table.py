"""The committed tables: what the sources say about each recipe, and what became of each of their scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from benchmarks.recipes.rules import Fact
from benchmarks.recipes.scripts import COMMITS, Script
from benchmarks.recipes.sources import Found

FACTS, SCRIPTS = Path("configs/recipes/facts.tsv"), Path("configs/recipes/scripts.tsv")
PAGE = Path("docs/recipes.md")
BEGIN, END = "<!-- scripts -->\n", "<!-- end -->\n"

TRAINER = "trainer"  # the row that names the trainer and the script of a recipe; what a trainer's recipes share is once
OWN_SCRIPT = "."  # as a path: the recipe's script

HEAD = "".join(
    [
        "# Read out of the sources by `python -m benchmarks.recipes CHECKOUT CHECKOUT`; not edited by hand.\n",
        *(f"# {source} {commit}\n" for source, commit in COMMITS.items()),
    ]
)


def facts_text(found: Mapping[str, Found]) -> str:
    """One line for each fact: recipe or trainer, key, value, path, line, option."""
    lines = [HEAD, "# recipe or its trainer, key, value, path, line, option\n"]
    for trainer in sorted({each.trainer for each in found.values()}):
        recipes = sorted(name for name, each in found.items() if each.trainer == trainer)
        shared = [fact for fact in found[recipes[0]].facts if all(fact in found[name].facts for name in recipes)]
        lines += [_line(trainer, fact, "") for fact in shared]
        for name in recipes:
            script = found[name].script
            lines.append(f"{name}\t{TRAINER}\t{trainer}\t{script}\n")
            lines += [_line(name, fact, script) for fact in found[name].facts if fact not in shared]
    return "".join(lines)


def read_facts(path: Path = FACTS) -> dict[str, dict[str, Fact]]:
    """Recipe -> key -> fact."""
    rows: dict[str, dict[str, Fact]] = {}
    scripts: dict[str, str] = {}
    trainers: dict[str, str] = {}
    for owner, key, value, path_of_fact, *place in _rows(path):
        if key == TRAINER:
            trainers[owner], scripts[owner] = value, path_of_fact
        else:
            where = scripts[owner] if path_of_fact == OWN_SCRIPT else path_of_fact
            rows.setdefault(owner, {})[key] = Fact(key, json.loads(value), where, int(place[0]), place[1])
    return {name: rows[trainer] | rows.get(name, {}) for name, trainer in trainers.items()}


def scripts_text(scripts: Iterable[Script]) -> str:
    """One line for each script: source, path, recipes, why there is none."""
    lines = [f"{script.source}\t{script.path}\t{' '.join(script.recipes)}\t{script.reason}\n" for script in scripts]
    return "".join([HEAD, "# source, script, recipes, why there is none\n", *lines])


def read_scripts(path: Path = SCRIPTS) -> list[Script]:
    """Every script of the sources."""
    return [Script(source, script, tuple(recipes.split()), reason) for source, script, recipes, reason in _rows(path)]


def page_with(scripts: Iterable[Script], page: str) -> str:
    """The page with the table of the scripts between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "".join([head, BEGIN, *_page_table(scripts), END, tail])


def _page_table(scripts: Iterable[Script]) -> Iterator[str]:
    for (source, folder), each in groupby(scripts, key=lambda script: (script.source, script.path.rpartition("/")[0])):
        yield f"\n|{source}, `{folder}`|recipe, or what is missing|\n|---|---|\n"
        for script in each:
            name = script.path.rpartition("/")[2].removesuffix(".sh")
            recipes = " ".join(f"`{recipe.rpartition('/')[2]}`" for recipe in script.recipes)
            yield f"|`{name}`|{recipes or script.reason}|\n"
    yield "\n"


def _line(owner: str, fact: Fact, script: str) -> str:
    path = OWN_SCRIPT if fact.path == script else fact.path
    return f"{owner}\t{fact.key}\t{json.dumps(fact.value)}\t{path}\t{fact.line}\t{fact.option}\n"


def _rows(path: Path) -> Iterator[list[str]]:
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            yield line.split("\t")
