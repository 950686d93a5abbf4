"""The critic beside the policy: what it is trained on, how it is saved, and that no layout changes it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from critic_at_work import STEPS, train_on
from learner_parts import VOCABULARY, make_batch, make_config, weights, write_model

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.observe.metrics import is_known
from streamrl.types import Batch, Sample

GAE = {"estimator": "gae", "gamma": 0.97, "lam": 0.9}


def config_of(
    model,
    *,
    algo: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    distributed: bool | None = None,
    **learner,
) -> Config:
    tree = make_config(model, optimizer={"lr": 1e-3, "distributed": distributed}, **learner).model_dump()
    tree["algo"] |= {"advantage": GAE, "entropy": 0.0, **(algo or {})}
    tree["critic"] |= {"optimizer": {"lr": 1e-2}, **(critic or {})}
    return Config.model_validate(tree)


def critic_weights(trainer) -> dict[str, torch.Tensor]:
    named = (pair for chunk in trainer._critic._chunks for pair in chunk.named_parameters())
    return {name: parameter.detach().clone() for name, parameter in named}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def with_a_gap(batch: Batch) -> Batch:
    """Every second sample has a token in its middle that somebody else has written."""

    def cut(sample: Sample) -> Sample:
        mask = sample.loss_mask.copy()
        mask[len(mask) // 2] = False
        return msgspec.structs.replace(sample, loss_mask=mask)

    groups = [
        msgspec.structs.replace(
            group, samples=tuple(cut(each) if place % 2 else each for place, each in enumerate(group.samples))
        )
        for group in batch.groups
    ]
    return msgspec.structs.replace(batch, groups=tuple(groups))


def test_the_policy_is_held_while_the_critic_is_warmed_up_and_every_metric_has_a_name(model_folder, trainer_of):
    trainer = trainer_of(config_of(model_folder(), critic={"warmup_steps": 1}))
    start, rows = weights(trainer), []
    for step in range(2):
        before = critic_weights(trainer)
        rows.append(trainer.train_step(with_a_gap(make_batch(step))))
        assert same(weights(trainer), start) == (step == 0)
        assert not same(critic_weights(trainer), before)
    assert [name for name in rows[0] if not is_known(name)] == []
    assert rows[0]["values/mean"] == 0, "the head starts at 0"
    assert rows[0]["critic/explained_variance"] == pytest.approx(0)
    assert [(row["steps/updates"], row["lr"]) for row in rows] == [(0, 0.0), (1, 1e-3)]
    assert all(row["grad_norm"] > 0 for row in rows)
    samples = [sample for group in with_a_gap(make_batch(0)).groups for sample in group.samples]
    returns = [
        sample.reward * (GAE["gamma"] * GAE["lam"]) ** behind
        for sample in samples
        for behind in range(int(sample.loss_mask.sum()))
    ]
    assert rows[0]["returns/mean"] == pytest.approx(sum(returns) / len(returns)), "the gap counts as no token"


def test_an_adaptive_weight_of_the_kl_stays_while_the_critic_is_warmed_up(model_folder, trainer_of):
    algo = {"kl": 0.1, "kl_target": 1e-3, "kl_horizon": 20}
    trainer = trainer_of(config_of(model_folder(), algo=algo, critic={"warmup_steps": 4}))
    weights_of_kl = [trainer.train_step(make_batch(step))["loss/kl_weight"] for step in range(6)]
    assert weights_of_kl[:5] == [0.1] * 5
    assert weights_of_kl[5] < 0.1, "the first trained step was at the reference"


def test_its_gradient_norm_that_is_no_number_is_told_whatever_the_others_of_the_step_are(
    model_folder, trainer_of, monkeypatch
):
    trainer = trainer_of(config_of(model_folder(), mini_batches=2))
    norms = iter([1.0, math.nan])
    monkeypatch.setattr(trainer._critic._optimizer.megatron, "get_grad_norm", lambda: next(norms))
    row = trainer.train_step(make_batch(0))
    assert math.isnan(row["critic/grad_norm"])
    assert row["critic/skipped"] == 1


def test_without_a_trained_token_it_stays_as_it_is(model_folder, trainer_of):
    trainer = trainer_of(config_of(model_folder(), critic={"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}))
    trainer.train_step(make_batch(0))
    before = critic_weights(trainer)
    batch = make_batch(1)
    empty = msgspec.structs.replace(batch, groups=tuple(group.emptied for group in batch.groups))
    row = trainer.train_step(empty)
    assert same(critic_weights(trainer), before)
    assert (row["critic/skipped"], row["steps/skipped"]) == (1, 1)


def test_the_last_step_of_its_decay_trains(model_folder, trainer_of):
    config = config_of(model_folder(), critic={"optimizer": {"lr": 1e-2, "decay": "linear"}})
    trainer = trainer_of(config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})}))
    rates = []
    for step in range(2):
        before = critic_weights(trainer)
        rates.append(trainer.train_step(make_batch(step))["critic/lr"])
        assert not same(critic_weights(trainer), before)
    assert rates == pytest.approx([1e-2, 5e-3])


@pytest.mark.slow
def test_it_learns_what_answers_are_worth(model_folder, trainer_of):
    trainer = trainer_of(config_of(model_folder(), critic={"warmup_steps": 12}, passes=2))
    rows = [trainer.train_step(msgspec.structs.replace(make_batch(0), step=step)) for step in range(12)]
    assert max(row["critic/explained_variance"] for row in rows) > 0.5, rows
    assert rows[-1]["critic/loss"] < 0.5 * rows[0]["critic/loss"]


@pytest.mark.slow
def test_one_that_resumes_goes_on_bit_for_bit(model_folder, trainer_of, tmp_path):
    config = config_of(model_folder(), algo={"kl_reward": 0.1, "proximal": "recompute"}, mini_batches=2)
    trainer = trainer_of(config, tmp_path / "run")
    for step in range(2):
        trainer.train_step(make_batch(step))
    trainer.save()
    trainer.saved(wait=True)
    went_on = [trainer.train_step(make_batch(step)) for step in (2, 3)]
    expected = weights(trainer), critic_weights(trainer)
    resumed = trainer_of(config, tmp_path / "run")
    assert resumed.version.step == 2
    again = [resumed.train_step(make_batch(step)) for step in (2, 3)]
    assert same(weights(resumed), expected[0])
    assert same(critic_weights(resumed), expected[1])
    for key in ("critic/loss", "critic/lr", "values/mean", "reward/kl"):
        assert [row[key] for row in again] == [row[key] for row in went_on], key
    with pytest.raises(ConfigError, match=r"critic\.model"):
        trainer_of(make_config(model_folder()), tmp_path / "run")


def of_layout(name: str) -> dict[str, Any]:
    sizes = {key: 2 for key in name.split() if key != "one"}
    layout: dict[str, Any] = {key: size for key, size in sizes.items() if key not in ("data", "whole")}
    if "whole" in sizes:
        layout["sequence"] = False
    return {"ranks": math.prod(size for key, size in sizes.items() if key != "whole"), "layout": layout}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen2", ["tensor", "pipeline", "context", "data", "one", "tensor data", "tensor whole"]),
        ("qwen3_moe", ["expert", "tensor", "pipeline", "one"]),
    ],
)
def test_every_layout_goes_on_from_the_checkpoint_of_another_as_one_process_trains(
    family, layouts, model_folder, on_ranks, tmp_path
):
    model, out = model_folder(family, tied=family == "qwen2"), tmp_path / "out.pt"

    def config(name: str) -> Config:
        return config_of(model, algo={"kl_reward": 0.1}, distributed=family == "qwen2", **of_layout(name))

    for place, name in enumerate(layouts):
        expected = train_on(config("one"), tmp_path / "alone")
        (tmp_path / "config.json").write_text(config(name).model_dump_json())
        ranks = config(name).learner.ranks
        on_ranks(ranks, "critic_at_work.py", tmp_path / "config.json", tmp_path / "run", out)
        for row, theirs in zip(torch.load(out), expected, strict=True):
            for key in ("critic/loss", "critic/grad_norm", "values/mean", "returns/mean", "grad_norm", "reward/kl"):
                assert row[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), (place * STEPS, name, key)


@pytest.mark.slow
def test_it_may_be_another_model_beside_adapters_and_values_groups_of_one(model_folder, trainer_of, tmp_path):
    other = write_model(tmp_path / "critic", "qwen3", layers=3, vocab_size=VOCABULARY + 64)
    trainer = trainer_of(config_of(model_folder(), critic={"model": other}, lora={"rank": 4}))
    batch = make_batch(0, groups=4, size=1)
    before = critic_weights(trainer)
    assert trainer.train_step(batch)["grad_norm"] > 0
    assert not same(critic_weights(trainer), before)
    assert len({name.split(".")[2] for name in before if ".layers." in name}) == 3
    trainer._critic.score = lambda rows: (_ for _ in ()).throw(RuntimeError("in the critic"))
    with pytest.raises(RuntimeError, match="in the critic"):
        trainer.rehearse(make_batch(1))
    small = write_model(tmp_path / "small", vocab_size=VOCABULARY - 1)
    with pytest.raises(ConfigError, match=rf"critic\.model: .*small has {VOCABULARY - 1} tokens"):
        trainer_of(config_of(model_folder(), critic={"model": small}))
