"""Prompts with images, by transformers one sample after the other, and by the learner in packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_models import IMAGE, TEMPERATURE, make_batch, with_images
from streamrl.config import Config
from streamrl.learner.model import PolicyModel
from streamrl.learner.packing import MicroBatch, Packing, plan_batch
from streamrl.learner.rows import RowMaker
from streamrl.learner.vision.pixels import ImageReader
from streamrl.types import Batch, Group, PolicyVersion, Sample, VersionSpan


def by_transformers(theirs: Any, folder: Path) -> Tensor:
    """The log-probs [N] of a batch's samples, each alone, whose prompts have images."""
    return expected(theirs, with_images(make_batch(), folder), folder)


def by_learner(model: PolicyModel, folder: Path) -> Tensor:
    """The same from one packed row, in the same order."""
    return _in_order(model, folder, with_images(make_batch(), folder))


def of_answer(
    model: PolicyModel, folder: Path, prompt: Sequence[int], images: tuple[bytes, ...], answer: Sequence[int]
) -> Tensor:
    """The learner's log-probs [T], at temperature 1, of the tokens of an answer to a prompt with images."""
    sample = Sample(
        prompt_ids=np.array(prompt, np.int32),
        output_ids=np.array(answer, np.int32),
        logprobs=np.zeros(len(answer), np.float32),
        loss_mask=np.ones(len(answer), np.bool_),
        spans=(VersionSpan(PolicyVersion(0), 0, len(answer)),),
        reward=0.0,
    )
    group = Group(group_id=0, task="copy", prompt_index=0, samples=(sample,), temperature=1.0, images=images)
    return _in_order(model, folder, Batch(step=0, groups=(group,)))


def _in_order(model: PolicyModel, folder: Path, batch: Batch) -> Tensor:
    row = packed(batch)
    return logprobs_of(model, folder, row)[np.argsort(row.place)]


def packed(batch: Batch, *, share_prompts: bool = True) -> MicroBatch:
    """All of a batch in one row."""
    packing = Packing(ranks=1, budget=4096, share_prompts=share_prompts, image_token=IMAGE)
    ((row,),) = plan_batch(batch, [1.0] * len(batch.samples), packing)
    return row


def logprobs_of(model: PolicyModel, folder: Path, micro: MicroBatch) -> Tensor:
    """The learner's log-probs [N] of the trained tokens of a row."""
    maker = RowMaker.of_model(model, Config.model_validate({"model": {"path": folder}}), torch.device("cpu"))
    row = maker.make(micro, maker.length([micro]))
    logprobs: Tensor = model(row.ids, row.positions, None, labels=row.targets, packed_seq_params=row.packed)[0]
    return logprobs


def expected(theirs: Any, batch: Batch, folder: Path, *, blind: bool = False) -> Tensor:
    """Those of transformers, in the batch's order; `blind`: without the images."""
    reader = ImageReader(folder)
    found = []
    for group in batch.groups:
        seen = () if blind else group.images
        for sample in group.samples:
            if len(sample.output_ids):
                found.append(_alone(theirs, sample, seen, reader)[torch.from_numpy(sample.loss_mask)])
    return torch.cat(found)


def _alone(theirs: Any, sample: Sample, images: tuple[bytes, ...], reader: ImageReader) -> Tensor:
    """The log-probs [T] of a sample's output tokens."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.output_ids]).astype(np.int64))[None]
    seen = {}
    if images:
        pixels = reader.read_all(images)
        seen = {
            "pixel_values": torch.from_numpy(np.concatenate([each.values for each in pixels])),
            "image_grid_thw": torch.from_numpy(np.stack([each.grid for each in pixels])),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    begin = len(sample.prompt_ids)
    logits = theirs(ids, **seen).logits[0, begin - 1 : -1] / TEMPERATURE
    chosen: Tensor = logits.log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]
    return chosen
