"""`streamrl audit RUN`: what a run recorded, checked against what it promised, by means that are not its own.

Every trained token's behaviour log-prob is computed again by a plain Hugging Face forward pass of the kept
weights of the version that is stamped on it. Tokens that an update in place left inexact (`VersionSpan.exact`) are
counted and compared apart, and held to no limit. The bound, the order, the prompts and the counts follow from the
journal's surviving history: a step that was trained again after a restart counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
from transformers.utils import logging as transformers_logging

from streamrl.config import Config
from streamrl.hub.model import with_local_model
from streamrl.lab.audit.findings import Findings
from streamrl.lab.audit.history import History
from streamrl.lab.audit.logprobs import Stamped
from streamrl.lab.audit.reuse import unmeasured
from streamrl.lab.audit.versions import check_versions
from streamrl.observe.bars import track
from streamrl.observe.ending import saved_steps
from streamrl.observe.limits import MARGIN, Limits, derived, limits_of, numbers_of, of_rounding, percentile
from streamrl.observe.metrics import read_metrics
from streamrl.observe.stamps import Neighbours
from streamrl.places import load_run
from streamrl.preflight.model import check_folder
from streamrl.recorded.journal import JournalDamaged, batches, has_deleted
from streamrl.recorded.weights import asked_versions, kept_versions, newest_start
from streamrl.replay.orders import make_order
from streamrl.types import Batch, PolicyVersion


def main(run_folder: Path, tolerance: float | None = None) -> int:
    """Audit a run and print the findings. Returns 0 when every check held, 1 otherwise."""
    transformers_logging.disable_progress_bar()
    config = with_local_model(load_run(run_folder))
    check_folder(config)
    findings = audit(run_folder, config, tolerance)
    _print(findings, run_folder, config)
    return 1 if findings.problems else 0


def audit(run_folder: Path, config: Config, tolerance: float | None = None) -> Findings:
    """Check the journal, the metrics and the kept weights of a run against one another.

    tolerance: the largest allowed log-prob difference of a token, in nats, in place of the limit of the run's numbers.
    """
    findings = Findings(bound=make_order(config.replay).worst_staleness)
    kept = kept_versions(run_folder)
    tokens: dict[PolicyVersion, list[Stamped]] = defaultdict(list)  # of the kept ones; the others have none
    versions = {int(row["step"]) - 1: row["version"] for row in read_metrics(run_folder)}
    history = History(config, versions, has_deleted=has_deleted(run_folder))
    reached = max([*saved_steps(run_folder), *(step + 1 for step in versions)], default=0)
    try:
        for batch in track(batches(run_folder), "journal", "batches", len(versions)):
            history.check(batch, findings, handed_out=batch.step == reached)
            for version, span in _stamped(batch, history.uses.seen):
                tokens[version] += [span] if version in kept else []
    except JournalDamaged as damage:
        findings.problems.append(str(damage))
    if findings.inexact and config.publish.interruption != "in_place":
        findings.problems.append(
            f"{findings.inexact} trained tokens are stamped inexact, which only publish.interruption=in_place leaves"
        )
    if config.replay.reuse > 1:
        found = unmeasured(run_folder / "journal", config.replay, whole=findings.first == 0)
        findings.problems += [problem for problem in found if problem not in findings.problems]
    _check_metrics(run_folder, findings)
    newest = max(history.newest, newest_start(run_folder))  # whose configuration is the run folder's
    check_versions(kept, tokens, config, findings, newest=newest, asked=asked_versions(run_folder))
    findings.limits = derived(limits_of(config), of_rounding(findings.rounded), tolerance)
    _check_differences(findings, findings.limits)
    if config.generate.quantization is None:  # what quantising takes away may be the very step
        findings.problems += _wrong_stamps(findings)
    return findings


def _stamped(batch: Batch, seen: Container[int]) -> Iterator[tuple[PolicyVersion, Stamped]]:
    """Every span of a batch, by its version; without the groups that a batch before had, too."""
    for group in batch.groups:
        for sample in group.samples if group.group_id not in seen else ():
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
        ("99th percentile", percentile(differences, 99), limits.p99),
        ("mean", differences.mean(), limits.mean),
    ):
        if found > limit:
            findings.problems.append(f"the {name} of the differences is {found:.2g}, the limit {limit:g}")


def _wrong_stamps(findings: Findings) -> Iterator[str]:
    """Tokens that another version drew than the one of their stamp."""
    for towards, where in ((findings.before, "before"), (findings.behind, "behind")):
        slope = towards.slope()
        if slope is not None and slope.wrong:
            yield (
                f"tokens are {slope.value:.2f} +- {slope.error:.2f} of the way to the kept versions {where} those of "
                "their stamps, where 0 is as stamped: another version drew them"
            )


def _check_metrics(run_folder: Path, findings: Findings) -> None:
    """The metrics say the same about counts and staleness."""
    rows = [row for row in read_metrics(run_folder) if row["step"] > findings.first]
    tokens = sum(int(row["tokens/trained"]) for row in rows)
    quarantined = sum(int(row.get("quarantined", 0)) for row in rows)
    again = sum(int(row.get("replay/reused", 0)) for row in rows)
    worst = max((int(row.get("staleness/max") or 0) for row in rows), default=0)
    for what, reported, found in (
        ("steps", len(rows), findings.batches),
        ("trained tokens", tokens, findings.trained),
        ("quarantined groups", quarantined, findings.quarantined),
        ("staleness/max", worst, findings.staleness),
        ("groups trained again", again, findings.reused),
    ):
        if reported != found:
            findings.problems.append(f"metrics.jsonl says {reported} {what}, the journal {found}")


def _print(findings: Findings, run_folder: Path, config: Config) -> None:
    print(f"audit of {run_folder}")
    print(f"  batches {findings.batches}, groups {findings.groups}, of them quarantined {findings.quarantined}")
    if (most := config.replay.reuse) > 1:
        print(f"  of them trained again {findings.reused}; a group {findings.uses} times at most, {most} are allowed")
    if findings.handed_out is not None:
        print(f"  (the batch of step {findings.handed_out} was handed out and not trained; the next start trains it)")
    if findings.first:
        print(f"  (from step {findings.first} on: a journal.keep other than all has deleted what was before)")
    again = f", {config.replay.reuse_bound} of groups trained again" if config.replay.reuse > 1 else ""
    bound = "none" if findings.bound is None else findings.bound
    print(f"  staleness: largest {findings.staleness}, bound {bound}{again}")
    print(f"  tokens audited {findings.audited}, tokens trained {findings.trained}")
    if config.publish.keep_every > 1:
        print(f"  (weights of every {config.publish.keep_every}th version were kept: publish.keep_every)")
    _print_differences(findings, numbers_of(config))
    if findings.inexact:
        _print_inexact(findings)
    for towards, where in ((findings.before, "before"), (findings.behind, "behind")):
        _print_stamps(towards, where)
    for problem in findings.problems:
        print(f"  PROBLEM {problem}")
    print(f"  {len(findings.problems)} problems" if findings.problems else "  every checked promise held")


def _print_differences(findings: Findings, numbers: str) -> None:
    if not findings.differences:
        print("  log-prob difference to Hugging Face: of no token")
        return
    differences, limits = np.concatenate(findings.differences), findings.limits
    print(f"  log-prob difference to Hugging Face, {numbers}:")
    for share in (50, 90, 99, 99.9):
        limit = f", limit {limits.p99:.3g}" if share == 99 else ""
        print(f"    {share:g}% of the tokens within {percentile(differences, share):.3g}{limit}")
    print(f"    largest {differences.max():.3g}, limit {limits.largest:.3g}")
    print(f"    mean {differences.mean():.3g}, limit {limits.mean:.3g}")
    if (rounding := of_rounding(findings.rounded)) is not None:
        print(
            f"    (limits: {MARGIN:g} times what {numbers} alone changes in Hugging Face, on "
            f"{sum(map(len, findings.rounded))} of these tokens, of all versions: {_brief(rounding)})"
        )


def _brief(limits: Limits) -> str:
    return f"99% within {limits.p99:.3g}, largest {limits.largest:.3g}, mean {limits.mean:.3g}"


def _print_stamps(towards: Neighbours, where: str) -> None:
    """How well the versions of the stamps can be told from those beside them, and whether they are the right ones."""
    if (slope := towards.slope()) is None:
        return
    told = "" if slope.tells else "; too near to tell them apart"
    print(
        f"  stamps: {slope.value:.3f} +- {slope.error:.2g} of the way to the kept versions {where}, on "
        f"{towards.tokens} tokens (0: as stamped, 1: of that version{told})"
    )


def _print_inexact(findings: Findings) -> None:
    differences = np.concatenate(findings.inexact_differences or [np.zeros(0, np.float32)])
    print(
        f"  tokens behind an update in place {findings.inexact}, of them compared {len(differences)}, without a limit:"
    )
    if len(differences):
        for share in (50, 90, 99):
            print(f"    {share}% of the tokens within {percentile(differences, share):.3g}")
        print(f"    largest {differences.max():.3g}")
