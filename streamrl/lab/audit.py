"""`streamrl audit RUN`: what a run recorded, checked against what it promised, by means that are not its own.

Every trained token's behaviour log-prob is computed again by a plain Hugging Face forward pass of the kept
weights of the version that is stamped on it. Tokens that an update in place left inexact (`VersionSpan.exact`) are
counted and compared apart, and held to no limit. The bound, the order, the prompts and the counts follow from the
journal's surviving history: a step that was trained again after a restart counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from streamrl.config import Config
from streamrl.hub.model import with_local_model
from streamrl.lab.as_drawn import as_drawn
from streamrl.lab.audit_reuse import Uses, unmeasured
from streamrl.lab.audited_images import image_inputs
from streamrl.observe.bars import Bar, track
from streamrl.observe.ending import saved_steps
from streamrl.observe.metrics import read_metrics
from streamrl.places import load_run
from streamrl.preflight.model import check_folder
from streamrl.recorded.journal import JournalDamaged, batches
from streamrl.recorded.weights import kept_versions, whole_weights
from streamrl.replay.orders import make_order
from streamrl.types import Batch, Group, PolicyVersion, Sample


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest allowed log-prob differences, in nats: of any token, of 99 in 100, and on average."""

    largest: float
    p99: float
    mean: float


# float32: two implementations differ by rounding alone. bfloat16: a logit of 16 to 32 has a spacing of 0.125, so
# that single tokens differ by several of these; the reference is computed in fp32 from the same bfloat16 weights.
# What a wrong stamp changes must be larger than that to be seen, so bfloat16 shows less than float32 does.
# fp8: servers with generate.quantization, compared to the bfloat16 weights that they quantised; e4m3 has three bits of
# mantissa where bfloat16 has seven. A tiny model has 0.026 on average by the CPU's stand-in; no GPU has been measured.
LIMITS = {"float32": Limits(1e-4, 1e-4, 1e-5), "bfloat16": Limits(2.0, 0.3, 0.05), "fp8": Limits(4.0, 0.9, 0.15)}

LOGITS_AT_ONCE = 1 << 26  # entries of a [tokens, vocabulary] block: 256 MiB in fp32


@dataclass
class Findings:
    """What an audit found; `problems` empty means that every checked promise held."""

    first: int = 0  # step of the first batch that the journal still has
    handed_out: int | None = None  # step of a last batch that was not trained before the run was ended
    batches: int = 0
    groups: int = 0
    quarantined: int = 0  # of them: neither lost nor trained
    reused: int = 0  # of them: an earlier step had them (`replay.reuse`)
    trained: int = 0  # tokens
    audited: int = 0  # exact tokens whose log-prob was computed again
    staleness: int = 0  # largest, in learner steps
    bound: int | None = None  # of the order; None: it has none
    differences: list[np.ndarray] = field(default_factory=list)  # |log-prob difference| of audited tokens
    inexact: int = 0  # trained tokens behind an update in place
    inexact_differences: list[np.ndarray] = field(default_factory=list)  # of those whose version's weights are kept
    problems: list[str] = field(default_factory=list)


def main(run_folder: Path, tolerance: float | None = None) -> int:
    """Audit a run and print the findings. Returns 0 when every check held, 1 otherwise."""
    transformers_logging.disable_progress_bar()
    config = with_local_model(load_run(run_folder))
    check_folder(config)
    limits = limits_of(config)
    if tolerance is not None:
        limits = replace(limits, largest=tolerance)
    findings = audit(run_folder, config, limits)
    _print(findings, run_folder, config, limits)
    return 1 if findings.problems else 0


def limits_of(config: Config) -> Limits:
    """Those of what the run's servers compute in."""
    return LIMITS[_numbers(config)]


def _numbers(config: Config) -> str:
    """What the servers compute in, as LIMITS calls it."""
    return config.generate.quantization or config.model.dtype


def audit(run_folder: Path, config: Config, limits: Limits) -> Findings:
    """Check the journal, the metrics and the kept weights of a run against one another."""
    findings = Findings(bound=make_order(config.replay).worst_staleness)
    tokens: dict[PolicyVersion, list[Stamped]] = defaultdict(list)
    versions = {int(row["step"]) - 1: row["version"] for row in read_metrics(run_folder)}
    history = History(config, versions)
    reached = max([*saved_steps(run_folder), *(step + 1 for step in versions)], default=0)
    try:
        for batch in track(batches(run_folder), "journal", "batches", len(versions)):
            history.check(batch, findings, handed_out=batch.step == reached)
            for version, span in _stamped(batch, history.uses.again):
                tokens[version].append(span)
    except JournalDamaged as damage:
        findings.problems.append(str(damage))
    if findings.inexact and config.publish.interruption != "in_place":
        findings.problems.append(
            f"{findings.inexact} trained tokens are stamped inexact, which only publish.interruption=in_place leaves"
        )
    if config.replay.reuse > 1:
        findings.problems += unmeasured(run_folder / "journal", config.replay)
    _check_metrics(run_folder, findings)
    _check_versions(run_folder, config, tokens, findings)
    _check_differences(findings, limits)
    return findings


