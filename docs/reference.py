"""The pages that are made from the code when the site is built: configuration.md, commands.md and metrics.md.

A hook of mkdocs (`mkdocs.yml`). It also writes the state machines into machines.md, which is a kept page, and puts
blank lines where CommonMark needs none and Python-Markdown does.
"""

from __future__ import annotations

import argparse
import html
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from streamrl import cli
from streamrl.choices import Kind, kind_in
from streamrl.config import Config
from streamrl.config.file import describe, fields
from streamrl.config.section import Section
from streamrl.config.words import allowed
from streamrl.machine import Machine
from streamrl.observe import metrics as table

# How a block begins that may directly follow a paragraph in CommonMark.
_BLOCK = re.compile(r"(?P<fence>```)|(?P<table>\|)|(?P<list>(?:[-*+]|\d+\.) )")

# What a page links to, so that a forge finds it, and the page of the site that is made from it.
MADE = {
    "../streamrl/config/": "configuration.md",
    "../streamrl/cli.py": "commands.md",
    "../streamrl/observe/metrics.py": "metrics.md",
}

_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def configuration() -> str:
    """The page of all keys: a heading for each section, a table of its keys."""
    parts = [
        "# Configuration",
        "Made from `streamrl/config/`, as is `streamrl train --help`. A key is written as in YAML, one level for each "
        "dot, or behind a command as `key=value`. Each mistake is refused by one line: file and line, the key, the "
        "value, what is allowed, and the nearest known key, also from the names of other trainers. A file may build "
        "on others: `base: other.yaml`, or a list. `streamrl schema` prints the JSON schema for editors.",
    ]
    defaults = dict(re.findall(r"^  ([\w.]+)=(.*)$", describe(), re.MULTILINE))
    sections: dict[str, list[tuple[str, FieldInfo]]] = {}
    for path, field in fields():
        sections.setdefault(path.rpartition(".")[0], []).append((path, field))
    tops = list(Config.model_fields)
    for section in sorted(sections, key=lambda name: (tops.index(name.split(".")[0]), name)):
        parts.append(f"## {section}\n{_described(section)}")
        rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
        for path, field in sections[section]:
            accepted = re.sub(r"matching (\S+)", r"matching `\1`", allowed(field))
            cells = (f"`{path}`", f"`{defaults[path]}`", accepted, field.description or "")
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows))
        kinds = [kind for _, field in sections[section] if (kind := kind_in(field.metadata))]
        parts += [choices(kind, kind.names) for kind in kinds]
    return "\n\n".join(parts) + "\n"


def choices(kind: Kind, names: Iterable[str]) -> str:
    """What can be said for a key that holds a choice: a table of choices, built in or a path."""
    rows = [f"| `{kind.key}` | meaning | keys that it uses | own options |", "|---|---|---|---|"]
    for name in names:
        declaration = kind.load(name)
        keys = ", ".join(f"`{key}`" for key in sorted(declaration.uses)) if not kind.hosted else ""
        options = "; ".join(
            f"`{key}`: {field.description} ({allowed(field)})"
            for key, field in ({} if kind.hosted else declaration.Options.model_fields).items()
        )
        meaning = " ".join((declaration.__doc__ or "").partition("\n\n")[0].split())
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", meaning, keys, options)) + " |"
        )
    return "\n".join(rows)


def commands() -> str:
    """The page of all commands: what each does, its usage, its arguments."""
    parts = [
        "# Commands",
        "Made from `streamrl/cli.py`. `key=value` behind a configuration changes one of its keys: "
        "[configuration.md](configuration.md). Exit codes: 0 done, 1 failed, 2 wrong usage or configuration "
        "(a line for each mistake), 130 interrupted after a clean checkpoint.",
    ]
    for name, text, parser in _subcommands():
        parts.append(f"## {name}\n{text}")
        usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
        parts.append(f"```\n{usage}\n```")
        rows = [f"| `{words}` | {meaning} |" for words, meaning in _arguments(parser)]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """The page of all metrics."""
    return (
        "# Metrics\n\nMade from `streamrl/observe/metrics.py`. Each learner step appends one object to "
        "`RUN/metrics.jsonl`; Weights & Biases and TensorBoard use the same names, Prometheus `streamrl_` and the name "
        "with `_` for `/`: [watching a run](watching.md).\n\n" + table.describe() + "\n"
    )


