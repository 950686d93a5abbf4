"""A sigmoid router's correction bias: loaded, published, kept and never moved; and its experts replayed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import transformers
from learner_parts import VOCABULARY, make_batch, make_config, weights, write_model
from safetensors.torch import load_file, save_file

from streamrl.config.algo import AlgoConfig
from streamrl.config.file import ConfigError
from streamrl.learner.attention import describe_row
from streamrl.learner.forward import in_dtype
from streamrl.learner.huggingface import export_weights
from streamrl.learner.logprobs import Targets
from streamrl.learner.router_replay import row_experts
from streamrl.learner.shape import FLOAT32, read_shape
from streamrl.preflight.model import check_model

TOKENS = 20


def biases(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.endswith(FLOAT32)}


@pytest.fixture
def other_folder(model_folder, tmp_path):
    """The same model with other biases."""
    folder = shutil.copytree(model_folder("glm4_moe"), tmp_path / "other")
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {name: bias + 0.5 for name, bias in biases(stored).items()}, file, {"format": "pt"})
    return folder


def test_its_bias_stays_as_the_folder_says_through_steps_a_reference_and_a_checkpoint(
    model_folder, other_folder, trainer_of, tmp_path
):
    folder = model_folder("glm4_moe")
    stored = load_file(folder / "model.safetensors")
    config = make_config(folder, "bfloat16", {"lr": 1e-2})
    config = config.model_copy(update={"algo": AlgoConfig(kl=0.1, reference=other_folder)})
    trainer = trainer_of(config, tmp_path / "run")
    for step in range(2):
        trainer.train_step(make_batch(step))
    trained = weights(trainer)
    assert biases(trained)
    for name, tensor in trained.items():
        frozen = name.endswith(FLOAT32)
        assert torch.equal(tensor, stored[name].to(tensor.dtype)) == frozen, name
        assert tensor.dtype == (torch.float32 if frozen else torch.bfloat16)
    trainer.save()
    (model,) = trainer._chunks
    model.decoder.layers[1].mlp.router.expert_bias.fill_(7.0)  # what a checkpoint did not have would stay
    resumed = weights(trainer_of(config, tmp_path / "run"))
    assert [name for name, tensor in trained.items() if not torch.equal(resumed[name], tensor)] == []


def test_a_model_that_is_cast_with_its_weights_loaded_keeps_the_bits(model_folder, trainer_of):
    folder = model_folder("glm4_moe")
    (model,) = trainer_of(make_config(folder, "bfloat16"))._chunks
    in_dtype(model)
    stored = biases(load_file(folder / "model.safetensors"))
    exported = dict(export_weights([model]))
    assert all(torch.equal(exported[name], bias) for name, bias in stored.items())


def test_a_rate_at_which_it_would_move_is_refused(model_folder):
    config = make_config(model_folder("glm4_moe"), megatron={"moe_router_bias_update_rate": 1e-3})
    with pytest.raises(ConfigError, match=r"^learner\.megatron\.moe_router_bias_update_rate: streamrl sets it"):
        check_model(config, read_shape(config.model.path))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "experts", "top_k"), [("glm4_moe", 4, 2), ("deepseek_v3", 8, 4)])
def test_replayed_experts_give_what_hugging_face_gives_when_it_is_made_to_take_them(
    family, experts, top_k, trainer_of, tmp_path
):
    folder = write_model(tmp_path / "model", family, layers=3)
    random = np.random.default_rng(1)
    choices = random.permuted(np.tile(np.arange(experts, dtype=np.int16), (TOKENS, 3, 1)), axis=2)[..., :top_k]
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    own = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    for index, layer in enumerate(theirs.model.layers):
        if index:  # the first is dense
            layer.mlp.gate.forward = _forced(layer.mlp.gate, torch.from_numpy(choices[:, index]).long())
    forced = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    (model,) = trainer_of(make_config(folder, router_replay=True))._chunks
    assert (own - forced).abs().max() > 1e-2
    for replayed, expected in ((None, own), (choices, forced)):
        row = describe_row(np.array([[0, TOKENS, 0, 0]]), torch.device("cpu"))
        if replayed is not None:
            row.routed_experts = row_experts(replayed, model.shape, TOKENS, torch.device("cpu"))
        targets = Targets(torch.arange(TOKENS - 1), ids[1:], temperature=1.0)
        ours, _ = model(ids[None], torch.arange(TOKENS)[None], None, labels=targets, packed_seq_params=row)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def _forced(gate, chosen):
    def forward(hidden):
        logits = torch.nn.functional.linear(hidden.reshape(TOKENS, -1).float(), gate.weight.float())
        weights = logits.sigmoid().gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, chosen

    return forward
