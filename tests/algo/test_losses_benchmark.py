"""The benchmark of the losses: it compares, and it fails when a branch is missed or a difference too large."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from benchmarks.losses import SETTINGS, TRL_SETTINGS, Row, against_critic, against_reference, against_trl, make_batch
from benchmarks.losses_critic import EXPLAINED
from benchmarks.losses_critic import LOSSES as CRITIC_LOSSES
from benchmarks.losses_critic import SETTINGS as CRITIC_SETTINGS
from streamrl.config.algo import AlgoConfig


@pytest.mark.parametrize(
    "name",
    ["loss=gspo dual_clip", "mask=second_moment", "covariance=kl_cov", "kl_reward recompute", "several at once"],
)
def test_a_setting_equals_the_loop_and_takes_every_branch(name):
    row = Row(name, "loop")
    against_reference(row, make_batch(0, samples=40, longest=40), AlgoConfig(**SETTINGS[name]))
    assert row.good
    assert sum(row.branches.values()) > 700
    assert 0 < row.float32 < 1e-5


NUMBERS = [name for name, field in AlgoConfig.model_fields.items() if "float" in str(field.annotation)]


@pytest.mark.parametrize("key", sorted({*NUMBERS} - {"kl_target"}))  # which is of the step, not of its loss
def test_each_number_of_the_loss_is_compared_at_a_value_that_float32_would_round(key):
    values = {getattr(AlgoConfig(**keys), key) for keys in SETTINGS.values()} - {None}
    assert any(float(np.float32(value)) != value for value in values)


def test_a_critics_advantages_and_loss_equal_the_loops_and_take_every_branch():
    rows = list(against_critic(range(2)))
    assert {row.setting for row in rows} == {*CRITIC_SETTINGS, *CRITIC_LOSSES, EXPLAINED}
    assert [row.setting for row in rows if not row.good] == []


@pytest.mark.parametrize("name", TRL_SETTINGS)
def test_a_setting_equals_trl_and_takes_every_branch(name):
    row = against_trl(name)
    assert row.good
    assert row.missed == []


def test_a_missed_branch_or_a_difference_above_the_bar_fails():
    good = Row("", "")
    good.add(0.0, 1e-12, Counter(taken=2))
    assert good.good
    good.add(0.0, 1e-8, Counter(taken=1))
    assert not good.good
    for place in ("value", "gradient", "float32"):
        broken = Row("", "")
        broken.add(**{"value": 0.0, "gradient": 0.0, "float32": 0.0, place: math.nan}, taken=Counter(taken=1))
        assert getattr(broken, place) == math.inf
        assert broken.good == (place == "float32")  # which has no bar
    missed = Row("", "")
    missed.add(0.0, 0.0, Counter({"taken": 2, "missed": 0}))
    assert (missed.good, missed.missed) == (False, ["missed"])
