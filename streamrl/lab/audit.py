"""`streamrl audit RUN`: what a run recorded, checked against what it promised, by means that are not its own.

Every trained token's behaviour log-prob is computed again by a plain Hugging Face forward pass of the kept
weights of the version that is stamped on it. The bound, the order and the counts follow from the journal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest allowed log-prob differences, in nats: of any token, of 99 in 100, and on average."""

    largest: float
    p99: float
    mean: float


LIMITS = {"float32": Limits(1e-4, 1e-4, 1e-5), "bfloat16": Limits(2.0, 0.3, 0.05)}
# float32: two implementations differ by rounding alone. bfloat16: a logit of 16 to 32 has a spacing of 0.125, so
# that single tokens differ by several of these; the reference is computed in fp32 from the same bfloat16 weights.
# What a wrong stamp changes must be larger than that to be seen, so bfloat16 shows less than float32 does.
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
    limits = LIMITS[config.model.dtype]
    if tolerance is not None:
        limits = replace(limits, largest=tolerance)
    findings = audit(run_folder, config, limits)
    _print(findings, run_folder, config, limits)
    return 1 if findings.problems else 0


def audit(run_folder: Path, config: Config, limits: Limits) -> Findings:
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
    _check_differences(findings, limits)
    return findings


def _check_differences(findings: Findings, limits: Limits) -> None:
    """The distribution of the differences stays within the limits."""
    if not findings.differences:
        findings.problems.append(
            "no token could be audited: publish.keep_every=0 keeps no weights, journal.keep=none no groups"
        )
        return
    differences = np.concatenate(findings.differences)
    if wrong := int((differences > limits.largest).sum()):
        findings.problems.append(
            f"{wrong} tokens differ from their stamped version by more than {limits.largest:g}, "
            f"the largest by {differences.max():.2g}"
        )
    for name, found, limit in (
        ("99th percentile", np.percentile(differences, 99), limits.p99),
        ("mean", differences.mean(), limits.mean),
    ):
        if found > limit:
            findings.problems.append(f"the {name} of the differences is {found:.2g}, the limit {limit:g}")


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
    bound = math.ceil(config.replay.bound)
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
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float() / temperature
    taken = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
    return [taken[row, len(sample.prompt_ids) - 1 : _length(sample) - 1].numpy() for row, sample in enumerate(samples)]


def _print(findings: Findings, run_folder: Path, config: Config, limits: Limits) -> None:
    differences = np.concatenate(findings.differences) if findings.differences else np.zeros(1)
    print(f"audit of {run_folder}")
    print(f"  batches {findings.batches}, groups {findings.groups}")
    print(f"  staleness: largest {findings.staleness}, bound {math.ceil(config.replay.bound)}")
    print(f"  tokens audited {findings.audited}, tokens trained {findings.trained}")
    if config.publish.keep_every > 1:
        print(f"  (weights of every {config.publish.keep_every}th version were kept: publish.keep_every)")
    print(f"  log-prob difference to Hugging Face, {config.model.dtype}:")
    for share in (50, 90, 99, 99.9):
        limit = f", limit {limits.p99:g}" if share == 99 else ""
        print(f"    {share:g}% of the tokens within {np.percentile(differences, share):.3g}{limit}")
    print(f"    largest {differences.max():.3g}, limit {limits.largest:g}")
    print(f"    mean {differences.mean():.3g}, limit {limits.mean:g}")
    for problem in findings.problems:
        print(f"  PROBLEM {problem}")
    print(f"  {len(findings.problems)} problems" if findings.problems else "  every checked promise held")
