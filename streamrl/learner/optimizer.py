"""Megatron's Adam with its schedule, and an update that a non-finite gradient cannot spoil."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from streamrl.config_learner import OptimizerSettings
from streamrl.learner.cpu_adapter import cuda_type_names


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did: not successful when the gradient was not finite, and then nothing changed."""

    successful: bool
    grad_norm: float  # before clipping
    lr: float


class PolicyOptimizer:
    """Adam over fp32 (master) weights, the learning-rate schedule, and the count of updates."""

    def __init__(
        self,
        model: DistributedDataParallel,
        settings: OptimizerSettings,
        dtype: torch.dtype,
        run_steps: int,
    ) -> None:
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
        )
        with cuda_type_names():
            self.megatron: MegatronOptimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        for adam in self.torch_adams():
            for group in adam.param_groups:
                group["fused"] = True
        self.settings = settings
        self.scheduler = _schedule(self.megatron, settings, run_steps)
        self.updates = 0  # successful ones
        self.skipped = 0

    def torch_adams(self) -> list[torch.optim.AdamW]:
        """The optimizers that are torch's own: all of them without Transformer Engine and Apex, else none."""
        inner = [part.optimizer for part in self.megatron.chained_optimizers]
        return [optimizer for optimizer in inner if isinstance(optimizer, torch.optim.AdamW)]

    def update(self) -> Update:
        """One learner step's update from the gradients in the model's buffers; every rank decides alike.

        Megatron checks for infinities only under a loss scale, so the norm is looked at here: it is not
        finite as soon as one gradient is not. The schedule moves on with every learner step.
        """
        self.scheduler.step(1)
        lr = self.megatron.param_groups[0]["lr"]
        found_inf = self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if found_inf or not math.isfinite(grad_norm):
            self.skipped += 1
            return Update(False, grad_norm, lr)
        self._clip(grad_norm)
        self.megatron.step_with_ready_grads()
        self.updates += 1
        return Update(True, grad_norm, lr)

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
        """Give torch's Adam the zeros that it would make at its first step, so that it can be saved and loaded."""
        for adam in self.torch_adams():
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                state = adam.state[parameter]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(parameter))
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device=parameter.device))

    def own_steps(self) -> None:
        """Give each parameter a `step` of its own after a load.

        Megatron hands one tensor to all of them, and torch's Adam then counts it up once a parameter: the
        first update after a resume is right, the second is not.
        """
        for adam in self.torch_adams():
            for state in adam.state.values():
                state["step"] = state["step"].detach().clone()

    def apply_settings(self) -> None:
        """After a load: the configuration, not the checkpoint, says what the learning rates are."""
        for group in self.megatron.param_groups:
            group["max_lr"], group["min_lr"] = self.settings.lr, self.settings.min_lr
            group["betas"] = (self.settings.beta1, self.settings.beta2)
            group["eps"] = self.settings.eps
        self.scheduler.step(0)


def _schedule(optimizer: MegatronOptimizer, settings: OptimizerSettings, run_steps: int) -> OptimizerParamScheduler:
    """Learning rate by learner step: step k (from 1) of a warm-up over n takes lr k / n."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(run_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
