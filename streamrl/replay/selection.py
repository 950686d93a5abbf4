"""Which answers are taken and trained: the check, the filters, and the audit of what they and the order select.

Whatever decides by a group's content favours some prompts and lengths over others. The audit puts lengths and
pass rates of generated, dropped and trained groups side by side, so that this can be seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from streamrl.config.replay import FilterConfig
from streamrl.replay.records import Completed
from streamrl.types import PASSED, Group, PolicyVersion, Ticket


def measure(group: Group, size: int) -> Completed:
    """What filters, order and audit read of a group of `size` bytes, in one pass: this runs for all that arrive."""
    tokens = failed = passed = 0
    oldest: int | None = None
    first: PolicyVersion | None = None
    for sample in group.samples:
        tokens += len(sample.output_ids)
        if sample.finish_reason == "placeholder":
            failed += 1
        else:  # `Sample.passed`, without its call
            parts = sample.reward_parts
            if (parts["exact"] if parts and "exact" in parts else sample.reward) >= PASSED:
                passed += 1
        if (spans := sample.spans) and spans[0].version is not first:  # versions never fall within a sample
            first = spans[0].version
            if oldest is None or first.step < oldest:
                oldest = first.step
    if group.branches:  # the last sample of a rollout has what it is worth
        answered = group.answered
        failed, passed = group.size - len(answered), sum(sample.passed for sample in answered)
    answers = group.size - failed
    return Completed(
        group_id=group.group_id,
        attempt=group.attempt,
        size=size,
        tokens=tokens,
        oldest=oldest,
        answers=answers,
        pass_rate=passed / answers if answers else 0.0,
    )


def mismatch(group: Group, record: Completed, ticket: Ticket) -> str | None:
    """Why a group does not answer its ticket. The version check is what the staleness bound rests on."""
    if group.task != ticket.task or group.prompt_index != ticket.prompt_index:
        return f"it answers {group.task} prompt {group.prompt_index}, not {ticket.task} prompt {ticket.prompt_index}"
    if record.oldest is not None and record.oldest < ticket.issued_version.step:
        return f"tokens of version {group.oldest}, at least step {ticket.issued_version.step} is required"
    return None


def reason_to_drop(group: Group, record: Completed, config: FilterConfig) -> str | None:
    """Why the filters drop a group; None where they let it through."""
    if config.placeholders and record.answers < group.size:
        return f"{group.size - record.answers} failed samples"
    if config.signal and not group.has_signal:
        return "no signal"
    if record.pass_rate < config.min_pass_rate:
        return f"pass rate {record.pass_rate:.3g} is below {config.min_pass_rate:g}"
    if record.pass_rate > config.max_pass_rate:
        return f"pass rate {record.pass_rate:.3g} is above {config.max_pass_rate:g}"
    return None


# Groups made of placeholders, tickets issued again, answers that came too late, groups too old to be trained.
COUNTS = ("placeholders", "reissued", "late_duplicates", "over_age")


@dataclass(slots=True)
class _Sums:
    groups: int = 0
    length: float = 0.0
    pass_rate: float = 0.0

    def add(self, record: Completed) -> None:
        self.groups += 1
        self.length += record.tokens / (record.answers or 1)
        self.pass_rate += record.pass_rate

    def means(self, of: str) -> dict[str, float]:
        """Means over the groups; only their number where there are none."""
        metrics = {f"selection/{of}/groups": float(self.groups)}
        if self.groups:
            metrics[f"selection/{of}/length"] = self.length / self.groups
            metrics[f"selection/{of}/pass_rate"] = self.pass_rate / self.groups
        return metrics


@dataclass(slots=True)
class Audit:
    """Lengths (tokens of an answer) and pass rates since the last batch, as means over groups."""

    generated: _Sums = field(default_factory=_Sums)
    dropped: _Sums = field(default_factory=_Sums)
    trained: _Sums = field(default_factory=_Sums)
    counts: Counter[str] = field(default_factory=Counter)  # of COUNTS

    def collect(self) -> dict[str, float]:
        """Flat, by their names in metrics.jsonl; the counts begin at 0 again."""
        found = {f"selection/{name}": float(self.counts[name]) for name in COUNTS}
        for name in ("generated", "dropped", "trained"):
            found |= getattr(self, name).means(name)
            setattr(self, name, _Sums())
        self.counts.clear()
        return found
