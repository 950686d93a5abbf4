"""Megatron's Adam with its schedule, and an update that neither a spike nor a non-finite gradient can spoil.

A learner step has one place on the schedule and one update for each mini batch:

    begin_step ──▶ update, update, ... ──▶ end_step
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from streamrl.config.file import ConfigError
from streamrl.config.learner import OptimizerSettings
from streamrl.learner.cpu_adapter import cuda_type_names
from streamrl.learner.dither import dither
from streamrl.learner.forward import Wrapped
from streamrl.learner.fully_sharded import FullySharded
from streamrl.learner.megatron_fields import refused, values_of
from streamrl.learner.params_metrics import ParamsMetrics
from streamrl.learner.safety import UpdateGuard, Verdict
from streamrl.learner.te import te_problem

# Where Megatron's optimizers have the float32 weights of a model in bfloat16; None where the inner Adam has them.
_MASTERS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did; nothing changed unless the verdict is "ok"."""

    verdict: Verdict
    grad_norm: float  # before clipping
    lr: float

    @property
    def successful(self) -> bool:
        return self.verdict == "ok"


def largest_norm(updates: Iterable[Update]) -> float:
    """The largest gradient norm, or the first that is not finite: what the reader of a metric must not miss."""
    return max((update.grad_norm for update in updates), key=lambda norm: math.inf if math.isnan(norm) else norm)


class PolicyOptimizer:
    """Adam over fp32 (master) weights, the learning-rate schedule, and the counts of updates."""

    def __init__(
        self,
        chunks: list[Wrapped],
        settings: OptimizerSettings,
        dtype: torch.dtype,
        run_steps: int,
        bad_steps: int,
        *,
        megatron: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """chunks: this rank's model chunks; bad_steps: see UpdateGuard; megatron: `learner.megatron`.

        Raises ConfigError where the machine cannot offload what the settings ask for, or Megatron refuses a field.
        """
        config = _config(chunks[0], settings, dtype, values_of(megatron, "OptimizerConfig"))
        with cuda_type_names():
            self.megatron: MegatronOptimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        # Of a fully sharded model the shards of this rank, by the names of its parameters.
        self.shards: dict[str, torch.nn.Parameter] | None = None
        if isinstance(chunks[0], FullySharded):
            self.shards = dict(chunks[0].named_parameters())
            for part in self.megatron.chained_optimizers:
                part.grad_stats_parallel_group = dist.group.WORLD  # the norm is of every rank's shards together
        for adam in self.torch_adams():
            for group in adam.param_groups:
                group["fused"] = True
        self._dtype = dtype
        self.settings = settings
        self.scheduler = _schedule(self.megatron, settings, run_steps)
        self.updates = 0  # successful ones
        self.skipped = 0  # updates that were not made: no token, a spike, or something that is not finite
        self.spikes = 0  # those of a spike
        self._guard = UpdateGuard(settings, bad_steps)
        self.observer: ParamsMetrics | None = None  # of `learner.params_metrics`
        self._device = next(chunks[0].parameters()).device

    def torch_adams(self) -> list[torch.optim.AdamW]:
        """The optimizers that are torch's own: all of them without Transformer Engine and Apex, else those that
        were offloaded to the host."""
        inner = [optimizer for part in self.megatron.chained_optimizers for optimizer in _inner(part)]
        return [optimizer for optimizer in inner if isinstance(optimizer, torch.optim.AdamW)]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every parameter and state that an update changes, on the device and on the host."""
        for part in self.megatron.chained_optimizers:
            for optimizer in _inner(part):
                for group in optimizer.param_groups:
                    yield from group["params"]
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def start(self) -> None:
        """Take the model's weights, which a file gave, for the first master weights."""
        self.megatron.reload_model_params()
        if self.settings.dither:
            for master in self._masters():
                dither(master)

    def _masters(self) -> Iterator[torch.Tensor]:
        """This rank's float32 weights whose model is in bfloat16."""
        if self.shards is not None and self._dtype == torch.bfloat16:
            yield from (shard for shard in self.shards.values() if shard.requires_grad)
        for part in self.megatron.chained_optimizers:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                yield from part.optimizer.param_to_fp32_param.values()
                continue
            groups = chain.from_iterable(getattr(part, name, ()) for name in _MASTERS)
            yield from (master for group in groups for master in group if master is not None)

    def begin_step(self) -> float:
        """Move the schedule on by one learner step, also one that will be skipped. Returns its learning rate."""
        self.scheduler.step(1)
        return float(self.megatron.param_groups[0]["lr"])

    def update(self, loss: float = 0.0, *, empty: bool = False) -> Update:
        """One update from the gradients in the model's buffers; every rank decides alike.

        loss: of the batch that the gradients are of; empty: no rank has a token of it that is trained. Megatron checks
        for infinities only under a loss scale, so the norm is looked at here: it is not finite as soon as one gradient
        is not.
        """
        lr = float(self.megatron.param_groups[0]["lr"])
        found_inf = self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if self.observer is not None:
            self.observer.observe_gradients()
        verdict = self._guard.judge(*self._agreed(math.inf if found_inf else loss, grad_norm), empty=empty)
        if verdict == "ok":
            self._clip(grad_norm)
            self.megatron.step_with_ready_grads()
            self.updates += 1
        else:
            self.skipped += 1
            self.spikes += verdict == "spike"
        return Update(verdict, grad_norm, lr)

    def hold(self) -> Update:
        """What an update from the gradients in the model's buffers would be, which is not made."""
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if self.observer is not None:
            self.observer.observe_gradients()
        return Update("held", grad_norm, lr=0.0)

    def end_step(self) -> None:
        """Close a learner step. Raises BadStepsError after `bad_steps` of them in a row without an update."""
        self._guard.end_step()

    def metrics(self) -> dict[str, float]:
        """The `steps/` metrics, counts of updates since the run began, and the observer's; then it is collective."""
        observed = {} if self.observer is None else self.observer.metrics()
        return {"steps/updates": self.updates, "steps/skipped": self.skipped, "steps/spikes": self.spikes, **observed}

    def counts(self) -> dict[str, Any]:
        """What a checkpoint holds beside Megatron's states."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "updates": self.updates,
            "skipped": self.skipped,
            "spikes": self.spikes,
            "guard": self._guard.state_dict(),
        }

    def load_counts(self, counts: dict[str, Any]) -> None:
        """Take up what `counts` gave. The configuration, not the checkpoint, says what the learning rates are."""
        self.scheduler.load_state_dict(counts["scheduler"])
        self.updates, self.skipped, self.spikes = (counts[key] for key in ("updates", "skipped", "spikes"))
        self._guard.load_state_dict(counts["guard"])
        for group in self.megatron.param_groups:
            group["max_lr"], group["min_lr"] = self.settings.lr, self.settings.min_lr
            group["betas"] = (self.settings.beta1, self.settings.beta2)
            group["eps"] = self.settings.eps
        self.scheduler.step(0)

    def _agreed(self, loss: float, grad_norm: float) -> tuple[float, float]:
        """The largest loss and norm of any rank, infinite where one is not finite: model copies round alike, but a
        decision on the edge must not hang on that."""
        values = [value if math.isfinite(value) else math.inf for value in (loss, grad_norm)]
        agreed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return float(agreed[0]), float(agreed[1])

    def _clip(self, grad_norm: float) -> None:
        if self.settings.clip_grad == 0:
            return
        for part in self.megatron.chained_optimizers:
            megatron_optimizer.clip_grad_by_total_norm_fp32(
                part.get_parameters(),
                max_norm=self.settings.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )

    def fill_state(self) -> None:
        """Make the state that an optimizer makes at its first update, so that it can be saved and loaded before.

        No weight moves, as it would in an update by zero gradients that decays weights.
        """
        for part in self.megatron.chained_optimizers:
            for optimizer in _inner(part):
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if "exp_avg" not in optimizer.state[parameter]:
                        _initialise(optimizer, parameter)
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                part.optimizer._sync_sub_optimizers_state_to_hdo()

    def own_steps(self) -> None:
        """Give each counter of updates to its one owner after a load.

        Megatron hands one tensor to all parameters, and torch's Adam then counts it up once a parameter: the first
        update after a resume is right, the second is not. An offloading optimizer has the loaded count in its own
        groups, too, and would set the fused Adam inside it back to that count at every update.
        """
        for adam in self.torch_adams():
            for state in adam.state.values():
                state["step"] = state["step"].detach().clone()
        for part in self.megatron.chained_optimizers:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                for group in part.optimizer.param_groups:
                    group.pop("step", None)


def _inner(part: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that update: those inside one that offloads; none where a rank trains no parameter."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        return list(part.optimizer.sub_optimizers)
    return [] if part.optimizer is None else [part.optimizer]


def _initialise(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Adam's state of a parameter before its first update."""
    fused: Any = optimizer
    if hasattr(fused, "initialize_state"):  # Transformer Engine's, also with states in smaller dtypes
        fused.initialize_state(parameter, fused.store_param_remainders and parameter.dtype == torch.bfloat16)
        return
    state = optimizer.state[parameter]
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    if isinstance(optimizer, torch.optim.AdamW):  # Apex's counts in its groups
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)


