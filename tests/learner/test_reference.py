"""The reference policy: in the model while it scores, and gone without a trace afterwards."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from learner_parts import make_batch, make_config, weights
from safetensors.torch import load_file, save_file

from streamrl.config.algo import AlgoConfig
from streamrl.config.file import ConfigError
from streamrl.learner.packing import Packing, plan_batch
from streamrl.learner.reference import Reference


def config_of(model, kl=0.1, reference=None, dtype="float32", distributed=False, **learner):
    config = make_config(model, dtype, {"distributed": distributed, "lr": 1e-3}, **learner)
    return config.model_copy(update={"algo": AlgoConfig(kl=kl, reference=reference)})


@pytest.fixture
def other_folder(model_folder, tmp_path):
    """The same shape with other weights."""
    folder = shutil.copytree(model_folder(), tmp_path / "other")
    file = folder / "model.safetensors"
    noise = torch.Generator().manual_seed(1)
    changed = {k: v + 0.05 * torch.randn(v.shape, generator=noise) for k, v in load_file(file).items()}
    save_file(changed, file, {"format": "pt"})
    return folder


def rows():
    batch = make_batch()
    return plan_batch(batch, [1.0] * len(batch.samples), Packing(ranks=1, budget=64, share_prompts=True))[0]


def score(trainer) -> np.ndarray:
    return torch.cat(trainer._step._passes.score(rows())).numpy()


def reference_of(trainer) -> Reference:
    return trainer._step._reference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_inside_the_model_is_the_reference_and_afterwards_it_is_what_it_was_bit_for_bit(
    dtype, distributed, model_folder, other_folder, trainer_of
):
    expected = score(trainer_of(config_of(other_folder, 0.0, dtype=dtype)))
    trainer = trainer_of(config_of(model_folder(), reference=other_folder, dtype=dtype, distributed=distributed))
    for step in range(2):
        trainer.train_step(make_batch(step))
        before, own = weights(trainer), score(trainer)
        with reference_of(trainer).swapped():
            assert np.array_equal(score(trainer), expected)
        assert np.abs(own - expected).max() > 0.1
        assert np.array_equal(score(trainer), own)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_a_failure_inside_leaves_the_model_as_it_was(model_folder, other_folder, trainer_of):
    trainer = trainer_of(config_of(model_folder(), reference=other_folder))
    before = weights(trainer)
    with pytest.raises(RuntimeError, match="in between"), reference_of(trainer).swapped():
        raise RuntimeError("in between")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_swapping_changes_nothing_of_a_step_but_the_kl_term(model_folder, other_folder, trainer_of):
    """With a weight of the KL term that vanishes in float32, two steps end in the same weights as without one."""
    plain = trainer_of(config_of(model_folder(), 0.0))
    for step in range(2):
        plain.train_step(make_batch(step))
    expected = weights(plain)
    trainer = trainer_of(config_of(model_folder(), 1e-30, other_folder))
    metrics = [trainer.train_step(make_batch(step)) for step in range(2)]
    assert min(row["loss/kl"] for row in metrics) > 0.1
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(trainer).items())


def test_the_reference_of_a_resumed_run_is_that_of_its_start(model_folder, trainer_of, tmp_path):
    config = config_of(model_folder())
    trainer = trainer_of(config, tmp_path / "run")
    at_start = score(trainer)
    assert trainer.train_step(make_batch())["loss/kl"] == 0  # pi is the reference still
    trainer.save()
    trainer.saved(wait=True)
    resumed = trainer_of(config, tmp_path / "run")
    assert resumed.version.step == 1
    assert not np.array_equal(score(resumed), at_start)
    with reference_of(resumed).swapped():
        assert np.array_equal(score(resumed), at_start)
    assert resumed.train_step(make_batch(1))["loss/kl"] > 0


def test_a_reference_of_another_shape_or_none_is_refused(model_folder, other_folder, trainer_of, tmp_path):
    settings = json.loads((other_folder / "config.json").read_text())
    (other_folder / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match=r"algo\.reference: .*other has norm_eps=0\.5, the policy has norm_eps=1e-06"):
        trainer_of(config_of(model_folder(), reference=other_folder))
    with pytest.raises(ConfigError, match=r"algo\.reference: .*nowhere has no config\.json"):
        trainer_of(config_of(model_folder(), reference=tmp_path / "nowhere"))


def test_a_reference_without_weights_is_refused_under_its_own_key(model_folder, other_folder, trainer_of):
    (other_folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"algo\.reference: .*other has no safetensors file"):
        trainer_of(config_of(model_folder(), reference=other_folder))


def test_without_a_kl_term_there_is_no_reference(model_folder, trainer_of):
    trainer = trainer_of(config_of(model_folder(), 0.0))
    assert reference_of(trainer) is None
    assert trainer.train_step(make_batch())["loss/kl"] == 0


def test_a_strong_kl_term_holds_the_policy_near_the_reference(model_folder, trainer_of):
    def distance(kl: float) -> float:
        trainer = trainer_of(config_of(model_folder(), kl))
        return [trainer.train_step(make_batch(step))["loss/kl"] for step in range(6)][-1]

    assert distance(30.0) < 0.5 * distance(1e-6)


def test_with_lora_the_reference_is_the_model_without_its_adapters_and_nothing_is_kept(model_folder, trainer_of):
    config = config_of(model_folder(), lora={"rank": 4})
    trainer = trainer_of(config)
    at_start = score(trainer)
    trainer.train_step(make_batch())
    own = score(trainer)
    assert reference_of(trainer).nbytes == 0
    with reference_of(trainer).swapped():
        assert np.array_equal(score(trainer), at_start)
    assert np.array_equal(score(trainer), own)
    assert not np.array_equal(own, at_start)


def test_with_lora_a_reference_of_its_own_has_no_adapters(model_folder, other_folder, trainer_of):
    expected = score(trainer_of(config_of(other_folder, 0.0)))
    trainer = trainer_of(config_of(model_folder(), reference=other_folder, lora={"rank": 4}))
    trainer.train_step(make_batch())
    own = score(trainer)
    with reference_of(trainer).swapped():
        assert np.array_equal(score(trainer), expected)
    assert np.array_equal(score(trainer), own)
