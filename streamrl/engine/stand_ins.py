"""Stand-ins for GPU packages that SGLang imports on every machine and never runs on a CPU.

SGLang imports `triton`, `torchvision` and `sgl_kernel` unconditionally; on a CPU machine they are
absent (no build, or a gigabyte for nothing). `install` makes `import` find an inert module for
each name that is really absent; an installed package is never replaced.

An inert module answers whatever an import or a decorator at module level does with it: attributes
are further inert modules (`triton.language`), capitalised ones are empty classes (`triton.Config`),
and calling it gives the function back undecorated (`@triton.jit`, `@triton.autotune(...)`).

Page-locked memory is replaced as well: SGLang keeps adapters and the routing of experts in it without asking
whether there is a device that it could be locked for. In this one respect torch itself is changed, in the processes
of SGLang where `sgl_kernel` is absent: `pin_memory` is ignored, and `torch.cuda.cudart` registers nothing.
The kernels that a module of SGLang names when it is loaded, KERNELS, are there too and raise when they are called:
without them the module would be passed over, and with it every model and image processor that imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NoReturn

ABSENT_ON_CPU = ("triton", "torchvision", "sgl_kernel")

# What the Qwen-VL image processors import of `torch.ops.sgl_kernel`, by sglang.srt.models.qwen3_5. No others: SGLang
# asks for some by `hasattr`, and takes another way where they are absent.
KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


class _InertClass(type):
    """A class such as `triton.Config`: takes any argument, and every attribute is a name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__()


class _InertModule(types.ModuleType):
    """A module that takes part in imports, decorations and annotations, and does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__version__ = "0.0.0"  # the oldest of all: no feature of a newer release is assumed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = (
            _InertClass(name, (), {"__module__": self.__name__}) if name[0].isupper() else importlib.import_module(full)
        )
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return _undecorated

    def __bool__(self) -> bool:
        return False

    def __contains__(self, item: object) -> bool:
        return False  # without it, torch's `"cpu" in triton.backends.backends` iterates for ever

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: object) -> _InertModule:
        return self

    def __or__(self, other: object) -> _InertModule:
        return self  # annotations such as `tl.tensor | None`

    __ror__ = __or__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins; last on `sys.meta_path`, so that everything real comes first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _InertModule(spec.name)
        if spec.name == "triton":  # the two that are called, with numbers, when SGLang's modules load
            vars(module).update(cdiv=_cdiv, next_power_of_2=_next_power_of_2)
        if spec.name == "sgl_kernel":  # SGLang imports it after torch, in each of its processes
            _leave_memory_unpinned()
            name_kernels()
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


def install(names: Sequence[str] = ABSENT_ON_CPU) -> tuple[str, ...]:
    """Make each of `names` importable that is not installed. Returns those that got a stand-in."""
    absent = tuple(name for name in names if PathFinder.find_spec(name) is None)
    known = {name for finder in sys.meta_path if isinstance(finder, _Finder) for name in finder.names}
    if missing := [name for name in absent if name not in known]:
        sys.meta_path.append(_Finder(missing))
    return absent


def _leave_memory_unpinned() -> None:
    """`pin_memory=True`, `tensor.pin_memory()` and `cudaHostRegister` give ordinary memory: torch refuses them."""
    import torch

    torch.cuda.cudart = _Runtime

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    torch.Tensor.pin_memory = stay  # type: ignore[assignment, method-assign]
    for name in ("arange", "empty", "ones", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def name_kernels(names: Sequence[str] = KERNELS) -> None:
    """Have `torch.ops.sgl_kernel` know kernels that are absent; a call raises."""
    import torch

    for name in names:
        if not hasattr(torch.ops.sgl_kernel, name):
            setattr(torch.ops.sgl_kernel, name, functools.partial(_absent, name))


def _absent(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(f"sgl_kernel.{name}: the kernel is not installed on this machine")


def _unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _Runtime:
    """The CUDA runtime as SGLang's host pools call it: they register memory, and look whether that went well."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def _cdiv(a: int, b: int) -> int:
    return -(a // -b)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
