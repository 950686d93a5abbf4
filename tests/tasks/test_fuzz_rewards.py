"""A short fuzz run of the rewards, so that the long one (`benchmarks/fuzz_rewards.py`) starts from green."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import fuzz_rewards
from streamrl.tasks import countdown


def test_junk_is_worth_nothing_to_any_reward_and_breaks_none():
    kinds = ("math boxed", "text", "countdown", "user", "strings", "gym chain_sum")
    outcomes = asyncio.run(fuzz_rewards.fuzz(20 * len(kinds), seed=1, only=kinds, batch=20))
    assert {kind: counts.total() for kind, counts in outcomes.items()} == dict.fromkeys(kinds, 20)
    assert all(counts["nothing"] > 0 for counts in outcomes.values())


def test_a_reward_for_junk_is_told_with_the_text(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(countdown, "verdict", lambda expression, numbers, target: False)  # an attempt, whatever it is
    task = fuzz_rewards.rewards(tmp_path, ["countdown"])["countdown"]
    with pytest.raises(RuntimeError, match=r"countdown, prompt 0: 0\.1 for '<answer>x</answer>'"):
        asyncio.run(fuzz_rewards._judged("countdown", task, task.prompt(0), ["<answer>x</answer>"]))
