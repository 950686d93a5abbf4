"""`learner.megatron`: what may be set, what is refused and how, and that it reaches Megatron-Core."""

from __future__ import annotations

import ast
import dataclasses

import pytest
import torch
from learner_parts import make_batch, make_config
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from streamrl import run_folder
from streamrl.config.file import ConfigError, load
from streamrl.device import Device
from streamrl.learner import megatron_fields, megatron_owned
from streamrl.learner import model as model_module
from streamrl.learner import optimizer as optimizer_module
from streamrl.learner.annotations import converted, fits, words
from streamrl.learner.model import LayerChoice, _transformer_config, build, padded
from streamrl.learner.shape import read_shape
from streamrl.preflight.machine import check_machine
from streamrl.preflight.model import check_model

ENGINE = LayerChoice("transformer_engine", "in this test")


def test_the_fields_are_those_of_the_dataclasses_without_an_import_of_them():
    classes = {each.__name__: each for each in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)}
    for name, made in classes.items():
        public = {field.name for field in dataclasses.fields(made) if not field.name.startswith("_")}
        assert {field for field, of in megatron_fields.installed().items() if name in of} == public
    owned = (megatron_owned.KEYS, megatron_owned.MODEL, megatron_owned.FIXED, megatron_owned.UNREAD)
    sets = (*owned, megatron_owned.DEFAULTS, megatron_owned.FREE)
    assert {field for each in sets for field in each} == megatron_fields.installed().keys()
    assert sum(map(len, sets)) == len({field for each in sets for field in each}), "one field, one owner"


def test_every_field_that_streamrl_sets_has_its_owner(model_folder, trainer_of, monkeypatch):
    given: set[str] = set()

    def noting(kind):
        return lambda **fields: given.update(fields) or kind(**fields)

    monkeypatch.setattr(model_module, "TransformerConfig", noting(TransformerConfig))
    monkeypatch.setattr(optimizer_module, "OptimizerConfig", noting(OptimizerConfig))
    monkeypatch.setattr("streamrl.learner.forward.DistributedDataParallelConfig", noting(DistributedDataParallelConfig))
    trainer_of(make_config(model_folder("qwen3_moe"), recompute="full"))
    monkeypatch.setattr(model_module, "TransformerConfig", lambda **fields: given.update(fields))
    learner = make_config(model_folder(), recompute="selective").learner
    _transformer_config(read_shape(model_folder()), learner, torch.bfloat16, ENGINE, Device("cuda", 0))
    ours = [field for field in given if megatron_owned.owner(field) is None]
    assert set(ours) == megatron_owned.DEFAULTS


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"moe_router_dtyp": "fp32"}, r"moe_router_dtyp: unknown field \(given fp32\); allowed: .*router_dtype$"),
        ({"moe_router_dtype": "fp16"}, "moe_router_dtype: fp16 is not allowed; allowed: one of fp32, fp64 or null$"),
        ({"bucket_size": True}, "bucket_size: true is not allowed; allowed: whole number or null$"),
        ({"cp_comm_type": ["p2p", 1]}, r"cp_comm_type: \[p2p, 1\] is .*; allowed: text or a list of text or null$"),
        ({"init_method": "ones"}, "init_method: nothing that streamrl runs reads it; allowed: no value$"),
        (
            {"moe_expert_capacity_factor": 1.0},
            "moe_expert_capacity_factor: streamrl sets it, and relies on it; allowed",
        ),
        ({"moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff: streamrl sets it, and relies on it; allowed: no value$"),
        ({"loss_scale": 1024.0}, "loss_scale: streamrl sets it, and relies on it; allowed: no value$"),
        ({"lr": 1.0}, r"lr: learner\.optimizer\.lr sets it; allowed: that key$"),
        ({"hidden_size": 7}, r"hidden_size: the model's config\.json sets it; allowed: another model\.path$"),
        ({"hidden_dropout": 0.1}, "hidden_dropout: streamrl sets it, and relies on it; allowed: no value$"),
        ({"fp8": "hybrid"}, r"fp8: hybrid needs .*bfloat16, and model\.dtype is float32; allowed: null, or model"),
    ],
)
def test_a_field_that_cannot_be_set_so_is_one_line(fields, line, model_folder):
    config = make_config(model_folder(), megatron=fields)
    with pytest.raises(ConfigError, match=rf"^learner\.megatron\.{line}") as refused:
        check_model(config, read_shape(config.model.path))
    assert len(refused.value.lines) == 1


def test_a_field_that_a_later_release_adds_is_refused_until_it_is_known(model_folder, monkeypatch):
    known = {**megatron_fields.installed(), "moe_new": {"TransformerConfig": ast.parse("int", mode="eval").body}}
    monkeypatch.setattr(megatron_fields, "installed", lambda: known)
    config = make_config(model_folder(), megatron={"moe_new": 1})
    with pytest.raises(ConfigError, match=r"^learner\.megatron\.moe_new: streamrl does not know what it changes"):
        check_model(config, read_shape(config.model.path))


