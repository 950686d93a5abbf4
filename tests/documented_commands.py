"""The shell commands of the documents: where they are, what the page says they need, what its placeholders mean."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
SETTING = re.compile(r"([A-Z_]+)=(.*)")  # of the environment, before a command
PROGRAMS = "streamrl|python3?|make|pip|torchrun|docker|kubectl|sbatch|apt-get|source|bash|git"
# What a line looks like that a reader would type.
SHELL = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) \S")

# Inline code that names a command or one of its options, and is none that can be run.
NAMES = re.compile(r"(streamrl (?!doctor)\S+|python -m (?!benchmarks)\S+|.* (--model|--port|--fleet|--set|--export))")

# What represents something of the reader's own, and what a test puts there.
PLACEHOLDERS = (
    (r"^/path/to/[\w-]+|=/path/to/[\w-]+", "models/tiny"),
    (r"^/shared/", "shared/"),
    (r"\bRUN\.yaml$", "launch/runs/quickstart.yaml"),
    (r"^RUN$|^runs/NAME$", "runs/quickstart"),
    (r"^CONFIG$", "configs/quickstart.yaml"),
    (r"^(SWEEP|FILE)$", "configs/experiments/order.yaml"),
    (r"^RECIPE$", "configs/recipes/verl/qwen3-8b-gsm8k.yaml"),
    (r"\bMODEL\.json$", "qwen3-8b.json"),
    (r"^FOLDER$", "runs/again"),
    (r"^SOURCE$", "models/tiny"),
    (r"^OUT$", "models/converted"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command as a document has it, without comments, on one line."""

    page: str
    text: str
    needs: str = ""  # behind `# needs` in the block: GPUs, a cluster; nothing for what runs anywhere

    @property
    def words(self) -> tuple[str, ...]:
        """What a shell makes of it, placeholders filled in, without the settings before it."""
        return tuple(filled(word) for word in dropwhile(SETTING.fullmatch, shlex.split(self.text)))

    @property
    def environment(self) -> dict[str, str]:
        """The settings before it: of `PYTHONPATH=. streamrl train`."""
        before = takewhile(bool, map(SETTING.fullmatch, shlex.split(self.text)))
        return {found[1]: found[2] for found in before if found}

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def filled(word: str) -> str:
    """`word` without placeholders.

    >>> filled("model.path=/path/to/folder"), filled("RUN")
    ('model.path=models/tiny', 'runs/quickstart')
    """
    for pattern, meaning in PLACEHOLDERS:
        word = re.sub(pattern, lambda found, meaning=meaning: "=" * found[0].startswith("=") + meaning, word)
    return word


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block; language is `inline` for all that is outside of them."""
    pieces = re.split(r"^```(.*)\n((?:(?!```).*\n)*)```$", page.read_text(), flags=re.MULTILINE)
    for place in range(0, len(pieces) - 1, 3):
        yield "inline", pieces[place]
        yield pieces[place + 1], pieces[place + 2]
    yield "inline", pieces[-1]


def commands(page: Path) -> Iterator[Command]:
    """Every command of the page: of its `bash` and `console` blocks, and of its inline code."""
    for language, text in blocks(page):
        if language in ("bash", "console"):
            yield from typed(page, text, prompt="$ " if language == "console" else "")
        elif language == "inline":
            yield from spoken(page, text)


def typed(page: Path, block: str, prompt: str) -> Iterator[Command]:
    """A line each. `# needs WHAT` behind a command is about that one; on a line of its own about all below it."""
    below = ""
    for line in block.replace("\\\n", " ").splitlines():
        code, _, comment = re.sub(r"(^|\s)#", "\0", line, count=1).partition("\0")
        _, marked, needs = comment.partition("needs ")
        if not code.strip():
            below = needs if marked else below
        elif line.startswith(prompt):
            yield Command(page.name, " ".join(code.removeprefix(prompt).split()), needs if marked else below)


def spoken(page: Path, prose: str) -> Iterator[Command]:
    """Inline code that is a whole command, without its optional parts in brackets."""
    for span in re.findall(r"`((?:streamrl|python -m|make) [^`]+)`", prose):
        text = re.sub(r"\s*\[[^\]]*\]", "", " ".join(span.split()))
        if "..." not in text and not NAMES.fullmatch(text):
            yield Command(page.name, text)


def hidden(page: Path) -> list[str]:
    """Lines that a reader would type, in blocks that do not say that they are for a shell."""
    other = [text for language, text in blocks(page) if language in ("", "text")]
    indented = [line[4:] for language, text in blocks(page) if language == "inline" for line in text.splitlines()
                if line.startswith("    ")]  # fmt: skip
    return [line for line in [*indented, *"\n".join(other).splitlines()] if SHELL.match(line)]
