"""Parameters, gradients and the optimizer's state shared out over ranks: the same training, in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learner_parts import make_batch, make_config, weights

from streamrl.config import Config
from streamrl.config.algo import AlgoConfig
from streamrl.config.file import ConfigError
from streamrl.device import Device
from streamrl.lab.plan.learner_memory import fullest_rank
from streamrl.lab.plan.machines import Machines
from streamrl.learner.checkpoint import CheckpointMismatchError
from streamrl.learner.fully_sharded import FullySharded, units
from streamrl.learner.shape import read_shape
from streamrl.learner.shared_rows import fill
from streamrl.preflight.model import check_model

FULL = {"sharding": "full"}
ROWS = 32  # tokens of a micro batch, which the longest sample fits: several of them in a step


def of_algo(config: Config, **algo: Any) -> Config:
    return config.model_copy(update={"algo": AlgoConfig.model_validate(config.algo.model_dump() | algo)})


def trained(trainer: Any, steps: int = 2) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The metrics that clocks do not give, and the weights afterwards."""
    rows = [trainer.train_step(make_batch(step)) for step in range(trainer.version.step, trainer.version.step + steps)]
    timed = ("time/", "memory/", "learner/", "idle/")
    return [{name: row[name] for name in row if not name.startswith(timed)} for row in rows], weights(trainer)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("model", "algo", "learner"),
    [
        (("qwen2", True, "float32"), {"kl": 0.1, "proximal": "recompute"}, {"params_metrics": True}),
        (("qwen2", False, "bfloat16"), {"kl": 0.1, "kl_estimator": "full"}, {"passes": 2, "mini_batches": 2}),
        # Experts are another optimizer, whose part of the norm is added otherwise: nothing is clipped by it.
        (("qwen3_moe", False, "bfloat16"), {}, {"recompute": "full", "optimizer": {"lr": 1e-3, "clip_grad": 0.0}}),
    ],
    ids=["float32", "bfloat16", "experts"],
)
def test_one_rank_trains_bit_for_bit_as_without(model, algo, learner, model_folder, trainer_of):
    """Nothing is summed over ranks: master and rounded weights, gradients of micro batches and moments are the same."""
    family, tied, dtype = model
    settings = {"tokens_per_micro_batch": ROWS, "optimizer": {"weight_decay": 0.1, "lr": 1e-3}, **learner}
    found = []
    for layout in ({}, FULL):
        config = make_config(model_folder(family, tied), dtype, layout=layout, **settings)
        found.append(trained(trainer_of(of_algo(config, **algo))))
    (rows, plain), (sharded_rows, sharded) = found
    norms = [[row.pop("grad_norm") for row in of_run] for of_run in (rows, sharded_rows)]
    assert norms[1] == (pytest.approx(norms[0], rel=1e-6) if family == "qwen3_moe" else norms[0])
    assert sharded_rows == rows
    assert same(sharded, plain)


@pytest.mark.parametrize("value", [math.nan, 1e6])
def test_a_refused_update_changes_no_shard(value, model_folder, trainer_of):
    config = make_config(model_folder(), optimizer={"spike_factor": 100.0, "spike_window": 4}, layout=FULL)
    trainer = trainer_of(config)
    trained(trainer, 3)
    before, moments = weights(trainer), [each.clone() for each in trainer._optimizer.tensors()]
    optimizer = trainer._optimizer.megatron
    prepare = optimizer.prepare_grads

    def spoilt() -> bool:
        next(trainer._wrapped[0].parameters()).main_grad.view(-1)[0] = value
        optimizer.prepare_grads = prepare
        return prepare()

    optimizer.prepare_grads = spoilt
    row = trainer.train_step(make_batch(3))
    assert (row["steps/updates"], row["steps/skipped"], row["steps/spikes"]) == (3, 1, value == 1e6)
    assert same(weights(trainer), before)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trainer._optimizer.tensors(), moments, strict=True))
    assert trainer.train_step(make_batch(4))["steps/updates"] == 4


def test_it_goes_on_from_a_distributed_optimizer_and_back(model_folder, trainer_of, tmp_path):
    """Bit for bit, on one rank, with weights in bfloat16; from one that is not distributed it is refused by name."""
    run = tmp_path / "run"
    shared = make_config(model_folder(), "bfloat16", {"distributed": True, "lr": 1e-3})
    full = make_config(model_folder(), "bfloat16", {"lr": 1e-3}, layout=FULL)
    alone = make_config(model_folder(), "bfloat16", {"lr": 1e-3})
    _, expected = trained(trainer_of(shared), 6)
    for config in (shared, full, shared):
        trainer = trainer_of(config, run)
        trained(trainer, 2)
        trainer.save()
        trainer.saved(wait=True)
    assert trainer.version.step == 6
    assert same(weights(trainer), expected)
    with pytest.raises(CheckpointMismatchError, match="distributed_optimizer=True, this run has distributed_opt"):
        trainer_of(alone, run)


