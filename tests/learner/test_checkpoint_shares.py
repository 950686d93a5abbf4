"""Every rank writes a share of a checkpoint, and holds no more than that in host memory for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_parts import make_config

from streamrl.config import Config
from streamrl.lab.plan.machines import Machines
from streamrl.lab.plan.placement import place
from streamrl.lab.plan.saves import saves
from streamrl.learner import checkpoint_optimizer
from streamrl.learner.checkpoint_optimizer import boxes
from streamrl.learner.checkpoint_saver import CheckpointError
from streamrl.learner.shape import read_shape

SLOW = pytest.mark.slow
ONE_EACH = Machines(gpus_per_host=1)

# ids of the cases: model, learner
LAYOUTS: dict[str, tuple[tuple[str, bool], dict[str, Any]]] = {
    "DP2": (("qwen2", False), {"optimizer": {"distributed": True}}),
    "DP2, the optimizer is not distributed": (("llama", False), {"optimizer": {"distributed": False}}),
    "fully sharded": (("qwen2", False), {"layout": {"sharding": "full"}}),
    "EP2": (("qwen3_moe", False), {"optimizer": {"distributed": True}, "layout": {"expert": 2}}),
    "PP2, tied": (("qwen2", True), {"optimizer": {"distributed": True}, "layout": {"pipeline": 2}}),
    "TP2 DP2": (("llama", False), {"optimizer": {"distributed": True}, "layout": {"tensor": 2}, "ranks": 4}),
}


@pytest.fixture
def work(tmp_path, on_ranks) -> Callable[..., Any]:
    """`work(config, script, arguments)`: what rank 0 of the script leaves. All share one run folder."""

    def run(config: Config, script: str, *arguments: object) -> Any:
        (tmp_path / "config.json").write_text(config.model_dump_json())
        files = (tmp_path / "config.json", tmp_path / "run", tmp_path / "out.pt")
        on_ranks(config.learner.ranks, script, *files, *arguments)
        return torch.load(tmp_path / "out.pt")

    return run


@pytest.mark.parametrize("layout", [pytest.param(name, marks=SLOW) for name in LAYOUTS])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=SLOW)])
def test_each_rank_writes_its_share_and_holds_no_more_of_it(layout, dtype, model_folder, work):
    model, learner = LAYOUTS[layout]
    config = make_config(model_folder(*model), dtype=dtype, **{"ranks": 2, **learner})
    result = work(config, "shares_at_work.py")
    plan = saves(config, read_shape(config.model.path), ONE_EACH, place(config.learner.ranks, [], ONE_EACH))
    for rank, planned in zip(result["ranks"], plan, strict=True):
        assert rank["written"] == pytest.approx(planned.written, rel=0.01)
        assert rank["peak"] <= 1.001 * rank["written"]
        # Megatron's own gathers the state of a model-parallel part on each of its data-parallel ranks.
        copies = config.learner.ranks // config.learner.layout.model_ranks
        gathered = config.learner.optimizer.distributed and copies > 1
        assert rank["megatron"] >= (1.5 if gathered else 1.0) * rank["peak"]
    assert sum(rank["written"] for rank in result["ranks"]) <= sum(each.written for each in plan)
    # What Megatron has written is read.
    resumed = work(config, "checkpoint_at_work.py", 2)
    assert resumed["began"] == "2.1"
    assert all(torch.equal(tensor, result["weights"][name]) for name, tensor in resumed["weights"].items())


def test_a_tensor_that_is_not_written_as_a_whole_is_told(monkeypatch, model_folder, trainer_of, tmp_path):
    trainer = trainer_of(make_config(model_folder(), optimizer={"distributed": True}), tmp_path)
    cut = checkpoint_optimizer.cut
    # Of each tensor that is stored in two parts, gate and up of an MLP, the second.
    monkeypatch.setattr(checkpoint_optimizer, "cut", lambda *arguments: list(cut(*arguments))[-1:])
    trainer.save()
    with pytest.raises(CheckpointError, match=r"of \d+ values of optimizer.state.param.decoder.layers.mlp.linear_fc1"):
        trainer.saved(wait=True)
    assert not list((tmp_path / "checkpoints").glob("step_*"))


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