def machines(page: str) -> str:
    """The page of all state machines, with the part between its markers written again."""
    begin, end = "<!-- machines: written by docs/reference.py -->\n", "<!-- end of machines -->\n"
    parts = [
        f"## {machine.name}\n`{module.replace('.', '/')}.py`\n\n```mermaid\n{machine.mermaid()}\n```\n"
        for module, machine in _machines()
    ]
    before, _, rest = page.partition(begin)
    return before + begin + "\n".join(parts) + end + rest.partition(end)[2]


def on_pre_build(config: Any) -> None:
    """Called by mkdocs before it looks for pages."""
    write_machines(Path(config.docs_dir) / "machines.md")


def write_machines(page: Path) -> None:
    """Bring machines.md up to date."""
    if (written := machines(page.read_text())) != page.read_text():
        page.write_text(written)


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs when it has found the pages: adds those that are made."""
    from mkdocs.structure.files import File

    made = {"configuration.md": configuration(), "commands.md": commands(), "metrics.md": metrics()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page: its text as Python-Markdown reads it, and the site's script draws it."""
    for source, made in MADE.items():
        markdown = markdown.replace(f"]({source})", f"]({made})")
    return _MERMAID.sub(
        lambda found: f'<pre class="mermaid"><code>{html.escape(found[1])}</code></pre>', spaced(markdown)
    )


def spaced(markdown: str) -> str:
    """The same text with a blank line between a paragraph and a list, table or fence, and behind a fence.

    >>> spaced("text:\\n- one\\n- two")
    'text:\\n\\n- one\\n- two'
    """
    lines: list[str] = []
    last = ""  # what the line before was part of: fence, table, list or, empty, anything else
    inside = False  # a fence
    for line in markdown.splitlines():
        found = _BLOCK.match(line)
        kind = (found.lastgroup or "") if found and not inside else ""
        if inside:
            kind = "fence"
        elif last == "list" and line.startswith("  "):
            kind = "list"  # the rest of an entry
        if line and lines and lines[-1] and not inside and (last == "fence" or kind != last):
            lines.append("")
        lines.append(line)
        if line.startswith("```"):
            inside = not inside
        last = kind
    return "\n".join(lines)


def _machines() -> Iterator[tuple[str, Machine[Any, Any]]]:
    """(module, machine) of each `NAME = Machine(...)` of the package, by the names of the modules."""
    package = Path(cli.__file__).parent
    for file in sorted(package.rglob("*.py")):
        module = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for name in re.findall(r"^(\w+)(?:: [^=]+)? = Machine\(", file.read_text(), re.MULTILINE):
            yield module, getattr(importlib.import_module(module), name)


def _described(section: str) -> str:
    """What the section's class says that it is."""
    found: type[Section] = Config
    for name in section.split("."):
        annotation = found.model_fields[name].annotation
        assert isinstance(annotation, type)
        found = annotation
    return (found.__doc__ or "").strip().splitlines()[0]


def _subcommands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, text and parser of each command, in the order of `streamrl --help`."""
    for action in cli._parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            yield from ((name, texts[name], parser) for name, parser in action.choices.items())


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.dest != "help":
            metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            words = ", ".join(action.option_strings) or metavar
            if action.option_strings and action.nargs != 0:
                words += f" {metavar}"
            yield words, (action.help or "").replace("|", "\\|")


if __name__ == "__main__":  # machines.md alone, without the site
    write_machines(Path(__file__).with_name("machines.md"))
