"""The documents say what is there: links, paths, commands, configuration keys, navigation, made pages."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.observe.metrics import describe
from tests.own_choices import write_files

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.md")])
MADE = {"configuration.md", "commands.md", "metrics.md"}  # by docs/reference.py, when the site is built
KEYS = {path for path, _ in config_file.fields()}
SECTIONS = {path.rsplit(".", depth)[0] for path in KEYS for depth in (1, 2, 3)} - KEYS
MAPPINGS = tuple(f"{path}." for path, field in config_file.fields() if config_file.allowed(field) == "a mapping")
# Events, and what follows from keys: named as keys are.
NO_KEYS = {
    "checkpoint.damaged",
    "journal.damage",
    "learner.quarantined",
    "replay.end",
    "replay.refused",
    "publish.apply",
    "reward_model.ground_truth",  # a column of data sets
    "publish.waited",
    "replay.slots",
}

FIGURE = re.compile(r"\b\d[\d.]*(?:e-\d+)?\b")  # not of 12k or 135M

FILES = (".py", ".md", ".json", ".yaml", ".sh", ".sbatch", ".safetensors")

FOLDERS = ("streamrl/", "launch/", "benchmarks/", "configs/", "tests/", "docs/", "requirements/")


def reference() -> ModuleType:
    specification = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def parts(page: Path) -> Iterator[tuple[str, str]]:
    """(kind, text) of each part of a page: `prose`, `indented`, or a fence's own language, `` for none."""
    kind, lines = "prose", list[str]()
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            yield kind, "\n".join(lines)
            kind, lines = ("prose" if kind.startswith("```") else line.strip()), []
            continue
        if not kind.startswith("```"):
            now = "indented" if line.startswith("    ") else ("prose" if line.strip() else kind)
            if now != kind:
                yield kind, "\n".join(lines)
                kind, lines = now, []
        lines.append(line)
    yield kind, "\n".join(lines)


def prose(page: Path) -> str:
    return "\n".join(text for kind, text in parts(page) if kind == "prose")


def code(page: Path, *languages: str) -> list[str]:
    return [text for kind, text in parts(page) if kind in languages]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each shell command in the page's blocks, without comments or a description behind."""
    for block in code(page, "```", "```bash", "```console", "indented"):
        for line in block.replace("\\\n", " ").splitlines():
            text = re.sub(r"\s+#.*$", "", line.strip()).removeprefix("$ ")
            if re.match(r"(streamrl|python -m|make) ", text):
                yield shlex.split(re.sub(r"(?<=\S) {3,}(?=[a-z]).*$", "", text) if "'" not in text else text)