def test_types_are_read_as_they_are_written():
    def typed(text: str) -> ast.expr:
        return ast.parse(text, mode="eval").body

    pair = typed("Optional[Tuple[int, int]]")
    assert [fits(pair, value) for value in ([1, 2], None, [1], [1, "x"], "1")] == [True, True, False, False, False]
    assert converted(pair, [1, 2]) == (1, 2)
    dtype = typed("torch.dtype")
    assert (fits(dtype, "bfloat16"), fits(dtype, "int3"), converted(dtype, "bfloat16")) == (True, False, torch.bfloat16)
    called = typed("Callable[[Tensor], Tensor]")
    assert (fits(called, "ones"), words(called)) == (False, "")
    number = typed("float | None")
    assert [fits(number, value) for value in (1, 1.5, None, True, "1")] == [True, True, True, False, False]
    assert words(typed("Union[float, List[float]]")) == "number or a list of number"


def test_fields_reach_the_configuration_that_has_them(model_folder, trainer_of):
    fields = {
        "tp_comm_bootstrap_backend": "gloo",
        "apply_wd_to_qk_layernorm": True,
        "gradient_reduce_div_fusion": False,
        "config_logger_dir": "",
    }
    trainer = trainer_of(make_config(model_folder(), megatron=fields))
    chunk = trainer._wrapped[0]
    assert chunk.config.tp_comm_bootstrap_backend == "gloo"
    assert not chunk.ddp_config.gradient_reduce_div_fusion
    assert trainer._optimizer.megatron.config.apply_wd_to_qk_layernorm
    given = megatron_fields.values_of({"fp8_recipe": "tensorwise"}, "OptimizerConfig")
    assert given == megatron_fields.values_of({"fp8_recipe": "tensorwise"}, "TransformerConfig")  # as one argument is


@pytest.mark.parametrize("dtype", ["fp32", None])
def test_a_router_of_experts_works_in_float32(dtype, model_folder, trainer_of):
    config = make_config(model_folder("qwen3_moe"), "bfloat16", megatron={"moe_router_dtype": dtype})
    trainer = trainer_of(config)
    router = next(module for module in trainer._chunks[0].modules() if type(module).__name__ == "TopKRouter")
    seen, gating = set(), router.gating
    router.gating = lambda hidden: seen.add((made := gating(hidden)).dtype) or made
    trainer.train_step(make_batch())
    assert seen == {torch.float32 if dtype else torch.bfloat16}


def test_fields_that_do_not_fit_together_are_one_line_of_megatrons(model_folder, trainer_of):
    config = make_config(model_folder(), megatron={"cpu_offloading": True, "cpu_offloading_num_layers": -1})
    line = r"^learner\.megatron: \{.*\} is refused by Megatron-Core: .*; allowed: [^\n]*$"
    with pytest.raises(ConfigError, match=line):
        trainer_of(config)


def test_fp8_is_refused_on_a_cpu_and_pads_rows_where_it_is_not(model_folder, monkeypatch):
    config = make_config(model_folder(), "bfloat16", megatron={"fp8": "hybrid", "fp8_recipe": "tensorwise"})
    check_model(config, read_shape(config.model.path))
    with pytest.raises(ConfigError, match=r"^learner\.megatron\.fp8: hybrid needs Transformer Engine's layers on GPUs"):
        check_machine(config)
    with pytest.raises(
        ConfigError, match=r"^learner\.megatron\.fp8: hybrid needs Transformer Engine's layers, not local"
    ):
        build(read_shape(config.model.path), config, Device("cpu", 0))
    taken: list[TransformerConfig] = []
    monkeypatch.setattr(model_module, "TransformerConfig", lambda **fields: taken.append(TransformerConfig(**fields)))
    cpu = LayerChoice("local", "in this test")
    _transformer_config(read_shape(config.model.path), config.learner, torch.bfloat16, cpu, Device("cpu", 0))
    assert (taken[0].fp8, padded(61, taken[0])) == ("hybrid", 64)


def test_a_resume_with_other_fields_is_refused_by_name(model_folder, tmp_path):
    given = [f"model.path={model_folder()}", f"run.folder={tmp_path}"]
    run_folder.make(load(None, given), fresh=False)
    with pytest.raises(
        ConfigError, match=r"^learner\.megatron: \{'moe_router_dtype': 'fp32'\} differs from \{\} of the run"
    ):
        run_folder.make(load(None, [*given, "learner.megatron.moe_router_dtype=fp32"]), fresh=False)
    run_folder.make(load(None, [*given, "run.exit_interval=5", "learner.profile.first_step=3"]), fresh=False)
