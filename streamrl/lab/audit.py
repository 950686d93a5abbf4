"""`streamrl audit RUN`: what a run recorded, checked against what it promised, by means that are not its own.

Every trained token's behaviour log-prob is computed again by a plain Hugging Face forward pass of the kept
weights of the version that is stamped on it. The bound, the order and the counts follow from the journal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from streamrl import config_file
from streamrl.config import Config
from streamrl.observe.metrics import read_metrics
from streamrl.publish.kept import kept_versions
from streamrl.replay.journal import recorded_batches
from streamrl.types import Batch, PolicyVersion, Sample

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
# Largest allowed log-prob difference. fp32: the two implementations differ by rounding alone. bf16: the server
# rounds every activation to 8 bits, the reference forward runs in fp32; a wrong stamp shows in the mean below.
MEAN_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03}
LOGITS_AT_ONCE = 1 << 26  # entries of a [tokens, vocabulary] block: 256 MiB in fp32


@dataclass
class Findings:
    """What an audit found; `problems` empty means that every checked promise held."""

    batches: int = 0
    groups: int = 0
    trained: int = 0  # tokens
    audited: int = 0  # tokens whose log-prob was computed again
    staleness: int = 0  # largest, in learner steps
    differences: list[np.ndarray] = field(default_factory=list)  # |log-prob difference| of audited tokens
    problems: list[str] = field(default_factory=list)


def main(run_folder: Path, tolerance: float | None = None) -> int:
    """Audit a run and print the findings. Returns 0 when every check held, 1 otherwise."""
    transformers_logging.disable_progress_bar()
    config = config_file.load(run_folder / "config.yaml")
    limit = TOLERANCE[config.model.dtype] if tolerance is None else tolerance
    findings = audit(run_folder, config, limit)
    _print(findings, run_folder, config, limit)
    return 1 if findings.problems else 0


def audit(run_folder: Path, config: Config, limit: float) -> Findings:
    """Check the journal, the metrics and the kept weights of a run against one another."""
    findings = Findings()
    tokens: dict[PolicyVersion, list[tuple[Sample, int, int]]] = defaultdict(list)
    seen: set[int] = set()
    for batch in recorded_batches(run_folder / "journal"):
        _check_batch(batch, config, seen, findings)
        for sample in batch.samples:
            for span in sample.spans:
                tokens[span.version].append((sample, span.start, span.end))
    _check_metrics(run_folder, findings)
    kept = kept_versions(run_folder)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    for version, spans in sorted(tokens.items()):
        if version in kept:
            _load(model, kept[version])
            _check_logprobs(model, spans, config, findings)
        elif config.publish.keep_every and version.step % config.publish.keep_every == 0:
            findings.problems.append(f"version {version} is stamped on tokens, but its weights are not kept")
    differences = np.concatenate(findings.differences) if findings.differences else np.zeros(0)
    if not len(differences):
        findings.problems.append("no token could be audited: publish.keep_every=0 keeps no weights")
    elif not (differences.max() <= limit and differences.mean() <= MEAN_TOLERANCE[config.model.dtype]):
        wrong = int((differences > limit).sum())
        findings.problems.append(
            f"{wrong} tokens differ from their stamped version by more than {limit:g}, the largest by "
            f"{differences.max():.2g} (mean {differences.mean():.2g})"
        )
    return findings


def _check_batch(batch: Batch, config: Config, seen: set[int], findings: Findings) -> None:
    """Order, completeness and staleness of one batch."""
    expected = findings.batches
    if batch.step != expected:
        findings.problems.append(f"batch of step {batch.step} where step {expected} was due")
    size = config.replay.groups_per_step
    ids = [group.group_id for group in batch.groups]
    if ids != list(range(batch.step * size, (batch.step + 1) * size)):
        findings.problems.append(f"step {batch.step} trained groups {ids}, not the {size} that strict order gives")
    if again := seen.intersection(ids):
        findings.problems.append(f"step {batch.step} trained groups {sorted(again)} a second time")
    seen.update(ids)
    ages = [batch.step - span.version.step for sample in batch.samples for span in sample.spans]
    oldest, newest = max(ages, default=0), min(ages, default=0)
    bound = math.ceil(config.replay.max_staleness)
    if oldest > bound or newest < 0:
        findings.problems.append(
            f"step {batch.step} trained tokens {oldest} steps old, newest {newest}; the bound is {bound}"
        )
    findings.batches += 1
    findings.groups += len(ids)
    findings.trained += sum(group.trained_tokens for group in batch.groups)
    findings.staleness = max(findings.staleness, oldest)


def _check_metrics(run_folder: Path, findings: Findings) -> None:
    """The metrics say the same about counts and staleness."""
    rows = list(read_metrics(run_folder))
    tokens = sum(int(row["tokens/trained"]) for row in rows)
    worst = max((int(row["staleness/max"]) for row in rows), default=0)
    for what, told, found in (
        ("steps", len(rows), findings.batches),
        ("trained tokens", tokens, findings.trained),
        ("staleness/max", worst, findings.staleness),
    ):
        if told != found:
            findings.problems.append(f"metrics.jsonl says {told} {what}, the journal {found}")


def _load(model: PreTrainedModel, folder: Path) -> None:
    """Put the weights of a kept version into the Hugging Face model. Raises ValueError where a weight is missing."""
    weights = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(model.all_tied_weights_keys)
    if unexpected or not tied.issuperset(missing):
        raise ValueError(f"{folder}: weights missing {sorted(set(missing) - tied)}, unexpected {unexpected}")


@torch.inference_mode()
def _check_logprobs(
    model: PreTrainedModel, spans: Sequence[tuple[Sample, int, int]], config: Config, findings: Findings
) -> None:
    """Compute the log-probs of all tokens that carry one version again, by the Hugging Face model in fp32."""
    for block in _blocks(spans, model.config.vocab_size):
        logprobs = _logprobs(model, [sample for sample, _, _ in block], config.generate.sampling.temperature)
        for (sample, start, end), computed in zip(block, logprobs, strict=True):
            trained = sample.loss_mask[start:end]
            difference = np.abs(computed[start:end] - sample.logprobs[start:end])[trained]
            findings.differences.append(np.nan_to_num(difference, nan=np.inf))
            findings.audited += int(trained.sum())


def _blocks(spans: Sequence[tuple[Sample, int, int]], vocabulary: int) -> Iterator[list[tuple[Sample, int, int]]]:
    """Spans in blocks of like lengths, padded to at most LOGITS_AT_ONCE logits."""
    block: list[tuple[Sample, int, int]] = []
    for span in sorted(spans, key=lambda span: -_length(span[0])):
        longest = _length(block[0][0]) if block else _length(span[0])
        if block and (len(block) + 1) * longest * vocabulary > LOGITS_AT_ONCE:
            yield block
            block = []
        block.append(span)
    if block:
        yield block


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.output_ids)


def _logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
    """Log-probs of every output token of each sample: one float32 [T] a sample."""
    longest = max(_length(sample) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        sequence = np.concatenate([sample.prompt_ids, sample.output_ids]).astype(np.int64)
        ids[row, : len(sequence)] = torch.from_numpy(sequence)
        attention[row, : len(sequence)] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / temperature
    taken = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    return [taken[row, len(sample.prompt_ids) - 1 : _length(sample) - 1].numpy() for row, sample in enumerate(samples)]


def _print(findings: Findings, run_folder: Path, config: Config, limit: float) -> None:
    differences = np.concatenate(findings.differences) if findings.differences else np.zeros(1)
    print(f"audit of {run_folder}")
    print(f"  batches {findings.batches}, groups {findings.groups}, each once, in order")
    print(f"  staleness: largest {findings.staleness}, bound {config.replay.max_staleness:g}")
    print(f"  tokens audited {findings.audited}, tokens trained {findings.trained}")
    print(
        f"  log-prob difference to Hugging Face: largest {differences.max():.3g}, p99 "
        f"{np.percentile(differences, 99):.3g}, mean {differences.mean():.3g} "
        f"(limit {limit:g}, mean {MEAN_TOLERANCE[config.model.dtype]:g}, {config.model.dtype})"
    )
    for problem in findings.problems:
        print(f"  PROBLEM {problem}")
    print("  every checked promise held" if not findings.problems else f"  {len(findings.problems)} problems")
