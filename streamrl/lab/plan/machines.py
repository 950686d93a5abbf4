"""The machines that a plan is for: what they hold and how fast their links are, as the user says it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from streamrl.config.file import ConfigError

GIB = 1 << 30
GB = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Hosts of one kind. No speed here is measured: the defaults are round figures, to be replaced by one's own.

    Example: `Machines(gpus_per_host=8, gpu_memory=141)` are hosts of eight H200.
    """

    gpus_per_host: int = 8  # 0: a machine without GPUs
    hosts: int = 0  # 0: as many as the plan needs
    gpu_memory: float = 80.0  # GiB of one GPU
    host_memory: float = 2048.0  # GiB of one host
    headroom: float = 0.1  # share of a GPU left for CUDA's context, NCCL's buffers and the allocator's gaps
    network: float = 25.0  # GB/s into or out of one host
    copy: float = 25.0  # GB/s between a GPU and pinned memory of its host
    pageable: float = 6.0  # GB/s between a GPU and other memory of its host
    memory: float = 10.0  # GB/s at which one process copies host memory
    hash: float = 10.0  # GB/s at which one process computes checksums (xxh3)
    disk: float = 2.0  # GB/s of the shared file system, for all together
    changed: float = 0.05  # bytes of a delta for each byte of the weights
    mem_fraction: float = 0.85  # share of a GPU for SGLang's weights and KV cache, where server_args do not say
    prompt: int = 512  # tokens of a prompt

    @property
    def has_gpus(self) -> bool:
        return self.gpus_per_host > 0

    @property
    def device_bytes(self) -> int:
        """What one rank of the learner may take: of its GPU, or of the whole host where there is none."""
        share = self.gpu_memory if self.has_gpus else self.host_memory
        return int(share * GIB * (1.0 - self.headroom))

    def __post_init__(self) -> None:
        shares = {"headroom": 0.0, "mem_fraction": 1e-9, "changed": 1e-9}
        for field in fields(self):
            given = getattr(self, field.name)
            flag = "--" + field.name.replace("_", "-")
            if field.name in shares:
                if not shares[field.name] <= given <= 1:
                    raise ConfigError(f"{flag}: {given:g} is not allowed; allowed: a share above 0, up to 1")
            elif given < 0 or (given == 0 and field.name not in ("gpus_per_host", "hosts")):
                raise ConfigError(f"{flag}: {given:g} is not allowed; allowed: a number above 0")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Machines:
        """From the flags of the command. Raises ConfigError."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


# What each flag is, for `--help`.
HELP = {
    "gpus_per_host": "GPUs of one host; 0: machines without GPUs",
    "hosts": "hosts that there are; 0: as many as are needed",
    "gpu_memory": "GiB of one GPU",
    "host_memory": "GiB of one host",
    "headroom": "share of a GPU that is left free",
    "network": "GB/s into or out of one host",
    "copy": "GB/s between a GPU and pinned memory of its host",
    "pageable": "GB/s between a GPU and other memory of its host",
    "memory": "GB/s at which one process copies host memory",
    "hash": "GB/s at which one process computes checksums",
    "disk": "GB/s of the shared file system",
    "changed": "bytes of a delta for each byte of the weights",
    "mem_fraction": "share of a GPU that SGLang takes, where generate.server_args do not say",
    "prompt": "tokens of a prompt",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field, with its default."""
    for field in fields(Machines):
        default = field.default
        assert isinstance(default, int | float)
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(default),
            default=default,
            metavar="N",
            help=f"{HELP[field.name]} (default: {default:g})",
        )
