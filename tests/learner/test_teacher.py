"""The teacher: another family and size beside the policy, whose scores are those of a process of its own."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from learner_parts import VOCABULARY, make_batch, make_config, weights, write_model

from streamrl.config import Config
from streamrl.config.algo import AlgoConfig
from streamrl.config.file import ConfigError
from streamrl.learner.packing import Packing, plan_batch


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """Another family, more layers, more rows in the embedding, other heads."""
    folder = tmp_path_factory.mktemp("teacher")
    return write_model(folder, "qwen3_moe", tied=True, layers=3, vocab_size=VOCABULARY + 64, num_key_value_heads=4)


def config_of(model, teacher, *, dtype="float32", rewards=False, lr=1e-3, **learner) -> Config:
    config = make_config(model, dtype, {"lr": lr}, **learner)
    distillation = None if teacher is None else {"teacher": teacher, "rewards": rewards}
    return config.model_copy(update={"algo": AlgoConfig.model_validate({"distillation": distillation or {}})})


def rows():
    batch = make_batch()
    return plan_batch(batch, [1.0] * len(batch.samples), Packing(ranks=1, budget=64, share_prompts=True))[0]


def own_scores(trainer) -> np.ndarray:
    return torch.cat(trainer._step._passes.score(rows())).numpy()


def teacher_scores(trainer) -> np.ndarray:
    return torch.cat(trainer._step._teacher.score(rows())).numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_of_another_family_and_size_scores_as_it_would_alone_whatever_is_trained_beside_it(
    dtype, model_folder, teacher_folder, trainer_of
):
    expected = own_scores(trainer_of(config_of(teacher_folder, None, dtype=dtype)))
    alone = trainer_of(config_of(model_folder(), None, dtype=dtype))
    before = own_scores(alone)
    trainer = trainer_of(config_of(model_folder(), teacher_folder, dtype=dtype, lora={"rank": 4}))
    assert np.array_equal(teacher_scores(trainer), expected)
    assert np.array_equal(own_scores(trainer), before)
    trainer.train_step(make_batch())
    assert np.array_equal(teacher_scores(trainer), expected)
    assert not np.array_equal(own_scores(trainer), before)
    assert not any(name.startswith("teacher") for name in weights(trainer))


def test_the_policy_comes_nearer_to_its_teacher_on_the_tokens_that_it_is_given(
    model_folder, teacher_folder, trainer_of
):
    config = config_of(model_folder(), teacher_folder, passes=30)
    algo = config.algo.model_copy(update={"loss": "reinforce"})  # no clip: the tokens are nobody's
    trainer = trainer_of(config.model_copy(update={"algo": algo}))
    taught = teacher_scores(trainer)
    before = np.abs(own_scores(trainer) - taught).mean()
    trainer.train_step(make_batch())
    assert np.abs(own_scores(trainer) - taught).mean() < 0.7 * before


def test_a_group_with_equal_rewards_is_trained_by_the_teacher(model_folder, teacher_folder, trainer_of):
    batch = make_batch()
    groups = [
        msgspec.structs.replace(
            group, samples=tuple(msgspec.structs.replace(sample, reward=1.0) for sample in group.samples)
        )
        for group in batch.groups
    ]
    batch = msgspec.structs.replace(batch, groups=tuple(groups))
    assert trainer_of(config_of(model_folder(), None)).train_step(batch)["grad_norm"] == 0
    assert trainer_of(config_of(model_folder(), teacher_folder, rewards=True)).train_step(batch)["grad_norm"] > 0


def test_a_resumed_run_trains_with_the_same_teacher_bit_for_bit(model_folder, teacher_folder, trainer_of, tmp_path):
    config = config_of(model_folder(), teacher_folder)
    trainer = trainer_of(config, tmp_path / "run")
    trainer.train_step(make_batch())
    trainer.save()
    trainer.saved(wait=True)
    trainer.train_step(make_batch(1))
    expected = weights(trainer)
    resumed = trainer_of(config, tmp_path / "run")
    assert resumed.version.step == 1
    resumed.train_step(make_batch(1))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_a_rehearsal_passes_through_the_teacher_as_well(model_folder, teacher_folder, trainer_of):
    trainer = trainer_of(config_of(model_folder(), teacher_folder))
    trainer._step._teacher.score = lambda rows: (_ for _ in ()).throw(RuntimeError("in the teacher"))
    with pytest.raises(RuntimeError, match="in the teacher"):
        trainer.rehearse(make_batch())


def test_a_teacher_that_lacks_tokens_or_that_the_layout_does_not_cut_is_refused(model_folder, trainer_of, tmp_path):
    small = write_model(tmp_path / "small", vocab_size=VOCABULARY - 1)
    line = rf"algo\.distillation\.teacher: .*small has {VOCABULARY - 1} tokens, and the policy draws from {VOCABULARY}"
    with pytest.raises(ConfigError, match=line):
        trainer_of(config_of(model_folder(), small))
    with pytest.raises(ConfigError, match=r"algo\.distillation\.teacher: .*nowhere has no config\.json"):
        trainer_of(config_of(model_folder(), tmp_path / "nowhere"))
