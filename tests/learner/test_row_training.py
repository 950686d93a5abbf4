"""`streamrl sft` in the learner: the numbers are those of plain cross entropy, and a resume changes none of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_parts import VOCABULARY, gradients, make_config, weights

from streamrl.config import Config
from streamrl.learner.lead_loop import LeadLoop, StopSignal
from streamrl.learner.row_batches import RowBatches
from streamrl.learner.token_rows import HELD_OUT, ROWS, TRAINED, TokenRows, write
from streamrl.learner.trainer import Trainer
from streamrl.observe.events import EventLog, event_path
from streamrl.observe.metrics import MetricsWriter, read_metrics
from streamrl.sft.command import supervised

SAME = ("step", "loss/total", "loss/held_out", "tokens/trained", "grad_norm", "lr", "rows/epoch", "micro_batches")


def random_rows(count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of 3 to 20 tokens of which about half are trained, with gaps as between turns; the first never is."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in draw.integers(3, 21, count):
        trained = draw.random(length) < 0.5
        trained[0], trained[1] = False, True
        rows.append((draw.integers(0, VOCABULARY, length).astype(np.int32), trained))
    return rows


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    write(tmp_path / ROWS / TRAINED, random_rows(8, seed=1))
    write(tmp_path / ROWS / HELD_OUT, random_rows(5, seed=2))
    return tmp_path


def config_of(model: Path, steps: int = 7, **learner: Any) -> Config:
    config = supervised(make_config(model, **learner))
    more = {
        "run": {"steps": steps},
        "sft": {"batch": 3, "evaluate_every": 3, "data": {"path": "rows.jsonl"}},
        "checkpoint": {"every": 2, "background": False, "export": False},
    }
    return Config.model_validate({**config.model_dump(), **more})


def cross_entropy(model: torch.nn.Module, rows: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    """Mean over all trained tokens, nats, one row after another."""
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for ids, trained in rows:
        logits = model(torch.from_numpy(ids).long()[None]).logits[0, :-1]
        chosen = torch.from_numpy(trained[1:])
        target = torch.from_numpy(ids).long()[1:][chosen]
        loss = loss + torch.nn.functional.cross_entropy(logits[chosen], target, reduction="sum")
        count += len(target)
    return loss / count


@pytest.mark.parametrize("budget", [4096, 24])
def test_loss_and_gradient_of_a_step_are_those_of_transformers_however_it_is_packed(
    budget: int, model_folder: Any, trainer_of: Any, run_folder: Path
):
    from transformers import AutoModelForCausalLM

    folder = model_folder("qwen2", False)
    config = config_of(folder, tokens_per_micro_batch=budget)
    delivery = RowBatches(config, run_folder).next(0, 1.0)
    rows = TokenRows(run_folder / ROWS / TRAINED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loss = cross_entropy(model, [rows[group.prompt_index] for group in delivery.batch.groups])
    loss.backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()

    trainer: Trainer = trainer_of(config, run_folder)
    found = gradients(trainer, delivery.batch)
    for name, theirs in (("embedding.word_embeddings", model.model.embed_tokens), ("output_layer", model.lm_head)):
        ours = found[f"{name}.weight"][:VOCABULARY].double()
        torch.testing.assert_close(ours, theirs.weight.grad, rtol=1e-4, atol=1e-7)
    held_out = random_rows(5, seed=2)
    assert trainer.evaluate(held_out_batch(run_folder)) == pytest.approx(
        cross_entropy(model, held_out).item(), rel=1e-5
    )
    metrics = trainer.train_step(delivery.batch)
    assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["tokens/trained"] == sum(group.trained_tokens for group in delivery.batch.groups)
    assert (metrics["micro_batches"] > 1) == (budget == 24)
    assert not [name for name in metrics if name.startswith(("offpolicy/", "weights/"))]


def held_out_batch(run_folder: Path):
    from streamrl.learner.row_batches import held_out

    return held_out(run_folder)


class Killed(Exception):
    pass


class Mortal(RowBatches):
    """Its process is gone when the rows of step `dies_at` are wanted."""

    def __init__(self, config: Config, run_folder: Path, dies_at: int | None) -> None:
        super().__init__(config, run_folder)
        self._dies_at = dies_at

    def next(self, step: int, timeout: float):
        if step == self._dies_at:
            raise Killed
        return super().next(step, timeout)


def lead(trainer: Trainer, config: Config, run_folder: Path, dies_at: int | None = None) -> None:
    events, metrics = EventLog(event_path(run_folder, "learner"), "learner-0"), MetricsWriter(run_folder)
    metrics.truncate_after(trainer.version.step)
    source = Mortal(config, run_folder, dies_at)
    try:
        LeadLoop(config, run_folder, trainer, source, stop=StopSignal(), metrics=metrics, events=events).run()
    finally:
        metrics.close()
        events.close()


def test_a_run_that_is_killed_at_any_step_and_resumed_equals_one_that_was_not_bit_for_bit(
    model_folder: Any, trainer_of: Any, run_folder: Path, tmp_path_factory: pytest.TempPathFactory
):
    config, other = config_of(model_folder("qwen2", False)), tmp_path_factory.mktemp("killed")
    (other / ROWS).symlink_to(run_folder / ROWS)
    trainer = trainer_of(config, run_folder)
    lead(trainer, config, run_folder)
    wanted = weights(trainer)

    dies_at = random.randrange(1, config.run.steps)
    trainer = trainer_of(config, other)
    with pytest.raises(Killed):
        lead(trainer, config, other, dies_at)
    trainer = trainer_of(config, other)
    assert trainer.version.step == dies_at // 2 * 2
    lead(trainer, config, other)
    found = weights(trainer)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == [], f"killed at {dies_at}"
    rows, theirs = (
        [{name: row.get(name) for name in SAME} for row in read_metrics(folder)] for folder in (other, run_folder)
    )
    assert rows == theirs, f"killed at {dies_at}"
    assert [row["step"] for row in rows if row["loss/held_out"] is not None] == [3, 6, 7]
    assert "learner.finished" in {json.loads(line)["event"] for line in event_path(other, "learner").open()}
