"""Families that SGLang does not serve on CPUs train on groups that transformers has drawn from the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.random_models import END, IMAGE, START, VOCABULARY, load_model, picture, write_model
from launch import tiny_model
from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.replay import JournalConfig
from streamrl.learner.shape import read_shape
from streamrl.learner.vision.pixels import image_reader
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import Journal
from streamrl.replay.records import Completed, Consumed
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan

UNSERVED = ("qwen3_next", "qwen3_5")  # docs/models.md names what SGLang lacks
STEPS, SAMPLES, TOKENS, PROMPT = 20, 4, 12, 6
EXACT = 1e-4  # nats, in float32
OF_IMAGES = list(range(IMAGE, VOCABULARY))  # tokens that no answer has
V0 = PolicyVersion(0)


def drawn(policy: PreTrainedModel, step: int, model: Path) -> Group:
    """One prompt, with an image where the model reads them, and its answers; the more even tokens an answer has, the
    better it is."""
    random = np.random.default_rng(step)
    prompt, images = random.integers(2, 10, PROMPT, dtype=np.int32), ()
    if (vision := read_shape(model).vision) is not None:
        side = 2 * vision.merge * vision.patch
        images = (picture(step, side, side),)
        prompt = np.concatenate([[START, *[IMAGE] * 4, END], prompt]).astype(np.int32)
    sequences = torch.from_numpy(prompt.astype(np.int64)).repeat(SAMPLES, 1)
    torch.manual_seed(step)
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = policy(sequences, **seen_beside(sequences, images, model)).logits[:, -1].float()
            logits[:, OF_IMAGES] = -torch.inf
            sequences = torch.cat([sequences, torch.multinomial(logits.softmax(-1), 1)], 1)
        logits = policy(sequences, **seen_beside(sequences, images, model)).logits[:, len(prompt) - 1 : -1].float()
    outputs = sequences[:, len(prompt) :]
    logprobs = torch.log_softmax(logits, -1).gather(-1, outputs[..., None])[..., 0]
    samples = tuple(
        Sample(
            prompt_ids=prompt,
            output_ids=output.astype(np.int32),
            logprobs=of_output,
            loss_mask=np.ones(TOKENS, np.bool_),
            spans=(VersionSpan(V0, 0, TOKENS),),
            reward=float(np.mean(output % 2 == 0)),
        )
        for output, of_output in zip(outputs.numpy(), logprobs.numpy(), strict=True)
    )
    return Group(group_id=step, attempt=0, task="copy", prompt_index=step, samples=samples, images=images)


def seen_beside(sequences: torch.Tensor, images: tuple[bytes, ...], model: Path) -> dict[str, torch.Tensor]:
    """What transformers is given of the images, which all sequences have."""
    if not images:
        return {}
    pixels = image_reader(model).read_all(images)
    return {
        "pixel_values": torch.from_numpy(np.concatenate([each.values for each in pixels])).repeat(SAMPLES, 1),
        "image_grid_thw": torch.from_numpy(np.stack([each.grid for each in pixels])).repeat(SAMPLES, 1),
        "mm_token_type_ids": (sequences == IMAGE).int(),
    }


def record(folder: Path, model: Path) -> None:
    """A run folder with the groups of STEPS steps."""
    tree = {
        "model": {"path": model},
        "replay": {"groups_per_step": 1, "max_staleness": STEPS},
        "generate": {"group_size": SAMPLES},
        "learner": {"optimizer": {"lr": 1e-3}},
        "checkpoint": {"export": False},
        "run": {"steps": STEPS},
    }
    (folder / "journal").mkdir(parents=True)
    config_file.save(Config.model_validate(tree | {"journal": {"keep": "all"}}), folder / "config.yaml")
    policy = load_model(model)
    journal = Journal(folder / "journal", JournalConfig(keep="all"), b"")
    for step in range(STEPS):
        frames = [bytes(frame) for frame in encode_group(drawn(policy, step, model), 1 << 20)]
        journal.append_group(Completed(group_id=step, attempt=0, size=1, tokens=SAMPLES * TOKENS), frames)
        journal.append(Consumed(step=step, group_ids=(step,)))
    journal.commit()
    journal.close()
    rows = [json.dumps({"step": step + 1, "version": f"{step + 1}.0"}) + "\n" for step in range(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(rows))


@pytest.mark.slow
@pytest.mark.parametrize("family", UNSERVED)
def test_its_log_probs_are_those_of_transformers_and_twenty_steps_change_them_as_rewards_say(family, tmp_path, capsys):
    write_model(tmp_path / "model", family)
    tiny_model.make_tokenizer(8).save_pretrained(tmp_path / "model")
    record(tmp_path / "run", tmp_path / "model")
    assert cli.main(["retrain", str(tmp_path / "run"), "--output", str(tmp_path / "again")]) == 0
    assert f"retrained {STEPS} steps" in capsys.readouterr().out
    rows = list(read_metrics(tmp_path / "again"))
    assert len(rows) == STEPS
    assert rows[0]["offpolicy/log_ratio_max"] < EXACT
    assert all(0 < row["grad_norm"] < np.inf for row in rows)
    assert rows[-1]["offpolicy/log_ratio_max"] > 0.01, "the policy has left the one that drew the groups"
