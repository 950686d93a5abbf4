"""The answers by which servers are compared with the learner: which they are, and their scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_parts import make_batch, make_config
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from streamrl.learner.mismatch import MismatchAnswers, choose


def forward(model, sample) -> np.ndarray:
    """Log-probs of the output tokens, by Hugging Face, at temperature 1."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.output_ids])).long()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(-1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0].numpy()


def test_scores_are_those_of_plain_forward_passes_before_and_after_the_step(model_folder, trainer_of):
    trainer = trainer_of(make_config(model_folder()))
    batch = make_batch()
    answers = MismatchAnswers(trainer, 6, budget=10_000)
    answers.begin(batch)
    trainer.train_step(batch)
    scored = answers.finish()
    trainer.export_model()
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (model_folder(), trainer._run_folder / "model")
    )
    samples = choose(batch, 6, 10_000).samples
    assert len(scored) == len(samples) == 6
    changed = 0.0
    for answer, sample in zip(scored, samples, strict=True):
        assert answer.ids == [*sample.prompt_ids, *sample.output_ids]
        assert (answer.prompt, answer.trained) == (len(sample.prompt_ids), np.flatnonzero(sample.loss_mask).tolist())
        assert answer.logprobs == pytest.approx(forward(after, sample)[answer.trained], abs=1e-4)
        assert answer.former == pytest.approx(forward(before, sample)[answer.trained], abs=1e-4)
        changed = max(changed, np.abs(np.subtract(answer.logprobs, answer.former)).max())
    assert changed > 1e-2
    assert answers.finish() == ()  # no batch was begun since


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}])
def test_every_layout_has_the_scores_of_one_process_on_rank_0(layout, model_folder, trainer_of, two_ranks, tmp_path):
    trainer = trainer_of(make_config(model_folder()))
    alone = [trainer.score(make_batch()), trainer.score(make_batch(groups=1, size=2))]
    found = two_ranks("scores", make_config(model_folder(), ranks=2, layout=layout), tmp_path / "run")
    for ours, theirs in zip(found, alone, strict=True):
        assert len(ours) == len(theirs) > 0
        assert ours.numpy() == pytest.approx(theirs, abs=1e-5)


def test_answers_are_spread_over_the_batch_and_those_that_cannot_be_scored_are_left_out():
    batch = make_batch(groups=4)
    able = [sample for group in batch.groups for sample in group.samples if sample.loss_mask.any()]
    chosen = choose(batch, 4, 10_000)
    assert [sample.output_ids.tolist() for sample in chosen.samples] == [
        able[place * len(able) // 4].output_ids.tolist() for place in range(4)
    ]
    assert all(group.temperature == 1.0 and not group.samples[0].extras for group in chosen.groups)
    assert len(choose(batch, 64, 10_000).samples) == len(able)
    first = len(able[0].prompt_ids) + len(able[0].output_ids)
    assert len(choose(batch, 4, first).samples) == len(choose(batch, 4, 1).samples) == 1
    seen = replace(batch, groups=tuple(replace(group, images=(b"png",)) for group in batch.groups))
    assert choose(seen, 4, 10_000) is None
    failed = replace(batch, groups=tuple(group.emptied for group in batch.groups))
    assert choose(failed, 4, 10_000) is None
