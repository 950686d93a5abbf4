"""A repository of the hub at a revision: where the hub's cache has it, and the command that fetches it.

    CACHE/models--ORG--NAME/refs/main            the commit that the branch was at when it was fetched last
    CACHE/models--ORG--NAME/snapshots/COMMIT/    the files of that commit

Nothing here asks the hub.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MAIN = "main"  # the revision where none is given

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A model or a data set. Example: `Repository(name="Qwen/Qwen3-0.6B", revision="main")`."""

    name: str
    kind: Literal["model", "dataset"] = "model"
    revision: str | None = None  # branch, tag or commit; None: main
    cache: Path | None = None  # None: the hub's default, which HF_HOME and HF_HUB_CACHE move

    @property
    def at(self) -> str:
        """The revision, by its name."""
        return self.revision or MAIN

    @property
    def root(self) -> Path:
        """The cache that it is looked for in."""
        return (default_cache() if self.cache is None else self.cache).expanduser().absolute()

    @property
    def folder(self) -> Path:
        return self.root / f"{self.kind}s--{self.name.replace('/', '--')}"

    @property
    def is_pinned(self) -> bool:
        """Is the revision a whole commit, which no push changes?"""
        return _COMMIT.fullmatch(self.at) is not None

    def snapshot(self) -> Path | None:
        """The cached folder of the revision, whole or not; None where nothing of it is cached."""
        commit = self.at if self.is_pinned else _text(self.folder / "refs" / self.at)
        folder = self.folder / "snapshots" / commit if commit and _COMMIT.fullmatch(commit) else None
        return folder if folder is not None and folder.is_dir() else None

    def command(self) -> str:
        """The command line that fetches all of it.

        >>> Repository(name="openai/gsm8k", kind="dataset", revision="v1").command().partition("hf ")[2]
        'download openai/gsm8k --repo-type dataset --revision v1'
        """
        words = ["hf", "download", self.name]
        words += ["--repo-type", self.kind] if self.kind != "model" else []
        words += ["--revision", self.revision] if self.revision is not None else []
        words += ["--cache-dir", str(self.root)] if self.cache is not None else []
        return f"{'HF_HUB_OFFLINE=0 ' if is_offline() else ''}{shlex.join(words)}"


def default_cache() -> Path:
    """The hub's cache where no other one is given."""
    from huggingface_hub import constants  # it takes a third of a second: only who asks of the hub imports it

    return Path(constants.HF_HUB_CACHE)


def is_offline() -> bool:
    """Does HF_HUB_OFFLINE forbid this process to ask the hub?"""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_name(text: str) -> bool:
    """Whether a text may be the name of a repository: `org/name`, or `name`.

    >>> is_name("Qwen/Qwen3-0.6B"), is_name("gpt2"), is_name("./gpt2"), is_name("a/b/c"), is_name("/srv/gpt2")
    (True, True, False, False, False)
    """
    return _NAME.fullmatch(text) is not None and "--" not in text and ".." not in text


def model_of(folder: Path) -> Repository | None:
    """The model whose snapshot in a cache `folder` is, pinned to its commit; None for any other folder.

    >>> model_of(Path("/hub/models--org--name/snapshots/" + 40 * "a")).name
    'org/name'
    """
    stored = folder.parent.parent.name
    if folder.parent.name != "snapshots" or _COMMIT.fullmatch(folder.name) is None or stored[:8] != "models--":
        return None
    return Repository(name=stored[8:].replace("--", "/"), revision=folder.name, cache=folder.parents[2])


def label(folder: Path) -> str:
    """What a model's folder is called: its name, a snapshot by its model and the commit's beginning.

    >>> label(Path("/srv/tiny")), label(Path("/hub/models--org--name/snapshots/" + 40 * "a"))
    ('tiny', 'name@aaaaaaa')
    """
    model = model_of(folder)
    return folder.name if model is None else f"{model.name.rpartition('/')[2]}@{model.at[:7]}"


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
