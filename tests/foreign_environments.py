"""Virtual environments of foreign libraries for tests, made once in .venv-envs/ and kept while their pins stay."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-envs"
EXAMPLES = ROOT / "tests" / "tasks" / "foreign"  # environments written against the libraries

INSTALL_TIMEOUT = 500.0  # seconds


def python_of(library: str) -> Path:
    """The interpreter of the environment with `requirements/foreign/LIBRARY.txt`, and without streamrl."""
    FOLDER.mkdir(exist_ok=True)
    venv, pins = FOLDER / library, (ROOT / "requirements" / "foreign" / f"{library}.txt").read_text()
    with (FOLDER / f"{library}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        made = venv / ".pins"
        if not made.exists() or made.read_text() != pins:
            _install(venv, library)
            made.write_text(pins)
    return venv / "bin" / "python"


def _install(venv: Path, library: str) -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--clear", str(venv)], check=True, timeout=INSTALL_TIMEOUT)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    requirements = ROOT / "requirements" / "foreign" / f"{library}.txt"
    subprocess.run([*pip, "-r", str(requirements)], check=True, timeout=INSTALL_TIMEOUT)
