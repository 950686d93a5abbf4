"""The algorithm's part of the configuration: advantages, losses, weights, masks, distillation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from streamrl.choices import (
    AGGREGATIONS,
    BASELINES,
    DIVERGENCES,
    FAMILIES,
    LOSSES,
    MASKS,
    PROXIMALS,
    REGULARISERS,
    REWARD_DIVERGENCES,
    WEIGHTS,
)
from streamrl.config.section import Section, rule
from streamrl.config.words import checked


class AdvantageConfig(Section):
    """Group-relative advantages, or those of a critic (section `critic`)."""

    estimator: Literal["group", "gae"] = Field(
        "group", description="group: an answer beside its siblings; gae: each token by a critic's values"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="gae: discount of what follows, per trained token")
    lam: float = Field(1.0, ge=0, le=1, description="gae: lambda; 1: the whole answer, 0: one token ahead")
    whiten: bool = Field(True, description="gae: centre the advantages of a step and divide by their deviation")
    std: Literal["population", "sample", "none"] = Field(
        "population", description="what the centred reward is divided by"
    )
    baseline: Annotated[str, BASELINES] = Field("mean", description="what is taken from the reward")
    baseline_options: dict[str, Any] = Field(default_factory=dict, description="options of a baseline of your own")
    eps: float = Field(1e-4, ge=0, description="added to the standard deviation")

    @property
    def has_critic(self) -> bool:
        """Does a value model say what an answer is worth?"""
        return self.estimator == "gae"

    @property
    def least_samples(self) -> int:
        """Samples of a group that may have an advantage besides 0."""
        least: int = 1 if self.has_critic else self.chosen("baseline").least_samples
        return least


class MaskRule(Section):
    """One more mask, beside `algo.mask`; each key as its namesake of `algo`."""

    mask: Annotated[str, MASKS] = Field(description="what masks far off-policy tokens, but second_moment")
    mask_options: dict[str, Any] = Field(default_factory=dict, description="options of a mask of your own")
    mask_low: float | None = Field(None, ge=0, description="lower edge of the mask; null: the rule's own default")
    mask_high: float | None = Field(None, gt=0, description="upper edge of the mask; null: the rule's own default")

    def _refused_choices(self) -> Iterator[PydanticCustomError]:
        """None here: `AlgoConfig` asks, because a mask may read other keys of it."""
        return iter(())


class DistillationConfig(Section):
    """On-policy distillation: a frozen teacher scores the tokens that the policy drew."""

    teacher: Path | None = Field(
        None, description="Hugging Face folder of the teacher, or else a name of the hub (`org/name`); null: none"
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a teacher of the hub; null: its main branch"
    )
    family: Annotated[str | None, FAMILIES] = Field(
        None, description="how the teacher is built, as model.family; null: by the architecture in its config.json"
    )
    family_options: dict[str, Any] = Field(default_factory=dict, description="options of a family of your own")
    coefficient: float = Field(1.0, gt=0, description="delta, weight of the reverse KL in the advantage of a token")
    rewards: bool = Field(True, description="the group's advantage counts beside it; false: the teacher alone")


class AlgoConfig(Section):
    """The loss and the importance weights; equations in docs/algorithm.md."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="group-relative advantages")
    distillation: DistillationConfig = Field(
        default_factory=DistillationConfig, description="a teacher's part in the advantages"
    )
    loss: Annotated[str, LOSSES] = Field("clip", description="family of the policy loss")
    loss_options: dict[str, Any] = Field(default_factory=dict, description="options of a family of your own")
    proximal: Annotated[str, PROXIMALS] = Field(
        "behaviour", description="the proximal policy; recompute takes one more forward pass"
    )
    proximal_options: dict[str, Any] = Field(
        default_factory=dict, description="options of a proximal policy of your own"
    )
    eps_low: float = Field(0.2, ge=0, le=1, description="lower clip range")
    eps_high: float = Field(0.28, ge=0, description="upper clip range")
    dual_clip: float | None = Field(None, gt=1, description="c of the dual clip for negative advantages; null: off")
    kl: float = Field(0.0, ge=0, description="beta, weight of the KL divergence to the reference policy")
    kl_estimator: Annotated[str, DIVERGENCES] = Field("k3", description="how a token's KL divergence is estimated")
    kl_estimator_options: dict[str, Any] = Field(
        default_factory=dict, description="options of an estimator of your own"
    )
    kl_target: float | None = Field(
        None, gt=0, description="KL of a token that an adaptive weight of it keeps to, nats; null: the weight is fixed"
    )
    kl_horizon: int = Field(10_000, ge=1, description="samples in which that weight follows the KL's relative error")
    kl_straight_through: bool = Field(False, description="the value of kl_estimator with the gradient of k2")
    kl_reward: float = Field(
        0.0, ge=0, description="weight of the KL divergence to the reference policy that is taken off the reward"
    )
    kl_reward_estimator: Annotated[str, REWARD_DIVERGENCES] = Field("k1", description="how that one is estimated")
    kl_reward_estimator_options: dict[str, Any] = Field(
        default_factory=dict, description="options of an estimator of your own"
    )
    reference: Path | None = Field(
        None, description="Hugging Face folder of the reference policy; null: model.path (LoRA: without adapters)"
    )
    entropy: float = Field(0.0, ge=0, description="lambda, weight of the entropy bonus")
    sapo_positive: float = Field(1.0, gt=0, description="temperature of sapo's gate for advantages above 0")
    sapo_negative: float = Field(1.05, gt=0, description="temperature of sapo's gate for the other advantages")
    ratio_cap: float = Field(20.0, ge=1, description="largest ratio that multiplies dppo's gradient")
    dro_temperature: float = Field(
        1.0, gt=0, description="tau of dro: how hard a token is drawn back to the proximal policy"
    )
    ratio_penalty: float = Field(0.0, ge=0, description="weight of (log r)^2 in the loss, whatever the family")
    weight: Annotated[str, WEIGHTS] = Field("token", description="what the truncated importance weight reads")
    weight_options: dict[str, Any] = Field(default_factory=dict, description="options of a weight of your own")
    weight_cap: float = Field(2.0, ge=1, description="C, cap of the importance weight")
    weight_gamma: float = Field(
        1.0, gt=0, le=1, description="gamma, tightens the cap with staleness: 1 + (C - 1) gamma^s"
    )
    weight_normalise: bool = Field(
        False, description="divide the weight by its mean of the step, before masks; needs proximal=recompute"
    )
    mask: Annotated[str, MASKS] = Field(
        "none", description="what masks far off-policy tokens; second_moment needs proximal=recompute"
    )
    mask_options: dict[str, Any] = Field(default_factory=dict, description="options of a mask of your own")
    mask_low: float | None = Field(None, ge=0, description="lower edge of the mask; null: the rule's own default")
    mask_high: float | None = Field(None, gt=0, description="upper edge of the mask; null: the rule's own default")
    more_masks: tuple[MaskRule, ...] = Field(
        (), description="further masks, which all must keep a token: [{mask: token_k2, mask_high: 1}]"
    )
    second_moment: float = Field(0.04, gt=0, description="largest mean of (log rho)^2 that mask=second_moment leaves")
    covariance: Annotated[str, REGULARISERS] = Field(
        "none", description="what is done to the tokens whose log-prob and advantage covary most"
    )
    covariance_options: dict[str, Any] = Field(default_factory=dict, description="options of a regulariser of your own")
    covariance_share: float = Field(2e-4, gt=0, le=1, description="share of the tokens that `covariance` acts on")
    covariance_low: float = Field(1.0, description="clip_cov: lower edge of the covariance it picks from")
    covariance_high: float = Field(5.0, description="clip_cov: upper edge of the covariance it picks from")
    covariance_kl: float = Field(1.0, ge=0, description="kl_cov: weight of the KL penalty on the tokens it picks")
    discount: float = Field(1.0, gt=0, le=1, description="lambda_s, weight factor per step of staleness")
    aggregation: Annotated[str, AGGREGATIONS] = Field("token_mean", description="mean over tokens or samples")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="options of an aggregation of your own"
    )
    norm_length: int | None = Field(None, ge=1, description="tokens by which sequence_sum_norm divides")

    @property
    def distils(self) -> bool:
        """Does a teacher score the tokens?"""
        return self.distillation.teacher is not None

    @property
    def least_samples(self) -> int:
        """Samples of a group that has something to teach: a teacher's word needs no siblings."""
        return 1 if self.distils else self.advantage.least_samples

    @rule
    def _mask_keeps_something(self) -> None:
        own_low, own_high = self.chosen("mask").edges or (None, None)
        low = own_low if self.mask_low is None else self.mask_low
        high = own_high if self.mask_high is None else self.mask_high
        if low is None or high is None or low < high:
            return
        if self.mask_low is None:
            raise ValueError(f"mask_high: {high:g} is not above mask_low={low:g}, the default of mask={self.mask}")
        default = "" if self.mask_high is not None else f", the default of mask={self.mask}"
        raise ValueError(f"mask_low: {low:g} is not below mask_high={high:g}{default}")

    @property
    def needs_reference(self) -> bool:
        """Is a token's log-prob under the reference policy read?"""
        return self.kl > 0 or self.kl_reward > 0

    @property
    def mask_chain(self) -> tuple[AlgoConfig, ...]:
        """The settings of each mask in order: `mask`, then `more_masks`."""
        return self, *(self.model_copy(update={**dict(each), "more_masks": ()}) for each in self.more_masks)

    @rule
    def _more_masks_hold(self) -> None:
        for each in self.mask_chain[1:]:
            declaration = each.chosen("mask")
            try:
                if declaration.whole_step:
                    raise ValueError(f"mask: {each.mask} looks at a whole step; allowed: as algo.mask alone")
                if each.mask_low is not None and "mask_low" not in declaration.uses:
                    raise ValueError(f"mask_low: {each.mask_low:g} does nothing with mask={each.mask}; allowed: null")
                checked(declaration.Options, each.mask_options, "mask_options")
                declaration.check(each)
                each._mask_keeps_something()
            except ValueError as error:
                raise ValueError(f"more_masks: {error}") from error

    @rule
    def _weights_can_be_normalised(self) -> None:
        if not self.weight_normalise:
            return
        if not self.chosen("weight").corrects:
            raise ValueError(f"weight_normalise: true does nothing with weight={self.weight}; allowed: false")
        if not self.chosen("proximal").scored:
            raise ValueError(
                f"weight_normalise: true needs weights that are known before the first update, not those of "
                f"proximal={self.proximal}; allowed: false, or proximal=recompute"
            )

    @rule
    def _straight_through_changes_something(self) -> None:
        if self.kl_straight_through and self.chosen("kl_estimator").follows_k2:
            raise ValueError(
                f"kl_straight_through: true does nothing with kl_estimator={self.kl_estimator}; allowed: false"
            )

    @rule
    def _reward_kl_is_of_drawn_tokens(self) -> None:
        if self.chosen("kl_reward_estimator").of_vocabulary:
            raise ValueError(
                f"kl_reward_estimator: {self.kl_reward_estimator} is of the whole vocabulary, and the reward is of "
                f"tokens that were drawn; allowed: {REWARD_DIVERGENCES.allowed}"
            )

    @rule
    def _rewards_that_are_left_out_need_nothing(self) -> None:
        if not self.distils or self.distillation.rewards:
            return
        if self.kl_reward > 0:
            raise ValueError(
                f"kl_reward: {self.kl_reward:g} is taken off rewards, which distillation.rewards=false leaves out; "
                f"allowed: 0, or distillation.rewards=true"
            )
        if self.advantage.has_critic:
            raise ValueError(
                f"advantage.estimator: {self.advantage.estimator} makes advantages of rewards, which "
                f"distillation.rewards=false leaves out; allowed: group, or distillation.rewards=true"
            )

    @rule
    def _kl_target_has_one_weight(self) -> None:
        if self.kl_target is not None and (self.kl > 0) == (self.kl_reward > 0):
            how_many = "both are" if self.kl > 0 else "neither is"
            raise ValueError(
                f"kl_target: {self.kl_target:g} makes one weight adaptive, and of kl={self.kl:g} and "
                f"kl_reward={self.kl_reward:g} {how_many} above 0; allowed: null, or one of them above 0"
            )

    @rule
    def _reference_is_read(self) -> None:
        if self.reference is not None and not self.needs_reference:
            raise ValueError(f"reference: {self.reference} is read only with kl or kl_reward above 0; allowed: null")

    @rule
    def _covariance_leaves_a_range(self) -> None:
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low: {self.covariance_low:g} is not below covariance_high={self.covariance_high:g}"
            )
