"""Kernels and settings that only a GPU machine has: reachable by keys, refused in one line where they are missing.

Nothing here has run on a GPU: what Megatron and Transformer Engine are asked for is looked at.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_parts import make_config
from megatron.core.models.common.embeddings import rope_utils

from streamrl.config.file import ConfigError, load
from streamrl.device import Device
from streamrl.learner import model as model_module
from streamrl.learner import te
from streamrl.learner.model import LayerChoice, _check_kernels, _transformer_config, build, padded
from streamrl.learner.parallel import Ranks
from streamrl.learner.rows import RowMaker
from streamrl.learner.shape import read_shape
from streamrl.preflight.model import check_model

ENGINE = LayerChoice("transformer_engine", "as on a GPU machine")
CUT = ["learner.ranks=2", "learner.layout.tensor=2"]


@pytest.mark.parametrize(
    ("key", "missing"),
    [
        ("moe_permute_fusion", "Transformer Engine's layers, not local layers: no CUDA on this machine"),
        ("tp_comm_overlap", "Transformer Engine's layers, not local layers: no CUDA on this machine"),
        ("gradient_accumulation_fusion", "fused_weight_gradient_mlp_cuda, which comes with Apex"),
    ],
)
def test_a_kernel_that_is_not_here_is_refused_in_one_line(key, missing, model_folder):
    learner = {key: True}
    if key == "tp_comm_overlap":
        learner |= {"ranks": 2, "layout": {"tensor": 2}}
    config = make_config(model_folder("qwen3_moe"), **learner)
    with pytest.raises(ConfigError, match=rf"^learner\.{key}: true needs {missing}.*; allowed: false$"):
        build(read_shape(config.model.path), config, Device("cpu", 0))


def test_the_overlap_of_tensor_parallel_ranks_needs_some_that_are_sequence_parallel():
    for overrides, given in (
        ([], "tensor=1, sequence=true"),
        ([*CUT, "learner.layout.sequence=false"], "tensor=2, seq"),
    ):
        with pytest.raises(ConfigError, match=rf"learner.tp_comm_overlap: true with learner.layout.{given}.*allowed: "):
            load(None, ["learner.tp_comm_overlap=true", *overrides])
    assert load(None, ["learner.tp_comm_overlap=true", *CUT]).learner.tp_comm_overlap


def test_a_model_without_experts_permutes_nothing(model_folder):
    config = make_config(model_folder(), moe_permute_fusion=True)
    with pytest.raises(ConfigError, match=r"learner\.moe_permute_fusion: true needs a mixture of experts, not Qwen2"):
        check_model(config, read_shape(config.model.path))


def test_the_keys_reach_megatron(model_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # Apex is there
    config = make_config(
        model_folder("qwen3_moe"), "bfloat16", ranks=2, layout={"tensor": 2}, tp_comm_overlap=True,
        gradient_accumulation_fusion=True, moe_permute_fusion=True,
    )  # fmt: skip
    _check_kernels(config.learner, ENGINE)
    taken: list[dict[str, object]] = []
    monkeypatch.setattr(model_module, "TransformerConfig", lambda **fields: taken.append(fields))
    shape = read_shape(config.model.path)
    for learner in (config.learner, make_config(model_folder()).learner):
        _transformer_config(shape, learner, torch.bfloat16, ENGINE, Device("cuda", 0))
    keys = ("tp_comm_overlap", "gradient_accumulation_fusion", "moe_permute_fusion")
    assert [[fields[key] for key in keys] for fields in taken] == [[True] * 3, [False] * 3]
    assert not any(fields["batch_p2p_sync"] for fields in taken)  # it waits for the publisher's streams


def test_buffers_of_the_overlap_are_made_before_the_layers_that_use_them(model_folder, monkeypatch):
    asked: list[dict[str, object]] = []
    base = SimpleNamespace(initialize_ub=lambda **given: asked.append(given))
    config = make_config(
        model_folder(), "bfloat16", ranks=2, layout={"tensor": 2}, tp_comm_overlap=True, tokens_per_micro_batch=61
    )
    shape = read_shape(config.model.path)
    monkeypatch.setattr(model_module, "choose_layers", lambda *_: ENGINE)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())  # of Transformer Engine
    monkeypatch.setattr(te.importlib, "import_module", {"transformer_engine.pytorch.module.base": base}.__getitem__)
    monkeypatch.setattr(model_module, "_chunk", lambda *_, **__: SimpleNamespace(to=lambda device: asked[:]))
    monkeypatch.setattr(model_module.sigmoid_router, "freeze", lambda chunks: None)
    (at_the_layers,) = build(shape, config, Device("cpu", 0))
    assert at_the_layers == [{"shape": [62, shape.hidden], "tp_size": 2, "bootstrap_backend": "gloo"}]


def test_every_row_is_as_long_as_the_buffers_of_the_overlap(model_folder):
    config = make_config(model_folder(), tokens_per_micro_batch=61)
    ranks = Ranks.start(config)
    try:
        (chunk,) = build(read_shape(config.model.path), config, ranks.device)
        short = [SimpleNamespace(ids=range(9), segments=np.array([[0, 9, 0, 0]]))]
        assert RowMaker.of_model(chunk, config, ranks.device.torch_device).length(short) == 9
        chunk.config.tp_comm_overlap = chunk.config.sequence_parallel = True
        chunk.config.tensor_model_parallel_size = 4
        rows = RowMaker.of_model(chunk, config, ranks.device.torch_device)
        assert rows.length(short) == rows._padded(60) == padded(61, chunk.config) == 64
    finally:
        ranks.stop()


@pytest.mark.parametrize("driver", [pytest.param(False, marks=pytest.mark.slow), True])
def test_megatron_is_imported_where_what_needs_the_driver_finds_none(driver, tmp_path):
    """As on a login node with the packages of a GPU node."""
    (tmp_path / "flash_mla.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    code = (
        "import ctypes; load = ctypes.CDLL\n"
        "def without(name, *rest, **more):\n"
        f"    if name == 'libcuda.so.1' and not {driver}: raise OSError(name)\n"
        "    return object() if name == 'libcuda.so.1' else load(name, *rest, **more)\n"
        "ctypes.CDLL = without\n"
        "import streamrl.learner\n"
        "try: import flash_mla\n"
        "except (ImportError, OSError) as error: print(type(error).__name__)\n"
    )
    if not driver:
        code += "import megatron.core.transformer.attention\n"
    environment = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("OSError" if driver else "ModuleNotFoundError")
