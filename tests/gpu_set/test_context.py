"""Context parallelism on Transformer Engine's layers: two real ranks with cut sequences give the numbers of one.

The kernels are written in torch, by Transformer Engine's description of which tokens a rank has; they are not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_learner import log_probs_and_gradients
from megatron.core.extensions.transformer_engine import TEDotProductAttention

from benchmarks.random_models import largest_difference
from streamrl.learner.attention import Slice, describe_row_for_engine

FOLDER = Path(__file__).parent
SECONDS = 240.0  # that two ranks may take
NEAR = 2e-5  # of float32 sums in another order


def on_two_ranks(folder: Path, settings: dict[str, object], out: Path) -> None:
    """Run `ranks_at_work.py` on two ranks until both have ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(FOLDER / "ranks_at_work.py"), str(folder), json.dumps(settings), str(out)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, text in zip(ranks, said, strict=True):
        assert process.returncode == 0, text[-4000:]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {}),
        ("qwen3_moe", {}),
        ("qwen3", {"lora": {"rank": 4}}),
    ],
)
def test_two_ranks_give_the_log_probs_and_gradients_of_one(family, settings, model_folder, learner, tmp_path):
    folder, out = model_folder(family), tmp_path / "found.pt"
    on_two_ranks(folder, {**settings, "ranks": 2, "layout": {"context": 2}}, out)
    kind, log_probs, entropies, gradients = torch.load(out)
    assert kind == "transformer_engine"
    alone = log_probs_and_gradients(learner(folder, dtype="float32", engine=False, **settings))
    torch.testing.assert_close(log_probs, alone[0], rtol=NEAR, atol=NEAR)
    torch.testing.assert_close(entropies, alone[1], rtol=NEAR, atol=NEAR)
    common = gradients.keys() & alone[2].keys()
    assert len(common) >= 8
    assert largest_difference({n: gradients[n] for n in common}, {n: alone[2][n] for n in common}) < 10 * NEAR


def test_transformer_engine_is_told_what_it_asserts_of_a_cut_row(model_folder, learner):
    segments = torch.tensor([[0, 8, 0, 0], [8, 4, 0, 0]]).numpy()
    row = describe_row_for_engine(segments, torch.device("cpu"), Slice(2, 1))
    kept = learner(model_folder("qwen2")).model.decoder.layers[0].self_attention.core_attention.kept_packed_seq_params
    assert isinstance(kept, set)
    assert {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"} <= kept
    assert issubclass(TEDotProductAttention, torch.nn.Module)
    assert row.cu_seqlens_q_padded.tolist() == row.cu_seqlens_q.tolist() == [0, 8, 12]
    with pytest.raises(ValueError, match=r"sequences of \[6\] tokens, not all multiples of 4"):
        describe_row_for_engine(torch.tensor([[0, 6, 0, 0]]).numpy(), torch.device("cpu"), Slice(2, 0))