def _check_versions(
    run_folder: Path, config: Config, tokens: dict[PolicyVersion, list[Stamped]], findings: Findings
) -> None:
    """The log-probs of what each kept version has generated, and whether all are kept that had to be."""
    kept = kept_versions(run_folder)
    settings = AutoConfig.from_pretrained(config.model.path)
    known = sorted(tokens.keys() & kept.keys())
    with Bar("log-probs", "tokens", sum(span.tokens for version in known for span in tokens[version])) as bar:
        for number, version in enumerate(known, 1):
            bar.what = f"version {number} of {len(known)}"
            model = load_kept(kept[version], settings, config.model.path)
            _check_logprobs(model, tokens[version], findings, bar, config.model.path)
    for version in sorted(tokens.keys() - kept.keys()):
        if config.publish.keep_every and version.step % config.publish.keep_every == 0:
            findings.problems.append(f"version {version} is stamped on tokens, but its weights are not kept")


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


def _stamped(batch: Batch, again: Container[int]) -> Iterator[tuple[PolicyVersion, Stamped]]:
    """Every span of a batch, by its version; without the groups that are trained `again`."""
    for group in batch.groups:
        for sample in group.samples if group.group_id not in again else ():
            for span in sample.spans:
                yield span.version, Stamped(sample, span.start, span.end, group.temperature, span.exact, group.images)


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


class History:
    """What the batches so far have trained, against which the next one is checked."""

    def __init__(self, config: Config, versions: dict[int, str]) -> None:
        """`versions`: learner step: the version that it made, from the metrics."""
        self._config = config
        self._order = make_order(config.replay)
        self._incarnations = {step: PolicyVersion.parse(version).incarnation for step, version in versions.items()}
        self.uses = Uses(config.replay, self._order.worst_staleness)
        self._oldest = 0  # the first id that is not trained yet
        self._prompts: set[tuple[str, int]] = set()

    def check(self, batch: Batch, findings: Findings, *, handed_out: bool = False) -> None:
        """Order, completeness, prompts and staleness of the next batch.

        One that was `handed_out` when the run was ended is trained by the next start, and counts then.
        """
        if findings.batches == 0 and self._config.journal.keep != "all":
            findings.first = batch.step  # what was before it has been deleted
        if batch.step != (due := findings.first + findings.batches):
            findings.problems.append(f"batch of step {batch.step} where step {due} was due")
        if len(batch.groups) != self._config.replay.groups_per_step:
            findings.problems.append(f"step {batch.step} trained {len(batch.groups)} groups")
        findings.problems += [f"step {batch.step} trained {problem}" for problem in self.uses.begin(batch)]
        for group in batch.groups:
            problems = self._problems(group, from_the_start=findings.first == 0)
            findings.problems += [f"step {batch.step} trained {problem}" for problem in problems]
            self._add(group)
        ages = self._check_ages(batch, findings)
        if handed_out and findings.handed_out is None:
            findings.handed_out = batch.step
            return
        findings.batches += 1
        findings.groups += len(batch.groups)
        findings.quarantined += len(batch.quarantined)
        findings.reused += len(self.uses.again)
        findings.trained += sum(group.trained_tokens for group in batch.groups)
        findings.inexact += sum(_inexact(sample) for sample in batch.samples)
        findings.staleness = max(findings.staleness, ages)

    def _problems(self, group: Group, from_the_start: bool) -> Iterator[str]:
        """What is wrong with training this group next; the order shows only in a history that is whole."""
        replay, name = self._config.replay, f"group {group.group_id}"
        if group.group_id in self.uses:
            yield from self.uses.problems(group)
            return
        if from_the_start and not self._order.allows(group.group_id, self._oldest):
            window = self._order.window
            yield f"{name} before group {self._oldest}, which {replay.order} with window {window} does not allow"
        if group.task not in {share.key for share in self._config.task.shares}:
            yield f"{name} of task {group.task!r}, which is none of the run"
        if replay.chosen("curriculum").each_prompt_once and (group.task, group.prompt_index) in self._prompts:
            yield f"prompt {group.prompt_index} of {group.task} a second time, in {name}"

    def _add(self, group: Group) -> None:
        self.uses.add(group)
        self._prompts.add((group.task, group.prompt_index))
        while self._oldest in self.uses:
            self._oldest += 1

    def _check_ages(self, batch: Batch, findings: Findings) -> int:
        """Staleness of a batch: no token too old, none from a future that its own incarnation had not reached.

        A group that was lost in a crash may be generated again by servers that a former incarnation had brought
        further. Returns the largest age in learner steps, at least 0.
        """
        spans = [span for sample in batch.samples for span in sample.spans]
        ages = list(self.uses.ages(batch, whole=findings.first == 0))
        oldest, bound = max((each for each in ages if each[1] is not None and each[0] > each[1]), default=(0, None))
        if bound is not None:
            findings.problems.append(f"step {batch.step} trained tokens {oldest} steps old; the bound is {bound}")
        incarnation = self._incarnations.get(batch.step, 0)
        ahead = [span.version for span in spans if span.version.step > batch.step]
        if early := [version for version in ahead if version.incarnation >= incarnation]:
            findings.problems.append(f"step {batch.step} trained tokens of version {early[0]}, which it came before")
        return max((age for age, _ in ages if age > 0), default=0)