class Stack(torch.nn.Module):
    """Two layers between an embedding and a head, and a layer that no pass takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.inner = torch.nn.Module()
        self.inner.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
        self.head = torch.nn.Linear(6, 1, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.inner.layers[:2]:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


def test_any_model_is_sharded_by_the_layers_of_its_lists(model_folder, trainer_of):
    trainer_of(make_config(model_folder()))  # the process groups of one rank
    plain, model, tokens = Stack(), Stack(), torch.arange(11)
    wrapped = FullySharded(model, model, torch.float32, Device("cpu", 0), None)
    assert units(model) == list(model.inner.layers)
    assert all(shard.isnan().all() for shard in wrapped.parameters())
    for name, weight in model.named_parameters():
        fill(weight, plain.get_parameter(name).detach(), torch.float32)
    for _ in range(2):  # micro batches
        wrapped(tokens).square().sum().backward()
        plain(tokens).square().sum().backward()
    wrapped.finish_grad_sync()
    for name, shard in wrapped.named_parameters():
        gradient = plain.get_parameter(name).grad
        assert torch.equal(shard.main_grad, torch.zeros_like(shard) if gradient is None else gradient), name
    wrapped.zero_grad_buffer()
    wrapped(tokens).sum().backward()
    wrapped.finish_grad_sync()
    expected = torch.autograd.grad(plain(tokens).sum(), plain.head.weight)
    assert torch.equal(dict(wrapped.named_parameters())["head.weight"].main_grad, *expected)


@pytest.fixture
def work(tmp_path, on_ranks) -> Callable[[Config], dict[str, Any]]:
    """What rank 0 of `sharded_at_work.py` leaves."""

    def run(config: Config) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(config.model_dump_json())
        files = (tmp_path / "config.json", tmp_path / f"run-{len(list(tmp_path.iterdir()))}", tmp_path / "out.pt")
        on_ranks(config.learner.ranks, "sharded_at_work.py", *files)
        return torch.load(tmp_path / "out.pt")

    return run


@pytest.mark.slow
def test_two_ranks_have_the_loss_norm_and_weights_of_data_parallel_ranks_and_of_one(model_folder, work):
    """Adam's epsilon is far above the rounding of a gradient, which it would divide by itself otherwise."""
    settings = {
        "optimizer": {"lr": 1e-3, "eps": 1e-3},
        "tokens_per_micro_batch": 2 * ROWS,
        "params_metrics": True,
    }
    one = work(make_config(model_folder(), **settings))
    plain = work(make_config(model_folder(), ranks=2, **settings))
    sharded = work(make_config(model_folder(), ranks=2, layout=FULL, **settings))
    assert all(rank["choice"] == [[1.0, 1.0], [2.0, 2.0]] for rank in sharded["ranks"])  # of weights that one rank uses
    for other in (plain, one):
        for row, expected in zip(sharded["rows"], other["rows"], strict=True):
            noise = {name for name in expected if name.startswith("gradient/")} if other is one else set()
            assert row == pytest.approx({**expected, **{name: row[name] for name in noise}}, rel=1e-6, abs=1e-7)
        for name, tensor in sharded["weights"].items():
            torch.testing.assert_close(tensor, other["weights"][name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_holds_its_rows_alone_as_the_plan_says(dtype, model_folder, work):
    config = make_config(model_folder("qwen3"), dtype, ranks=2, layout=FULL)
    plan = fullest_rank(config, read_shape(config.model.path), Machines(gpus_per_host=0))
    result = work(config)
    for rank in result["ranks"]:
        assert not rank["whole"]
        assert (rank["weights"], rank["gradients"], rank["moments"]) == (plan.weights, plan.gradients, plan.optimizer)
    sizes = {name: tensor.nbytes for name, tensor in result["weights"].items()}
    largest = sum(sizes[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")  # one parameter
    first, second = (rank["exported"] for rank in result["ranks"])
    assert second <= largest  # rounded rows that it sends, and those of the parameter before
    assert largest <= first <= 3 * largest < sum(sizes.values()) / 2  # gathered, cut for Hugging Face; the one before


@pytest.mark.parametrize(
    ("megatron", "dtype", "line"),
    [
        ({"bucket_size": 1000}, "float32", "bucket_size: 1000 is of Megatron's DDP, which learner.layout.sharding"),
        ({"fp8": "hybrid"}, "bfloat16", "fp8: hybrid with learner.layout.sharding=full, which gathers weights in"),
    ],
)
def test_fields_that_it_has_no_use_for_are_refused(megatron, dtype, line, model_folder):
    config = make_config(model_folder(), dtype, layout=FULL, megatron=megatron)
    with pytest.raises(ConfigError, match=rf"^learner\.megatron\.{line}"):
        check_model(config, read_shape(config.model.path))
