"""The batches of a run against what its order, its bound and its prompts allow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from streamrl.config import Config
from streamrl.lab.audit.findings import Findings
from streamrl.lab.audit.reuse import Uses
from streamrl.replay.orders import make_order
from streamrl.types import Batch, Group, PolicyVersion, Sample


class History:
    """What the batches so far have trained, against which the next one is checked."""

    def __init__(self, config: Config, versions: dict[int, str], *, has_deleted: bool = False) -> None:
        """`versions`: learner step: the version that it made, from the metrics. `has_deleted`: another `journal.keep`
        than the present one has deleted the first batches.
        """
        self._config = config
        self._has_begin = config.journal.keep == "all" and not has_deleted
        self._order = make_order(config.replay)
        self._incarnations = {step: PolicyVersion.parse(version).incarnation for step, version in versions.items()}
        self.uses = Uses(config.replay, self._order.worst_staleness)
        self._oldest = 0  # the first id that is not trained yet
        self._prompts: set[tuple[str, int]] = set()

    @property
    def newest(self) -> int:
        """The incarnation of the last learner that has made a version."""
        return max(self._incarnations.values(), default=0)

    def check(self, batch: Batch, findings: Findings, *, handed_out: bool = False) -> None:
        """Order, completeness, prompts and staleness of the next batch.

        One that was `handed_out` when the run was ended is trained by the next start, and counts then.
        """
        if findings.batches == 0 and not self._has_begin:
            findings.first = batch.step  # what was before it has been deleted
        whole = findings.first == 0
        if batch.step != (due := findings.first + findings.batches):
            findings.problems.append(f"batch of step {batch.step} where step {due} was due")
        if len(batch.groups) != self._config.replay.groups_per_step:
            findings.problems.append(f"step {batch.step} trained {len(batch.groups)} groups")
        findings.problems += [f"step {batch.step} trained {problem}" for problem in self.uses.begin(batch, whole=whole)]
        for group in batch.groups:
            problems = self._problems(group, from_the_start=whole)
            findings.problems += [f"step {batch.step} trained {problem}" for problem in problems]
            self._add(group)
        self._check_ages(batch, findings)
        if handed_out and findings.handed_out is None:
            findings.handed_out = batch.step
            return
        findings.batches += 1
        findings.groups += len(batch.groups)
        findings.quarantined += len(batch.quarantined)
        findings.reused += len(self.uses.again)
        findings.uses = self.uses.most
        findings.trained += sum(group.trained_tokens for group in batch.groups)
        findings.inexact += sum(inexact_tokens(sample) for sample in batch.samples)
        findings.staleness = max(findings.staleness, largest_age(batch))

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

    def _check_ages(self, batch: Batch, findings: Findings) -> None:
        """Staleness of a batch: no token too old, none from a future that its own incarnation had not reached.

        A group that was lost in a crash may be generated again by servers that a former incarnation had brought
        further.
        """
        spans = [span for sample in batch.samples for span in sample.spans]
        ages = list(self.uses.ages(batch))
        oldest, bound = max((each for each in ages if each[1] is not None and each[0] > each[1]), default=(0, None))
        if bound is not None:
            findings.problems.append(f"step {batch.step} trained tokens {oldest} steps old; the bound is {bound}")
        incarnation = self._incarnations.get(batch.step, 0)
        ahead = [span.version for span in spans if span.version.step > batch.step]
        if early := [version for version in ahead if version.incarnation >= incarnation]:
            findings.problems.append(f"step {batch.step} trained tokens of version {early[0]}, which it came before")


def largest_age(batch: Batch) -> int:
    """Of a trained token, in learner steps, at least 0: what no loss has seen counts in no metric either."""
    spans = (span for sample in batch.samples for span in sample.spans if sample.loss_mask[span.start : span.end].any())
    return max([0, *(batch.step - span.version.step for span in spans)])


def inexact_tokens(sample: Sample) -> int:
    """Trained tokens that are stamped as inexact."""
    spans = (span for span in sample.spans if not span.exact)
    return sum(int(np.count_nonzero(sample.loss_mask[span.start : span.end])) for span in spans)
