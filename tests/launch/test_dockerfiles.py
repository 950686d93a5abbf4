"""The Dockerfiles: known instructions, files that exist, pinned images, no root; the CPU one is `make demo`."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

LAUNCH = Path("launch")
DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.gpu"]
INSTRUCTIONS = {"FROM", "ARG", "RUN", "USER", "WORKDIR", "COPY", "ENV", "CMD"}


def _instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and comments left out."""
    lines = [line for line in (LAUNCH / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_instruction_is_known_and_the_image_is_pinned(name):
    instructions = _instructions(name)
    assert {instruction for instruction, _ in instructions} <= INSTRUCTIONS
    assert instructions[0][0] == "FROM"
    assert re.fullmatch(r"[\w/.-]+:[\w.-]*\d[\w.-]*", instructions[0][1])
    assert instructions[-1][0] == "CMD"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_file_that_is_copied_or_run_exists(name):
    for instruction, text in _instructions(name):
        if instruction == "COPY":
            *sources, _ = (word for word in text.split() if not word.startswith("--"))
            assert all(Path(source).exists() for source in sources), text
        if instruction == "RUN":
            assert all(Path(file).exists() for file in re.findall(r"requirements/[\w.-]+", text)), text


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_last_user_is_not_root_and_apt_leaves_no_lists(name):
    instructions = _instructions(name)
    assert [text for instruction, text in instructions if instruction == "USER"] == ["streamrl"]
    for _, text in instructions:
        if "apt-get install" in text:
            assert "--no-install-recommends" in text
            assert text.startswith("apt-get update &&")
            assert text.endswith("rm -rf /var/lib/apt/lists/*")


def test_the_cpu_image_does_what_make_demo_does():
    makefile = Path("Makefile").read_text()
    image = [text for instruction, text in _instructions("Dockerfile.cpu") if instruction in ("RUN", "CMD")]
    assert "@requirements/install.sh $(VENV)" in makefile
    assert "PYTHON=python3.11 requirements/install.sh .venv" in image
    model = re.search(r"python (-m launch\.tiny_model models/tiny)$", makefile, re.MULTILINE)
    train = re.search(r"streamrl (train \S+) \$\(ARGS\) (--fresh)$", makefile, re.MULTILINE)
    assert model is not None
    assert train is not None
    assert f"python {model[1]}" in image
    command = ["streamrl", *train[1].split(), train[2]]
    assert image[-1] == "[" + ", ".join(f'"{word}"' for word in command) + "]"


def test_what_the_images_leave_out_is_the_same():
    cpu, gpu = ((LAUNCH / f"{name}.dockerignore").read_text() for name in DOCKERFILES)
    assert cpu == gpu
    assert {".git", ".venv", "runs", "models"} <= set(cpu.splitlines())


def _pins(name: str) -> dict[str, str]:
    lines = Path("requirements", name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_the_gpu_requirements_agree_with_those_of_cpu_machines():
    gpu = _pins("gpu.txt")
    cpu = _pins("cpu.txt") | _pins("cpu-no-deps.txt")
    assert {name: gpu[name] for name in gpu.keys() & cpu.keys()} == {
        name: cpu[name] for name in gpu.keys() & cpu.keys()
    }
    assert gpu["sglang"] == "0.5.23"
    assert gpu["transformer-engine"] == gpu["transformer-engine-cu13"]
    assert _pins("gpu-no-deps.txt") == {"transformer-engine-torch": gpu["transformer-engine"]}
    assert "torch" not in gpu  # sglang says which


def test_what_is_installed_without_its_dependencies_finds_them_among_the_others():
    facts = json.loads(Path("requirements/gpu-no-deps.json").read_text())
    assert {name: fact["version"] for name, fact in facts.items()} == _pins("gpu-no-deps.txt")
    lines = Path("requirements/gpu.txt").read_text().splitlines()
    named = {re.split(r"[=<>]", line)[0] for line in lines if line and not line.startswith("#")}
    extra = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    by_sglang = {"torch"}
    for fact in facts.values():
        needed = {name.replace("cu12", "cu13") for name in fact["requires"]} - by_sglang
        assert needed <= named
        plain = {re.split(r"[=<>]", each)[0] for each in (*extra, *_project_dependencies())}
        assert needed <= plain


def _project_dependencies() -> list[str]:
    return tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
