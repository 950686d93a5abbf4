"""Hugging Face -> Megatron -> Hugging Face, and the same logits on the way."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from learner_parts import VOCABULARY, half_kept, make_config, write_model
from safetensors.torch import load_file, save_file

from benchmarks.random_models import FAMILIES, load_model
from streamrl.config.file import ConfigError
from streamrl.learner import huggingface
from streamrl.learner.attention import describe_row
from streamrl.learner.families.base import EMBEDDING
from streamrl.learner.huggingface import save_folder
from streamrl.learner.logprobs import Targets
from streamrl.learner.shape import FLOAT32, WeightsMismatchError, read_shape
from tests.operations_table import documented
from tests.slow_families import slow_but

OLDER = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")


@pytest.mark.parametrize("family", slow_but(FAMILIES, *OLDER, "glm4_moe"))
@pytest.mark.parametrize("tied", [False, True])
def test_the_round_trip_is_bitwise_and_logits_are_those_of_hugging_face(family, tied, model_folder, trainer_of):
    folder = model_folder(family, tied)
    trainer = trainer_of(make_config(folder))
    original = load_file(folder / "model.safetensors")
    exported = dict(trainer.export())
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)

    theirs = load_model(folder)
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = trainer._chunks[0](ids, torch.arange(24).expand(2, -1), None)[..., :VOCABULARY]
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=0, atol=1e-5)
        # A weight that is not the same shows in the logits.
        next(weight for name, weight in theirs.named_parameters() if name.endswith("o_proj.weight"))[0] += 1
        assert (ours - theirs(ids).logits).abs().max() > 1e-3


STRETCHED = {"rope_theta": 5000.0, "original_max_position_embeddings": 64, "factor": 4.0}
LLAMA3 = {**STRETCHED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "norm_topk_prob": True}
VARIANTS = {
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "linear scaling": ("qwen2", {"rope_parameters": {**STRETCHED, "rope_type": "linear"}}),
    "yarn scaling": ("qwen3", {"rope_parameters": {**STRETCHED, "rope_type": "yarn"}}),
    "expert weights that do not sum to 1": ("qwen3_moe", {"norm_topk_prob": False}),
    "a dense layer among mixtures": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "every second layer a mixture": ("qwen3_moe", {"decoder_sparse_step": 2, "num_experts": 6}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_configuration_says_besides_is_computed_as_hugging_face_does(variant, trainer_of, tmp_path):
    family, changes = VARIANTS[variant]
    folder = write_model(tmp_path / "model", family, layers=3, **changes)
    trainer = trainer_of(make_config(folder))
    original = load_file(folder / "model.safetensors")
    exported = dict(trainer.export())
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)

    ids = torch.randint(0, VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = trainer._chunks[0](ids, torch.arange(200).expand(2, -1), None)[..., :VOCABULARY]
        theirs = load_model(folder)(ids).logits
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        if changes.keys() & PLAIN.keys():  # without it, it is another model
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | PLAIN))
            plain = load_model(folder)(ids).logits
            assert (ours - plain).abs().max() > 1e-3


LAYOUTS = {
    "two tensor ranks": (2, "float32", {"tensor": 2}),
    "two stages of two chunks": (2, "bfloat16", {"pipeline": 2, "virtual": 2}),
    "experts over context ranks": (2, "float32", {"context": 2, "expert": 2}),
    "cut experts over tensor and data ranks": (4, "float32", {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    "experts in a pipeline": (4, "bfloat16", {"pipeline": 2, "expert": 2}),
}


# The layouts of the others are in the fast tests of the gradient and of the router replay.
@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "two tensor ranks"))
def test_every_family_goes_bitwise_through_a_model_that_is_cut(layout, folders, on_ranks, tmp_path):
    ranks, dtype, cut = LAYOUTS[layout]
    chosen = [folder for folder in folders if "expert" not in cut or folder.name.endswith("_moe")]
    if "virtual" in cut:  # the first chunk has fewer layers than some towers have levels
        chosen = [folder for folder in chosen if getattr(read_shape(folder).vision, "levels", 0) < 2]
    config = make_config(chosen[0], ranks=ranks, layout=cut, dtype=dtype)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    on_ranks(ranks, "conversion_at_work.py", tmp_path / "config.json", tmp_path / "out.pt", *chosen)
    exported = torch.load(tmp_path / "out.pt")
    for folder in chosen:
        original = load_file(folder / "model.safetensors")
        names = [name for name, _ in exported[str(folder)]]
        assert sorted(names) == sorted(original)
        assert names[0] in read_shape(folder).family.outside_layers[EMBEDDING][1]
        for name, tensor in exported[str(folder)]:
            assert str(tensor.dtype).endswith("float32" if name.endswith(FLOAT32) else dtype)
            assert torch.equal(tensor, original[name].to(tensor.dtype)), name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each family, tied and untied in turn."""
    root = tmp_path_factory.mktemp("four_layers")
    return [write_model(root / family, family, tied=bool(i % 2), layers=4) for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize("family", slow_but(FAMILIES, *OLDER, "nemotron_3"))
def test_packed_log_probs_are_those_of_hugging_face_at_the_sampling_temperature(family, model_folder, trainer_of):
    folder = model_folder(family)
    trainer = trainer_of(make_config(folder))
    theirs = load_model(folder)
    # A prompt of 5 with answers of 4 and 7 behind it, then a sequence of 6.
    segments = torch.tensor([[0, 5, 0, 0], [5, 4, 0, 5], [9, 7, 0, 5], [16, 6, 0, 0]]).numpy()
    ids = torch.randint(0, VOCABULARY, (22,), generator=torch.Generator().manual_seed(1))
    places = [list(range(5)), [*range(5), *range(5, 9)], [*range(5), *range(9, 16)], list(range(16, 22))]
    positions = torch.cat([torch.arange(5), torch.arange(5, 9), torch.arange(5, 12), torch.arange(6)])
    targets = torch.arange(22).flip(0)
    with torch.no_grad():
        logprobs, _ = trainer._chunks[0](
            ids[None],
            positions[None],
            None,
            labels=Targets(torch.arange(22), targets, temperature=0.8),
            packed_seq_params=describe_row(segments, torch.device("cpu")),
        )
        for (start, length, _, _), seen in zip(segments.tolist(), places, strict=True):
            logits = theirs(ids[seen][None]).logits[0, -length:] / 0.8
            chosen = targets[start : start + length, None]
            expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
            torch.testing.assert_close(logprobs[start : start + length], expected, rtol=0, atol=2e-5)


def test_a_model_cut_over_two_ranks_exports_the_same_bits_and_gives_the_same_log_probs(
    model_folder, trainer_of, two_ranks, tmp_path
):
    folder = model_folder("qwen3", True)
    cut = two_ranks("tensor_parallel", make_config(folder, ranks=2), tmp_path / "run")
    model = trainer_of(make_config(folder))._chunks[0]
    original = load_file(folder / "model.safetensors")
    assert cut["weights"].keys() == original.keys()
    assert all(torch.equal(cut["weights"][name], original[name]) for name in original)

    row = torch.arange(12)
    packed = describe_row(torch.tensor([[0, 12, 0, 0]]).numpy(), torch.device("cpu"))
    targets = Targets(row[:-1], row[1:], temperature=0.8, entropy_gradient=True, kept=half_kept(row[1:]))
    logprobs, entropy = model(row[None], row[None], None, labels=targets, packed_seq_params=packed)
    (logprobs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(cut["logprobs"], logprobs.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(cut["entropy"], entropy.detach(), rtol=0, atol=1e-5)
    norm = model.decoder.final_layernorm.weight
    torch.testing.assert_close(cut["norm_grad"], norm.main_grad if norm.grad is None else norm.grad, rtol=0, atol=1e-4)


def test_bfloat16_weights_are_exported_as_bfloat16(model_folder, trainer_of):
    folder = model_folder("llama")
    original = load_file(folder / "model.safetensors")
    exported = dict(trainer_of(make_config(folder, dtype="bfloat16")).export())
    assert all(torch.equal(exported[name], original[name].bfloat16()) for name in original)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 50_000])
def test_a_saved_folder_is_one_that_transformers_loads(shard_bytes, model_folder, trainer_of, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "SHARD_BYTES", shard_bytes)
    folder = model_folder("qwen2", True)
    save_folder(trainer_of(make_config(folder)).export(), folder, tmp_path / "out")
    original, saved = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "out"))
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), saved.parameters(), strict=True))
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shard_bytes < 1 << 30)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    # What was written can be read again, shards included.
    again = trainer_of(make_config(tmp_path / "out"))
    assert all(torch.equal(t, load_file(folder / "model.safetensors")[name]) for name, t in again.export())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
        (lambda w: w.update({"model.surplus": torch.zeros(1)}), "model.surplus and 0 more have no place"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"tensor model.norm.weight is \[3\], the model needs \[64\]",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_refused_by_name(change, text, model_folder, trainer_of, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(model_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    assert issubclass(WeightsMismatchError, ConfigError)
    with pytest.raises(WeightsMismatchError, match=text):
        trainer_of(make_config(folder))


def test_an_embedding_of_another_size_than_the_configuration_says_is_refused(model_folder, trainer_of, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(model_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 120}))
    with pytest.raises(WeightsMismatchError, match=r"embed_tokens.weight is \[131, 64\], the model needs \[120, 64\]"):
        trainer_of(make_config(folder))


def test_a_shard_that_is_missing_or_cut_off_is_refused_by_its_name(model_folder, trainer_of, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(model_folder("llama"), folder)
    first, last = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    last_names = sorted(weights)[-2:]
    save_file({name: weights[name] for name in weights.keys() - set(last_names)}, folder / first)
    save_file({name: weights[name] for name in last_names}, folder / last)
    index = {"weight_map": {name: last if name in last_names else first for name in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    content = (folder / last).read_bytes()
    (folder / last).write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsMismatchError) as refused:
        trainer_of(make_config(folder))
    documented("model.path: ... is no whole safetensors file: ...", str(refused.value), 2)
    assert last in str(refused.value)
    (folder / last).unlink()
    with pytest.raises(WeightsMismatchError, match=rf"{last} is missing, model.safetensors.index.json names it"):
        trainer_of(make_config(folder))
