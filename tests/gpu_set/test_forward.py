"""Transformer Engine's layers, their kernels written in torch, give the numbers of the local layers.

What is seen is the wiring: which norm, bias, angle, sequence and adapter meets which token, on one rank and on two
that cut the model or its rows. The kernels are not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_kernels
from engine_learner import log_probs_and_gradients, write_random_adapters
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.random_models import ENGINE_FAMILIES, largest_difference, make_batch
from streamrl.learner import lora, lora_folder
from streamrl.learner.attention import Slice, describe_row_for_engine
from streamrl.learner.huggingface import load_weights
from streamrl.learner.shape import read_shape

FOLDER = Path(__file__).parent
SECONDS = 240.0  # that two ranks may take
NEAR = 2e-5  # of float32 sums in another order


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_kernels.install(monkeypatch)


@pytest.fixture
def settings_of(model_folder: Any, learner: Any, tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    """`settings_of(family, rank)`: the learner's, with random adapters on all that may have some, or none."""

    def make(family: str, rank: int) -> dict[str, Any]:
        if rank == 0:
            return {}
        shape = read_shape(model_folder(family))
        targets = ["linear_qkv", "linear_proj"] + ([] if shape.moe is not None else ["linear_fc1", "linear_fc2"])
        targets = [target for target in targets if target not in shape.family.without_adapters]
        lora = {"rank": rank, "alpha": 6, "targets": targets}
        made = learner(model_folder(family), dtype="float32", engine=False, lora=lora)
        return {
            "lora": {**lora, "publish": "adapter", "adapter": str(write_random_adapters(made, tmp_path / "adapter"))}
        }

    return make


def assert_near(
    ours: tuple[Tensor, Tensor, dict[str, Tensor]], local: tuple[Tensor, Tensor, dict[str, Tensor]]
) -> None:
    """Log-probs, entropies and gradients are the same, but for rounding."""
    torch.testing.assert_close(ours[0], local[0], rtol=NEAR, atol=NEAR)
    torch.testing.assert_close(ours[1], local[1], rtol=NEAR, atol=NEAR)
    assert largest_difference(ours[2], local[2]) < 10 * NEAR


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_local_layers(family, rank, model_folder, learner, settings_of):
    folder, settings = model_folder(family), settings_of(family, rank)
    local = log_probs_and_gradients(learner(folder, dtype="float32", engine=False, **settings))
    assert_near(log_probs_and_gradients(learner(folder, dtype="float32", **settings)), local)


CUT = [
    ("qwen2", 0, {"context": 2}),
    ("qwen3", 4, {"context": 2}),
    ("qwen3_moe", 4, {"context": 2}),
    ("qwen2", 0, {"tensor": 2}),
    ("qwen2", 4, {"tensor": 2}),
    ("qwen2", 4, {"tensor": 2, "sequence": False}),
]


@pytest.mark.parametrize("case", CUT, ids=str)
def test_two_ranks_give_the_numbers_of_one(case, model_folder, learner, settings_of, tmp_path):
    family, rank, layout = case
    folder, settings = model_folder(family), settings_of(family, rank)
    local = log_probs_and_gradients(learner(folder, dtype="float32", engine=False, **settings))
    found = on_two_ranks("numbers", folder, {**settings, "layout": layout}, tmp_path / "found.pt")
    assert_near(found, local)


HELD = [
    ("qwen2", {"tensor": 2}),
    ("llama", {"pipeline": 2}),
    ("qwen3_moe", {"expert": 2}),
    ("qwen3_moe", {"tensor": 2, "expert_tensor": 2}),
]


@pytest.mark.parametrize(("family", "layout"), HELD, ids=str)
def test_weights_that_are_cut_over_two_ranks_come_back(family, layout, model_folder, tmp_path):
    folder = model_folder(family)
    found = on_two_ranks("weights", folder, {"layout": layout}, tmp_path / "found.pt")
    stored = load_file(folder / "model.safetensors")
    assert found.keys() == stored.keys()
    assert not [name for name, tensor in stored.items() if not torch.equal(found[name], tensor)]


@pytest.mark.usefixtures("kernels")
def test_an_adapter_that_is_switched_off_changes_nothing(model_folder, learner, settings_of):
    folder = model_folder("qwen2")
    made = learner(folder, dtype="float32", **settings_of("qwen2", 4))
    load_weights([made.model], folder)
    lora_folder.start([made.model], made.config)
    with torch.no_grad():
        with lora.disabled([made.model]):
            without, _ = made.log_probs(make_batch())
        adapted, _ = made.log_probs(make_batch())
    plain = learner(folder, dtype="float32")
    load_weights([plain.model], folder)
    with torch.no_grad():
        base, _ = plain.log_probs(make_batch())
    torch.testing.assert_close(without, base, rtol=NEAR, atol=NEAR)
    assert (adapted - base).abs().max() > 0.01


def test_sequences_that_cannot_be_cut_over_the_ranks_are_refused_in_one_line():
    segments = np.array([[0, 8, 0, 0], [8, 6, 0, 0]])
    with pytest.raises(ValueError, match=r"sequences of \[6, 8\] tokens, not all multiples of 4"):
        describe_row_for_engine(segments, torch.device("cpu"), Slice(2, 0))


def on_two_ranks(job: str, folder: Path, settings: dict[str, Any], out: Path) -> Any:
    """What rank 0 of two saved at the end of a job of `ranks_at_work.py`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [job, str(folder), json.dumps({"ranks": 2, **settings}), str(out)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / "ranks_at_work.py"), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=out.with_suffix(f".{rank}").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0], "".join(out.with_suffix(f".{rank}").read_text()[-3000:] for rank in range(2))
    return torch.load(out)
