"""The learner's step: a gradient that depends on the batch alone, and what a step leaves behind."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from learner_parts import gradients, largest_difference, make_batch, make_config, weights

from streamrl.config.file import ConfigError
from streamrl.learner.packing import SequenceTooLongError
from streamrl.types import Batch, VersionSpan


@pytest.mark.parametrize("tied", [False, True])
def test_neither_packing_nor_shared_prompts_nor_the_split_changes_the_gradient(tied, model_folder, trainer_of):
    batch, folder = make_batch(groups=4, size=4), model_folder("qwen2", tied)
    reference = gradients(trainer_of(make_config(folder, share_prompts=False)), batch)
    for learner in (
        {"share_prompts": True},
        {"share_prompts": True, "tokens_per_micro_batch": 30},
        {"share_prompts": False, "tokens_per_micro_batch": 30},
        {"share_prompts": False, "tokens_per_micro_batch": 60},
    ):
        trainer = trainer_of(make_config(folder, **learner))
        assert largest_difference(gradients(trainer, batch), reference) < 2e-5, learner


def test_the_gradient_does_not_depend_on_the_order_of_the_samples(model_folder, trainer_of):
    batch = make_batch()
    turned = Batch(
        step=0, groups=tuple(msgspec.structs.replace(g, samples=g.samples[::-1]) for g in reversed(batch.groups))
    )
    trainer = trainer_of(make_config(model_folder()))
    assert largest_difference(gradients(trainer, turned), gradients(trainer, batch)) < 2e-5


def test_another_batch_has_another_gradient(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder()))
    first = gradients(trainer, make_batch())
    assert largest_difference(gradients(trainer, make_batch(groups=2)), first) > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_stale_groups_train_end_to_end(dtype, distributed, model_folder, trainer_of):
    config = make_config(
        model_folder("qwen2", True), dtype=dtype, optimizer={"distributed": distributed, "warmup_steps": 2}
    )
    trainer = trainer_of(config)
    before = weights(trainer)
    rows = [trainer.train_step(make_batch(step)) for step in range(2)]
    assert str(trainer.version) == "2.0"
    assert rows[1]["tokens/trained"] == sum(group.trained_tokens for group in make_batch(1).groups)
    assert rows[1]["loss/total/s1"] != 0  # some tokens were a step old
    assert [row["lr"] for row in rows] == pytest.approx([0.005, 0.01])
    assert rows[1]["steps/updates"] == 2
    assert all(math.isfinite(value) for row in rows for value in row.values())
    after = weights(trainer)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("distributed", [False, True])
def test_the_norm_of_parameters_and_the_zeros_of_gradients_are_there_where_they_are_asked_for(
    distributed, model_folder, trainer_of
):
    plain = trainer_of(make_config(model_folder())).train_step(make_batch())
    assert not {"params_norm", "grad_zeros", "gradient/signal"} & plain.keys()
    given = {"params_metrics": True, "tokens_per_micro_batch": 61}
    config = make_config(model_folder(), optimizer={"distributed": distributed}, **given)
    trainer = trainer_of(config)
    row = trainer.train_step(make_batch())
    assert row["params_norm"] == pytest.approx(
        math.sqrt(sum(float(w.square().sum()) for w in weights(trainer).values()))
    )
    assert 0 < row["grad_zeros"] < 1
    assert row["gradient/noise"] > 0
    assert "gradient/signal" in row


def test_bfloat16_keeps_a_float32_master_that_small_updates_reach(model_folder, trainer_of):
    config = make_config(model_folder(), dtype="bfloat16", optimizer={"lr": 1e-7})
    trainer = trainer_of(config)
    before = weights(trainer)
    trainer.train_step(make_batch())
    parameter = trainer._chunks[0].decoder.final_layernorm.weight
    assert torch.equal(weights(trainer)["model.norm.weight"], before["model.norm.weight"])
    assert not torch.equal(parameter.main_param, parameter.detach().float())


def test_repeating_a_policy_that_earns_reward_makes_it_likelier(model_folder, trainer_of):
    """One prompt with a right and a wrong answer, trained on-policy: the right one's log-prob rises."""
    trainer = trainer_of(make_config(model_folder()))
    template = make_batch().groups[1]
    right, wrong = (
        msgspec.structs.replace(sample, reward=reward, loss_mask=np.ones(len(sample.output_ids), bool))
        for sample, reward in zip(template.samples[:2], (1.0, 0.0), strict=True)
    )
    gaps = []
    for step in range(8):
        group = msgspec.structs.replace(template, samples=(_on_policy(trainer, right), _on_policy(trainer, wrong)))
        gaps.append(float(group.samples[0].logprobs.mean() - group.samples[1].logprobs.mean()))
        trainer.train_step(Batch(step=step, groups=(group,)))
    assert gaps[-1] > gaps[0] + 1


