"""`streamrl convert`: every way there and back is bitwise, OUT is whole or not there, and a refusal is one line."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file, save_file

from benchmarks.random_models import make_batch, write_model
from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig
from streamrl.config.model import TRANSFORMERS
from streamrl.lab import convert
from streamrl.learner import conversion
from streamrl.learner.checkpoint import CheckpointDamaged
from streamrl.learner.conversion import to_huggingface, to_megatron
from streamrl.learner.huggingface import load_weights
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import WeightsMismatchError
from streamrl.learner.trainer import Trainer

ALONE = {"tensor": 1, "pipeline": 1, "expert": 1}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8}  # heads that eight ranks can share


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_equal(folder: Path, original: Path) -> None:
    """Every tensor has the same bits; config.json is the same file."""
    ours, theirs = weights_of(folder), weights_of(original)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert (folder / "config.json").read_bytes() == (original / "config.json").read_bytes()


def run(*words: object, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamrl.cli", "convert", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def done(*words: object) -> None:
    ended = run(*words)
    assert ended.returncode == 0, ended.stderr[-4000:]


@contextmanager
def alone(model: Path, dtype: str = "float32", **learner: Any) -> Iterator[tuple[Config, Ranks]]:
    """This process as the only rank."""
    config = Config.model_validate({"model": {"path": model, "dtype": dtype}, "learner": learner})
    ranks = Ranks.start(config)
    try:
        yield config, ranks
    finally:
        ranks.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def megatron(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Megatron checkpoint of two tensor-parallel ranks, by the command."""
    out = tmp_path_factory.mktemp("megatron") / "out"
    done(model, out, "--tensor", 2)
    return out


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one rank, by this process."""
    out = tmp_path_factory.mktemp("checkpoint") / "out"
    with alone(model) as (config, ranks):
        to_megatron(config, ranks, out)
    return out


@pytest.mark.slow
def test_two_ranks_write_what_one_reads_back_bitwise(model, megatron, tmp_path):
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(path.name for path in megatron.glob("release/*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert [path.name for path in megatron.parent.iterdir()] == ["out"]  # and no draft
    source = convert.identify(megatron)
    with alone(source.model) as (config, ranks):
        to_huggingface(config, ranks, source.checkpoint, tmp_path / "back")
    assert_equal(tmp_path / "back", model)


@pytest.mark.slow
def test_a_model_made_of_the_checkpoints_own_arguments_reads_every_weight(model, megatron):
    """Megatron-Core alone, with its own layers, as Megatron-LM makes them of `args`."""
    common = dist_checkpointing.load_common_state_dict(megatron / "release")
    args = common["args"]
    assert isinstance(args, Namespace)
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, 0)
    assert (args.tensor_model_parallel_size, args.padded_vocab_size, args.vocab_size) == (2, 256, 131)
    with alone(model) as (config, ranks):
        theirs = _stock(args)
        wanted = theirs.sharded_state_dict(metadata=dist_checkpointing.load_content_metadata(megatron / "release"))
        loaded = dist_checkpointing.load({"model": wanted}, str(megatron / "release"))
        theirs.load_state_dict(loaded["model"])
        ours = conversion._model(config, ranks)
        load_weights([ours], model)
        expected = dict(ours.named_parameters())
        for name, parameter in theirs.named_parameters():
            rows = 131 if "embeddings" in name or "output_layer" in name else None
            assert torch.equal(parameter[:rows], expected.pop(name)[:rows]), name
        assert not expected


def _stock(args: Namespace) -> GPTModel:
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        use_cpu_initialization=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


@pytest.mark.parametrize(("family", "tied", "shape"), [
    ("qwen3", True, {}),
    ("qwen3_moe", False, {}),
    ("qwen3_moe", False, {"mlp_only_layers": [1]}),
    pytest.param("glm4", False, {}, marks=pytest.mark.slow),
    pytest.param("glm4_moe", False, {}, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", False, {}, marks=pytest.mark.slow),
    pytest.param("gpt_oss", False, {}, marks=pytest.mark.slow),
    pytest.param("gemma3_text", True, {}, marks=pytest.mark.slow),
    pytest.param("phi3", False, {}, marks=pytest.mark.slow),
    pytest.param("nemotron_3", False, {}, marks=pytest.mark.slow),
    pytest.param("mixtral", False, {}, marks=pytest.mark.slow),
    pytest.param("moonlight", False, {}, marks=pytest.mark.slow),
    pytest.param("seed_oss", True, {}, marks=pytest.mark.slow),
    pytest.param("qwen3_next", False, {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_other_families_go_there_and_back_bitwise(family, tied, shape, tmp_path):
    folder = write_model(tmp_path / "model", family, tied, **shape)
    with alone(folder) as (config, ranks):
        to_megatron(config, ranks, tmp_path / "megatron")
        to_huggingface(config, ranks, tmp_path / "megatron/release", tmp_path / "back")
    assert_equal(tmp_path / "back", folder)
    if family == "qwen3_moe":  # the names are those of Transformer Engine's layers, which the local ones have not
        keys = dist_checkpointing.load_tensors_metadata(str(tmp_path / "megatron/release"))
        place = "0." if shape else ""
        assert f"decoder.layers.{place}pre_mlp_layernorm.weight" in keys
        assert f"decoder.layers.{place}mlp.experts.experts.linear_fc1.weight" in keys


@pytest.mark.parametrize(("dtype", "lora"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_a_runs_checkpoint_becomes_what_the_run_itself_exports(model, dtype, lora, tmp_path):
    config = trained(model, tmp_path / "run", dtype, lora)
    checkpoint = tmp_path / "run/checkpoints/step_2"
    source = convert.identify(checkpoint)
    assert source.model == checkpoint / "huggingface"
    theirs = config.learner.lora
    assert (source.adapters.rank, source.adapters.alpha) == (theirs.rank, theirs.alpha)
    assert set(source.adapters.targets) == set(theirs.targets)
    assert convert._stored_dtype(source) == dtype
    with alone(source.model, dtype, lora=source.adapters) as (own, ranks):
        to_huggingface(own, ranks, checkpoint, tmp_path / "out")
    assert_equal(tmp_path / "out", checkpoint / "huggingface")
    assert any(
        not torch.equal(tensor, weights_of(model)[name].to(tensor.dtype))
        for name, tensor in weights_of(tmp_path / "out").items()
    )
    # Without an export it is described by the model that the run started from.
    shutil.rmtree(checkpoint / "huggingface")
    assert convert.identify(checkpoint).model == model


def test_a_runs_checkpoint_with_a_flipped_bit_is_refused_in_one_line_and_with_a_damaged_export_converted(
    model, tmp_path
):
    trained(model, tmp_path / "run", "float32", 0)
    checkpoint = tmp_path / "run/checkpoints/step_2"
    (checkpoint / "huggingface" / "model.safetensors").unlink()
    (shard,) = checkpoint.glob("*.distcp")
    content = shard.read_bytes()
    middle = len(content) // 2
    with alone(model) as (own, ranks):
        shard.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        with pytest.raises(CheckpointDamaged) as refused:
            to_huggingface(own, ranks, checkpoint, tmp_path / "out")
        assert str(refused.value) == f"{shard} does not match its checksum"
        assert not (tmp_path / "out").exists()
        shard.write_bytes(content)
        to_huggingface(own, ranks, checkpoint, tmp_path / "out")
    assert weights_of(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])
def test_of_a_model_that_reads_images_checkpoints_become_folders_and_folders_no_checkpoints(family, tmp_path):
    folder = write_model(tmp_path / "model", family)
    trained(folder, tmp_path / "run", "float32", 0)
    checkpoint = tmp_path / "run/checkpoints/step_2"
    source = convert.identify(checkpoint)
    with alone(source.model, lora=source.adapters) as (own, ranks):
        to_huggingface(own, ranks, checkpoint, tmp_path / "out")
    assert_equal(tmp_path / "out", checkpoint / "huggingface")
    with pytest.raises(ConfigError, match="is a vision-language model, of which no Megatron checkpoint is written"):
        convert.main(folder, tmp_path / "megatron", {}, dtype=None, model=None, timeout=60.0)
    assert not (tmp_path / "megatron").exists()


def trained(model: Path, run_folder: Path, dtype: str, lora: int) -> Config:
    """A run folder with the checkpoint of two steps, and its export inside."""
    learner = {"optimizer": {"lr": 1e-2}, "lora": {"rank": lora, "alpha": 8.0}}
    checkpoint = {"export_each": True, "background": False}
    config = Config.model_validate(
        {
            "run": {"name": run_folder.name, "folder": run_folder.parent},
            "model": {"path": model, "dtype": dtype},
            "generate": {"sampling": {"temperature": 0.8}},
            "learner": learner,
            "checkpoint": checkpoint,
        }
    )
    run_folder.mkdir()
    config_file.save(config, run_folder / "config.yaml")
    trainer = Trainer(config, run_folder)
    try:
        trainer.restore_or_start()
        for step in range(2):
            trainer.train_step(make_batch(step))
        trainer.save()
    finally:
        trainer.close()
    return config


@pytest.mark.parametrize(("shape", "text"), [
    ({"layers": 3}, r"is \[2, \S+.*\], the model needs \[3, "),
    ({"vocab_size": 300}, r"word_embeddings.weight is \[192, 64\], the model needs \[300, 64\]"),
])  # fmt: skip
def test_a_checkpoint_of_another_shape_is_refused(shape, text, checkpoint, tmp_path):
    other = write_model(tmp_path / "model", "qwen2", **shape)
    with alone(other) as (config, ranks), pytest.raises(WeightsMismatchError, match=text):
        to_huggingface(config, ranks, checkpoint / "release", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_missing_or_have_no_place_are_refused_by_name(model, tmp_path):
    mixed = write_model(tmp_path / "mixed", "qwen3_moe", mlp_only_layers=[1])
    with alone(mixed) as (config, ranks):
        to_megatron(config, ranks, tmp_path / "megatron")
        checkpoint = tmp_path / "megatron/release"
        deeper = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "deeper"})})
        write_model(tmp_path / "deeper", "qwen3_moe", layers=3, mlp_only_layers=[1])
        with pytest.raises(WeightsMismatchError, match=r"tensor decoder.layers.2.\S+ is missing"):
            to_huggingface(deeper, ranks, checkpoint, tmp_path / "out")
        tied = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "tied"})})
        write_model(tmp_path / "tied", "qwen3_moe", tied=True, mlp_only_layers=[1])
        with pytest.raises(WeightsMismatchError, match=r"output_layer.weight and 0 more have no place"):
            to_huggingface(tied, ranks, checkpoint, tmp_path / "out")


RENAMED = '''
from streamrl.learner.families.base import IN_A_LAYER, ModelFamily


class Renamed(ModelFamily):
    """Qwen2 with another name."""

    architectures = ("RenamedForCausalLM",)
    qkv_bias = True
    in_a_layer = {**IN_A_LAYER, "mlp.linear_fc2.weight": ("columns", ("mlp.down.weight",))}
'''


@pytest.fixture
def renamed(model: Path, tmp_path: Path) -> Path:
    """A folder of another architecture, with a family for it in `family.py` beside it."""
    folder = changed(model, tmp_path / "renamed", architectures=["RenamedForCausalLM"])
    weights = {name.replace("mlp.down_proj", "mlp.down"): tensor for name, tensor in weights_of(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "family.py").write_text(RENAMED)
    return folder


def test_a_family_of_ones_own_goes_there_and_back_bitwise(renamed, tmp_path):
    source = convert.Source(renamed, family=f"{tmp_path}/family.py:Renamed")
    config = convert._config(source, LayoutConfig(), convert._shape(source), "float32", timeout=60)
    ranks = Ranks.start(config)
    try:
        to_megatron(config, ranks, tmp_path / "megatron")
        to_huggingface(config, ranks, tmp_path / "megatron/release", tmp_path / "back")
    finally:
        ranks.stop()
    assert_equal(tmp_path / "back", renamed)


def test_a_runs_checkpoint_is_of_the_family_that_its_run_names(renamed, tmp_path):
    own, checkpoint = f"{tmp_path}/family.py:Renamed", tmp_path / "run/checkpoints/step_2"
    checkpoint.mkdir(parents=True)
    fixed = {"lora_rank": 0, "lora_alpha": 1.0, "lora_targets": []}
    (checkpoint / "checkpoint.json").write_text(json.dumps({"fixed": fixed}))
    config = Config.model_validate({"model": {"path": renamed, "family": own}, "run": {"folder": tmp_path}})
    config_file.save(config, tmp_path / "run/config.yaml")
    source = convert.identify(checkpoint)
    assert (source.model, source.family) == (renamed, own)


def test_a_family_that_is_none_is_refused_by_one_line(renamed, tmp_path):
    out = tmp_path / "out"
    assert "or a family of your own by --family" in refusal(renamed, out)
    assert refusal(renamed, out, family="qwen5").startswith(
        "--family: qwen5 is not allowed; allowed: one of deepseek_v3, "
    )


def changed(model: Path, folder: Path, **keys: object) -> Path:
    """A copy of a model's folder with other keys in config.json."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize(("sizes", "text"), [
    ({"tensor": 4}, "--tensor: 4 does not divide 2 key and value heads; allowed: a divisor of 2"),
    ({"pipeline": 4}, "--pipeline: 4 stages of 1 chunks do not share 2 layers evenly"),
    ({"expert": 2}, "--expert: 2 ranks cannot share experts, Qwen2ForCausalLM has none"),
])  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused_by_one_line(sizes, text, model, tmp_path, capsys):
    flags = [str(word) for name, size in sizes.items() for word in (f"--{name}", size)]
    assert cli.main(["convert", str(model), str(tmp_path / "out"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"streamrl: {text}")
    assert not list(tmp_path.iterdir())


def refusal(
    source: Path, output: Path, dtype: str | None = None, model: Path | None = None, family: str | None = None
) -> str:
    with pytest.raises(ConfigError) as refused:
        convert.main(source, output, ALONE, dtype=dtype, model=model, family=family, timeout=60)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


def test_what_cannot_be_converted_is_refused_before_anything_starts(model, checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert "is nothing that can be converted; allowed: a Hugging Face folder" in refusal(tmp_path, out)
    other = changed(model, tmp_path / "other", architectures=["GPT2LMHeadModel"])
    refused = refusal(other, out)
    assert "architecture GPT2LMHeadModel is not supported; allowed: " in refused
    assert "Qwen2ForCausalLM" in refused
    assert "a family of your own by --family" in refused
    assert "model.implementation" not in refused
    assert "is built by transformers, and Megatron-LM has no such model" in refusal(model, out, family=TRANSFORMERS)
    assert f"OUT: {model} is not empty; allowed: a new folder" in refusal(model, model)
    assert f"--model: {model} would describe {model}" in refusal(model, out, model=model)
    bare = tmp_path / "release"
    shutil.copytree(checkpoint / "release", bare)
    assert f"{bare} has no config.json in {tmp_path / 'huggingface'}; allowed: --model" in refusal(bare, out)
    (tmp_path / "legacy").mkdir()
    (tmp_path / "legacy/latest_checkpointed_iteration.txt").write_text("500")
    assert "iter_0000500 has neither metadata.json nor mp_rank_*; allowed: Megatron's formats" in refusal(
        tmp_path / "legacy", out
    )
    for text in ("[]", '{"fixed": null}', '{"fixed": {"lora_rank": "x", "lora_alpha": 1, "lora_targets": []}}'):
        (tmp_path / "step").mkdir(exist_ok=True)
        (tmp_path / "step/checkpoint.json").write_text(text)
        assert "checkpoint.json is none of this streamrl's: " in refusal(tmp_path / "step", out)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1000))
    assert f"{tmp_path} has 0.0 GB free" in refusal(model, out)
    assert not out.exists()


def test_several_dtypes_ask_for_one(model, tmp_path):
    mixed = changed(model, tmp_path / "mixed")
    weights = load_file(mixed / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    save_file(weights, mixed / "model.safetensors", metadata={"format": "pt"})
    text = refusal(mixed, tmp_path / "out")
    assert text == "--dtype: needed, the weights are stored as bfloat16, float32; allowed: float32, bfloat16"


def test_ranks_that_take_too_long_are_ended_and_leave_nothing(model, tmp_path, capsys):
    assert convert.main(model, tmp_path / "out", ALONE, dtype=None, model=None, timeout=0.5) == 1
    assert capsys.readouterr().err == "streamrl: the ranks had not ended after --timeout 0.5 s\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_eight_tensor_parallel_ranks_and_back_in_another_layout_bitwise(tmp_path):
    folder = write_model(tmp_path / "model", "qwen2", layers=4, **EIGHT)
    done(folder, tmp_path / "eight", "--tensor", 8)
    shards = sorted(path.name for path in tmp_path.glob("eight/release/*.distcp"))
    assert shards == [f"__{rank}_0.distcp" for rank in range(8)]
    assert all((tmp_path / "eight/release" / name).stat().st_size > 1000 for name in shards)
    done(tmp_path / "eight", tmp_path / "back", "--tensor", 2, "--pipeline", 2)
    assert_equal(tmp_path / "back", folder)
    done(tmp_path / "eight/release", tmp_path / "alone", "--model", folder)
    assert_equal(tmp_path / "alone", folder)


@pytest.mark.slow
def test_experts_over_ranks_in_bfloat16_and_back(tmp_path):
    folder = write_model(tmp_path / "model", "qwen3_moe")
    done(folder, tmp_path / "megatron", "--tensor", 2, "--expert", 2, "--dtype", "bfloat16")
    done(tmp_path / "megatron", tmp_path / "back")
    ours = weights_of(tmp_path / "back")
    for name, tensor in weights_of(folder).items():
        assert torch.equal(ours[name], tensor.bfloat16()), name


@pytest.mark.slow
def test_what_a_rank_refuses_is_the_commands_one_line(model, tmp_path):
    broken = changed(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    ended = run(broken, tmp_path / "out", "--tensor", 2)
    assert ended.returncode == 2
    *bars, told = ended.stderr.splitlines()  # on a slow machine a bar has begun
    assert told == f"streamrl: {broken.resolve()}: tensor model.norm.weight is missing"
    assert all(each.startswith("read: ") for each in bars)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_the_ranks_end_with_the_command_and_a_draft_is_left_by_kill_9_alone(number, left, model, tmp_path):
    command = [sys.executable, "-m", "streamrl.cli", "convert", model, tmp_path / "out", "--tensor", "2"]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(tree := process.children(recursive=True)) < 3:  # torchrun and two ranks
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(60) == (-number if left else 128 + number)
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert not alive
    drafts = [path.name for path in tmp_path.iterdir()]
    assert len(drafts) == left
    assert all(name.startswith(".out.") for name in drafts)
