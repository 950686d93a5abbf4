"""Log-prob ratios of the shown tokens: the policy that trained them over the one that generated them.

A run does not record them. They are computed here as the audit computes behaviour log-probs: by a Hugging Face
forward pass of the kept weights, here of the version that the step began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from streamrl.lab.audit.logprobs import Stamped, load_kept, logprobs
from streamrl.lab.report.runs import Run
from streamrl.lab.report.samples import TOKENS, Shown
from streamrl.recorded.weights import kept_versions
from streamrl.sampling_columns import beginning

# bytes of a version's weights up to which `auto` computes ratios: a forward pass on the CPU is a matter of seconds
LARGEST = 2**30


def add_ratios(run: Run, shown: Sequence[Shown], ratios: str) -> str:
    """Fill in `ratios` of the answers whose weights are kept. Returns what the page says about it."""
    kept = {version.step: folder for version, folder in sorted(kept_versions(run.folder).items())}
    folders = {each.step: kept[each.step] for each in shown if each.step in kept}
    if ratios == "no":
        return "not computed: --ratios no"
    if not folders:
        return "not computed: the weights of these steps are not kept (publish.keep_every)"
    if not (run.config.model.path / "config.json").exists():
        return f"not computed: model.path {run.config.model.path} is not there"
    size = max(_size(folder) for folder in folders.values())
    if ratios == "auto" and size > LARGEST:
        return f"not computed: weights of {size / 1e9:.1f} GB, and --ratios auto stops at {LARGEST / 1e9:.1f} GB"
    transformers_logging.disable_progress_bar()
    settings = AutoConfig.from_pretrained(run.config.model.path)
    for step, some in groupby(shown, key=lambda each: each.step):
        if step in folders:
            model = load_kept(folders[step], settings, run.config.model.path)
            for answer in some:
                answer.ratios = _ratios(model, answer, run.config.model.path)
    return "by a Hugging Face forward pass of the kept weights, in float32"


@torch.inference_mode()
def _ratios(model: PreTrainedModel, shown: Shown, base: Path) -> np.ndarray:
    """float32 [T] of the tokens that the page shows: one answer at a time, for the sake of memory."""
    sample = shown.sample
    ids, behaviour = sample.output_ids[:TOKENS], sample.logprobs[:TOKENS]
    if not len(ids):
        return behaviour
    begin = structs.replace(sample, output_ids=ids, logprobs=behaviour, extras=beginning(sample, len(ids)))
    group = shown.group
    (computed,) = logprobs(model, [Stamped(begin, 0, len(ids), group.temperature, images=group.images)], base)
    return computed - behaviour


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
