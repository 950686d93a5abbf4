"""Model FLOPs of a step against what torch counts, and the metrics that are made of them."""

from __future__ import annotations

import dataclasses

import pytest
from learner_parts import make_batch, make_config
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from streamrl.config.learner import LoraConfig
from streamrl.learner.flops import Work, training_flops, work_of
from streamrl.learner.packing import Packing, plan_batch
from streamrl.learner.peak import data_sheet, measured
from streamrl.learner.shape import read_shape

ADAPTERS = {"rank": 2, "targets": ["linear_qkv", "linear_proj"]}


def rows_of(batch, **packing):
    return [row for rows in plan_batch(batch, [1.0] * 2, Packing(budget=100, **packing)) for row in rows]


def test_a_shared_prompt_counts_once_and_pairs_are_those_that_attention_sees(two_answers):
    shared = rows_of(two_answers, ranks=1, share_prompts=True)
    assert work_of(shared) == Work(tokens=5, pairs=3 + (2 * 2 + 3) + (2 + 1), targets=5)
    apart = rows_of(two_answers, ranks=1, share_prompts=False)
    assert work_of(apart) == Work(tokens=7, pairs=10 + 6, targets=5)
    # A rank without a sample computes a row of one token, which trains nothing.
    assert work_of(rows_of(two_answers, ranks=3, share_prompts=False)) == work_of(apart)


def counted(trainer, batch) -> tuple[float, float]:
    """FLOPs that torch counts in the products of a step's passes, and the model's, attention left out of both."""
    shares = trainer._shares(batch)
    (share,), step = shares, trainer._step
    signals = step.signals(share)[0]
    with FlopCounterMode(display=False) as counter:
        step.differentiate(share.mini_batches[0], signals)
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    work = dataclasses.replace(work_of(share.micro_batches), pairs=0)
    return products, training_flops(trainer._chunks[0].shape, trainer._config.learner.lora, work)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen2", {}),
        ("qwen3_moe", {}),
        ("qwen3", ADAPTERS),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
    ],
)
def test_products_are_as_many_as_torch_counts(family, lora, model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(family), lora=lora, tokens_per_micro_batch=1000))
    products, model = counted(trainer, make_batch())
    shape, (share,) = trainer._chunks[0].shape, trainer._planned[1]
    work = work_of(share.micro_batches)
    if lora:  # below the first layer nothing is trained, so that torch spares the gradient of its input
        width = (shape.heads + 2 * shape.groups) * shape.head_dim + 3 * lora["rank"]
        model -= 2 * width * shape.hidden * work.tokens
    # The backward pass computes the logits again, and pads are multiplied.
    logits = 2 * shape.hidden * (2 * shape.padded_vocabulary(1) - shape.vocabulary) * work.targets
    assert products == pytest.approx(model, abs=logits)


def test_a_token_meets_top_k_experts_and_frozen_weights_cost_a_third_less(model_folder):
    shape, work = read_shape(model_folder("qwen3_moe")), Work(tokens=1)
    more = dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, experts=shape.moe.experts + 1))
    router = 3 * 2 * shape.layers * shape.hidden
    assert training_flops(more, LoraConfig(), work) - training_flops(shape, LoraConfig(), work) == router
    adapters = training_flops(shape, LoraConfig(rank=1, targets=("linear_proj",)), work)
    own = 3 * 2 * shape.layers * (shape.heads * shape.head_dim + shape.hidden)
    pair = training_flops(shape, LoraConfig(), Work(pairs=1))  # products of head_dim for a score and for a value
    assert pair == 3 * (2 + 2) * shape.head_dim * shape.heads * shape.layers
    assert adapters - own == training_flops(shape, LoraConfig(), work) * 2 / 3


def test_a_token_of_a_hybrid_model_meets_the_matrices_of_each_layer_and_its_states(model_folder):
    folder = model_folder("nemotron_3")
    shape, weights = read_shape(folder), load_file(folder / "model.safetensors")
    matrices = {name: weight.numel() for name, weight in weights.items() if ".layers." in name and weight.dim() == 2}
    met = sum(size for name, size in matrices.items() if ".experts." not in name)
    met += shape.moe.top_k * sum(size for name, size in matrices.items() if ".experts.0." in name)
    states = 2 * 2 * shape.mamba.heads * shape.mamba.head * shape.mamba.state  # two layers, written and read
    assert training_flops(shape, LoraConfig(), Work(tokens=1)) == 3 * 2 * (met + states)
    pair = training_flops(shape, LoraConfig(), Work(pairs=1))
    assert pair == 3 * (2 + 2) * shape.head_dim * shape.heads  # one layer has attention


def test_the_utilisation_of_a_step_is_its_flops_by_its_time_and_the_peak(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(), passes=2, peak_tflops=0.5))
    row = trainer.train_step(make_batch())
    work = work_of(rows_of_step(trainer))
    flops = 2 * training_flops(trainer._chunks[0].shape, LoraConfig(), work)
    seconds = row["time/forward_backward"] + row["time/optimizer"]
    assert row["learner/tflops"] == pytest.approx(flops / seconds / 1e12)
    assert row["learner/mfu"] == pytest.approx(row["learner/tflops"] / 0.5)


def rows_of_step(trainer):
    """Those of the step that was planned last."""
    return [row for share in trainer._planned[1] for row in share.micro_batches]


def test_the_peak_of_a_cpu_is_measured_and_that_of_a_gpu_is_its_data_sheets(model_folder, trainer_of):
    peak = trainer_of(make_config(model_folder())).peak
    assert peak.source == "measured"
    assert peak.tflops * 1e12 == measured("float32", 1) > 1e8
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA H100 NVL", "NVIDIA GB200", "NVIDIA L40S", "Tesla T4")
    assert [data_sheet(name, "bfloat16") for name in names] == [312, 989, 835, 2500, 362, None]
