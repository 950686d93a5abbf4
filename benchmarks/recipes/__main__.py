"""Read the recipes' facts out of checkouts of Megatron-LM and verl:

    python -m benchmarks.recipes CHECKOUT CHECKOUT

A checkout is a git folder, bare or not, that has the commit of benchmarks/recipes/scripts.py, whatever it is at. It
writes configs/recipes/facts.tsv, configs/recipes/scripts.tsv and the table of docs/recipes.md; a second time changes
nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recipes import table
from benchmarks.recipes.rules import RuleError
from benchmarks.recipes.scripts import COMMITS, FOLDERS, ORIGINS, scripts
from benchmarks.recipes.shell import ShellError
from benchmarks.recipes.sources import Checkout, recipe_facts


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables. Returns 0, or 2 with one line for what is missing or not understood."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT", help="git folder of Megatron-LM or verl")
    parser.add_argument("--into", type=Path, default=Path(), help="folder with configs/ and docs/")
    given = parser.parse_args(arguments)
    try:
        _write(given.checkouts, given.into)
    except (RuleError, ShellError) as error:
        print(f"recipes: {error}", file=sys.stderr)
        return 2
    return 0


def _write(folders: Sequence[Path], into: Path) -> None:
    checkouts = {source: _checkout(folders, source) for source in COMMITS}
    listed = [each for source, it in checkouts.items() for each in scripts(source, it.under(FOLDERS[source]))]
    found = {name: recipe_facts(checkouts[origin.source].text, origin) for name, origin in ORIGINS.items()}
    (into / table.FACTS).write_text(table.facts_text(found))
    (into / table.SCRIPTS).write_text(table.scripts_text(listed))
    page = into / table.PAGE
    page.write_text(table.page_with(listed, page.read_text()))
    print(f"{len(found)} recipes after {sum(bool(each.recipes) for each in listed)} of {len(listed)} scripts")


def _checkout(folders: Sequence[Path], source: str) -> Checkout:
    for folder in folders:
        if (checkout := Checkout(folder, COMMITS[source])).is_there():
            return checkout
    raise RuleError(f"{' '.join(map(str, folders))}: none has {COMMITS[source]}; allowed: a git folder of {source}")


if __name__ == "__main__":
    sys.exit(main())
