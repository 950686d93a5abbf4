"""What `streamrl doctor` says of an installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT = 200.0  # seconds


def doctor(*paths: Path) -> tuple[int, str, str]:
    """Exit code, output and errors with these folders before all others."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "streamrl.cli", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (
            "raise FileNotFoundError('Could not find shared object file')",
            "FileNotFoundError: Could not find shared object",
        ),
        pytest.param(
            "import no_such_package_of_onnx",
            "ModuleNotFoundError: No module named 'no_such_package_of_onnx'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_half_an_installation_of_transformer_engine_is_one_line(tmp_path, part, reason):
    (tmp_path / "transformer_engine/pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine/__init__.py").touch()
    (tmp_path / "transformer_engine/pytorch/__init__.py").write_text(part)
    code, output, errors = doctor(tmp_path, Path.cwd())
    assert code == 1
    (line,) = [line for line in output.splitlines() if line.startswith("BROKEN")]
    assert line.startswith(f"BROKEN Transformer Engine cannot be imported ({reason}")
    assert line.endswith("install requirements/gpu-no-deps.txt as docs/gpu.md says")
    assert "Traceback" not in errors


WITHOUT_MEGATRON = """
import sys
from importlib import metadata

version = metadata.version


def missing(name):
    if name == "megatron-core":
        raise metadata.PackageNotFoundError(name)
    return version(name)


metadata.version = missing
sys.modules["megatron"] = None
"""


def test_without_megatron_core_it_says_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MEGATRON)
    code, output, errors = doctor(tmp_path, Path.cwd())
    assert (code, errors) == (1, "")
    assert "MISSING megatron-core: make venv, or pip install" in output


@pytest.mark.slow
def test_a_whole_installation_says_which_paths_a_run_takes():
    code, output, _ = doctor(Path.cwd())
    assert code == 0
    assert "layers in bfloat16" in output
    assert "BROKEN" not in output
