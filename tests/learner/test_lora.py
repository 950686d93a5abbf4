"""Adapters in the learner: what they compute, in every layout, and what they leave alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learner_parts import largest_difference, make_batch, make_config, write_model
from lora_at_work import ADVANTAGES, adapter_gradients, frozen_with_gradient, loss_of
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.random_models import load_model, random_adapter
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.learner import lora
from streamrl.learner.huggingface import export_weights
from streamrl.learner.lora_folder import export_adapters, load_adapters, save_adapters
from streamrl.learner.trainer import Trainer
from streamrl.publish.peft import write_adapter

LORA = {"rank": 4, "alpha": 6, "publish": "adapter"}
SCALE = 6 / 4
TEMPERATURE = 0.8  # of make_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lora") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder with random matrices on every projection."""
    tensors = random_adapter(model, seed=5)
    folder = tmp_path_factory.mktemp("lora") / "adapter"
    write_adapter(folder, tensors.items(), make_config(model, lora=LORA).learner.lora, model)
    return folder


def config_of(model: Path, adapter: Path | None = None, **learner: Any) -> Config:
    settings = LORA | ({"adapter": adapter} if adapter else {}) | learner.pop("lora", {})
    return make_config(model, lora=settings, **learner)


def slow_loss(model: Path, adapters: dict[str, Tensor]) -> Tensor:
    """`loss_of` by transformers in float64, sample after sample, with W + scale * B A written out."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    merged = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    for name, a in adapters.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            merged[target] = merged[target] + SCALE * adapters[name.replace("lora_A", "lora_B")] @ a
    total = torch.zeros((), dtype=torch.float64)
    for sample, advantage in zip(make_batch().samples, ADVANTAGES, strict=True):
        if len(sample.output_ids) == 0:
            continue
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.output_ids.tolist()])
        logits = torch.func.functional_call(policy, merged, (ids[None],)).logits[0, :-1] / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)[len(sample.prompt_ids) - 1 :]
        taken = log_p.gather(1, torch.tensor(sample.output_ids).long()[:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask)
        entropy = -(log_p.exp() * log_p).sum(-1)
        total = total + loss_of(taken[mask], entropy[mask], torch.full((int(mask.sum()),), advantage))
    return total


def test_the_gradient_of_the_adapters_is_that_of_the_merged_weights_written_out(
    model: Path, adapter: Path, trainer_of: Callable[..., Trainer]
):
    trainer = trainer_of(config_of(model, adapter))
    given = {name: tensor.clone() for name, tensor in export_adapters(trainer._chunks)}
    assert frozen_with_gradient(trainer) == []
    leaves = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    slow_loss(model, leaves).backward()
    expected = {name: leaf.grad for name, leaf in leaves.items()}
    assert largest_difference(adapter_gradients(trainer), expected) < 5e-6


def test_every_layout_has_the_adapters_and_the_gradient_of_one_process(
    model: Path, adapter: Path, trainer_of: Callable[..., Trainer], on_ranks: Callable[..., None], tmp_path: Path
):
    layouts = {
        "tensor": {"layout": {"tensor": 2, "sequence": False}},
        "tensor and sequence": {"layout": {"tensor": 2}},
        "pipeline": {"layout": {"pipeline": 2}},
        "context": {"layout": {"context": 2}},
        "data": {},
    }
    cases = {name: config_of(model, adapter, ranks=2, **learner) for name, learner in layouts.items()}
    found = at_work(cases, on_ranks, tmp_path)
    trainer = trainer_of(config_of(model, adapter))
    alone = {
        "adapters": {name: tensor.clone() for name, tensor in export_adapters(trainer._chunks)},
        "merged": {name: tensor.clone() for name, tensor in export_weights(trainer._chunks)},
        "gradients": adapter_gradients(trainer),
    }
    assert found.keys() == cases.keys()
    for name, result in found.items():
        assert result["frozen"] == []
        assert all(torch.equal(result["adapters"][key], alone["adapters"][key]) for key in alone["adapters"]), name
        assert all((result["merged"][key] - alone["merged"][key]).abs().max() < 1e-6 for key in alone["merged"]), name
        assert largest_difference(result["gradients"], alone["gradients"]) < 5e-6, name


@pytest.mark.slow
def test_fresh_adapters_change_nothing_and_are_the_same_in_every_layout(
    model: Path, trainer_of: Callable[..., Trainer], on_ranks: Callable[..., None], tmp_path: Path
):
    cases = {name: config_of(model, ranks=2, layout={name: 2}) for name in ("tensor", "pipeline")}
    found = at_work(cases, on_ranks, tmp_path)
    trainer = trainer_of(config_of(model))
    drawn = dict(export_adapters(trainer._chunks))
    assert all(tensor.abs().max() > 0 for name, tensor in drawn.items() if ".lora_A." in name)
    base = load_file(model / "model.safetensors")
    for name, tensor in export_weights(trainer._chunks):
        assert torch.equal(tensor, base[name])
    for result in found.values():
        assert all(torch.equal(result["adapters"][name], drawn[name]) for name in drawn)


def at_work(cases: dict[str, Config], on_ranks: Callable[..., None], folder: Path) -> dict[str, dict[str, Any]]:
    """What two ranks found in each case."""
    stores = {name: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for name in cases}
    order = {
        name: (json.loads(config.model_dump_json()), str(folder / f"run {name}"), stores[name].port)
        for name, config in cases.items()
    }
    (folder / "cases.json").write_text(json.dumps(order))
    on_ranks(2, "lora_at_work.py", folder / "cases.json", folder / "out.pt")
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("distributed", [False, True])
def test_training_changes_the_adapters_alone_and_a_resumed_run_goes_on_bit_for_bit(
    model: Path, trainer_of: Callable[..., Trainer], tmp_path: Path, distributed: bool
):
    config = config_of(model, lora={"dropout": 0.1}, optimizer={"distributed": distributed})

    def base_of(trainer: Trainer) -> dict[str, Tensor]:
        return {
            name: tensor.clone()
            for chunk in trainer._chunks
            for name, tensor in chunk.named_parameters()
            if not lora.is_adapter_parameter(name)
        }

    def train(trainer: Trainer, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            metrics = trainer.train_step(make_batch(trainer.version.step))
            assert metrics["grad_norm"] > 0
        return {name: tensor.clone() for name, tensor in trainer.export()}

    trainer = trainer_of(config, tmp_path / "run")
    base, start = base_of(trainer), {name: tensor.clone() for name, tensor in trainer.export()}
    trained = train(trainer, 2)
    assert all(not torch.equal(trained[name], start[name]) for name in start)
    assert all(torch.equal(tensor, base[name]) for name, tensor in base_of(trainer).items())
    trainer.save()
    trainer.saved(wait=True)
    straight = train(trainer, 3)
    resumed = train(trainer_of(config, tmp_path / "run"), 3)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_a_checkpoint_is_restored_in_another_layout(
    model: Path, trainer_of: Callable[..., Trainer], on_ranks: Callable[..., None], tmp_path: Path
):
    cases = {name: config_of(model, ranks=2, layout={name: 2}) for name in ("tensor", "pipeline")}
    expected = {}
    for name in cases:
        trainer = trainer_of(config_of(model), tmp_path / f"run {name}")
        trainer.train_step(make_batch())
        trainer.save()
        trainer.saved(wait=True)
        expected = {key: tensor.clone() for key, tensor in trainer.export()}
    for result in at_work(cases, on_ranks, tmp_path).values():
        assert all(torch.equal(result["adapters"][key], expected[key]) for key in expected)


def test_disabled_adapters_leave_the_base_model_bit_for_bit(
    model: Path, adapter: Path, trainer_of: Callable[..., Trainer]
):
    def logits(trainer: Trainer) -> Tensor:
        row = torch.arange(12)[None]
        with torch.no_grad():
            return trainer._chunks[0](row, row, None)

    plain = logits(trainer_of(make_config(model)))
    trainer = trainer_of(config_of(model, adapter))
    with_adapters = logits(trainer)
    with lora.disabled(trainer._wrapped):
        assert torch.equal(logits(trainer), plain)
    assert torch.equal(logits(trainer), with_adapters)
    assert not torch.equal(with_adapters, plain)


def test_full_recomputation_reaches_the_adapters_behind_a_frozen_embedding(
    model: Path, adapter: Path, trainer_of: Callable[..., Trainer]
):
    plain = adapter_gradients(trainer_of(config_of(model, adapter)))
    recomputed = adapter_gradients(trainer_of(config_of(model, adapter, recompute="full")))
    assert largest_difference(recomputed, plain) < 1e-6


def test_a_peft_folder_comes_out_as_it_went_in(
    model: Path, adapter: Path, trainer_of: Callable[..., Trainer], tmp_path: Path
):
    config = config_of(model, adapter)
    save_adapters(trainer_of(config)._chunks, tmp_path / "out", config.learner.lora, model)
    given, written = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "out"))
    assert given.keys() == written.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in given.items())
    configurations = [json.loads((f / "adapter_config.json").read_text()) for f in (adapter, tmp_path / "out")]
    assert configurations[0] == configurations[1]


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl", "qwen3_vl"])
def test_a_peft_folder_names_the_modules_of_transformers(family: str, trainer_of: Callable[..., Trainer], model_folder):
    folder = model_folder(family)
    modules, names = load_model(folder), set()
    for name, tensor in export_adapters(trainer_of(make_config(folder, lora={"rank": 4}))._chunks):
        place, _, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        linear = modules.get_submodule(place)
        assert list(tensor.shape) == {"lora_A": [4, linear.in_features], "lora_B": [linear.out_features, 4]}[matrix]
        names.add(place)
    assert len(names) == 2 * 7


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"r": 8}, r"learner\.lora\.rank: 4, but .* has r=8"),
        ({"lora_alpha": 8}, r"learner\.lora\.alpha: 6, but .* has lora_alpha=8"),
        ({"use_dora": True}, r"use_dora=True is not supported; allowed: False"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ],
)
def test_a_peft_folder_that_would_be_computed_otherwise_is_refused(model: Path, adapter: Path, tmp_path, changes, text):
    configuration = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(configuration))
    (tmp_path / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=text):
        load_adapters([], tmp_path, config_of(model).learner.lora)


def test_a_peft_folder_with_more_than_the_targets_is_refused(model: Path, adapter: Path, trainer_of):
    with pytest.raises(ConfigError, match=r"linear_qkv has no place for .*down_proj.*; needed too: linear_fc2"):
        trainer_of(config_of(model, adapter, lora={"targets": ["linear_qkv"]}))


@pytest.mark.parametrize(
    ("name", "matrices", "columns", "text"),
    [
        ("model.layers.2.self_attn.q_proj", "AB", 64, r"layers\.2\.self_attn.* has no place .*, layers 0\.\.1"),
        ("layers.1.self_attn.q_proj", "AB", 64, "has no place in the model"),
        ("model.layers.1.self_attn.q_proj", "A", 64, r"has one of .*lora_A\.weight and .*lora_B\.weight, not both"),
        ("model.layers.1.self_attn.q_proj", "AB", 8, r"lora\.adapter: .*lora_A.* is \[4, 8\], .* \[4, 64\]"),
    ],
)
def test_a_tensor_without_a_place_or_of_another_shape_is_refused_by_name(
    model: Path,
    trainer_of: Callable[..., Trainer],
    tmp_path: Path,
    *,
    name: str,
    matrices: str,
    columns: int,
    text: str,
):
    sizes = {"A": (4, columns), "B": (64, 4)}
    tensors = [(f"base_model.model.{name}.lora_{matrix}.weight", torch.zeros(sizes[matrix])) for matrix in matrices]
    write_adapter(tmp_path / "adapter", tensors, config_of(model).learner.lora, model)
    with pytest.raises(ConfigError, match=text):
        trainer_of(config_of(model, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("adapter_config.json", '{"peft_type": "LORA", "lora_alpha": 6}', r"adapter_config\.json: r is missing"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 0, "lora_alpha": 6}', "r=0 is not allowed"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 4}', "lora_alpha is missing"),
        ("adapter_config.json", "{", r"adapter_config\.json is not JSON"),
        ("adapter_config.json", "[]", "is no mapping of keys"),
        ("adapter_model.safetensors", "x", r"adapter_model\.safetensors cannot be read"),
        ("adapter_model.safetensors", None, r"adapter_model\.safetensors cannot be read"),
    ],
)
def test_a_peft_folder_with_a_file_that_is_none_is_refused(
    model: Path, adapter: Path, tmp_path: Path, *, file: str, content: str | None, text: str
):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=text):
        load_adapters([], folder, config_of(model).learner.lora)


def test_experts_get_no_adapters_and_attention_beside_them_does(trainer_of: Callable[..., Trainer], tmp_path: Path):
    moe = write_model(tmp_path / "moe", "qwen3_moe")
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets: linear_fc1 is a layer of experts"):
        lora.adapted(get_gpt_layer_local_spec(num_experts=4), config_of(moe).learner.lora)
    trainer = trainer_of(config_of(moe, lora={"targets": ["linear_qkv", "linear_proj"]}))
    assert {module.target for _, module in lora.adapters(trainer._chunks)} == {"linear_qkv", "linear_proj"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rank": 4, "adapter": "some"}, "merged cannot start from an adapter"),
        ({"adapter": "some", "publish": "adapter"}, r"needs learner\.lora\.rank"),
        ({"rank": 4, "targets": []}, "allowed: at least one"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(model: Path, settings, text):
    with pytest.raises(ValueError, match=text):
        make_config(model, lora=settings)
