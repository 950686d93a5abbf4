"""Stand-ins take the place of absent packages only, and survive what importers do with them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.engine import stand_ins


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test makes importable is gone after it."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_an_absent_package_gets_a_stand_in_that_takes_part_in_imports_and_decorations():
    assert stand_ins.install(("gpu_only",)) == ("gpu_only",)
    language = importlib.import_module("gpu_only.language")
    gpu_only = importlib.import_module("gpu_only")

    @gpu_only.jit
    def kernel() -> int:
        return 7

    @gpu_only.autotune(configs=[gpu_only.Config({"BLOCK": 8}, num_warps=4)], key=["n"])
    def tuned(x: language.tensor | None) -> int:
        return 8

    assert (kernel(), tuned(None)) == (7, 8)
    assert "cpu" not in gpu_only.backends.backends
    assert not gpu_only.runtime
    assert gpu_only.language is language


def test_an_installed_package_is_never_replaced(tmp_path: Path):
    (tmp_path / "gpu_really").mkdir()
    (tmp_path / "gpu_really" / "__init__.py").write_text("real = True\n")
    sys.path.insert(0, str(tmp_path))
    assert stand_ins.install(("gpu_really", "json")) == ()
    assert importlib.import_module("gpu_really").real is True


def test_torch_sees_no_triton_behind_the_stand_ins():
    code = (
        "from streamrl.engine import stand_ins; stand_ins.install()\n"
        "import triton\n"
        "from torch.utils._triton import has_triton\n"
        "real = 'streamrl' not in (triton.__file__ or '')\n"
        "assert real or not has_triton()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_pinned_memory_is_ordinary_memory_where_there_is_no_device_for_it():
    code = (
        "from streamrl.engine import stand_ins; stand_ins.install()\n"
        "import torch, sgl_kernel\n"
        "if not torch.cuda.is_available():\n"
        "    assert torch.tensor([1, 2], pin_memory=True).pin_memory().tolist() == [1, 2]\n"
        "    assert torch.zeros(2, dtype=torch.int32, pin_memory=True).dtype == torch.int32\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