def _inexact(sample: Sample) -> int:
    """Trained tokens that are stamped as inexact."""
    spans = (span for span in sample.spans if not span.exact)
    return sum(int(np.count_nonzero(sample.loss_mask[span.start : span.end])) for span in spans)


def _check_metrics(run_folder: Path, findings: Findings) -> None:
    """The metrics say the same about counts and staleness."""
    rows = [row for row in read_metrics(run_folder) if row["step"] > findings.first]
    tokens = sum(int(row["tokens/trained"]) for row in rows)
    quarantined = sum(int(row.get("quarantined", 0)) for row in rows)
    worst = max((int(row["staleness/max"]) for row in rows), default=0)
    for what, reported, found in (
        ("steps", len(rows), findings.batches),
        ("trained tokens", tokens, findings.trained),
        ("quarantined groups", quarantined, findings.quarantined),
        ("staleness/max", worst, findings.staleness),
    ):
        if reported != found:
            findings.problems.append(f"metrics.jsonl says {reported} {what}, the journal {found}")


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
    return model.eval()


@torch.inference_mode()
def _check_logprobs(model: PreTrainedModel, spans: Sequence[Stamped], findings: Findings, bar: Bar, base: Path) -> None:
    """Compute the log-probs of all tokens that carry one version again, by the Hugging Face model in fp32."""
    for block in _blocks(spans, model.config.get_text_config().vocab_size):
        for (sample, start, end, _, exact, _), computed in zip(block, logprobs(model, block, base), strict=True):
            trained = sample.loss_mask[start:end]
            difference = np.abs(computed[start:end] - sample.logprobs[start:end])[trained]
            difference = np.nan_to_num(difference, nan=np.inf)
            if exact:
                findings.differences.append(difference)
                findings.audited += len(difference)
            else:
                findings.inexact_differences.append(difference)
        bar.advance(sum(span.tokens for span in block))


def _blocks(spans: Sequence[Stamped], vocabulary: int) -> Iterator[list[Stamped]]:
    """Spans in blocks of like lengths, padded to at most LOGITS_AT_ONCE logits."""
    block: list[Stamped] = []
    for span in sorted(spans, key=lambda span: -_length(span.sample)):
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


def _print(findings: Findings, run_folder: Path, config: Config, limits: Limits) -> None:
    differences = np.concatenate(findings.differences) if findings.differences else np.zeros(1)
    print(f"audit of {run_folder}")
    print(f"  batches {findings.batches}, groups {findings.groups}, of them quarantined {findings.quarantined}")
    if (times := config.replay.reuse) > 1:
        print(f"  of them trained again {findings.reused}; a group at most {times} times, as the journal says")
    if findings.handed_out is not None:
        print(f"  (the batch of step {findings.handed_out} was handed out and not trained; the next start trains it)")
    if findings.first:
        print(f"  (from step {findings.first} on; journal.keep={config.journal.keep} has deleted what was before)")
    again = f", {config.replay.reuse_bound} of groups trained again" if config.replay.reuse > 1 else ""
    bound = "none" if findings.bound is None else findings.bound
    print(f"  staleness: largest {findings.staleness}, bound {bound}{again}")
    print(f"  tokens audited {findings.audited}, tokens trained {findings.trained}")
    if config.publish.keep_every > 1:
        print(f"  (weights of every {config.publish.keep_every}th version were kept: publish.keep_every)")
    print(f"  log-prob difference to Hugging Face, {_numbers(config)}:")
    for share in (50, 90, 99, 99.9):
        limit = f", limit {limits.p99:g}" if share == 99 else ""
        print(f"    {share:g}% of the tokens within {np.percentile(differences, share):.3g}{limit}")
    print(f"    largest {differences.max():.3g}, limit {limits.largest:g}")
    print(f"    mean {differences.mean():.3g}, limit {limits.mean:g}")
    if findings.inexact:
        _print_inexact(findings)
    for problem in findings.problems:
        print(f"  PROBLEM {problem}")
    print(f"  {len(findings.problems)} problems" if findings.problems else "  every checked promise held")


def _print_inexact(findings: Findings) -> None:
    differences = np.concatenate(findings.inexact_differences or [np.zeros(0, np.float32)])
    print(
        f"  tokens behind an update in place {findings.inexact}, of them compared {len(differences)}, without a limit:"
    )
    if len(differences):
        for share in (50, 90, 99):
            print(f"    {share}% of the tokens within {np.percentile(differences, share):.3g}")
        print(f"    largest {differences.max():.3g}")
