"""The command lines of `streamrl init` and `streamrl schema`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from streamrl.choices import TASKS

Commands = argparse._SubParsersAction
Add = Callable[[Commands, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_commands(commands: Commands, add: Add) -> None:
    """Add both to the commands of `streamrl`, as `add` makes one."""
    init = add(commands, "init", _init, "write a commented configuration, and what its task needs, for a first run")
    init.add_argument("folder", type=Path, help="new folder")
    init.add_argument(
        "--task", default="jsonl", metavar="NAME", help=f"one of {', '.join(TASKS.names)} (default: jsonl)"
    )
    init.add_argument("--model", metavar="MODEL", help="Hugging Face folder or hub name (default: models/tiny)")

    schema = add(commands, "schema", _schema, "print the JSON schema of a configuration, for editors")
    schema.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it here instead")


def _init(options: argparse.Namespace) -> int:
    from streamrl.starter import folder

    return folder.main(options.folder, options.task, options.model)


def _schema(options: argparse.Namespace) -> int:
    from streamrl.starter import schema

    return schema.main(options.output)
