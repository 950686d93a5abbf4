"""Everything that Megatron-Core needs to run on a machine without CUDA: a no-op where CUDA is there.

Megatron-Core takes a GPU for granted in six ways; each patch below names the one that it answers. The
patches reach Megatron's own modules alone wherever that is possible: each of them sees a stand-in for
the name `torch`, and everybody else sees torch as it is. They know one version by heart, so any other
is refused. Layers that need a replacement of their own (core attention, norm) are in `attention.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from streamrl.config.file import ConfigError

# The version whose assumptions are answered here, and whose private methods the learner overrides. Another one needs
# this file read again, line by line.
MEGATRON_VERSION = "0.16.1"

# Imported before the stand-in is handed out, so that no module of Megatron on our paths is missed.
_MODULES = (
    "dist_checkpointing",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
    "distributed",
    "distributed.finalize_model_grads",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer.distrib_optimizer",
    "optimizer_param_scheduler",
    "parallel_state",
    "pipeline_parallel",
    "pipeline_parallel.schedules",
    "tensor_parallel",
    "tensor_parallel.random",
    "transformer.moe.experts",
    "transformer.moe.moe_layer",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.shared_experts",
    "transformer.moe.token_dispatcher",
    "transformer.utils",
)


class UnsupportedMegatronError(ConfigError):
    """The installed Megatron-Core is not the one that streamrl knows."""


def install() -> None:
    """Make Megatron-Core usable on this machine. Call before the first use of Megatron; again does nothing.

    Raises UnsupportedMegatronError for another version of Megatron-Core, on every machine: streamrl's model,
    attention and checkpoints override private methods of this one.
    """
    version = importlib.metadata.version("megatron-core")
    if version != MEGATRON_VERSION:
        raise UnsupportedMegatronError(
            f"megatron-core {version} is installed; streamrl runs on {MEGATRON_VERSION} alone "
            f"(pip install megatron-core=={MEGATRON_VERSION})"
        )
    if torch.cuda.is_available():
        return
    with warnings.catch_warnings():
        # That Transformer Engine and Apex are not there is why this file exists.
        warnings.simplefilter("ignore")
        for name in _MODULES:
            importlib.import_module(f"megatron.core.{name}")
    _hand_out_stand_in()
    _track_random_states_on_cpu()
    _let_tensors_stay()
    _accept_cpu_gradients()
    _count_tokens_on_cpu()


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Optimizers sort parameters by `param.type() == 'torch.cuda.FloatTensor'`: let CPU tensors say so.

    Needed only while an optimizer is built or clips gradients; outside, tensors name their true type.
    """
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def with_cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = with_cuda_name  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


class _NoStream:
    """A CUDA stream or event where there is nothing to overlap: everything is ordered already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *args: Any) -> _NoStream:
        return self


class _CudaStandIn(types.ModuleType):
    """`torch.cuda` as Megatron's modules see it: the current device is the CPU, its generator torch's own."""

    Stream = Event = _NoStream

    def __init__(self) -> None:
        super().__init__("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, *args: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def current_stream(self, *args: Any) -> _NoStream:
        return _NoStream()

    default_stream = current_stream

    def stream(self, *args: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


class _TorchStandIn(types.ModuleType):
    """`torch` as Megatron's modules see it: tensors that they ask for on "cuda" are made on the CPU."""

    _FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaStandIn()
        for name in self._FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _hand_out_stand_in() -> None:
    """Assumption 1: `device="cuda"`, `pin_memory=True`, `torch.cuda.current_device()`, side streams."""
    stand_in = _TorchStandIn()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            vars(module)["torch"] = stand_in


def _track_random_states_on_cpu() -> None:
    """Assumption 2: each parallel region draws from a CUDA generator. Here all draw from torch's own.

    `fork` is replaced as a whole, because Megatron's warns whenever the CPU generator moves inside it.
    """
    from megatron.core.tensor_parallel import random as tracked

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = tracked._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    tracked._get_cuda_rng_state = get_state
    tracked._set_cuda_rng_state = set_state
    tracked.CudaRNGStatesTracker.fork = fork


def _let_tensors_stay() -> None:
    """Assumption 3: `tensor.cuda()` moves a tensor to where the model is. It is there already."""

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    torch.Tensor.cuda = stay  # type: ignore[assignment, method-assign]


def _accept_cpu_gradients() -> None:
    """Assumption 4: a gradient that is clipped has the type 'torch.cuda.FloatTensor'.

    (Assumption 5, the same of parameters while an optimizer is built, is answered by `cuda_type_names`.)
    """
    from megatron.core.optimizer import optimizer

    clip = optimizer.clip_grad_by_total_norm_fp32
    if getattr(clip, "accepts_cpu", False):
        return

    def clip_on_cpu(*args: Any, **kwargs: Any) -> None:
        with cuda_type_names():
            clip(*args, **kwargs)

    clip_on_cpu.accepts_cpu = True  # type: ignore[attr-defined]
    optimizer.clip_grad_by_total_norm_fp32 = clip_on_cpu


def _count_tokens_on_cpu() -> None:
    """Assumption 6: the sizes of an all-to-all between experts come as arrays, because they left a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    exchange = token_dispatcher.all_to_all
    if getattr(exchange, "accepts_tensors", False):
        return

    def exchange_counted(group: Any, tensor: torch.Tensor, *sizes: Any, **rest: Any) -> torch.Tensor:
        return exchange(group, tensor, *(size.tolist() if torch.is_tensor(size) else size for size in sizes), **rest)

    exchange_counted.accepts_tensors = True  # type: ignore[attr-defined]
    token_dispatcher.all_to_all = exchange_counted
