"""The learner takes the experts that the generator took, with weights of its own router."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from learner_parts import VOCABULARY, largest_difference, make_config, write_model
from replay_at_work import replayed_gradient

from streamrl.config.file import ConfigError
from streamrl.learner.attention import describe_row
from streamrl.learner.logprobs import Targets
from streamrl.learner.router_replay import row_experts
from streamrl.moe_routing import UNKNOWN

TOKENS, LAYERS, EXPERTS, TOP_K = 20, 3, 6, 2


@pytest.fixture(params=[True, False], ids=["normalised", "not normalised"])
def folder(request, tmp_path):
    shape = {"num_experts": EXPERTS, "norm_topk_prob": request.param, "mlp_only_layers": [1]}
    return write_model(tmp_path / "moe", "qwen3_moe", layers=LAYERS, **shape)


def random_experts(seed=1):
    choices = np.tile(np.arange(EXPERTS, dtype=np.int16), (TOKENS, LAYERS, 1))
    return np.random.default_rng(seed).permuted(choices, axis=2)[..., :TOP_K]


def logprobs_of(trainer, experts):
    """Log-probs of a row of one sequence, and the gradient of the first router, with these experts replayed."""
    (model,) = trainer._chunks
    row = describe_row(np.array([[0, TOKENS, 0, 0]]), torch.device("cpu"))
    row.routed_experts = None if experts is None else row_experts(experts, model.shape, TOKENS, torch.device("cpu"))
    ids, router = ids_of_row(), model.decoder.layers[0].mlp.router
    targets = Targets(torch.arange(TOKENS - 1), ids[1:], temperature=1.0)
    logprobs, _ = model(ids[None], torch.arange(TOKENS)[None], None, labels=targets, packed_seq_params=row)
    gradient = torch.autograd.grad(logprobs.sum(), router.weight)[0]
    return logprobs.detach(), gradient


def ids_of_row():
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))


def theirs_with(folder, experts):
    """The same by transformers, whose routers are made to choose these experts; None: their own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    own = {}
    for index, layer in enumerate(model.model.layers):
        if index != 1:
            layer.mlp.gate.forward = _forced(layer.mlp.gate, own, index, None if experts is None else experts[:, index])
    ids = ids_of_row()
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    gradient = torch.autograd.grad(logprobs.sum(), model.model.layers[0].mlp.gate.weight)[0]
    return logprobs.detach(), gradient, own


def _forced(gate, own, index, experts):
    def forward(hidden):
        logits = torch.nn.functional.linear(hidden.reshape(TOKENS, -1), gate.weight)
        probabilities = logits.softmax(-1)
        own[index] = probabilities.topk(TOP_K, -1).indices
        chosen = own[index] if experts is None else torch.from_numpy(experts).long()
        chosen = torch.where(chosen < 0, own[index], chosen)
        weights = probabilities.gather(1, chosen)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    return forward


def test_replayed_experts_give_what_hugging_face_gives_when_it_is_made_to_take_them(folder, trainer_of):
    trainer = trainer_of(make_config(folder, router_replay=True))
    experts = random_experts()
    expected, expected_gradient, _ = theirs_with(folder, experts)
    logprobs, gradient = logprobs_of(trainer, experts)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    assert expected_gradient.abs().max() > 1e-2  # the weights of the replayed experts are the learner's
    own, _ = logprobs_of(trainer, None)
    assert (own - logprobs).abs().max() > 1e-2


def test_the_learners_own_experts_replayed_change_nothing(folder, trainer_of):
    trainer = trainer_of(make_config(folder, router_replay=True))
    expected, _, own = theirs_with(folder, None)
    experts = random_experts()
    for layer, chosen in own.items():
        experts[:, layer] = chosen.numpy()
    without, _ = logprobs_of(trainer, None)
    replayed, _ = logprobs_of(trainer, experts)
    assert torch.equal(without, replayed)
    torch.testing.assert_close(replayed, expected, rtol=0, atol=1e-5)


def test_where_the_experts_are_unknown_the_learners_router_decides(folder, trainer_of):
    trainer = trainer_of(make_config(folder, router_replay=True))
    experts = random_experts()
    experts[::2] = UNKNOWN
    experts[5, 0, 1] = UNKNOWN  # one of two: not enough to go by
    expected, *_ = theirs_with(folder, np.where((experts < 0).any(2, keepdims=True), UNKNOWN, experts))
    logprobs, _ = logprobs_of(trainer, experts)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    unknown, _ = logprobs_of(trainer, np.full_like(experts, UNKNOWN))
    assert torch.equal(unknown, logprobs_of(trainer, None)[0])


LAYOUTS = {
    "layers computed again": (1, {"recompute": "full"}),
    "two stages of two chunks, computed again": (2, {"recompute": "full", "layout": {"pipeline": 2, "virtual": 2}}),
    "tensor, sequence and expert ranks": (2, {"layout": {"tensor": 2, "expert": 2}}),
    "context ranks": (2, {"layout": {"context": 2}}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A model of four layers, and its gradient with replayed experts on one rank."""
    folder = write_model(tmp_path_factory.mktemp("replay") / "moe", "qwen3_moe", layers=4, num_experts=EXPERTS)
    return folder, replayed_gradient(make_config(folder, router_replay=True))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[pytest.mark.slow] * each.startswith(("two", "context"))) for each in LAYOUTS],
)
def test_replay_gives_the_same_gradient_in_every_layout(layout, alone, on_ranks, tmp_path):
    folder, expected = alone
    ranks, learner = LAYOUTS[layout]
    config = make_config(folder, router_replay=True, ranks=ranks, **learner)
    if ranks == 1:
        gradient = replayed_gradient(config)
    else:
        (tmp_path / "config.json").write_text(config.model_dump_json())
        on_ranks(ranks, "replay_at_work.py", tmp_path / "config.json", tmp_path / "out.pt")
        gradient = torch.load(tmp_path / "out.pt")
    assert largest_difference(gradient, expected) < 1e-5


def test_the_layouts_are_compared_on_a_step_in_which_replay_matters(alone):
    folder, expected = alone
    without = replayed_gradient(make_config(folder, router_replay=False))
    assert largest_difference(without, expected) > 1e-2


def test_routing_that_is_not_this_models_is_refused(folder, trainer_of):
    (model,) = trainer_of(make_config(folder, router_replay=True))._chunks
    for experts, text in (
        (np.zeros((4, LAYERS, 3), np.int16), r"of \(3, 3\) layers and choices, the model has \(3, 2\)"),
        (np.full((4, LAYERS, TOP_K), EXPERTS, np.int16), "routed expert 6, the model has 6"),
    ):
        with pytest.raises(ValueError, match=text):
            row_experts(experts, model.shape, 4, torch.device("cpu"))


def test_replay_needs_experts(model_folder, trainer_of):
    with pytest.raises(ConfigError, match="router_replay: true needs a mixture of experts, not Qwen2ForCausalLM"):
        trainer_of(make_config(model_folder("qwen2"), router_replay=True))
