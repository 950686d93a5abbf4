"""Every family, weight and regulariser passes what a user's own must pass; and one that breaks a promise does not."""

from __future__ import annotations

import pytest

from benchmarks.losses import LIMITS
from streamrl.algo.aggregations.token_mean import TokenMean
from streamrl.algo.families.clip import Clip
from streamrl.algo.proximals.interpolate import Interpolate
from streamrl.algo.weights.token import TokenWeight
from streamrl.testing.losses import (
    AggregationConformance,
    BaselineConformance,
    DivergenceConformance,
    FamilyConformance,
    MaskConformance,
    ProximalConformance,
    RegulariserConformance,
    WeightConformance,
)

TOGETHER = {"test_every_process_can_load_it_without_torch": None}  # in tests/test_own_choices.py, all at once
SETTINGS = {name: {"mask_high": high} for name, high in LIMITS.items()}
SETTINGS |= {"second_moment": {"proximal": "recompute"}, "sequence_sum_norm": {"norm_length": 20}}
KITS = (
    FamilyConformance, WeightConformance, MaskConformance, RegulariserConformance, ProximalConformance,
    AggregationConformance, DivergenceConformance, BaselineConformance,
)  # fmt: skip

for _kit in KITS:
    for _name in _kit.kind.names:
        _class = f"Test{_kit.__name__.removesuffix('Conformance')}_{_name}"
        globals()[_class] = type(_class, (_kit,), {"name": _name, "settings": SETTINGS.get(_name, {}), **TOGETHER})


class Unbounded(Clip):
    """The ratio is not clamped."""

    def surrogate(self, tokens, log_r, config):
        surrogate, clipped = super().surrogate(tokens, log_r, config)
        return surrogate * log_r.exp() / log_r.exp().detach(), clipped


class Doubled(Clip):
    """Twice the surrogate."""

    def surrogate(self, tokens, log_r, config):
        surrogate, clipped = super().surrogate(tokens, log_r, config)
        return 2 * surrogate, clipped


class Silent(Clip):
    """Says nothing of its clip."""

    def surrogate(self, tokens, log_r, config):
        return super().surrogate(tokens, log_r, config)[0], {}


class Halved(TokenWeight):
    """Half the weight."""

    def factors(self, tokens, log_correction, config, *, of_policy):
        ratio, weight = super().factors(tokens, log_correction, config, of_policy=of_policy)
        return ratio, weight / 2


class Always(Interpolate):
    """Not the policy that generated the tokens, when nothing has changed either."""

    def logprobs(self, behaviour, log_rho, staleness, scores):
        return super().logprobs(behaviour, log_rho, staleness, scores) - 0.1


class OfThePart(TokenMean):
    """The mean over the tokens of a micro batch."""

    def shares(self, batch, config, denominators):
        return super().shares(batch, config, denominators) * 60 / len(batch.mask)


@pytest.mark.parametrize(
    ("kit", "own", "test"),
    [
        (FamilyConformance, Unbounded, "test_no_ratio_makes_it_infinite"),
        (FamilyConformance, Doubled, "test_on_policy_its_gradient_is_the_advantage"),
        (FamilyConformance, Silent, "test_it_says_which_tokens_are_clipped"),
        (WeightConformance, Halved, "test_what_is_on_policy_weighs_one"),
        (ProximalConformance, Always, "test_on_policy_it_is_the_policy_that_generated_the_tokens"),
        (AggregationConformance, OfThePart, "test_the_parts_of_an_update_add_up_whatever_their_order"),
    ],
)
def test_one_that_breaks_a_promise_is_found_out(kit, own, test):
    conformance = kit()
    conformance.name = f"{__name__}:{own.__name__}"
    with pytest.raises(AssertionError):
        getattr(conformance, test)()