def offload_problem() -> str | None:
    """Why this machine cannot keep a part of Adam's state on the host, the end of a sentence; None where it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA on this machine"
    problem = te_problem()  # Megatron compares its version on the way
    return None if problem is None else f"Transformer Engine {problem}"


def _config(chunk: Wrapped, settings: OptimizerSettings, dtype: torch.dtype, given: dict[str, Any]) -> OptimizerConfig:
    distributed = chunk.ddp_config.use_distributed_optimizer
    if isinstance(chunk, FullySharded):
        dtype = torch.float32  # shards are master weights
    problem = offload_problem() if settings.offload else None
    if problem is not None:
        raise ConfigError(
            f"learner.optimizer.offload: {settings.offload:g} keeps Adam's state on the host beside a GPU, "
            f"and {problem}; allowed: 0"
        )
    if settings.offload and not distributed:
        raise ConfigError(
            f"learner.optimizer.offload: {settings.offload:g} needs learner.optimizer.distributed=true; allowed: 0"
        )
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.beta1,
        "adam_beta2": settings.beta2,
        "adam_eps": settings.eps,
        "clip_grad": settings.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": distributed,
        "optimizer_cpu_offload": settings.offload > 0,
        "optimizer_offload_fraction": settings.offload,
        "overlap_cpu_optimizer_d2h_h2d": settings.offload > 0,
        # Megatron offloads along the paths of this option alone.
        "use_precision_aware_optimizer": settings.offload > 0,
    }
    try:
        return OptimizerConfig(**{**fields, **given})
    except (ValueError, AssertionError, ImportError) as error:
        raise refused(given, error) if given else error from None


def _schedule(optimizer: MegatronOptimizer, settings: OptimizerSettings, run_steps: int) -> OptimizerParamScheduler:
    """Learning rate by learner step: step k (from 1) of a warm-up over n takes lr k / n.

    A decay leaves the full rate with the last step of the warm-up, or the first of all, and reaches `min_lr` behind the
    last step: every step trains. Without a warm-up that is transformers' schedule.
    """
    warmup = max(1, settings.warmup_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(run_steps, warmup) + 1,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
