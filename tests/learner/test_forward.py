"""Passes over micro batches: what they return, and that they leave alone what they should."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from learner_parts import make_batch, make_config

from streamrl.config.learner import LoraConfig
from streamrl.learner.forward import Passes, wrap
from streamrl.learner.huggingface import load_weights
from streamrl.learner.model import build
from streamrl.learner.packing import Packing, plan_batch
from streamrl.learner.parallel import Ranks
from streamrl.learner.rows import RowMaker
from streamrl.learner.shape import read_shape


@pytest.fixture
def started(model_folder):
    """`started(config)`: (chunks, wrapped chunks, passes) of a process that is alone."""
    running = []

    def start(config):
        ranks = Ranks.start(config)
        running.append(ranks)
        chunks = build(read_shape(config.model.path), config, ranks.device)
        load_weights(chunks, config.model.path)
        wrapped = wrap(chunks, config, ranks)
        return chunks, wrapped, Passes(wrapped, ranks, config)

    yield start
    for ranks in running:
        ranks.stop()


def rows(budget: int = 40):
    batch = make_batch()
    packing = Packing(ranks=1, budget=budget, share_prompts=True)
    return plan_batch(batch, [sample.reward for sample in batch.samples], packing)[0]


def weighted(micro_batches, logprobs, entropy, index):
    """A loss whose gradient is different for every token, and sums that say which micro batch they are of."""
    weight = torch.from_numpy(micro_batches[index].advantages)
    loss = -(weight * logprobs).sum()
    return loss, {"loss": loss.detach()[None], "max/index": torch.tensor([float(index)])}


def gradient(chunks):
    return {name: parameter.main_grad.clone() for name, parameter in chunks[0].named_parameters()}


def test_sums_are_merged_over_micro_batches_and_the_gradient_is_that_of_their_sum(model_folder, started):
    chunks, _, passes = started(make_config(model_folder()))
    micro_batches = rows()
    assert len(micro_batches) > 2
    sums = passes.forward_backward(micro_batches, partial(weighted, micro_batches))
    whole, several = gradient(chunks), []
    for micro in micro_batches:
        part = passes.forward_backward([micro], partial(weighted, [micro]))
        several.append((part["loss"], gradient(chunks)))
    assert sums["max/index"].item() == len(micro_batches) - 1
    assert sums["loss"].item() == pytest.approx(sum(float(loss) for loss, _ in several), rel=1e-5)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, sum(parts[name] for _, parts in several), rtol=1e-4, atol=1e-5)
    assert passes.busy > 0


def test_scores_are_the_log_probs_that_the_loss_sees_and_leave_the_gradient_alone(model_folder, started):
    chunks, _, passes = started(make_config(model_folder()))
    micro_batches, seen = rows(), []

    def loss(logprobs, entropy, index):
        seen.append(logprobs.detach().clone())
        return weighted(micro_batches, logprobs, entropy, index)

    passes.forward_backward(micro_batches, loss)
    before = gradient(chunks)
    scores = passes.score(micro_batches)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scores, seen, strict=True))
    assert not any(score.requires_grad for score in scores)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gradient(chunks).items())
    assert chunks[0].training


def test_dropout_of_adapters_acts_in_training_and_not_in_scores(model_folder, started):
    config = make_config(model_folder(), lora=LoraConfig(rank=2, dropout=0.5).model_dump())
    chunks, _, passes = started(config)
    with torch.no_grad():
        for name, parameter in chunks[0].named_parameters():
            if "lora_" in name:
                parameter.normal_()
    micro_batches, seen = rows(), []

    def loss(logprobs, entropy, index):
        seen.append(logprobs.detach().clone())
        return weighted(micro_batches, logprobs, entropy, index)

    first, second = passes.score(micro_batches), passes.score(micro_batches)
    passes.forward_backward(micro_batches, loss)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, seen, strict=True))


def test_a_pass_without_a_micro_batch_is_refused(model_folder, started):
    _, _, passes = started(make_config(model_folder()))
    with pytest.raises(ValueError, match="a pass needs one micro batch at least"):
        passes.score([])


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_reduced_during_the_backward_pass_where_that_is_asked_for(overlap, model_folder, started):
    """In buckets as small as parameters, of which the output layer's is one: its weight is read without a call."""
    config = make_config(model_folder(), overlap=overlap, optimizer={"distributed": True}, megatron={"bucket_size": 1})
    chunks, wrapped, passes = started(config)
    micro_batches = rows()
    gradients = []
    for _ in range(3):  # updates of one batch: nothing is exported between them
        passes.forward_backward(micro_batches, partial(weighted, micro_batches))
        gradients.append([parameter.main_grad.clone() for parameter in chunks[0].parameters()])
    assert (wrapped[0].ddp_config.overlap_grad_reduce, wrapped[0].ddp_config.overlap_param_gather) == (overlap, False)
    assert len(wrapped[0].bucket_groups) > 1 or not overlap
    assert all(torch.equal(*pair) for later in gradients[1:] for pair in zip(gradients[0], later, strict=True))


def test_masks_are_made_for_the_attention_that_reads_them(model_folder, started):
    """As on a GPU, where rows of half precision go through a kernel that needs none; nothing is put there."""
    chunks, _, _ = started(make_config(model_folder()))
    varlen = {
        (dtype, device): RowMaker.of_model(chunks[0], make_config(model_folder(), dtype), torch.device(device)).varlen
        for dtype in ("float32", "bfloat16")
        for device in ("cpu", "cuda")
    }
    assert [where for where, yes in varlen.items() if yes] == [("bfloat16", "cuda")]
