"""Every rank writes a share of a checkpoint, and holds no more than that in host memory for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_parts import make_config

from streamrl.lab.plan.machines import Machines
from streamrl.lab.plan.placement import Host
from streamrl.lab.plan.saves import saves
from streamrl.learner.checkpoint_optimizer import boxes
from streamrl.learner.shape import read_shape

SLOW = pytest.mark.slow


DISTRIBUTED = {"optimizer": {"distributed": True}}


@pytest.mark.parametrize(
    ("model", "dtype", "ranks", "learner"),
    [
        (("qwen2", False), "bfloat16", 2, DISTRIBUTED),
        pytest.param(("llama", False), "float32", 2, {"optimizer": {"distributed": False}}, marks=SLOW),
        pytest.param(("qwen3_moe", False), "bfloat16", 2, DISTRIBUTED | {"layout": {"expert": 2}}, marks=SLOW),
        pytest.param(("qwen2", True), "bfloat16", 2, DISTRIBUTED | {"layout": {"pipeline": 2}}, marks=SLOW),
        pytest.param(("llama", False), "bfloat16", 4, DISTRIBUTED | {"layout": {"tensor": 2}}, marks=SLOW),
    ],
    ids=["DP2", "DP2, the optimizer is not distributed", "EP2", "PP2, tied", "TP2 DP2"],
)
def test_each_rank_writes_its_share_and_holds_no_more_of_it(
    model, dtype, ranks, learner, model_folder, on_ranks, tmp_path
):
    config = make_config(model_folder(*model), dtype=dtype, ranks=ranks, **learner)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    arguments = (tmp_path / "config.json", tmp_path / "run", tmp_path / "out.pt")
    on_ranks(ranks, "shares_at_work.py", *arguments)
    result = torch.load(tmp_path / "out.pt")
    apart = [Host(gpus=1, learner_ranks=1, first_rank=rank) for rank in range(ranks)]
    print(result["ranks"])
    plan = saves(config, read_shape(config.model.path), Machines(), apart)
    print(plan)
    for rank, planned in zip(result["ranks"], plan, strict=True):
        assert rank["written"] == pytest.approx(planned.written, rel=0.05)
        assert rank["peak"] <= 1.001 * rank["written"]
        # Megatron's own gathers the state of a model-parallel part on each of its data-parallel ranks.
        copies = ranks // config.learner.layout.model_ranks if config.learner.optimizer.distributed else 1
        assert rank["megatron"] >= (1.5 if copies > 1 else 1.0) * rank["peak"]
    assert sum(rank["written"] for rank in result["ranks"]) <= sum(each.written for each in plan)
    # What Megatron has written is read.
    on_ranks(ranks, "checkpoint_at_work.py", *arguments, 2)
    resumed = torch.load(tmp_path / "out.pt")
    assert resumed["began"] == "2.1"
    assert all(torch.equal(tensor, result["weights"][name]) for name, tensor in resumed["weights"].items())


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), data=st.data())
def test_the_boxes_of_a_range_are_its_values_in_their_order(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    values = np.arange(count).reshape(shape)
    found = [
        values[tuple(slice(begin, begin + length) for begin, length in zip(*box, strict=True))].ravel()
        for box in boxes(start, end, shape)
    ]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(start, end))
    assert all(part.size for part in found)
    assert len(found) <= 2 * len(shape) - 1
