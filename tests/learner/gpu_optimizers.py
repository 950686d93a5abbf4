"""What optimizers need that a machine without a GPU lacks: Transformer Engine's Adam, and a GPU beside the host.

The first has the state, and the methods on it, of `FusedAdam` of Transformer Engine 2.11; its arithmetic is torch's.
"""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from streamrl.learner import optimizer as policy_optimizer

MASTER = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """State appears at the first update or by `initialize_state`; the count of updates is in the groups alone.

    With `master_weights` the float32 weight is a state, too; a moment may be kept in bfloat16.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert (adam_w_mode, bias_correction) == (True, True)
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, MASTER: master_weight_dtype}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders, "no test has them"
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=self.dtypes[name])
        if self.master_weights:
            self.state[param][MASTER] = param.detach().float()

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        return self.state[param][state_name].float()  # the state itself where it is float32

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        assert unscaled_state.dtype == torch.float32
        if state_name not in self.state[param]:
            self.state[param][state_name] = torch.empty_like(param, dtype=self.dtypes[state_name])
        self.state[param][state_name].copy_(unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        numbers = _numbers(found["param_groups"], self.param_groups)
        found["state"] = {
            number: {name: self.get_unscaled_state(numbers[number], name) for name in state}
            for number, state in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbers = _numbers(state_dict["param_groups"], self.param_groups)
        for number, state in state_dict["state"].items():
            self.state[numbers[number]] = {}
            for name, value in state.items():
                self.set_scaled_state(numbers[number], name, value.float())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(group, param, grad.float())

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        (beta1, beta2), step = group["betas"], group["step"]
        weight = self.state[param][MASTER] if self.master_weights else param
        mean = torch.lerp(self.get_unscaled_state(param, "exp_avg"), grad, 1 - beta1)
        square = self.get_unscaled_state(param, "exp_avg_sq") * beta2 + (1 - beta2) * grad * grad
        self.set_scaled_state(param, "exp_avg", mean)
        self.set_scaled_state(param, "exp_avg_sq", square)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        scale = (square / (1 - beta2**step)).sqrt() + group["eps"]
        weight.sub_(group["lr"] / (1 - beta1**step) * mean / scale)
        if weight is not param:
            param.copy_(weight)


def _numbers(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
    groups = zip(saved, own, strict=True)
    return {number: param for a, b in groups for number, param in zip(a["params"], b["params"], strict=True)}


def use_fused_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it where Megatron has what it imports from Transformer Engine."""
    monkeypatch.setattr(megatron.core.optimizer, "Adam", FusedAdam)
    monkeypatch.setattr(megatron.core.optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "Adam", FusedAdam)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    _keep_whole_master_weights(monkeypatch)


def _keep_whole_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Transformer Engine that knows no remainders of them; without one Megatron has no version to compare."""
    for module in (megatron.core.optimizer, optimizer_config):
        monkeypatch.setattr(module, "is_te_min_version", lambda version: False)


def use_two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `HybridDeviceOptimizer` take the memory of this machine for that of a GPU, and copies of it for the host's.

    Streams, events and pinned memory are those of `streamrl/learner/cpu_adapter.py`.
    """
    monkeypatch.setattr(policy_optimizer, "offload_problem", lambda: None)
    _keep_whole_master_weights(monkeypatch)
    share_out, move = (
        HybridDeviceOptimizer._get_sub_optimizer_param_groups,
        HybridDeviceOptimizer._move_new_state_to_right_device,
    )

    def shared_out(self: HybridDeviceOptimizer, fraction: float) -> tuple[Any, ...]:
        with monkeypatch.context() as pretended:
            pretended.setattr(torch.Tensor, "is_cuda", property(lambda tensor: not isinstance(tensor, _OnHost)))
            pretended.setattr(torch.Tensor, "cpu", lambda tensor: tensor.as_subclass(_OnHost))
            pretended.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            on_host, on_gpu, copies, originals, masters = share_out(self, fraction)
        plain = _Plain()
        on_host = [{**group, "params": [plain(param) for param in group["params"]]} for group in on_host]
        copies, masters = ({key: plain(value) for key, value in each.items()} for each in (copies, masters))
        return on_host, on_gpu, copies, {plain(key): value for key, value in originals.items()}, masters

    def moved(self: HybridDeviceOptimizer) -> None:
        to = torch.Tensor.to
        with monkeypatch.context() as pretended:
            pretended.setattr(torch.Tensor, "to", lambda tensor, *a, **k: tensor if a == ("cuda",) else to(tensor, *a))
            move(self)

    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", shared_out)
    monkeypatch.setattr(HybridDeviceOptimizer, "_move_new_state_to_right_device", moved)


class _OnHost(torch.Tensor):
    """A copy in the host's memory, and what is made of it."""


class _Plain:
    """One plain tensor for each `_OnHost`: as a subclass it would be in checkpoints."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, _OnHost):
            return tensor
        return self._made.setdefault(id(tensor), tensor.as_subclass(torch.Tensor))
