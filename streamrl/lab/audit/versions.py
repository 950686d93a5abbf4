"""The tokens of each kept version, scored again with its weights; some of them with the weights beside it, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from streamrl.config import Config
from streamrl.lab.audit.findings import Findings
from streamrl.lab.audit.logprobs import Stamped, in_order, load_kept, scored
from streamrl.observe.bars import Bar
from streamrl.observe.limits import rounds
from streamrl.observe.stamps import spread_over
from streamrl.types import PolicyVersion

NEIGHBOURS = 1024  # tokens of a version that are scored with the weights beside it
FEWEST = 4  # of its samples, where there are as many: how they differ says how much the result is worth
ROUNDED = 2048  # tokens of a run whose rounding is measured, about, as many of each version


def check_versions(
    kept: Mapping[PolicyVersion, Path],
    tokens: Mapping[PolicyVersion, Sequence[Stamped]],
    config: Config,
    findings: Findings,
    *,
    newest: int = 0,
    asked: Set[PolicyVersion] | None = None,
) -> None:
    """Compare what was recorded of `tokens`, by their stamps, with the kept weights; and whether all are kept.

    Which are to be kept is said by the configuration. A former incarnation than the `newest` may have had another one:
    of its versions those are to be there that were `asked` for; None: that is not known, and the configuration counts.
    """
    settings = AutoConfig.from_pretrained(config.model.path)
    stamped = sorted(tokens.keys() & kept.keys())
    scorer = _Scorer(tokens, config, findings, ROUNDED // max(1, len(stamped)))
    beside = _beside(sorted(kept), stamped)
    with Bar("log-probs", "tokens", sum(span.tokens for version in stamped for span in tokens[version])) as bar:
        for number, version in enumerate(sorted({*stamped, *beside}), 1):
            bar.what = f"version {number} of {len({*stamped, *beside})}"
            model = load_kept(kept[version], settings, config.model.path)
            if version in tokens:
                scorer.check(version, model, bar)
            for neighbour, where in beside[version]:
                scorer.check_neighbour(neighbour, model, where)
            if version in tokens and rounds(config):
                scorer.round(version, model)
    for version in sorted(tokens.keys() - kept.keys()):
        every = config.publish.keep_every
        is_due = every > 0 and version.step % every == 0
        if version.incarnation != newest and asked is not None:
            is_due = version in asked
        if is_due:
            findings.problems.append(f"version {version} is stamped on tokens, but its weights are not kept")


def _beside(
    kept: Sequence[PolicyVersion], stamped: Sequence[PolicyVersion]
) -> defaultdict[PolicyVersion, list[tuple[PolicyVersion, str]]]:
    """By version: the stamped ones next to it, and where it is, seen from those."""
    found: defaultdict[PolicyVersion, list[tuple[PolicyVersion, str]]] = defaultdict(list)
    places = {version: place for place, version in enumerate(kept)}
    for version in stamped:
        place = places[version]
        if place > 0:
            found[kept[place - 1]].append((version, "before"))
        if place + 1 < len(kept):
            found[kept[place + 1]].append((version, "behind"))
    return found


class _Scorer:
    """Scores all tokens of a version by its own weights, and a few of them by others."""

    def __init__(
        self, tokens: Mapping[PolicyVersion, Sequence[Stamped]], config: Config, findings: Findings, rounded: int
    ) -> None:
        """`rounded`: tokens of a version whose rounding is measured, about."""
        self._tokens = tokens
        self._rounded = rounded
        self._base = config.model.path
        self._findings = findings
        # Of the few tokens of a version, by span: by its own weights, and by those beside it until both are known.
        self._own: dict[PolicyVersion, list[np.ndarray]] = {}
        self._others: defaultdict[PolicyVersion, dict[str, list[np.ndarray]]] = defaultdict(dict)

    def check(self, version: PolicyVersion, model: PreTrainedModel, bar: Bar) -> None:
        """Check all of a version's tokens, by its own weights."""
        findings = self._findings
        for span, recorded, computed in scored(model, self._tokens[version], self._base):
            difference = np.nan_to_num(np.abs(computed - recorded), nan=np.inf)
            if span.exact:
                findings.differences.append(difference)
                findings.audited += len(difference)
            else:
                findings.inexact_differences.append(difference)
            bar.advance(span.tokens)
        self._own[version] = self._few(version, model)
        self._compare(version)

    def check_neighbour(self, version: PolicyVersion, model: PreTrainedModel, where: str) -> None:
        """Check a few of a version's tokens, by the weights `where` it: before, or behind."""
        self._others[version][where] = self._few(version, model)
        self._compare(version)

    def round(self, version: PolicyVersion, model: PreTrainedModel) -> None:
        """Measure how far bfloat16 takes some of these from what float32 computes. Leaves the model in bfloat16."""
        spans = in_order(self._spans(version))
        if not spans:
            return
        places = spread_over([span.tokens for span in spans], self._rounded)
        half = nn.Module.to(model, torch.bfloat16)
        rounded = (computed for _, _, computed in scored(half, [spans[place] for place in places], self._base))
        own = (self._own[version][place] for place in places)
        self._findings.rounded += [np.abs(a - b) for a, b in zip(rounded, own, strict=True)]

    def _few(self, version: PolicyVersion, model: PreTrainedModel) -> list[np.ndarray]:
        return [computed for _, _, computed in scored(model, self._spans(version), self._base)]

    def _spans(self, version: PolicyVersion) -> list[Stamped]:
        exact = [span for span in self._tokens[version] if span.exact]
        sizes = [span.tokens for span in exact]
        return [exact[place] for place in spread_over(sizes, NEIGHBOURS, fewest=FEWEST)]

    def _compare(self, version: PolicyVersion) -> None:
        """Where both are known."""
        if version not in self._own:
            return
        spans = in_order(self._spans(version))
        for where, others in self._others.pop(version, {}).items():
            towards = self._findings.before if where == "before" else self._findings.behind
            for span, own, other in zip(spans, self._own[version], others, strict=True):
                towards.add(span.recorded, own, other)