def _on_policy(trainer, sample):
    """The sample with the log-probs that the trainer's weights give it."""
    from streamrl.learner.attention import describe_row
    from streamrl.learner.logprobs import Targets

    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.output_ids])).long()
    places = torch.arange(len(sample.prompt_ids) - 1, len(ids) - 1)
    with torch.no_grad():
        logprobs, _ = trainer._chunks[0](
            ids[None],
            torch.arange(len(ids))[None],
            None,
            labels=Targets(places, ids[places + 1], 0.8),
            packed_seq_params=describe_row(np.array([[0, len(ids), 0, 0]]), torch.device("cpu")),
        )
    spans = (VersionSpan(trainer.version, 0, len(sample.output_ids)),)
    return msgspec.structs.replace(sample, logprobs=logprobs.numpy(), spans=spans)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(dtype, model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(), dtype=dtype))
    trainer.train_step(make_batch(0))
    before = weights(trainer)
    with torch.no_grad():  # a weight that overflows in the forward pass
        saved = trainer._chunks[0].decoder.final_layernorm.weight[0].clone()
        trainer._chunks[0].decoder.final_layernorm.weight[0] = torch.inf
    row = trainer.train_step(make_batch(1))
    with torch.no_grad():
        trainer._chunks[0].decoder.final_layernorm.weight[0] = saved
    assert (row["steps/skipped"], row["steps/updates"]) == (1, 1)
    assert trainer.version.step == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert trainer.train_step(make_batch(2))["steps/updates"] == 2


def test_a_batch_without_a_trained_token_is_a_step_without_a_gradient(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder()))
    batch = make_batch()
    silent = [msgspec.structs.replace(s, loss_mask=np.zeros(len(s.output_ids), bool)) for s in batch.groups[1].samples]
    row = trainer.train_step(Batch(step=0, groups=(msgspec.structs.replace(batch.groups[1], samples=tuple(silent)),)))
    assert (row["tokens/trained"], row["grad_norm"], row["loss/total"]) == (0, 0, 0)


def test_a_batch_of_another_step_and_one_that_is_too_long_are_refused(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder(), tokens_per_micro_batch=9))
    with pytest.raises(ValueError, match=r"version 0.0 trains the batch of step 0, not of 3"):
        trainer.train_step(make_batch(3))
    assert issubclass(SequenceTooLongError, ConfigError)
    with pytest.raises(SequenceTooLongError, match="tokens_per_micro_batch"):
        trainer.train_step(make_batch(0))


def test_another_number_of_ranks_than_was_started_is_refused(model_folder, trainer_of):
    with pytest.raises(ConfigError, match=r"learner.ranks: 2 is configured, 1 were started"):
        trainer_of(make_config(model_folder(), ranks=2))


def test_two_data_parallel_ranks_have_the_gradients_and_metrics_of_one(model_folder, trainer_of, two_ranks, tmp_path):
    folder = model_folder("llama", True)
    (whole, small), metrics = two_ranks("dp_gradients", make_config(folder, ranks=2), tmp_path / "run")
    trainer = trainer_of(make_config(folder))
    assert largest_difference(whole, gradients(trainer, make_batch())) < 2e-5
    # One bundle: the second rank has nothing to train and still takes part.
    assert largest_difference(small, gradients(trainer, make_batch(groups=1, size=2))) < 2e-5
    alone = trainer.train_step(make_batch())
    timeless = {key for key in alone if not key.startswith(("time/", "straggler/", "learner/"))}
    assert {key: metrics[key] for key in timeless} == pytest.approx({key: alone[key] for key in timeless}, rel=1e-4)
