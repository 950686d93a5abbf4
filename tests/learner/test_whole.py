"""Models that transformers builds: the same log-probs and gradients as Megatron's, and those of each sequence alone."""

from __future__ import annotations

import json

import pytest
import torch
from learner_parts import gradients, largest_difference, make_batch, make_config, weights, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from whole_models import FOREIGN, whole, write_foreign

from benchmarks.parity import Layout, configure
from benchmarks.parity_ranks import Case, run_ranks
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.learner import LoraConfig
from streamrl.lab.plan.parameters import whole_model
from streamrl.learner.flops import Work, training_flops
from streamrl.learner.huggingface import export_weights
from streamrl.learner.packing import plan_batch
from streamrl.learner.shape import UnsupportedModelError, WeightsMismatchError, read_shape
from streamrl.preflight.model import check_model
from tests.slow_families import slow_but

FAST = ("olmo2", "granite", "mamba")


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """`foreign(name)`: the folder of one of FOREIGN, made once a session."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = write_foreign(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


def scores(trainer, batch):
    """The log-prob of each trained token of a batch, in its order."""
    (rows,) = plan_batch(batch, [0.0] * len(batch.samples), trainer._packing)
    found = torch.empty(sum(len(row.place) for row in rows))
    for row, given in zip(rows, trainer._step._passes.score(rows), strict=True):
        found[torch.from_numpy(row.place)] = given
    return found, rows


def alone(folder, batch):
    """The same by transformers, each sequence by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for group in batch.groups:
        for sample in group.samples:
            if not sample.loss_mask.any():
                continue
            ids = torch.tensor([*sample.prompt_ids, *sample.output_ids], dtype=torch.int64)
            with torch.no_grad():
                logits = model(ids[None], use_cache=False).logits[0] / group.temperature
            taken = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)[len(sample.prompt_ids) - 1 :]
            found.append(taken[torch.from_numpy(sample.loss_mask)])
    return torch.cat(found)


def in_folder(trainer, batch):
    """The gradient under the folder's names."""
    gradients(trainer, batch)
    for chunk in trainer._chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.main_grad.float()
    return {name: tensor.clone() for name, tensor in export_weights(trainer._chunks)}


@pytest.mark.parametrize("tied", [False, True])
def test_log_probs_and_gradients_are_those_of_megatron_s_layers(tied, trainer_of, tmp_path):
    batch = make_batch(groups=3, size=3)
    pad = int(batch.groups[0].samples[0].prompt_ids[0])  # torch gives the embedding of a pad no gradient
    config = make_config(write_model(tmp_path / "model", "qwen2", tied, pad_token_id=pad))
    trainer = trainer_of(config)
    theirs, expected = scores(trainer, batch)[0], in_folder(trainer, batch)
    trainer = trainer_of(whole(config))
    assert trainer._packing.share_prompts
    assert torch.allclose(scores(trainer, batch)[0], theirs, atol=1e-5, rtol=0)
    assert largest_difference(in_folder(trainer, batch), expected) < 1e-5
    recomputing = trainer_of(whole(config, learner={"recompute": "full"}))
    calls = []
    recomputing._chunks[0].inner.model.layers[0].self_attn.register_forward_hook(lambda *given: calls.append(1))
    assert largest_difference(in_folder(recomputing, batch), expected) < 1e-5
    assert len(calls) == 2


@pytest.mark.parametrize("name", slow_but(FOREIGN, *FAST))
def test_a_row_gives_each_sequence_what_it_has_alone_in_the_way_that_the_model_allows(name, foreign, trainer_of):
    folder, batch = foreign(name), make_batch(groups=3, size=3)
    *_, way, plain = FOREIGN[name]
    trainer = trainer_of(whole(make_config(folder)))
    model = trainer._chunks[0]
    assert (model.way.name, model._is_plain) == (way, plain)
    found, rows = scores(trainer, batch)
    assert torch.allclose(found, alone(folder, batch), atol=2e-5, rtol=0)
    assert max(len(row.segments) for row in rows) == 1 if way == "alone" else any(len(row.segments) > 1 for row in rows)
    assert any(row.segments[:, 3].any() for row in rows) == (way == "shared")
    stored = load_file(folder / "model.safetensors")
    exported = weights(trainer)
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[key], stored[key]) for key in stored)
    before = gradients(trainer, batch)
    sums = trainer.train_step(batch)
    assert sums["steps/updates"] == 1
    assert all(gradient.abs().sum() > 0 for key, gradient in before.items() if "experts" not in key)
    assert whole_model(read_shape(folder, family=trainer._config.model.built_by)) == sum(
        tensor.numel() for tensor in stored.values()
    )


