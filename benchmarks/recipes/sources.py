"""What a source says about one recipe: its script is followed, and its options become keys of streamrl."""

from __future__ import annotations

import posixpath
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from benchmarks.recipes import megatron_rl, shell, verl
from benchmarks.recipes.options import Option, flags, overrides, python_defaults, scalar, yaml_defaults
from benchmarks.recipes.rules import Fact, RuleError, constants, facts
from benchmarks.recipes.scripts import MEGATRON_LM, Origin

Files = Callable[[str], str | None]  # the text of a path, or None

README = "examples/rl/README.md"
MODEL_VARIABLES = ("COMMON_OPTIONS", "ENV_DEPENDENT", "MODEL_OPTIONS")  # of a model's file, for the command of README
VERL_DEFAULTS = "verl/trainer/config/_generated_{}.yaml"


class Checkout:
    """A git folder, bare or with a work tree, at one commit."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder, self.commit = folder, commit

    def is_there(self) -> bool:
        """Has the folder the commit?"""
        return self._git("cat-file", "-e", f"{self.commit}^{{commit}}") is not None

    @cache  # noqa: B019  (one of each source in a process)
    def text(self, path: str) -> str | None:
        """A file of the commit."""
        return self._git("show", f"{self.commit}:{posixpath.normpath(path)}")

    def under(self, folder: str) -> list[str]:
        """The paths of the shell scripts of a folder."""
        listed = self._git("ls-tree", "--name-only", self.commit, f"{folder}/") or ""
        return [path for path in listed.splitlines() if path.endswith(".sh")]

    def _git(self, *words: str) -> str | None:
        done = subprocess.run(["git", "-C", self.folder, *words], capture_output=True, timeout=60)
        return done.stdout.decode() if done.returncode == 0 else None


@dataclass(frozen=True)
class Found:
    """What a source says about one recipe: the trainer that the script is for, and the facts, one a key."""

    trainer: str
    script: str
    facts: tuple[Fact, ...]


def recipe_facts(files: Files, origin: Origin) -> Found:
    """Follow a recipe's script; the facts are in the order of their keys.

    Raises RuleError and ShellError, in one line, where the source says what is not understood.
    """
    follow = _megatron_facts if origin.source == MEGATRON_LM else _verl_facts
    trainer, facts = follow(files, origin)
    by_key = {fact.key: fact for fact in facts}
    return Found(trainer, origin.script, tuple(by_key[key] for key in sorted(by_key)))


def _text(files: Files, path: str) -> str:
    if (text := files(path)) is None:
        raise RuleError(f"{path}: is not there")
    return text


def _command(script: shell.Script, program: str, path: str) -> list[shell.Text]:
    found = [words for words in script.commands if program in map(shell.plain, words)]
    if len(found) != 1:
        raise RuleError(f"{path}: runs {program} {len(found)} times; allowed: once")
    return found[0]


# -- verl


def _verl_facts(files: Files, origin: Origin) -> tuple[str, list[Fact]]:
    script = shell.read(_text(files, origin.script), origin.script, files=files)
    command = _command(script, "verl.trainer.main_ppo", origin.script)
    named = flags(command).get("--config-name")
    trainer = str(named.value).removesuffix(".yaml") if named else "ppo_trainer"
    path = VERL_DEFAULTS.format(trainer)
    found = facts(verl.LANGUAGE, overrides(command), yaml_defaults(_text(files, path), path))
    return f"verl/{trainer}", [*constants(verl.LANGUAGE, files), *found]


# -- Megatron-RL


def _megatron_facts(files: Files, origin: Origin) -> tuple[str, list[Fact]]:
    begin: dict[str, shell.Value] = {"ENV_CONFIG": shell.written(origin.environment, origin.script, 1)}
    model = shell.read(_text(files, origin.script), origin.script, begin, files=files)
    fixed = () if origin.published else MODEL_VARIABLES
    launcher = shell.read(_bash_of(_text(files, README)), README, model.variables, fixed=fixed, files=files)
    given = flags(_command(launcher, "train_rl.py", README))
    saved = model.variables.get(megatron_rl.SAVE_INTERVAL)
    if saved and not origin.published:
        given[megatron_rl.SAVE_INTERVAL] = _option(megatron_rl.SAVE_INTERVAL, saved)
    given |= _environment(files, origin.environment)
    defaults: dict[str, Option] = {}
    for path in megatron_rl.FLAGS_FILES:
        defaults |= python_defaults(_text(files, path), path)
    language = megatron_rl.LANGUAGE
    return "Megatron-RL", [*constants(language, files), *facts(language, given, defaults)]


def _bash_of(markdown: str) -> str:
    """The bash of a page, each line where it is."""
    lines, inside = [], False
    for line in markdown.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = (line.strip() == "```bash") if fence else inside
    return "\n".join(lines) + "\n"


def _option(name: str, value: shell.Value) -> Option:
    text = shell.one_text(value)
    return Option(name, scalar(shell.plain(text)), text[-1].path, text[-1].line)


def _environment(files: Files, path: str) -> dict[str, Option]:
    """The agents of an environments' file: those that are trained, and those that are evaluated alone."""
    text = _text(files, path)
    agents: dict[str, list[str]] = {megatron_rl.TRAINED: [], megatron_rl.EVALUATED: []}
    for entry in yaml.safe_load(text):
        kind = megatron_rl.EVALUATED if entry.get("evaluation_only") else megatron_rl.TRAINED
        agents[kind].append(entry["agent_type"])
    line_of = {name: line for line, words in enumerate(text.splitlines(), 1) for name in words.split()}
    return {kind: Option(kind, names, path, line_of[names[0]]) for kind, names in agents.items() if names}
