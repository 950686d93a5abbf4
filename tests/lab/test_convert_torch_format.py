"""Checkpoints of Megatron-LM's `--ckpt-format torch`, cut here by the rules of its layers, become the folder again."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from benchmarks.random_models import write_model
from streamrl.config.file import ConfigError
from streamrl.lab import convert
from streamrl.learner import conversion, torch_format
from streamrl.learner.conversion import to_huggingface
from streamrl.learner.huggingface import load_weights
from tests.lab.test_convert import ALONE, alone, assert_equal, done

COLUMNS = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
ROWS = ("linear_proj.weight", "linear_fc2.weight")


def whole(model: Path) -> dict[str, torch.Tensor]:
    """The weights by the names of the local layers, uncut."""
    with alone(model) as (config, ranks):
        ours = conversion._model(config, ranks)
        load_weights([ours], model)
        return {name: value.clone() for name, value in ours.state_dict().items() if value is not None}


def part(name: str, value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a tensor-parallel rank holds of a weight."""
    if name.endswith("linear_fc1.weight"):  # gate and up, each cut
        return torch.cat([half.chunk(ranks)[rank] for half in value.chunk(2)])
    if name.endswith(ROWS):
        return value.chunk(ranks, 1)[rank]
    return value.chunk(ranks)[rank] if name.endswith(COLUMNS) else value


def write(model: Path, folder: Path, *, tensor: int = 1, pipeline: int = 1, expert: int = 1, **more: Any) -> Path:
    """As the ranks of Megatron-LM with Transformer Engine write it; experts are not cut by tensor ranks."""
    weights = whole(model)
    layers = 1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    experts = 1 + max((int(name.split(".")[6]) for name in weights if "local_experts" in name), default=-1)
    args = Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert,
        num_experts=experts or None, expert_tensor_parallel_size=1, params_dtype=torch.float32, place=Path("/tmp"),
    )  # fmt: skip
    for t, p, e in product(range(tensor), range(pipeline), range(expert)):
        state: OrderedDict[str, Any] = OrderedDict()
        for name, value in weights.items():
            words = name.split(".")
            if ".layers." in name:
                if int(words[2]) // (layers // pipeline) != p:
                    continue
                words[2] = str(int(words[2]) % (layers // pipeline))
            elif p != (0 if name.startswith("embedding") else pipeline - 1):
                continue
            if "local_experts" in name:
                if int(words[6]) // (experts // expert) != e:
                    continue
                new = ".".join([*words[:5], words[7], f"weight{int(words[6]) % (experts // expert)}"])
                state[new] = value.clone()
                continue
            new = ".".join(words).replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            new = new if experts else new.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            state[new] = part(name, value, t, tensor).clone()
        state["decoder.layers.0.mlp.linear_fc2._extra_state"] = None
        content = {
            "args": args, "checkpoint_version": 3.0, "iteration": 7, "model": state,
            "rng_state": [{"np_rng_state": numpy.random.get_state(), "place": Path("/tmp")}], **more,
        }  # fmt: skip
        at = folder / torch_format.Cut(tensor, pipeline, expert).folder(t, p, e)
        at.mkdir(parents=True)
        torch.save(content, at / "model_optim_rng.pt")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, with the tracker."""
    folder = tmp_path_factory.mktemp("torch")
    write(model, folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def test_one_ranks_file_becomes_the_folder_again_bitwise(model, written, tmp_path):
    source = convert.identify(written, model)
    assert convert._stored_dtype(source) == "float32"
    with alone(source.model) as (config, ranks):
        to_huggingface(config, ranks, source.checkpoint, tmp_path / "back")
    assert_equal(tmp_path / "back", model)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied", "sizes"), [
    ("qwen3", True, {"tensor": 2, "pipeline": 2}),
    ("qwen3_moe", False, {"pipeline": 2, "expert": 2}),
    ("llama", False, {"tensor": 2}),
])  # fmt: skip
def test_the_files_of_several_ranks_become_the_folder_again_bitwise(family, tied, sizes, tmp_path):
    model = write_model(tmp_path / "model", family, tied)
    write(model, tmp_path / "old", **sizes)
    if tied and "pipeline" in sizes:  # its last stage has a copy of the embedding
        for path in tmp_path.glob("old/mp_rank_*_001/model_optim_rng.pt"):
            content = torch.load(path, weights_only=False)
            first = torch.load(path.parent.with_name(path.parent.name[:-1] + "0") / path.name, weights_only=False)
            content["model"]["output_layer.weight"] = first["model"]["embedding.word_embeddings.weight"]
            torch.save(content, path)
    done(tmp_path / "old", tmp_path / "back", "--model", model)
    assert_equal(tmp_path / "back", model)


def test_nothing_that_a_file_names_is_run(model, tmp_path):
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "run"),)

    folder = write(model, tmp_path / "old", opt_param_scheduler=Attack())
    assert isinstance(torch_format.read_file(next(folder.glob("*/*.pt")))["opt_param_scheduler"], torch_format.Unread)
    assert not (tmp_path / "run").exists()


def refused(source: Path, output: Path, model: Path, **sizes: int) -> str:
    with pytest.raises(ConfigError) as raised:
        convert.main(source, output, ALONE | sizes, dtype=None, model=model, timeout=60)
    (line,) = raised.value.lines
    assert not output.exists()
    return line


def test_what_is_not_read_is_refused_by_one_line(model, written, tmp_path):
    out = tmp_path / "out"
    assert refused(written, out, model, tensor=2).startswith("--tensor: 2 is not how ")
    at = shutil.copytree(written / "iter_0000007", tmp_path / "copy") / "mp_rank_00/model_optim_rng.pt"
    good = torch.load(at, weights_only=False)
    for change, text in (
        ({"checkpoint_version": 2.0}, "has checkpoint_version 2.0; allowed: 3.0"),
        ({"args": Namespace(tensor_model_parallel_size=4, num_experts=8, expert_tensor_parallel_size=2)}, "cut in 2,"),
    ):
        torch.save(good | change, at)
        assert text in refused(tmp_path / "copy", out, model)
    torch.save({name: value for name, value in good.items() if name != "model"} | {"model0": {}}, at)
    assert "without virtual pipeline stages" in refused(tmp_path / "copy", out, model)
    torch.save([1], at)
    assert "holds list" in refused(tmp_path / "copy", out, model)
    at.write_bytes(at.read_bytes()[:500])
    assert "is cut short" in refused(tmp_path / "copy", out, model)


@pytest.mark.parametrize(("name", "value", "text"), [
    ("decoder.layers.1.mlp.linear_fc2.weight", None, "tensor decoder.layers.1.mlp.linear_fc2.weight is missing"),
    ("decoder.layers.1.mlp.gate", torch.zeros(1), "decoder.layers.1.mlp.gate and 0 more have no place"),
    ("decoder.final_layernorm.weight", torch.zeros(3), "is [3], the model needs [64]"),
    ("embedding.word_embeddings.weight", torch.zeros(100, 64), "has 100 rows over all ranks, the model needs 131"),
])  # fmt: skip
def test_weights_of_another_model_are_refused_by_name(name, value, text, written, tmp_path):
    folder = shutil.copytree(written / "iter_0000007", tmp_path / "copy")
    model = write_model(tmp_path / "model", "qwen2")
    at = folder / "mp_rank_00/model_optim_rng.pt"
    content = torch.load(at, weights_only=False)
    content["model"][name] = value
    torch.save(content, at)
    with alone(model) as (config, ranks), pytest.raises(ConfigError) as raised:
        to_huggingface(config, ranks, folder, tmp_path / "out")
    assert text in str(raised.value)