@pytest.mark.parametrize("name", ["granite", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_packing_does_not_change_the_gradient_of_a_head_of_its_own(name, foreign, trainer_of):
    batch, config = make_batch(groups=3, size=3), whole(make_config(foreign(name)))
    expected = gradients(trainer_of(config), batch)
    apart = whole(config, learner={"share_prompts": False, "tokens_per_micro_batch": 60})
    assert largest_difference(gradients(trainer_of(apart), batch), expected) < 2e-5


@pytest.mark.slow  # those of a model that Megatron builds are in the fast tests
def test_two_data_parallel_ranks_have_the_gradient_and_norms_of_one(model_folder):
    def case(layout):
        config = Config.model_validate_json(configure(model_folder("qwen2", True), "float32", layout))
        return Case(layout.name, whole(config).model_dump_json())

    one = Layout("one", 1)
    two = [Layout("two", 2), Layout("shared optimizer", 2, {}, {"optimizer": {"distributed": True}})]
    (expected,) = run_ranks([case(one)], 1).values()
    for name, given in run_ranks([case(layout) for layout in two], 2).items():
        assert largest_difference(given.tensors, expected.tensors) < 2e-5, name
        assert given.loss == pytest.approx(expected.loss, rel=2e-5), name
        assert given.norm == pytest.approx(expected.norm, rel=2e-5), name
        assert given.params_norm == pytest.approx(expected.params_norm, rel=1e-6), name
        assert given.of_norm == pytest.approx(expected.of_norm, rel=1e-4), name
        assert given.scores < 1e-5, name


@pytest.mark.parametrize("trained", [("float32", False), pytest.param(("bfloat16", True), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(FOREIGN, "olmo2"))
def test_a_resume_goes_on_bit_for_bit_and_its_folder_is_transformers_own(name, trained, foreign, trainer_of, tmp_path):
    dtype, distributed = trained
    config = whole(make_config(foreign(name), dtype, optimizer={"distributed": distributed}))
    trainer = trainer_of(config, tmp_path / "run")
    trainer.train_step(make_batch(0))
    trainer.save()
    trainer.saved(wait=True)
    trainer.train_step(make_batch(1))
    expected = weights(trainer)
    trainer = trainer_of(config, tmp_path / "run")
    assert trainer.version.step == 1
    trainer.train_step(make_batch(1))
    found = weights(trainer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    trainer.export_model()
    made, told = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {each.dtype for each in made.parameters()} == {getattr(torch, dtype)}


def test_a_tied_model_is_saved_once_and_resumed(model_folder, trainer_of, tmp_path):
    config = whole(make_config(model_folder("qwen2", True)))
    trainer = trainer_of(config, tmp_path / "run")
    trainer.train_step(make_batch(0))
    trainer.save()
    trainer.saved(wait=True)
    expected = weights(trainer)
    assert "lm_head.weight" not in expected
    found = weights(trainer_of(config, tmp_path / "run"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_reference_critic_and_teacher_are_built_as_the_policy(foreign, trainer_of):
    folder = foreign("olmo2")
    algo = {"kl": 0.1, "advantage": {"estimator": "gae"}}
    trainer = trainer_of(whole(make_config(folder), algo=algo))
    before = weights(trainer)
    row = trainer.train_step(make_batch())
    assert row["loss/kl"] == pytest.approx(0, abs=1e-6)
    assert row["critic/loss"] > 0
    assert trainer.train_step(make_batch(1))["loss/kl"] > 1e-6
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    trainer = trainer_of(whole(make_config(folder), algo={"distillation": {"teacher": folder}}))
    assert trainer.train_step(make_batch())["steps/updates"] == 1
    with pytest.raises(ConfigError, match=r"algo\.kl_estimator: full needs logits that are the output layer's"):
        trainer_of(whole(make_config(foreign("granite")), algo={"kl": 0.1, "kl_estimator": "full"}))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_plan_and_the_learner_count_the_parameters_and_operations_of_megatron_s_layers(family, model_folder):
    folder = model_folder(family)
    shapes = [read_shape(folder), read_shape(folder, family=whole(make_config(folder)).model.built_by)]
    assert len({whole_model(shape) for shape in shapes}) == 1
    assert len({training_flops(shape, LoraConfig(), Work(tokens=5, pairs=7, targets=3)) for shape in shapes}) == 1


def test_a_reference_of_another_computation_is_refused_by_the_key(foreign, trainer_of, tmp_path):
    config = json.loads((foreign("olmo2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5, "pad_token_id": 9}))
    with pytest.raises(ConfigError, match=r"has rms_norm_eps=0\.5, the policy has rms_norm_eps=1e-05"):
        trainer_of(whole(make_config(foreign("olmo2")), algo={"kl": 0.1, "reference": tmp_path}))


@pytest.mark.slow
def test_the_least_able_model_decides_how_rows_are_made(foreign, trainer_of):
    config = whole(make_config(foreign("olmo2")), algo={"distillation": {"teacher": foreign("mamba")}})
    trainer = trainer_of(config)
    assert trainer._packing.apart
    assert not trainer._packing.share_prompts
    assert trainer.train_step(make_batch())["steps/updates"] == 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"learner": {"ranks": 2, "layout": {"tensor": 2}}}, "learner.layout.tensor: 2 would cut Olmo2ForCausalLM"),
        ({"learner": {"ranks": 2, "layout": {"pipeline": 2}}}, "learner.layout.pipeline: 2 would cut"),
        ({"learner": {"ranks": 2, "layout": {"context": 2}}}, "learner.layout.context: 2 would cut"),
        ({"learner": {"ranks": 2, "layout": {"expert": 2}}}, "learner.layout.expert: 2 would cut"),
        ({"learner": {"router_replay": True}}, "learner.router_replay: true is not possible with model.implementation"),
        ({"learner": {"moe_permute_fusion": True}}, "learner.moe_permute_fusion: true is not possible"),
        ({"learner": {"gradient_accumulation_fusion": True}}, "learner.gradient_accumulation_fusion: true is not"),
        ({"learner": {"freeze_vision": True}}, "learner.freeze_vision: true is not possible"),
        ({"learner": {"lora": {"rank": 8}}}, "learner.lora.rank: 8 is not possible with model.implementation"),
        ({"learner": {"recompute": "selective"}}, "learner.recompute: selective is not possible"),
        ({"learner": {"megatron": {"fp8": "hybrid"}}}, "learner.megatron.fp8: Megatron-Core builds no layers"),
        ({"model": {"family": "qwen2"}}, "model.family: qwen2 is not possible with model.implementation: transformers"),
        ({"generate": {"quantization": "fp8"}}, "generate.quantization: fp8 is not possible"),
        (
            {"algo": {"distillation": {"teacher": "HERE", "family": "qwen2"}}},
            "algo.distillation.family: qwen2 is not possible",
        ),
    ],
)
def test_what_a_whole_model_cannot_have_is_refused_by_name(changed, text, foreign):
    folder = foreign("olmo2")
    changed = json.loads(json.dumps(changed).replace("HERE", str(folder)))
    if "generate" in changed:
        changed |= {"model": {"dtype": "bfloat16"}}
    config = whole(make_config(folder), **changed)
    with pytest.raises(ConfigError) as refused:
        check_model(config, read_shape(folder, family=config.model.built_by))
    assert any(line.startswith(text) and "; allowed: " in line for line in refused.value.lines), refused.value.lines


@pytest.mark.parametrize(
    ("described", "text"),
    [
        ({"vision_config": {}}, "vision_config is not supported with model.implementation: transformers"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"architectures": ["Olmo2Model"]}, "transformers .* builds Olmo2ForCausalLM of model_type olmo2"),
        ({"model_type": "own_model", "architectures": ["OwnForCausalLM"]}, "has no model_type own_model"),
        ({"num_attention_heads": "many"}, "transformers refuses it"),
    ],
)
def test_a_folder_that_transformers_does_not_build_is_refused(described, text, foreign, tmp_path):
    config = json.loads((foreign("olmo2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | described))
    with pytest.raises(UnsupportedModelError, match=text):
        read_shape(tmp_path, family=whole(make_config(tmp_path)).model.built_by)


def test_an_unknown_architecture_is_refused_with_the_way_to_train_it(foreign):
    with pytest.raises(UnsupportedModelError, match=r"any of transformers' with model\.implementation=transformers"):
        read_shape(foreign("olmo2"))


def test_tensors_that_are_not_the_model_s_are_refused(foreign, trainer_of, tmp_path):
    stored = load_file(foreign("olmo2") / "model.safetensors")
    (tmp_path / "config.json").write_text((foreign("olmo2") / "config.json").read_text())
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    for changed, text in (
        ({key: tensor for key, tensor in stored.items() if key != norm}, f"has no tensor {norm}, as transformers"),
        ({**stored, "extra.weight": stored[norm].clone()}, "extra.weight and 0 more have no place in the model"),
        ({**stored, table: stored[table][:-1].clone()}, f"tensor {table} is .130, 64., the model needs .131, 64."),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(WeightsMismatchError, match=text):
            trainer_of(whole(make_config(tmp_path)))
