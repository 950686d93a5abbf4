"""What a user installs: the script for CPU machines, from any folder, and the wheel, which needs no clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "requirements" / "install.sh"
DEADLINE = 240.0  # seconds of one command
COPIED = ("configs", "launch", "streamrl", "LICENSE", "README.md", "pyproject.toml")  # what a wheel is made from


def shell(*command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=own | environment, capture_output=True, text=True,
        timeout=DEADLINE,
    )  # fmt: skip


def test_without_an_interpreter_the_script_says_in_one_line_what_is_missing(tmp_path):
    done = shell(INSTALL, folder=tmp_path, PYTHON="python9.9")
    assert done.returncode == 2
    assert done.stderr == (
        "streamrl: python9.9 is not on the path; allowed: Python 3.11 or 3.12, named by PYTHON=/path/to/python3.11\n"
    )
    assert not list(tmp_path.iterdir())


def test_an_interpreter_of_another_version_is_refused_in_one_line(tmp_path):
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.10\n")
    other.chmod(0o755)
    done = shell(INSTALL, folder=tmp_path, PYTHON=str(other))
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, f"streamrl: {other} is Python 3.10")


def test_what_is_installed_already_is_left_alone_and_found_from_any_folder(tmp_path):
    """In the place that is named from the present folder, or in the active environment."""
    files = sorted(ROOT.glob("requirements/*.txt"))
    pins = subprocess.run(
        f"cat {' '.join(map(str, files))} {INSTALL} {ROOT / 'pyproject.toml'} | sha256sum",
        shell=True, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".pins").write_text(pins)
    for words, variables in ([["venv"], {}], [[], {"VIRTUAL_ENV": str(tmp_path / "venv")}]):
        done = shell(INSTALL, *words, folder=tmp_path, PYTHON="python9.9", **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_script_explains_itself(tmp_path):
    done = shell(INSTALL, "--help", folder=tmp_path)
    assert done.returncode == 0
    assert "UV=1 requirements/install.sh" in done.stdout
    assert "#" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: pip install uv")
def test_uv_finds_every_pin(tmp_path):
    """As `UV=1 requirements/install.sh` asks for them, without taking the files."""
    assert shell("uv", "venv", "--python", sys.executable, tmp_path / "venv", folder=tmp_path).returncode == 0
    install = ["uv", "pip", "install", "--dry-run", "--python", tmp_path / "venv"]
    pinned = ["--constraint", ROOT / "requirements" / "constraints.txt"]
    files = [word for name in ("cpu", "dev") for word in ("-r", ROOT / "requirements" / f"{name}.txt")]
    for words in (pinned + files, ["--no-deps", "-r", ROOT / "requirements" / "cpu-no-deps.txt"]):
        done = shell(*install, *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Would install" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wheel_has_all_that_its_commands_read_and_nothing_beside_the_package(tmp_path):
    source, empty, environment = tmp_path / "source", tmp_path / "empty", tmp_path / "venv"
    source.mkdir()
    for name in COPIED:
        subprocess.run(["cp", "--archive", ROOT / name, source], check=True, timeout=DEADLINE)
    built = shell(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source,
        folder=tmp_path,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {re.sub(r"-.*", "", name.partition("/")[0]) for name in names} == {"streamrl"}
    for folder, ending in (
        ("configs", "*.yaml"),
        ("configs", "*.json"),
        ("launch", "*.py"),
        ("launch", "*.j2"),
        ("launch", "*.yaml"),
    ):
        ours = {f"streamrl/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob(ending)}
        assert ours <= set(names)
    venv.create(environment, with_pip=True)
    binaries = environment / "bin"
    installed = shell(binaries / "python", "-m", "pip", "install", "--no-deps", wheel, folder=tmp_path)
    assert installed.returncode == 0, installed.stderr
    # The dependencies are this environment's. Its package is not, which is the clone's: a path brings no finder.
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty.mkdir()
    for words in (
        [binaries / "python", "-c", f"import streamrl; assert streamrl.__file__.startswith({str(site)!r})"],
        [binaries / "streamrl", "--version"],
        [binaries / "streamrl", "doctor"],
        [binaries / "python", "-m", "streamrl.launch.tiny_model", "models/tiny"],
        [binaries / "python", "-m", "streamrl.launch.tiny_vl_model", "models/tiny_vl"],
        [binaries / "python", "-m", "streamrl.launch.tiny_reward_model", "models/tiny_reward"],
        [binaries / "streamrl", "train", "configs/quickstart.yaml", "--dry-run"],
        [binaries / "streamrl", "sweep", "configs/experiments/order.yaml", "--print-jobs"],
        [binaries / "streamrl", "plan", "configs/recipes/verl/qwen3-8b-gsm8k.yaml"],
        [binaries / "python", "-m", "streamrl.launch.render", "hosts", "launch/runs/quickstart.yaml", "--dry-run"],
    ):
        done = shell(*words, folder=empty)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
