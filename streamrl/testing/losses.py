"""What each part of the policy loss must do: its family, weight, mask, regulariser, proximal policy and mean.

They need torch, on the CPU.

from streamrl.testing.losses import FamilyConformance

class TestSpo(FamilyConformance):
    name = "spo.py:Spo"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.algo.families.base import CLIPPED
from streamrl.choices import AGGREGATIONS, BASELINES, DIVERGENCES, LOSSES, MASKS, PROXIMALS, REGULARISERS, WEIGHTS
from streamrl.config.algo import AlgoConfig
from streamrl.testing.declarations import Conformance

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.regularisers.base import Measured
    from streamrl.algo.tokens import TokenBatch

TOKENS = 60  # of five samples
EXTREME = (0.0, 1e-3, 5.0, 50.0, 1e4)  # log-ratios, with either sign


def token_batch(seed: int = 0, spread: float = 0.5) -> TokenBatch:
    """Random tokens of five samples; `spread`: how far the policy is from the one that generated them."""
    import torch

    from streamrl.algo.tokens import TokenBatch

    draw = torch.Generator().manual_seed(seed)
    behaviour = -3 * torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    logprobs = behaviour + spread * torch.randn(TOKENS, generator=draw, dtype=torch.float64)
    sample = torch.arange(TOKENS) % 5
    return TokenBatch(
        logprobs=logprobs.requires_grad_(),
        entropy=None,
        behaviour=behaviour,
        advantages=torch.randn(5, generator=draw, dtype=torch.float64)[sample],
        mask=torch.ones(TOKENS, dtype=torch.bool),
        staleness=torch.randint(0, 4, (TOKENS,), generator=draw),
        sample=sample,
        samples=5,
        covariant=torch.rand(TOKENS, generator=draw) < 0.2,
        outliers=torch.rand(TOKENS, generator=draw) < 0.2,
        proximal=behaviour,
        reference=behaviour.roll(1),
        full_kl=(behaviour.roll(1) - logprobs).square(),
    )


class _OfTheLoss(Conformance):
    """Give `name`, and what else the section `algo` needs, such as its own options."""

    settings: ClassVar[dict[str, Any]] = {}

    @property
    def config(self) -> AlgoConfig:
        return AlgoConfig.model_validate({self.kind.key.rpartition(".")[2]: self.name} | self.settings)

    def test_the_loss_and_its_gradient_are_finite_with_it(self) -> None:
        import torch

        from streamrl.algo.aggregations.base import Denominators
        from streamrl.algo.losses import policy_loss

        for spread in (0.0, 0.5, 30.0):
            batch = token_batch(spread=spread)
            loss, _ = policy_loss(batch, self.config, Denominators(tokens=TOKENS, rollouts=5))
            (gradient,) = torch.autograd.grad(loss, batch.logprobs)
            assert loss.isfinite(), f"the loss is {loss} at a spread of {spread:g}"
            assert gradient.isfinite().all(), f"the gradient is not finite at a spread of {spread:g}"


class FamilyConformance(_OfTheLoss):
    """A surrogate: finite everywhere, REINFORCE with a baseline on-policy, the same for every order of the tokens."""

    kind = LOSSES

    def test_on_policy_its_gradient_is_the_advantage(self) -> None:
        import torch

        batch = token_batch(spread=0.0)
        surrogate, _ = self._surrogate(batch, batch.logprobs - batch.behaviour)
        (gradient,) = torch.autograd.grad(surrogate.sum(), batch.logprobs)
        assert torch.allclose(gradient, batch.advantages), "at r = 1 the gradient of S is A"

    def test_no_ratio_makes_it_infinite(self) -> None:
        import torch

        batch = token_batch()
        for size in EXTREME:
            for log_r in (torch.full_like(batch.logprobs, size), torch.full_like(batch.logprobs, -size)):
                surrogate, _ = self._surrogate(batch, log_r)
                assert surrogate.isfinite().all(), f"S is not finite at log r = {log_r[0]:g}"

    def test_it_says_which_tokens_are_clipped(self) -> None:
        import torch

        batch = token_batch()
        surrogate, clipped = self._surrogate(batch, (batch.logprobs - batch.behaviour).detach())
        assert surrogate.shape == batch.logprobs.shape
        assert set(clipped) == set(CLIPPED)
        assert all(each.dtype == torch.bool and each.shape == surrogate.shape for each in clipped.values())

    def test_the_order_of_the_tokens_does_not_matter(self) -> None:
        import torch

        batch = token_batch()
        turned = torch.arange(TOKENS).flip(0)
        one, _ = self._surrogate(batch, (batch.logprobs - batch.behaviour).detach())
        other, _ = self._surrogate(batch.select(turned), (batch.logprobs - batch.behaviour).detach()[turned])
        assert torch.allclose(one[turned], other)

    def _surrogate(self, batch: TokenBatch, log_r: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.families import family_of

        return family_of(self.config).surrogate(batch, log_r, self.config)


class WeightConformance(_OfTheLoss):
    """An importance weight: positive, finite, without gradient, 1 where nothing has to be corrected."""

    kind = WEIGHTS

    def test_it_is_positive_finite_and_without_gradient(self) -> None:
        import torch

        batch = token_batch()
        for size in EXTREME:
            for correction in (torch.full_like(batch.behaviour, size), torch.full_like(batch.behaviour, -size)):
                for of_policy in (True, False):
                    for factor in self._factors(batch, correction, of_policy):
                        assert factor.shape == batch.logprobs.shape
                        assert not factor.requires_grad
                        assert factor.isfinite().all()
                        assert (factor > 0).all()

    def test_what_is_on_policy_weighs_one(self) -> None:
        import torch

        batch = token_batch()
        for of_policy in (True, False):
            ratio, weight = self._factors(batch, torch.zeros_like(batch.behaviour), of_policy)
            assert torch.allclose(ratio, torch.ones_like(ratio))
            assert torch.allclose(weight, torch.ones_like(weight))

    def _factors(self, batch: TokenBatch, correction: Tensor, of_policy: bool) -> tuple[Tensor, Tensor]:
        from streamrl.algo.weights import weight_of

        return weight_of(self.config).factors(batch, correction, self.config, of_policy=of_policy)


class MaskConformance(_OfTheLoss):
    """A mask: what is on-policy stays, and it takes the same tokens in every order."""

    kind = MASKS

    def test_what_is_on_policy_stays(self) -> None:
        import torch

        batch = token_batch()
        assert not self._taken(batch, torch.zeros_like(batch.behaviour)).any()

    def test_the_order_of_the_tokens_does_not_matter(self) -> None:
        import torch

        batch = token_batch()
        turned, correction = torch.arange(TOKENS).flip(0), (batch.logprobs - batch.behaviour).detach()
        taken = self._taken(batch, correction)
        assert taken.dtype == torch.bool
        assert torch.equal(taken[turned], self._taken(batch.select(turned), correction[turned]))

    def _taken(self, batch: TokenBatch, log_correction: Tensor) -> Tensor:
        from streamrl.algo.masks import mask_of

        mask = mask_of(self.config)
        if not mask.acts:
            return log_correction.isnan()
        return (
            mask.outliers(log_correction, self.config)
            if mask.whole_step
            else mask.masked(batch, log_correction, self.config)
        )


class RegulariserConformance(_OfTheLoss):
    """A regulariser: it picks the same tokens in every order, and what it does to them fits the tokens."""

    kind = REGULARISERS

    def test_the_order_of_the_tokens_does_not_matter(self) -> None:
        import torch

        measured = self._measured()
        turned = torch.arange(TOKENS).flip(0)
        other = type(measured)(
            covariance=measured.covariance[turned], stopped=measured.stopped[turned], lots=measured.lots[turned]
        )
        picked = self._regulariser().pick(measured, self.config)
        assert picked.dtype == torch.bool
        assert torch.equal(picked[turned], self._regulariser().pick(other, self.config))

    def test_what_it_does_fits_the_tokens(self) -> None:
        import torch

        batch, regulariser = token_batch(), self._regulariser()
        assert batch.covariant is not None
        log_r = batch.logprobs - batch.behaviour
        mask, penalty = regulariser.mask(batch.covariant), regulariser.penalty(batch.covariant, log_r, self.config)
        assert mask is None or (mask.dtype == torch.bool and mask.shape == batch.mask.shape)
        assert penalty is None or (penalty.shape == batch.mask.shape and penalty.isfinite().all())
        assert regulariser.acts == (mask is not None or penalty is not None), "`acts` says whether it does anything"

    def _measured(self) -> Measured:
        import torch

        from streamrl.algo.regularisers.base import Measured

        draw = torch.Generator().manual_seed(1)
        return Measured(
            covariance=3 * torch.randn(TOKENS, generator=draw, dtype=torch.float64).abs(),
            stopped=torch.rand(TOKENS, generator=draw) < 0.1,
            lots=torch.randperm(TOKENS, generator=draw),
        )

    def _regulariser(self) -> Any:
        from streamrl.algo.regularisers import regulariser_of

        return regulariser_of(self.config)


class ProximalConformance(_OfTheLoss):
    """A proximal policy: the one that generated a token where nothing has changed since, and always a constant."""

    kind = PROXIMALS

    def test_on_policy_it_is_the_policy_that_generated_the_tokens(self) -> None:
        import torch

        batch = token_batch(spread=0.0)
        found = self._logprobs(batch, torch.zeros_like(batch.behaviour), batch.behaviour)
        assert torch.equal(found, batch.behaviour)

    def test_it_is_finite_and_without_gradient(self) -> None:
        import torch

        batch = token_batch()
        for size in EXTREME:
            log_rho = torch.full_like(batch.behaviour, -size)
            found = self._logprobs(batch, log_rho, batch.behaviour + log_rho)
            assert found.shape == batch.behaviour.shape
            assert found.isfinite().all(), f"not finite at log rho = {-size:g}"
            assert not found.requires_grad

    def _logprobs(self, batch: TokenBatch, log_rho: Tensor, scores: Tensor) -> Tensor:
        from streamrl.algo.proximals import proximal_of

        proximal = proximal_of(self.config)
        given = scores.clone().requires_grad_() if proximal.scored else None
        return proximal.logprobs(batch.behaviour, log_rho, batch.staleness, given)


class AggregationConformance(_OfTheLoss):
    """A mean: every trained token counts, and parts of an update add up to the whole."""

    kind = AGGREGATIONS

    def test_every_token_counts(self) -> None:
        shares = self._shares(token_batch())
        assert shares.shape == (TOKENS,)
        assert shares.isfinite().all()
        assert (shares > 0).all()
        assert not shares.requires_grad

    def test_the_parts_of_an_update_add_up_whatever_their_order(self) -> None:
        import torch

        batch = token_batch()
        whole = self._shares(batch)
        for part in (batch.sample.argsort(), (batch.sample < 2).nonzero()[:, 0], (batch.sample >= 2).nonzero()[:, 0]):
            assert torch.allclose(self._shares(batch.select(part)), whole[part])

    def _shares(self, batch: TokenBatch) -> Tensor:
        from streamrl.algo.aggregations import aggregation_of
        from streamrl.algo.aggregations.base import Denominators

        return aggregation_of(self.config).shares(batch, self.config, Denominators(tokens=TOKENS, rollouts=5))


class DivergenceConformance(_OfTheLoss):
    """An estimator of a divergence: nothing between equal policies, finite and of the right gradient elsewhere."""

    kind = DIVERGENCES

    @property
    def config(self) -> AlgoConfig:
        return super().config.model_copy(update={"kl": 0.1})

    def test_equal_policies_have_none(self) -> None:
        import torch

        if self.declaration.of_vocabulary:
            return
        assert torch.equal(self._estimate(torch.zeros(3)), torch.zeros(3))

    def test_it_is_finite_up_to_the_largest_difference(self) -> None:
        import torch

        if self.declaration.of_vocabulary:
            return
        difference = torch.linspace(-20, 20, TOKENS).requires_grad_()
        estimate = self._estimate(difference)
        assert estimate.shape == difference.shape
        assert estimate.isfinite().all()
        (gradient,) = torch.autograd.grad(estimate.sum(), difference)
        assert gradient.isfinite().all()

    def test_it_looks_at_each_token_by_itself(self) -> None:
        import torch

        if self.declaration.of_vocabulary:
            return
        difference = torch.linspace(-1, 1, TOKENS)
        assert torch.equal(self._estimate(difference.flip(0)).flip(0), self._estimate(difference))

    def _estimate(self, difference: Tensor) -> Tensor:
        from streamrl.algo.divergences import divergence_of

        return divergence_of(self.config).estimate(difference)


class BaselineConformance(_OfTheLoss):
    """A baseline of the advantages: of the scale of the rewards, whatever the order of the answers."""

    kind = BASELINES

    @property
    def config(self) -> AlgoConfig:
        return AlgoConfig.model_validate({"advantage": {"baseline": self.name} | self.settings})

    def test_twice_the_rewards_have_twice_the_advantages(self) -> None:
        import torch

        rewards = torch.tensor([0.0, 1.0, 0.25, 3.0], dtype=torch.float64)
        assert torch.allclose(self._advantages(2 * rewards), 2 * self._advantages(rewards))

    def test_the_order_of_the_answers_does_not_matter(self) -> None:
        import torch

        rewards = torch.tensor([0.0, 1.0, 0.25, 3.0], dtype=torch.float64)
        lengths = torch.tensor([3, 0, 9, 4])
        turned = torch.arange(4).flip(0)
        other = self._advantages(rewards[turned], lengths[turned])
        assert torch.allclose(self._advantages(rewards, lengths)[turned], other)

    def test_the_best_answer_is_not_below_the_worst(self) -> None:
        import torch

        advantages = self._advantages(torch.tensor([0.0, 1.0, 0.25, 3.0], dtype=torch.float64))
        assert advantages.isfinite().all()
        assert advantages[3] > advantages[0]

    def _advantages(self, rewards: Tensor, lengths: Tensor | None = None) -> Tensor:
        import torch

        from streamrl.algo.advantages import group_advantages

        config = self.config.advantage.model_copy(update={"std": "none"})
        valid = torch.ones(len(rewards), dtype=torch.bool)
        return group_advantages(rewards, valid, config, torch.tensor([3, 0, 9, 4]) if lengths is None else lengths)
