"""Log-probs of recorded tokens, by a plain Hugging Face forward pass of the kept weights of a version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from streamrl.lab.audit.drawn import as_drawn
from streamrl.lab.audit.images import image_inputs
from streamrl.mamba_steps import without_floor
from streamrl.recorded.weights import whole_weights
from streamrl.types import Sample

LOGITS_AT_ONCE = 1 << 26  # entries of a [tokens, vocabulary] block: 256 MiB in fp32


class Stamped(NamedTuple):
    """Tokens of one sample that one version generated."""

    sample: Sample
    start: int
    end: int
    temperature: float  # of its group
    exact: bool = True
    images: tuple[bytes, ...] = ()  # of its prompt

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def trained(self) -> np.ndarray:
        """Which output tokens of the sample it is about: int64 [n], those that are trained."""
        return np.flatnonzero(self.sample.loss_mask[self.start : self.end]) + self.start

    @property
    def recorded(self) -> np.ndarray:
        """Their log-probs, float32 [n]."""
        return self.sample.logprobs[self.trained]


def load_kept(folder: Path, settings: PretrainedConfig, base: Path) -> PreTrainedModel:
    """The Hugging Face model with the weights of a kept version: whole ones, or `base` with its adapters merged.

    Raises ValueError where a weight is missing.
    """
    # Not load_state_dict: only this way a model that fuses its experts takes them one by one.
    mapping = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if hasattr(settings, "vision_config") else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    kind: Any = mapping[type(settings)]
    model, report = kind.from_pretrained(
        None,
        config=settings,
        state_dict=whole_weights(folder, base),
        dtype=torch.float32,
        output_loading_info=True,
    )
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing or unexpected:
        raise ValueError(f"{folder}: weights missing {missing}, unexpected {unexpected}")
    kept: PreTrainedModel = without_floor(model).eval()
    return kept


@torch.inference_mode()
def scored(
    model: PreTrainedModel, spans: Sequence[Stamped], base: Path
) -> Iterator[tuple[Stamped, np.ndarray, np.ndarray]]:
    """Each span, `in_order`, with two log-probs float32 [n] of its trained tokens: as recorded, and by `model`.

    base: the model's folder, by which images are read.
    """
    for block in _in_blocks(spans, model.config.get_text_config().vocab_size):
        for span, computed in zip(block, logprobs(model, block, base), strict=True):
            yield span, span.recorded, computed[span.trained]


def in_order(spans: Sequence[Stamped]) -> list[Stamped]:
    """The longest sequences first."""
    return sorted(spans, key=lambda span: -_length(span.sample))


def _in_blocks(spans: Sequence[Stamped], vocabulary: int) -> Iterator[list[Stamped]]:
    """Spans `in_order`, in blocks of like lengths, padded to at most LOGITS_AT_ONCE logits."""
    block: list[Stamped] = []
    for span in in_order(spans):
        longest = _length(block[0].sample if block else span.sample)
        if block and (len(block) + 1) * longest * vocabulary > LOGITS_AT_ONCE:
            yield block
            block = []
        block.append(span)
    if block:
        yield block


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.output_ids)


def logprobs(model: PreTrainedModel, spans: Sequence[Stamped], base: Path) -> list[np.ndarray]:
    """Log-probs of every output token of the sample of each span, as it was drawn: one float32 [T] a span.

    base: the model's folder, by which images are read.
    """
    samples = [span.sample for span in spans]
    longest = max(_length(sample) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        sequence = np.concatenate([sample.prompt_ids, sample.output_ids]).astype(np.int64)
        ids[row, : len(sequence)] = torch.from_numpy(sequence)
        attention[row, : len(sequence)] = 1
    prompts = [(len(span.sample.prompt_ids), span.images) for span in spans]
    with image_inputs(model, str(base), ids, prompts) as seen:
        logits = model(attention_mask=attention, **seen).logits[:, :-1].float()
    found = []
    for row, (sample, _, _, temperature, *_) in enumerate(spans):
        output = slice(len(sample.prompt_ids) - 1, _length(sample) - 1)
        drawn = torch.log_softmax(as_drawn(logits[row, output], sample, temperature), dim=-1)
        found.append(drawn.gather(-1, ids[row, 1:][output, None])[:, 0].numpy())
    return found