def anchors(page: Path) -> set[str]:
    """What `#name` may say of a page: headings that GitHub and Python-Markdown name alike, each there once."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    names = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    github = [re.sub(r"\s", "-", name) for name in names]
    return {name for name in github if re.sub(r"-+", "-", name).strip("-") == name and github.count(name) == 1}


def test_every_link_leads_to_a_file_and_a_heading():
    """As a forge shows the repository: the pages that only the site has are linked by what they are made from."""
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" in link:
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.name}: {link}")
    assert not broken


def test_every_figure_of_the_readme_is_in_the_page_of_figures():
    measured = (ROOT / "README.md").read_text().partition("## What is measured")[2].partition("Each row is printed")[0]
    page = set(FIGURE.findall((ROOT / "docs" / "figures.md").read_text()))
    rows = [line for line in measured.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 5
    for row in rows:
        assert set(FIGURE.findall(row)) <= page, row


def test_what_is_made_for_the_site_is_linked_by_its_source_and_there_by_its_page():
    made = reference().MADE
    assert set(made.values()) == MADE
    for source, page in made.items():
        assert (ROOT / "docs" / source).exists()
        assert f"[x]({page})" in reference().on_page_markdown(f"[x]({source})")


def test_every_path_of_the_repository_that_a_document_names_is_there():
    missing = []
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:
        for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})[\w./-]*)", prose(page)):
            made = name.removeprefix("docs/") in MADE
            if not made and not (ROOT / name).exists() and not list(ROOT.glob(f"{name}.*")):
                missing.append(f"{page.name}: {name}")
    assert not missing


def test_every_streamrl_command_parses_and_its_keys_fit(capsys, monkeypatch, tmp_path):
    write_files(tmp_path)  # the user's own classes that commands name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_file, "describe", str)  # the epilog of --help, made again for every parser
    refused = []
    for page in PAGES:
        for words in commands(page):
            try:
                if words[0] == "streamrl":
                    check(words[1:])
            except (SystemExit, config_file.ConfigError) as error:
                refused.append(f"{page.name}: {' '.join(words)}: {error} {capsys.readouterr().err}")
    assert not refused


def check(words: list[str]) -> None:
    """Raises SystemExit for what argparse refuses, ConfigError for keys or values that do not fit."""
    if "--help" in words:
        words = [word for word in words if word != "--help"]
    options = vars(cli._parse(words))
    overrides = [*(options.get("override") or []), *(options.get("set") or [])]
    for text in [*overrides, *(options.get("vary") or [])]:
        key = text.partition("=")[0]
        if key not in KEYS and not key.startswith(MAPPINGS):
            raise config_file.ConfigError(f"{key}: unknown key")
    path = options.get("config")
    if path is not None and "CONFIG" not in str(path) and (ROOT / path).is_file():
        config_file.load(ROOT / path, overrides)
    elif path is not None and str(path).startswith("configs/"):
        raise config_file.ConfigError(f"{path}: no such file")


def test_every_command_make_target_and_module_that_a_document_names_is_there():
    missing, known = [], set(re.findall(r"^## (.*)$", reference().commands(), re.MULTILINE))
    for page in PAGES:
        spans = re.findall(r"`((?:streamrl|python -m|make) [^`]+)`", prose(page))
        for words in [*commands(page), *(span.split() for span in spans)]:
            if not is_there(words, known):
                missing.append(f"{page.name}: {' '.join(words)}")
    assert not missing


def is_there(words: list[str], known: set[str]) -> bool:
    """Whether what `streamrl NAME`, `make NAME` or `python -m NAME` begins with exists; `NAME` itself does."""
    name = words[2] if words[0] == "python" else words[1]
    if "NAME" in name or name.startswith("-"):
        return True
    if words[0] == "make":
        return name in re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if words[0] == "streamrl":
        return name in known
    module = ROOT.joinpath(*name.split("."))
    ours = name.split(".")[0] in ("streamrl", "launch", "benchmarks")
    return not ours or module.with_suffix(".py").exists() or (module / "__main__.py").exists()


def test_every_yaml_block_that_is_a_configuration_loads(tmp_path):
    refused, loaded = [], 0
    for page in PAGES:
        for block in (text for whole in code(page, "```yaml") for text in alternatives(whole)):
            tree = config_file.parse_yaml(block, page.name)
            if not isinstance(tree, dict) or not tree.keys() <= set(Config.model_fields):
                continue
            file = tmp_path / "block.yaml"
            file.write_text(block)
            try:
                config_file.load(file)
                loaded += 1
            except config_file.ConfigError as error:
                refused.append(f"{page.name}: {error}")
    assert not refused
    assert loaded >= 5


def alternatives(block: str) -> list[str]:
    """The block itself, or each of its entries where a key is in it twice, to show two ways."""
    entries = re.split(r"\n(?=\S)", block)
    keys = [entry.partition(":")[0] for entry in entries]
    return [block] if len(set(keys)) == len(keys) or block.startswith(("-", "#")) else entries


def test_every_configuration_key_that_a_document_names_is_one():
    unknown, sections = [], "|".join(Config.model_fields)
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:
        for key in re.findall(rf"`((?:{sections})\.[a-z_.]+[a-z_])(?:=[^`]*)?`", prose(page)):
            known = key in KEYS | SECTIONS or key.startswith(MAPPINGS) or key.endswith(FILES)
            if not known and key not in NO_KEYS:
                unknown.append(f"{page.name}: {key}")
    assert not unknown


def test_every_page_is_in_the_navigation_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(leaves(site["nav"]))
    assert sorted(listed) == sorted({page.name for page in ROOT.glob("docs/*.md")} | MADE)


def leaves(navigation: object) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    elif isinstance(navigation, dict):
        for below in navigation.values():
            yield from leaves(below)
    elif isinstance(navigation, list):
        for below in navigation:
            yield from leaves(below)


def test_the_page_of_state_machines_is_current():
    page = (ROOT / "docs" / "machines.md").read_text()
    assert page == reference().machines(page), "make docs writes it"


def test_the_made_pages_have_every_key_every_command_and_every_metric():
    configuration, commands = reference().configuration(), reference().commands()
    assert describe() in reference().metrics()
    assert {path for path in KEYS if f"| `{path}` |" in configuration} == KEYS
    headings = re.findall(r"^## (.*)$", configuration, re.MULTILINE)
    assert len(set(headings)) == len(headings)
    assert {"train", "replay", "generator", "learner", "audit"} <= set(re.findall(r"(?m)^## (.*)$", commands))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("text:\n- one\n- two\n  more\nend", "text:\n\n- one\n- two\n  more\n\nend"),
        ("text\n| a |\n|---|", "text\n\n| a |\n|---|"),
        ("text\n```\n- no list\n| no table\n```\nend", "text\n\n```\n- no list\n| no table\n```\n\nend"),
        ("# Title\ntext\n\n    code\n    more", "# Title\ntext\n\n    code\n    more"),
    ],
)
def test_a_page_gets_the_blank_lines_that_python_markdown_needs(written: str, read: str):
    assert reference().spaced(written) == read


def test_the_page_of_devices_says_what_the_device_layer_says():
    tree = ast.parse((ROOT / "streamrl" / "device.py").read_text())
    raised = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    missing = [found[1] for text in raised if (found := re.search(r"missing are (.*?)\. Use", text))]
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert len(missing) == 2
    assert all(text in page for text in missing)
