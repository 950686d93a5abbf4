"""One learner step as an algorithm: what is scored first, then passes over mini batches with an update each.

    rank 0: batch ──plan_shares──▶ a share for each data-parallel rank (learner/shares.py)
    every rank: share ──scores, teacher, reference, selections──▶ passes x mini batches: forward, loss, backward, update

The loss of a micro batch is divided by the counts of its whole mini batch before its backward pass, so that
neither packing, nor the split into micro batches, nor the number of ranks changes the gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from streamrl.algo.aggregations import aggregation_of
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.diagnostics import before_updates, finish, merge
from streamrl.algo.families import family_of
from streamrl.algo.importance import weight_sums
from streamrl.algo.kl_control import KlControl
from streamrl.algo.losses import policy_loss
from streamrl.algo.tokens import TokenBatch
from streamrl.algo.whole_step import needs_scores, needs_selection
from streamrl.config import Config
from streamrl.config.algo import AlgoConfig
from streamrl.device import Device
from streamrl.device_copy import DONE, Copied
from streamrl.learner.critic import Critic
from streamrl.learner.critic_estimates import Estimates, estimate
from streamrl.learner.forward import Passes
from streamrl.learner.full_kl import ReferenceStates
from streamrl.learner.gradient_noise import GradientNoise
from streamrl.learner.group_ess import GroupEss
from streamrl.learner.optimizer import PolicyOptimizer, Update, largest_norm
from streamrl.learner.packing import MicroBatch
from streamrl.learner.parallel import from_last_stage
from streamrl.learner.reference import Reference
from streamrl.learner.reward_penalty import Penalised, penalise
from streamrl.learner.selection import select
from streamrl.learner.shares import MiniBatch, Share
from streamrl.learner.teacher import Teacher
from streamrl.observe.events import now

log = logging.getLogger(__name__)

# More steps than a run has, so that no two runs with different seeds share a step's draw.
_SEEDS_APART = 1_000_003

# What the loss says of rows of a data set: they are of no policy, and of no age.
_OF_ROWS = ("loss/total", "loss/entropy", "tokens/trained")


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """What is known of the tokens of a micro batch before the first update of the step; see TokenBatch."""

    proximal: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    outliers: Tensor | None = None
    covariant: Tensor | None = None
    states: ReferenceStates | None = None  # of the reference, where the KL is over the whole vocabulary
    # What `algo.kl_reward` or a critic puts in place of the micro batch's advantages.
    penalised: Penalised | Estimates | None = None
    mean_weight: float | None = None


class LearnerStep:
    """Trains one share after another. Every method is collective."""

    def __init__(
        self,
        config: Config,
        passes: Passes,
        optimizer: PolicyOptimizer,
        *,
        reference: Reference | None,
        teacher: Teacher | None,
        critic: Critic | None = None,
        device: Device,
        kl_control: KlControl | None = None,
        noise: GradientNoise | None = None,
    ) -> None:
        """`kl_control`: with the state of the checkpoint that the run resumes from; `noise`: measured if given."""
        self._noise = noise
        self._config = config
        self._kl_control = kl_control or KlControl(config.algo)
        self._algo = self._kl_control.applied()
        self._passes = passes
        self._optimizer = optimizer
        self._reference = reference
        self._teacher = teacher
        self._output: Tensor | None = None  # the reference's output layer, this rank's rows
        self._critic = critic
        self._device = device
        self.copied: Copied = DONE  # a copy that still reads the weights, which must not change before its end
        self.taken_off: list[float] = []  # from the reward of each sample by the last step's `algo.kl_reward`; or empty
        self._measured: GroupEss | None = None  # while it trains a step whose groups may be trained again
        self.group_ess: list[float | None] = []  # of each group of the last step, where `replay.reuse` asks for it
        self.busy = 0.0  # seconds of this rank's passes in the last step, without its waits for the other ranks
        self.phases: list[tuple[str, float, float]] = []  # (name, begin, end) in the last step, since the epoch

    def train(self, share: Share) -> dict[str, float]:
        """Make the updates of a step. Returns its metrics, the same on every rank but for memory and times.

        An update without a measured token, one whose loss or gradient is not finite, and a spike change nothing.
        Raises BadStepsError after `learner.bad_steps` steps in a row that were refused.
        """
        clock = _Clock(self._device)
        self._algo = self._kl_control.applied()
        signals = self.signals(share)
        clock.lap("scores")
        valued = self._train_critic(share, signals, clock)
        held = self._critic is not None and self._critic.holds(share.step)
        if not held:
            self._optimizer.begin_step()
        self.busy = self._critic.busy if self._critic else 0.0
        if share.ends is not None:
            self._measured = GroupEss(taught=self._algo.distils)
            self._measured.begin(share.ends, self._device.torch_device)
        sums: list[dict[str, Tensor]] = []
        updates: list[Update] = []
        for _ in range(self._config.learner.passes):
            for mini, known in zip(share.mini_batches, signals, strict=True):
                observed = self._noise if self._noise is not None and not sums else None
                with observed.observing(shares_of(mini.micro_batches, self._algo)) if observed else nullcontext():
                    sums.append(self.differentiate(mini, known))
                clock.lap("backward", forward=self._passes.forward)
                updates.append(self._optimizer.hold() if held else self._update(share.step, sums[-1]))
                clock.lap("optimizer")
        if not held:
            self._optimizer.end_step()
        self.group_ess = self._measured.finish() if self._measured else []
        self._measured = None
        self.phases = clock.phases
        measured = finish(merge(sums[: len(share.mini_batches)]), merge(sums), len(updates))
        measured |= before_updates(sums, family_of(self._algo).stops)
        measured |= self._noise.metrics() if self._noise else {}
        measured |= self._kl_control.metrics()
        if any(update.successful for update in updates):  # no weight moves a policy that stays where it is
            self._kl_control.update(measured, sum(mini.denominators.rollouts for mini in share.mini_batches))
        if self._config.trains_rows:
            measured = {name: measured[name] for name in _OF_ROWS if name in measured}
        return {
            **measured,
            **valued,
            **self._device.memory(),
            **self._optimizer.metrics(),
            "grad_norm": largest_norm(updates),
            "lr": updates[-1].lr,
            "micro_batches": len(share.micro_batches),
            **clock.metrics(),
        }

    def evaluate(self, share: Share) -> float:
        """The cross entropy of a share's targets under the present weights, nats a token; the same on every rank."""
        return -self._passes.mean_logprob(share.micro_batches)

    def score(self, rows: Sequence[MicroBatch], targets: int) -> Tensor:
        """As `Passes.logprobs`, under the present weights."""
        return self._passes.logprobs(rows, targets)

    def rehearse(self, share: Share) -> None:
        """Pass a share forward and do nothing with it. Raises what the passes raise."""
        for model in (self._passes, self._teacher, self._critic):
            if model is not None:
                model.score(share.micro_batches)

    def differentiate(self, mini: MiniBatch, known: Sequence[Signals]) -> dict[str, Tensor]:
        """Gradients of a mini batch into the buffers; returns the diagnostic sums over micro batches and ranks."""
        self._optimizer.megatron.zero_grad()
        sums = self._passes.forward_backward(mini.micro_batches, partial(self._loss, mini, known), _states(known))
        self.busy += self._passes.busy
        return sums

    def _update(self, step: int, sums: dict[str, Tensor]) -> Update:
        self._await_copy()
        update = self._optimizer.update(float(sums["loss"].sum()), empty=not sums["measured"].any())
        if not update.successful:
            log.warning("step %d: %s, gradient norm %g, update skipped", step, update.verdict, update.grad_norm)
        return update

    def _await_copy(self) -> None:
        """Wait until the weights may change. Raises TimeoutError after `learner.collective_timeout`."""
        limit = self._config.learner.collective_timeout
        if not self.copied.wait(limit):
            raise TimeoutError(f"the weights were not copied out in learner.collective_timeout={limit:g} s")
        self.copied = DONE

    def signals(self, share: Share) -> list[list[Signals]]:
        """What must be known of the whole step before its first update: for each mini batch, of each micro batch."""
        rows = share.micro_batches
        nothing: list[Any] = [None] * len(rows)
        scores = self._passes.score(rows) if needs_scores(self._algo) else nothing
        taught = self._teacher.score(rows) if self._teacher else nothing
        values = self._critic.score(rows) if self._critic else nothing
        reference, states = self._reference_scores(rows) if self._reference else (nothing, nothing)
        known = [Signals() for _ in rows]
        if parallel_state.is_pipeline_last_stage():  # the others have no log-probs, and no loss
            known = self._known(share, scores, reference, taught, values)
            known = [replace(each, states=state) for each, state in zip(known, states, strict=True)]
        self.taken_off = from_last_stage(self.taken_off) if share.outcomes is not None else []
        left = iter(known)
        return [[next(left) for _ in mini.micro_batches] for mini in share.mini_batches]

    def _reference_scores(self, rows: Sequence[MicroBatch]) -> tuple[list[Any], list[Any]]:
        """For each micro batch the reference's log-probs, and its states where the KL is over the whole vocabulary."""
        assert self._reference is not None
        self._await_copy()
        with self._reference.swapped():
            if self._algo.kl > 0 and self._algo.chosen("kl_estimator").of_vocabulary:
                scores, states = self._passes.score_with_states(rows)
                return scores, self._of_the_reference(states)
            return self._passes.score(rows), [None] * len(rows)

    def _train_critic(self, share: Share, signals: list[list[Signals]], clock: _Clock) -> dict[str, float]:
        """The critic's updates of the step, by the estimates that the policy's advantages come from; its metrics."""
        if self._critic is None:
            return {}
        made = [[s.penalised if isinstance(s.penalised, Estimates) else None for s in mini] for mini in signals]
        valued = self._critic.train(share, made)
        clock.lap("critic")
        return valued

    def _known(
        self, share: Share, scores: list[Any], reference: list[Any], taught: list[Any], values: list[Any]
    ) -> list[Signals]:
        """The signals of each micro batch.

        scores, reference, taught: its log-probs under policy, reference and teacher; values: the critic's. None in
        place of what was not scored.
        """
        algo, rows = self._algo, share.micro_batches
        nothing: list[Any] = [None] * len(rows)
        proximal = scores if algo.chosen("proximal").scored else nothing
        penalised = nothing
        if algo.kl_reward or self._critic is not None:
            old = proximal if algo.chosen("proximal").scored else [_behaviour(row, self._device) for row in rows]
            if share.outcomes is not None:
                penalised, self.taken_off = penalise(rows, old, reference, share.outcomes, algo)
            else:
                penalised = estimate(rows, values, old, reference, algo)
        seed = self._config.run.seed * _SEEDS_APART + share.step
        selected = nothing
        if needs_selection(algo):
            changed = [made.advantages for made in penalised] if penalised is not nothing else None
            selected = select(rows, scores, taught, changed, seed=seed, config=algo)
        mean_weight = _mean_weight(rows, proximal, algo) if algo.weight_normalise else None
        return [
            Signals(
                proximal=of_proximal,
                reference=of_reference,
                teacher=of_teacher,
                outliers=selection and selection.outliers,
                covariant=selection and selection.covariant,
                penalised=advantages,
                mean_weight=mean_weight,
            )
            for of_proximal, of_reference, of_teacher, selection, advantages in zip(
                proximal, reference, taught, selected, penalised, strict=True
            )
        ]

    def _loss(
        self,
        mini: MiniBatch,
        known: Sequence[Signals],
        logprobs: Tensor,
        entropy: Tensor,
        index: int,
        *full_kl: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of a micro batch in the loss of its mini batch."""
        tokens = tokens_of(mini.micro_batches[index], logprobs, entropy, known[index])
        if self._measured is not None:
            self._measured.add(mini.micro_batches[index].place, tokens)
        return policy_loss(replace(tokens, full_kl=full_kl[0] if full_kl else None), self._algo, mini.denominators)

    def _of_the_reference(self, states: list[ReferenceStates]) -> list[Any]:
        """The states with the reference's own output layer, which is the policy's again when the swap is over."""
        if not states:  # not of the last stage
            return []
        if self._output is None:
            self._output = states[0].weight.clone()
        return [replace(each, weight=self._output) for each in states]


def _states(known: Sequence[Signals]) -> list[ReferenceStates | None]:
    """The reference's states of each micro batch; none where the loss needs none."""
    states = [each.states for each in known]
    return states if any(each is not None for each in states) else []


def tokens_of(
    micro: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    signals: Signals = Signals(),
) -> TokenBatch:
    """What the loss takes of a micro batch; log-probs and entropies float32 [N] of its targets, on their device."""

    def on_device(array: Any) -> Tensor:
        return torch.from_numpy(array).to(logprobs.device)

    made = signals.penalised
    return TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        behaviour=on_device(micro.behaviour),
        advantages=on_device(micro.advantages) if made is None else made.advantages,
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        staleness=on_device(micro.staleness),
        sample=on_device(micro.sample),
        samples=micro.samples,
        rollout_tokens=None if micro.rollout_tokens is None else on_device(micro.rollout_tokens),
        proximal=signals.proximal,
        reference=signals.reference,
        teacher=signals.teacher,
        outliers=signals.outliers,
        covariant=signals.covariant,
        reward_kl=None if made is None else made.reward_kl,
        mean_weight=signals.mean_weight,
    )


