"""What the GPU requirement set installs, as its packages and streamrl see it on a machine without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from streamrl.engine import hardware
from streamrl.engine.hardware import NCCL_ENVIRONMENT, has_cuda, torch_cuda
from streamrl.engine.stand_ins import ABSENT_ON_CPU, install

FACTS = json.loads(Path("requirements/gpu-no-deps.json").read_text())
SECONDS = 200.0  # that a command may take


def installed() -> dict[str, str]:
    """Version by name of all that is installed here."""
    return {canonicalize_name(each.metadata["Name"]): each.version for each in metadata.distributions()}


def unmet(requirements: list[str], present: dict[str, str]) -> list[str]:
    """Those of `requirements` that apply to this machine and that `present` does not satisfy."""
    parsed = [Requirement(text) for text in requirements]
    wanted = [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [
        str(each)
        for each in wanted
        if not each.specifier.contains(present.get(canonicalize_name(each.name), ""), prereleases=True)
        or canonicalize_name(each.name) not in present
    ]


def test_every_package_of_the_set_has_what_its_own_metadata_asks_for():
    present = installed()
    found = {each.metadata["Name"]: unmet(each.requires or [], present) for each in metadata.distributions()}
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert len(found) > 100


def test_what_is_compiled_where_it_is_used_has_what_it_asks_for():
    present = installed()
    for name, fact in FACTS.items():
        assert name not in present, "these tests fake it"
        assert unmet([each.replace("cu12", "cu13") for each in fact["requires"]], present) == []
    assert unmet(["transformer-engine-cu12", "onnx<1"], present) == ["transformer-engine-cu12", "onnx<1"]


def test_the_pins_and_the_extra_of_the_project_are_what_is_installed():
    present = installed()
    lines = [line for line in Path("requirements/gpu.txt").read_text().splitlines() if line and line[0] != "#"]
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert unmet([*lines, *project["dependencies"], *project["optional-dependencies"]["gpu"]], present) == []


def test_torch_is_the_one_that_sglang_pins_and_a_build_for_cuda():
    (pin,) = {text for text in metadata.requires("sglang") or [] if re.fullmatch(r"torch==[\d.]+", text)}
    assert installed()["torch"].partition("+")[0] == pin.removeprefix("torch==")
    assert torch_cuda() is not None
    assert torch_cuda().startswith("13.")


def test_transformer_engine_needs_what_its_part_for_torch_imports():
    assert "transformer_engine.pytorch.onnx_extensions" in sys.modules  # it imports onnxscript at module level
    for name in FACTS["transformer-engine-torch"]["requires"]:
        if not name.startswith("transformer-engine"):
            importlib.import_module(name)


def test_a_gpu_is_used_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    assert not has_cuda()
    (tmp_path / "nvidia0").touch()
    assert has_cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_cuda()


def test_nothing_that_sglang_imports_is_stood_in_for():
    assert install(ABSENT_ON_CPU) == ()


def test_doctor_says_in_one_line_that_the_compiled_part_is_missing():
    code, output, errors = run("-m", "streamrl.cli", "doctor")
    assert code == 1
    (line,) = [line for line in output.splitlines() if line.startswith("BROKEN")]
    assert line.startswith("BROKEN Transformer Engine cannot be imported (FileNotFoundError: Could not find shared")
    assert "Traceback" not in errors


SET = """
import json, os, sys
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import ServerArgs
engine._set_envs_and_config(ServerArgs(model_path=sys.argv[1], attention_backend="triton", device="cpu"))
print(json.dumps({name: os.environ[name] for name in sys.argv[2:]}))
"""


@pytest.mark.parametrize("given", [{}, {"NCCL_CUMEM_ENABLE": "1"}], ids=["unset", "set"])
def test_both_ends_of_a_weight_group_have_the_same_settings_of_nccl(given, model_folder, monkeypatch):
    for name in NCCL_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, output, errors = run("-c", SET, str(model_folder("qwen2")), *NCCL_ENVIRONMENT)
    assert code == 0, errors
    assert json.loads(output.splitlines()[-1]) == hardware.nccl_environment()


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of Python without the faked extension, the checkout before all else."""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    return done.returncode, done.stdout, done.stderr
