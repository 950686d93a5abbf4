"""Samples over training: a few groups of evenly spaced steps, token by token.

Of each shown step one group is chosen, with different rewards where there is one, and by the most versions in one
answer; of it the best answer, the worst and some between. Of a rollout of several branches it is the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from streamrl.algo.advantages import group_advantages
from streamrl.config.algo import AlgoConfig
from streamrl.images import data_url, file_name
from streamrl.lab.report.curves import brief
from streamrl.lab.report.groups import Groups
from streamrl.lab.report.runs import Run
from streamrl.observe.taken_off import TakenOff, taken_off
from streamrl.recorded.journal import RecordedGroup
from streamrl.recorded.weights import kept_versions
from streamrl.types import Group, Sample

# At most: steps of a run, answers of a step, tokens of an answer.
STEPS = 24
SAMPLES = 4
TOKENS = 1024

# of all runs of a page; fewer steps are shown where the answers are long
ALL_TOKENS = 60_000

# groups of a step among which one is chosen
LOOKED_AT = 32

# characters of a prompt
PROMPT = 4000

# bytes of an image that the page shows; of a larger one it has the name
IMAGE = 1 << 16


@dataclass(slots=True)
class Shown:
    """One answer that the page shows."""

    step: int  # that trained it: its weights have so many learner steps
    group: Group
    sample: Sample
    advantage: float | None  # None: the group's is not what was trained
    taken_off: float = 0.0  # from its reward by algo.kl_reward
    ratios: np.ndarray | None = None  # float32 [T], log-prob under those weights minus behaviour log-prob


def choose(run: Run, groups: Groups, runs: int = 1) -> list[Shown]:
    """The answers to show, in the order of steps. `runs`: how many share the page."""
    steps = groups.by_step
    if not steps:
        return []
    kept = {version.step for version in kept_versions(run.folder)} & steps.keys()
    candidates = sorted(kept) if len(kept) > 1 else list(steps)
    offered = [each for step in candidates for each in steps[step]]
    answers = sum(each.answers for each in offered)
    length = min(TOKENS, sum(each.tokens for each in offered) / max(1, answers))
    affordable = int(ALL_TOKENS / runs / (SAMPLES * max(1.0, length)))
    count = min(len(candidates), max(2, min(STEPS, affordable)))
    places = np.linspace(0, len(candidates) - 1, count).round().astype(int)
    shown: list[Shown] = []
    lost = taken_off(run.folder) if run.config.algo.kl_reward else {}
    for step in (candidates[place] for place in places):
        shown += _of_step(step, steps[step], groups, run.config.algo, lost)
    return shown


def describe(run: Run, shown: Sequence[Shown], source: str) -> dict[str, Any]:
    """As JSON. `source`: where the ratios come from, or why there are none."""
    tokenizer = _tokenizer(run)
    return {
        "ratios": source,
        "has_text": tokenizer is not None,
        "steps": [
            {
                "step": step,
                "group": (answers := list(some))[0].group.group_id,
                "task": answers[0].group.task,
                "prompt": _prompt(answers[0].sample, tokenizer),
                "images": [_image(file) for file in answers[0].group.images],
                "answers": [_answer(each, tokenizer, answers[0].sample) for each in answers],
            }
            for step, some in groupby(shown, key=lambda each: each.step)
        ],
    }


def _of_step(
    step: int, recorded: Sequence[RecordedGroup], groups: Groups, algo: AlgoConfig, lost: TakenOff
) -> list[Shown]:
    """Answers of the group of a step that says most."""
    loaded = [group for each in recorded[:LOOKED_AT] if (group := groups.load(each)) is not None and group.answered]
    if not loaded:
        return []
    group = max(loaded, key=lambda each: (each.has_signal, max(len(sample.spans) for sample in each.samples)))
    penalties = lost.get((step, group.group_id), [0.0] * len(group.samples))
    rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
    rewards -= torch.tensor(penalties, dtype=torch.float64)
    lengths = torch.tensor([np.count_nonzero(sample.loss_mask) for sample in group.samples])
    valid = torch.tensor([not sample.is_placeholder for sample in group.samples])
    advantages: list[float | None] = group_advantages(rewards, valid, algo.advantage, lengths, group.branches).tolist()
    if algo.advantage.has_critic or (algo.distils and not algo.distillation.rewards):
        advantages = [None] * len(advantages)  # each token has its own, of a critic or of a teacher
    last = [end - 1 for end in accumulate(group.branches or (1,) * len(group.samples))]
    answers = [
        Shown(step, group, group.samples[place], advantages[place], penalties[place])
        for place in last
        if not group.samples[place].is_placeholder
    ]
    answers.sort(key=lambda each: each.taken_off - each.sample.reward)
    places = np.linspace(0, len(answers) - 1, min(SAMPLES, len(answers))).round().astype(int)
    return [answers[place] for place in places]


def _answer(shown: Shown, tokenizer: Tokenizer | None, first: Sample) -> dict[str, Any]:
    """`first`: the answer whose prompt is shown already."""
    sample = shown.sample
    own = None if np.array_equal(sample.prompt_ids, first.prompt_ids) else _prompt(sample, tokenizer)
    ids = sample.output_ids[:TOKENS].tolist()
    parts = dict(sample.reward_parts) | ({"kl_reward": -shown.taken_off} if shown.taken_off else {})
    return {
        "reward": brief(sample.reward - shown.taken_off),
        "parts": {name: brief(value) for name, value in parts.items()},
        "prompt": own,
        "finish": sample.finish_reason,
        "advantage": None if shown.advantage is None else brief(shown.advantage),
        "length": len(sample.output_ids),
        "tokens": pieces(ids, tokenizer),
        "ids": ids,
        "logprobs": _brief(sample.logprobs, sample),
        "ratios": None if shown.ratios is None else _brief(shown.ratios, sample),
        "untrained": np.flatnonzero(~sample.loss_mask[:TOKENS]).tolist(),
        "versions": [[str(span.version), span.version.step, span.start, span.end] for span in sample.spans],
    }


def _brief(values: np.ndarray, sample: Sample) -> list[float | None]:
    """Four decimals of each token's number; null where it is not finite, or the policy did not generate the token."""
    shown = values[:TOKENS]
    is_told = np.isfinite(shown) & sample.loss_mask[: len(shown)]
    return [round(value, 4) if known else None for value, known in zip(shown.tolist(), is_told.tolist(), strict=True)]


def _prompt(sample: Sample, tokenizer: Tokenizer | None) -> str:
    ids = sample.prompt_ids.tolist()
    text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
    return text if len(text) <= PROMPT else f"{text[:PROMPT]} … ({len(text):,} characters)"


def _image(file: bytes) -> dict[str, str | None]:
    try:
        return {"name": file_name(file), "url": data_url(file) if len(file) <= IMAGE else None}
    except ValueError as error:
        return {"name": str(error), "url": None}


def pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The text that each token adds; empty for one that ends inside a character, which the next one completes.

    Without a tokenizer a token's text is its id.
    """
    if tokenizer is None:
        return [f"{token} " for token in ids]
    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, token) or "" for token in ids]
    except Exception as error:
        if type(error) is not Exception:  # for ids that it cannot decode the library raises nothing more special
            raise
        return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def _tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer of the model folder, or of a kept version, which has a copy."""
    folders = [run.config.model.path, *(folder for _, folder in sorted(kept_versions(run.folder).items()))]
    for folder in folders:
        if (file := Path(folder) / "tokenizer.json").exists():
            return Tokenizer.from_file(str(file))
    return None