def shares_of(micro_batches: Sequence[MicroBatch], algo: AlgoConfig) -> list[float]:
    """How much each micro batch counts in the mean over its update by `algo.aggregation`, in the same unit."""
    unit, shares = Denominators(tokens=1, rollouts=1), []
    for micro in micro_batches:
        nothing = torch.zeros(len(micro.tokens))
        tokens = tokens_of(micro, nothing, nothing)
        shares.append(float(aggregation_of(algo).shares(tokens, algo, unit).double().sum()))
    return shares


def _mean_weight(rows: Sequence[MicroBatch], proximal: Sequence[Tensor], algo: AlgoConfig) -> float:
    """What `algo.weight_normalise` divides by: the mean over the step; 1 where no token has a weight.

    Collective over the data-parallel group.
    """
    batches = (
        tokens_of(row, score, torch.zeros_like(score), Signals(proximal=score))
        for row, score in zip(rows, proximal, strict=True)
    )
    sums = torch.stack([weight_sums(tokens, algo) for tokens in batches]).sum(0)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    total, count = sums.tolist()
    return total / count if count else 1.0


def _behaviour(micro: MicroBatch, device: Device) -> Tensor:
    return torch.from_numpy(micro.behaviour).to(device.torch_device)


class _Clock:
    """Which phase of a step went on when, and the seconds of each, `time/PHASE`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last = now()
        self.phases: list[tuple[str, float, float]] = []  # (name, begin, end)

    def lap(self, phase: str, *, forward: float | None = None) -> None:
        """What has passed since the last lap was `phase`, but for `forward` seconds of it.

        The forward and backward passes of micro batches alternate: what is shown first in one piece has the right
        length, not the right place.
        """
        self._device.synchronize()
        end = now()
        between = min(end, self._last + (forward or 0.0))
        if forward is not None:
            self.phases.append(("forward", self._last, between))
        self.phases.append((phase, between, end))
        self._last = end

    def metrics(self) -> dict[str, float]:
        seconds = {f"time/{phase}": 0.0 for phase, _, _ in self.phases}
        for phase, begin, end in self.phases:
            seconds[f"time/{phase}"] += end - begin
        return {**seconds, "time/forward_backward": seconds["time/forward"] + seconds["time/backward"]}
