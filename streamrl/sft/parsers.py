"""The command line of `streamrl sft`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from streamrl.config import file as config_file

Commands = argparse._SubParsersAction
Add = Callable[[Commands, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_command(commands: Commands, add: Add, add_config: Callable[..., None]) -> None:
    """Add it to the commands of `streamrl`, as `add` makes one; `add_config` gives it CONFIG and `key=value`."""
    sft = add(commands, "sft", _sft, "train on rows of prompts and answers, before a run of `train`, or resume it")
    add_config(sft, optional=False)
    sft.add_argument("--fresh", action="store_true", help="keep an existing run folder as NAME.1 and start a new one")


def _sft(options: argparse.Namespace) -> int:
    config = config_file.load(options.config, options.override)
    from streamrl.sft import command

    return command.main(config, options.config, fresh=options.fresh)
