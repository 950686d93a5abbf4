"""The critic: a value model on the learner's ranks, with an optimizer and a schedule of its own.

    rows ──score──▶ values ──critic_estimates.py──▶ returns ──train──▶ passes x mini batches: value loss, update

It is cut as `learner.layout` cuts the policy, and trained on the same rows in the same mini batches. Values are of the
weights that a step starts from.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from streamrl.algo.diagnostics import merge
from streamrl.algo.gae import value_loss, value_metrics, value_sums
from streamrl.config import Config
from streamrl.config.learner import LoraConfig
from streamrl.learner import checkpoint
from streamrl.learner.critic_estimates import Estimates
from streamrl.learner.critic_shape import KEY, critic_shape
from streamrl.learner.forward import Passes, wrap
from streamrl.learner.huggingface import load_weights
from streamrl.learner.model import PolicyModel, build
from streamrl.learner.optimizer import PolicyOptimizer, Update, largest_norm
from streamrl.learner.packing import MicroBatch
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import ModelShape
from streamrl.learner.shares import Share
from streamrl.learner.value_model import ValueModel
from streamrl.observe.bars import Report, silent

log = logging.getLogger(__name__)

# What of the learner's section is about adapters, the policy's own router, and buffers that there are once.
_OF_THE_POLICY = {"lora": LoraConfig(), "router_replay": False, "tp_comm_overlap": False}


class Critic:
    """The value model's chunks of this rank. Every method but `holds` is collective.

    critic = Critic.of(config, policy_shape, ranks)
    critic.start()                             # or a checkpoint is loaded into `critic.state`
    values = critic.score(micro_batches)
    metrics = critic.train(share, estimates)
    """

    def __init__(self, config: Config, shape: ModelShape, ranks: Ranks) -> None:
        """Build the model, without weights yet, and its optimizer. Raises ConfigError as the policy's does."""
        settings = config.critic.optimizer.settings(config.learner.optimizer)
        learner = config.learner.model_copy(update={**_OF_THE_POLICY, "optimizer": settings})
        self._config = own = config.model_copy(update={"learner": learner})
        self._ranks = ranks
        self._chunks = build(shape, own, ranks.device, ValueModel)
        wrapped = wrap(self._chunks, own, ranks)
        self._passes = Passes(wrapped, ranks, own)
        self._optimizer = PolicyOptimizer(
            wrapped,
            settings,
            getattr(torch, config.model.dtype),
            config.run.steps,
            learner.bad_steps,
            megatron=learner.megatron,
        )
        self.busy = 0.0  # seconds of this rank's passes in the last `train`, without its waits for the other ranks

    @classmethod
    def of(cls, config: Config, policy: ModelShape, ranks: Ranks) -> Critic | None:
        """The critic of a run; None without one. policy: shape of the model that it values. Raises ConfigError."""
        shape = critic_shape(config, policy)
        return None if shape is None else cls(config, shape, ranks)

    def start(self, report: Report = silent) -> None:
        """Take the weights of `critic.model`, or else the policy's first ones; the head is 0."""
        folder = self._config.critic.model
        key = "model.path" if folder is None else KEY
        load_weights(self._chunks, folder or self._config.model.path, key, report)
        self._optimizer.start()
        log.info("critic: %s", folder or self._config.model.path)

    @property
    def model(self) -> PolicyModel:
        """The first chunk of its model."""
        return self._passes.model

    @property
    def state(self) -> checkpoint.State:
        """What of it is in a checkpoint."""
        return checkpoint.State(self._chunks, self._optimizer, self._ranks, {}, name="critic.")

    def holds(self, step: int) -> bool:
        """Is the policy left as it is in this learner step, counted from 0?"""
        return step < self._config.critic.warmup_steps

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The value of each target, float32 [N], as `Passes.score` gives log-probs."""
        return self._passes.score(_own(micro_batches))

    def train(self, share: Share, estimates: Sequence[Sequence[Estimates | None]]) -> dict[str, float]:
        """The updates of a step. Returns its metrics, the same on every rank.

        estimates: of each mini batch of each micro batch, on the ranks of the last pipeline stage. An update without a
        token, or whose loss or gradient is not finite, changes nothing. Raises BadStepsError as the policy's.
        """
        self._optimizer.begin_step()
        self.busy = 0.0
        sums: list[dict[str, Tensor]] = []
        updates: list[Update] = []
        for _ in range(self._config.learner.passes):
            for mini, known in zip(share.mini_batches, estimates, strict=True):
                self._optimizer.megatron.zero_grad()
                loss = partial(self._loss, known, mini.denominators.tokens)
                sums.append(self._passes.forward_backward(_own(mini.micro_batches), loss))
                self.busy += self._passes.busy
                empty = mini.denominators.tokens == 0
                updates.append(self._optimizer.update(float(sums[-1]["loss"]), empty=empty))
                if not updates[-1].successful:
                    log.warning(
                        "step %d: %s, gradient norm %g of the critic, update skipped",
                        share.step, updates[-1].verdict, updates[-1].grad_norm,
                    )  # fmt: skip
        self._optimizer.end_step()
        first, every = merge(sums[: len(share.mini_batches)]), merge(sums)
        return {
            **value_metrics(first),
            "critic/loss": float(every["loss"]) / len(updates),
            "critic/clip": float(every["clipped"] / every["returns/0"].clamp(min=1)),
            "critic/grad_norm": largest_norm(updates),
            "critic/lr": updates[-1].lr,
            "critic/skipped": self._optimizer.skipped,
        }

    def _loss(
        self, known: Sequence[Estimates | None], tokens: int, values: Tensor, _: Tensor, index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of a micro batch in the loss of its mini batch of so many tokens."""
        made = known[index]
        assert made is not None
        each, clipped = value_loss(values, made.values, made.returns, self._config.critic.value_clip)
        loss = self._config.critic.loss_weight * each.sum() / max(1, tokens)
        sums = {"loss": loss.detach(), "clipped": clipped.double().sum(), **value_sums(made.values, made.returns)}
        return loss.float(), sums


def _own(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Routes of experts are those of the policy."""
    return [replace(micro, routed_experts=None) for micro in micro_batches]
