"""The learner's state: its ranks, model, optimizer, version and checkpoints, and what changes them.

batch ──plan_shares──▶ a share for each rank ──LearnerStep──▶ weights of the next version ──▶ export, save
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from streamrl.algo.kl_control import KlControl
from streamrl.config import Config
from streamrl.config.learner import LearnerConfig
from streamrl.device_copy import Copied
from streamrl.learner import checkpoint, lora, lora_folder
from streamrl.learner.blame import MicroBatchFailed, blame
from streamrl.learner.checkpoint import Checkpoint
from streamrl.learner.checkpoint_saver import Saver
from streamrl.learner.critic import Critic
from streamrl.learner.forward import Passes, shares_optimizer, wrap
from streamrl.learner.gradient_noise import GradientNoise
from streamrl.learner.huggingface import export_folder, export_weights, load_weights
from streamrl.learner.model import PolicyModel, build
from streamrl.learner.optimizer import PolicyOptimizer
from streamrl.learner.packing import Packing, plan_batch
from streamrl.learner.parallel import Ranks
from streamrl.learner.params_metrics import ParamsMetrics, pads
from streamrl.learner.peak import Peak
from streamrl.learner.profiler import Profiler
from streamrl.learner.reference import Reference
from streamrl.learner.resume import newest_whole
from streamrl.learner.rows import sequence_multiple
from streamrl.learner.shape import ModelShape, read_shape
from streamrl.learner.shared_rows import local
from streamrl.learner.shares import Share, plan_shares
from streamrl.learner.step import LearnerStep
from streamrl.learner.stragglers import Stragglers
from streamrl.learner.teacher import Teacher
from streamrl.learner.utilisation import Utilisation
from streamrl.observe.bars import Report, silent
from streamrl.observe.ending import ADAPTER, MODEL
from streamrl.stream.identity import run_identity
from streamrl.trainable import Limits
from streamrl.types import Batch, Ledger, PolicyVersion

log = logging.getLogger(__name__)


class Trainer:
    """The model of this rank and everything that changes it.

        trainer = Trainer(config, run_folder)
        trainer.restore_or_start()
        metrics = trainer.train_step(batch)  # rank 0; the other ranks pass None

    All methods but `version`, `rank`, `lend` and those of finished checkpoints are collective: every rank calls them in
    the same order.
    """

    def __init__(self, config: Config, run_folder: Path) -> None:
        """Join the ranks and build the model, without weights yet.

        Raises ConfigError, also for a wrong number of ranks, and UnsupportedAcceleratorError.
        """
        self._shape = shape = read_shape(config.model.path, family=config.model.built_by)
        self._config = config
        self._run_folder = run_folder
        self._checkpoints = run_folder / "checkpoints"
        self._identity = run_identity(run_folder, config.run.id)
        self.limits = Limits(vocabulary=shape.vocabulary, tokens=config.learner.tokens_per_micro_batch)
        self._ranks = Ranks.start(config)
        with ExitStack() as on_failure:
            on_failure.callback(self._ranks.stop)
            device, dtype = self._ranks.device, getattr(torch, config.model.dtype)
            self._chunks = build(shape, config, device)
            if config.learner.lora.rank:
                lora.freeze(self._chunks)
            self._wrapped = wrap(self._chunks, config, self._ranks)
            self._optimizer = PolicyOptimizer(
                self._wrapped,
                config.learner.optimizer,
                dtype,
                config.policy_steps,
                config.learner.bad_steps,
                megatron=config.learner.megatron,
            )
            if config.learner.params_metrics:
                padding = 0 if config.learner.lora.rank else pads(shape, config.learner.layout.tensor)
                self._optimizer.observer = ParamsMetrics(self._optimizer.megatron, padding, device.torch_device)
            self._critic = Critic.of(config, shape, self._ranks)
            self._packing = self._packing_of(self._critic)
            self._saver = Saver(self._checkpoints, self._ranks, config.checkpoint, self._identity.id)
            self._noise = GradientNoise.of(config, self._wrapped[-1], device.torch_device)
            self._stragglers = Stragglers(self._ranks)
            self._profiler = Profiler(config.learner.profile, run_folder / "profile", self._ranks.rank, device)
            self._utilisation = Utilisation(shape, config, self._ranks) if self.rank == 0 else None
            on_failure.pop_all()
        self._kl_control = KlControl(config.algo)
        self._step: LearnerStep | None = None  # from `restore_or_start` on
        self._planned: tuple[Batch, list[Share]] | None = None  # on rank 0
        self._version = PolicyVersion(0)
        self.ledger: Ledger | None = None  # of the checkpoint that was restored
        self.damage: list[str] = []  # of checkpoints, found by `restore_or_start`; a line each, on rank 0

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def version(self) -> PolicyVersion:
        """The policy that the weights are: the next batch is the one of step `version.step`."""
        return self._version

    @property
    def rank_seconds(self) -> list[float]:
        """Seconds of every rank's passes in the last step, without its waits for the other data-parallel ranks."""
        return self._stragglers.seconds

    @property
    def peak(self) -> Peak | None:
        """The peak of a rank's device, for `learner/mfu`; only rank 0 knows it."""
        return self._utilisation.peak if self._utilisation else None

    @property
    def taken_off(self) -> list[float]:
        """From the reward of each sample of the last step by `algo.kl_reward`, in the batch's order; or empty."""
        return self._step.taken_off if self._step else []

    @property
    def group_ess(self) -> list[float | None]:
        """Effective sample size of each group of the last step, in the batch's order; empty without `replay.reuse`."""
        return self._step.group_ess if self._step else []

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """(name, begin, end) of the parts of the last step on this rank, in seconds since the epoch."""
        return self._step.phases if self._step else []

    def restore_or_start(self, report: Report = silent) -> None:
        """Take up the newest whole checkpoint of the run, or else the Hugging Face weights as step 0.

        The first start of a run has incarnation 0; every later one has an incarnation of its own. report: bytes of
        this rank's weights that are read from the Hugging Face folder, of all. Raises ConfigError where checkpoints are
        there and none can be resumed from.
        """
        teacher = Teacher.of(self._config, self._shape, self._ranks)
        self._packing = self._packing_of(self._critic, teacher)
        reference = Reference.of(self._config, self._wrapped)
        incarnation = checkpoint.next_incarnation(self._checkpoints, self._ranks)
        found = newest_whole(self._checkpoints, self._ranks, self._identity, self._report_damage)
        if found is None:
            load_weights(self._chunks, self._config.model.path, report=report)
            if self._config.learner.lora.rank:
                lora_folder.start(self._chunks, self._config)
            self._optimizer.start()
            if self._critic is not None:
                self._critic.start(report)
            self._version = PolicyVersion(0, incarnation)
        else:
            checkpoint.load(found, self._state())
            self._version = PolicyVersion(found.version.step, max(incarnation, found.version.incarnation + 1))
            self.ledger = found.ledger
        log.info("starting as version %s from %s", self._version, found.folder if found else self._config.model.path)
        passes = Passes(self._wrapped, self._ranks, self._config)
        self._step = LearnerStep(
            self._config,
            passes,
            self._optimizer,
            reference=reference,
            teacher=teacher,
            critic=self._critic,
            device=self._ranks.device,
            kl_control=self._kl_control,
            noise=self._noise,
        )

    def train_step(self, batch: Batch | None) -> dict[str, float]:
        """Train on the batch of step `version.step`; rank 0 passes it, the others None.

        Returns the metrics of the step, reduced over ranks; `learner/` ones on rank 0 alone. A step without a
        trained token, or whose gradient is not finite, changes no weight; it counts as a step and in `steps/skipped`.
        Raises ValueError for the batch of another step, SequenceTooLongError for one that cannot be packed,
        BadStepsError after too many steps that were refused.
        """
        assert self._step is not None, "restore_or_start comes first"
        shares = self._shares(batch) if self.rank == 0 else None
        with self._profiler.step(self._version.step + 1):
            share: Share = self._ranks.scatter(shares)
            with self._blaming(share.step):
                metrics = self._step.train(share)
        if self._utilisation is not None and shares is not None:
            metrics |= self._utilisation.metrics(shares, metrics)
        if self._config.run.shares_devices:
            self._ranks.device.release_memory()
        self._version = PolicyVersion(self._version.step + 1, self._version.incarnation)
        return metrics | self._stragglers.report(self._step.busy)

    def plan(self, batch: Batch) -> None:
        """Plan a step ahead: `train_step` of this very batch takes what was planned. Rank 0 alone; not collective.

        Raises SequenceTooLongError and ValueError, naming group and sample, and whatever else its data brings about.
        """
        parts = min(self._config.learner.mini_batches, len(batch.groups))  # fewer groups are planned on trial alone
        self._planned = batch, plan_shares(batch, self._config, self._packing, parts)

    def rehearse(self, batch: Batch | None) -> None:
        """Pass each group of a batch through the model in rows of its own; no weight changes.

        A rank that fails in it blames a single group. Returns once every rank has passed.
        """
        assert self._step is not None, "restore_or_start comes first"
        shares = None
        if batch is not None:
            packing = replace(self._packing, apart=True)
            shares = plan_shares(batch, self._config, packing, 1)
        share: Share = self._ranks.scatter(shares)
        with self._blaming(share.step):
            self._step.rehearse(share)
        self._ranks.barrier()  # nobody has passed before all have

    def evaluate(self, batch: Batch | None) -> float:
        """The cross entropy of the trained tokens of a batch, in nats a token; rank 0 passes it, the others None."""
        assert self._step is not None, "restore_or_start comes first"
        shares = None if batch is None else plan_shares(batch, self._config, self._packing, 1)
        return self._step.evaluate(self._ranks.scatter(shares))

    def score(self, batch: Batch | None) -> np.ndarray:
        """The log-probs of the trained tokens of a batch under the present weights: float32 [N], in its order.

        Rank 0 passes the batch, the others None; all get the same.
        """
        assert self._step is not None, "restore_or_start comes first"
        parts = None
        if batch is not None:
            targets = sum(group.trained_tokens for group in batch.groups)
            rows = plan_batch(batch, [0.0] * len(batch.samples), self._packing)
            parts = [(batch.step, of_rank, targets) for of_rank in rows]
        step, own, total = self._ranks.scatter(parts)
        with self._blaming(step):
            scores: np.ndarray = self._step.score(own, total).cpu().numpy()
        return scores

    @contextmanager
    def _blaming(self, step: int) -> Iterator[None]:
        """A failure that data may have brought about leaves the names of the groups behind."""
        try:
            yield
        except MicroBatchFailed as failure:
            blame(self._run_folder, step, self.rank, failure)
            raise

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """What is published: (Hugging Face name, tensor in the model's dtype and on its device), complete on rank 0.

        Every weight, adapters merged in; or the adapters alone under PEFT's names (`learner.lora.publish`). A tensor
        may share memory with the model (`resident`): use or copy it before the next step, or see `lend`.
        """
        by_adapter = self._config.learner.lora.by_adapter
        yield from lora_folder.export_adapters(self._chunks) if by_adapter else export_weights(self._chunks)
        if self._config.run.shares_devices:
            self._ranks.device.release_memory()

    @property
    def resident(self) -> frozenset[int]:
        """Addresses of the storages of this rank's weights, which stay as they are until they are changed."""
        parameters = (parameter for chunk in self._chunks for parameter in chunk.parameters())
        return frozenset(local(parameter).untyped_storage().data_ptr() for parameter in parameters)

    def lend(self, copied: Copied) -> None:
        """Change no weight of this rank before `copied` is done. Not collective."""
        assert self._step is not None, "restore_or_start comes first"
        self._step.copied = copied

    def export_model(self) -> None:
        """Write this version as a Hugging Face folder, RUN/model, in place of a former one; adapters also in PEFT's.

        Of adapters it has the merged weights. RUN/model appears whole. Raises OSError on rank 0, which writes it.
        """
        self._export_folder(self._run_folder / MODEL, self._run_folder / ADAPTER)
        if self._config.run.shares_devices:
            self._ranks.device.release_memory()

    def save(self, ledger: Ledger | None = None) -> None:
        """Begin to write the checkpoint of this version, on rank 0 with the groups that it contains."""
        export = self._export_beside if self._config.checkpoint.export_each else None
        self._saver.start(self._version, self._state(), ledger, export)

    def saved(self, *, wait: bool = False) -> list[Checkpoint]:
        """The checkpoints that have become complete on disk since the last call; only rank 0 is told of any.

        `wait` for the one that is being written. Raises CheckpointError. Not collective.
        """
        return self._saver.wait() if wait else self._saver.finished()

    def settled(self, seconds: float) -> bool:
        """Whether no checkpoint is being written, after a wait of so many seconds at most. Not collective."""
        return self._saver.settled(seconds)

    @property
    def oldest_checkpoint(self) -> int | None:
        """The step of the oldest checkpoint that a run may resume from; None when there is none."""
        return self._saver.oldest

    def broadcast(self, value: Any) -> Any:
        """A small object of rank 0, on every rank."""
        return self._ranks.broadcast(value)

    def close(self) -> None:
        """Let a checkpoint and a profile that are being written come to their end, and leave the process groups."""
        self._profiler.close()
        self._saver.close()
        self._ranks.stop()

    def _report_damage(self, line: str) -> None:
        log.error("%s", line)
        self.damage.append(line)

    def _state(self) -> checkpoint.State:
        adapters = self._config.learner.lora
        settings = {
            "dtype": self._config.model.dtype,
            "distributed_optimizer": shares_optimizer(self._wrapped[0]),
            "lora_rank": adapters.rank,
            "lora_alpha": adapters.alpha,
            "lora_targets": sorted(adapters.targets),
            "freeze_vision": self._config.learner.freeze_vision or None,  # absent from before there was one
        }
        critic = None if self._critic is None else self._critic.state
        return checkpoint.State(
            self._chunks, self._optimizer, self._ranks, settings, kl_control=self._kl_control, critic=critic
        )

    def _export_beside(self, folder: Path) -> None:
        self._export_folder(folder, folder.with_name(ADAPTER))

    def _export_folder(self, folder: Path, adapter: Path) -> None:
        """Write the weights of this version as a Hugging Face folder, from rank 0, and adapters in a PEFT folder."""
        export_folder(self._chunks, self._config.model.path, folder, self._version)
        if self._config.learner.lora.rank:
            base, settings = self._config.model.path, self._config.learner.lora
            lora_folder.save_adapters(self._chunks, adapter, settings, base)
        self._ranks.barrier(behind_files=True)

    def _packing_of(self, *others: Critic | Teacher | None) -> Packing:
        """How rows are made for the policy and what reads them beside it."""
        models = [self._chunks[0], *(other.model for other in others if other is not None)]
        return _packing(self._config.learner, self._shape, models)

    def _shares(self, batch: Batch | None) -> list[Share]:
        if batch is None or batch.step != self._version.step:
            given = None if batch is None else batch.step
            raise ValueError(f"version {self._version} trains the batch of step {self._version.step}, not of {given}")
        if self._planned is None or self._planned[0] is not batch:
            self.plan(batch)
        assert self._planned is not None
        return self._planned[1]


def _packing(learner: LearnerConfig, shape: ModelShape, models: Sequence[PolicyModel]) -> Packing:
    """How rows are made for these models, the policy of this shape first, on these ranks."""
    moe = shape.moe
    return Packing(
        ranks=parallel_state.get_data_parallel_world_size(),
        budget=learner.tokens_per_micro_batch,
        share_prompts=learner.shares_prompts and all(model.shares_prompts for model in models),
        whole_answers=learner.as_served,
        apart=any(model.one_a_row for model in models),
        sequence_multiple=sequence_multiple(learner.layout.context, models[0].layers),
        multiple=learner.layout.rows_multiple,
        routing=(shape.layers, moe.top_k) if learner.router_replay and moe else None,
        image_token=None if shape.vision is None else shape.vision.image,
    )
