"""A checkpoint resumes bit for bit in the layout that wrote it, and with the same numbers in every other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learner_parts import VOCABULARY, make_config
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from streamrl.learner import cpu_adapter

PADDED = ("word_embeddings.weight", "output_layer.weight")  # to a size that is the layout's


@dataclass(frozen=True)
class Resumable:
    """One run folder, in which ranks start or resume, save, and train on."""

    folder: Path
    models: Callable[..., Path]
    on_ranks: Callable[..., None]

    def go(self, model: tuple[str, bool], steps: int, dtype: str = "float32", **learner: Any) -> dict[str, Any]:
        config = make_config(self.models(*model), dtype=dtype, **learner)
        config_path, out = self.folder / "config.json", self.folder / "out.pt"
        config_path.write_text(config.model_dump_json())
        self.on_ranks(config.learner.ranks, "checkpoint_at_work.py", config_path, self.folder, out, steps)
        found = torch.load(out)
        assert equal(load_file(self.folder / "model" / "model.safetensors"), found["saved"])
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every weight and moment of the checkpoint of step 2, whole, the vocabulary without its pads."""
        cpu_adapter.install()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            loaded = dist_checkpointing.load_plain_tensors(str(self.folder / "checkpoints" / "step_2"))
        finally:
            dist.destroy_process_group()
        tensors = {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}
        return {name: tensor[:VOCABULARY] if name.endswith(PADDED) else tensor for name, tensor in tensors.items()}


@pytest.fixture
def run(tmp_path: Path, model_folder: Callable[..., Path], on_ranks: Callable[..., None]) -> Resumable:
    return Resumable(tmp_path, model_folder, on_ranks)


@pytest.mark.parametrize(
    ("family", "dtype", "learner"),
    [
        pytest.param("llama", "float32", {"optimizer": {"distributed": True}}, marks=pytest.mark.slow),
        pytest.param("qwen2", "bfloat16", {"layout": {"tensor": 2}}, marks=pytest.mark.slow),
        pytest.param("qwen3", "float32", {"layout": {"pipeline": 2}}, marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", {"layout": {"sharding": "full"}}, marks=pytest.mark.slow),
    ],
    ids=["DP2 distributed", "TP2", "PP2", "fully sharded"],
)
def test_five_steps_after_a_resume_on_two_ranks_equal_the_uninterrupted_run(family, dtype, learner, run):
    first = run.go((family, False), 5, dtype, ranks=2, **learner)
    second = run.go((family, False), 5, dtype, ranks=2, **learner)
    assert (first["began"], second["began"]) == ("0.0", "2.1")
    assert first["rows"] == second["rows"]
    assert equal(first["weights"], second["weights"])


@pytest.mark.parametrize(
    ("model", "distributed", "layouts"),
    [
        (("qwen2", True), False, ["one", "tensor", "pipeline", "one"]),
        pytest.param(("llama", False), True, ["tensor", "data", "one", "tensor"], marks=pytest.mark.slow),
        pytest.param(("qwen2", True), True, ["one", "tensor data", "pipeline", "tensor data"], marks=pytest.mark.slow),
        pytest.param(("qwen2", True), True, ["full data", "data", "one", "full data"], marks=pytest.mark.slow),
        pytest.param(("llama", False), True, ["pipeline", "full tensor data", "full"], marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", False), True, ["expert", "full data", "data"], marks=pytest.mark.slow),
        pytest.param(("qwen3_next", False), True, ["full data", "tensor", "full data"], marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", False), False, ["one", "expert", "tensor"], marks=pytest.mark.slow),
        pytest.param(("qwen3_moe", False), True, ["one", "expert", "tensor", "expert"], marks=pytest.mark.slow),
        pytest.param(("deepseek_v3", False), False, ["one", "tensor", "pipeline"], marks=pytest.mark.slow),
        pytest.param(("gpt_oss", False), False, ["one", "tensor", "pipeline"], marks=pytest.mark.slow),
        pytest.param(("qwen3_next", False), False, ["one", "tensor", "pipeline"], marks=pytest.mark.slow),
        pytest.param(("nemotron_3", False), False, ["one", "tensor", "pipeline"], marks=pytest.mark.slow),
        pytest.param(("gemma3_text", True), False, ["one", "tensor", "pipeline"], marks=pytest.mark.slow),
    ],
    ids=[
        "TP1 to TP2 to PP2",
        "TP2 to DP2 to DP1 to TP2, distributed",
        "DP1 to TP2 DP2 to PP2 and back, distributed",
        "fully sharded to DP2 to DP1 and back",
        "PP2 to fully sharded with TP2 to fully sharded DP1",
        "EP2 to fully sharded to DP2",
        "a gate of one row, fully sharded to TP2 and back",
        "EP1 to EP2 to TP2",
        "EP1 to EP2 to TP2 to EP2, distributed",
        "latent attention, TP1 to TP2 to PP2",
        "sinks and biased experts, TP1 to TP2 to PP2",
        "delta nets, TP1 to TP2 to PP2",
        "Mamba-2 and experts, TP1 to TP2 to PP2",
        "norms behind each part, tied, TP1 to TP2 to PP2",
    ],
)
def test_a_checkpoint_goes_from_layout_to_layout_with_every_number_as_it_was(model, distributed, layouts, run):
    results, numbers = [], []
    for name in layouts:
        sizes = {key: 2 for key in name.split() if key not in ("one", "full")}
        layout: dict[str, Any] = {key: size for key, size in sizes.items() if key != "data"}
        layout |= {"sharding": "full"} if "full" in name.split() else {}
        # A gate's gradient may be rounding alone, of which Adam makes whole steps unless eps is above it.
        optimizer = {"distributed": distributed} | ({"eps": 1e-3} if model[0] == "qwen3_next" else {})
        # Each saves step 2 again, from its own shards, before it trains on.
        results.append(run.go(model, 2, ranks=math.prod(sizes.values()), layout=layout, optimizer=optimizer))
        numbers.append(run.tensors())
    for result, tensors in zip(results[1:], numbers[1:], strict=True):
        assert equal(result["saved"], results[0]["saved"])
        assert equal(tensors, numbers[0])
        for row, expected in zip(result["rows"], results[0]["rows"], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
