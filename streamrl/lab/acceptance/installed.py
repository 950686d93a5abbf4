"""What is installed, whether it can be imported, which GPUs there are, and what the operating system allows."""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from streamrl.engine.hardware import NCCL_ENVIRONMENT, nccl_environment, torch_cuda, visible_gpus
from streamrl.engine.stand_ins import ABSENT_ON_CPU, install
from streamrl.lab.acceptance.check import Bench, Failed, Measured, Skipped
from streamrl.lab.acceptance.quickstart import run_of
from streamrl.lab.acceptance.trial import Trial
from streamrl.learner.te import TORCH_PART, te_problem

# What a run imports on the way to its first step.
MODULES = ("torch", "megatron.core.models.gpt", "sglang.srt.server_args", "sglang.srt.entrypoints.http_server")

FILES = 4096  # descriptors: a connection, a log and a few pipes for each of hundreds of processes
SHARED = 64 << 20  # bytes of /dev/shm that a rank's NCCL and torch may take
PROBE = 60.0  # seconds that a process may take to multiply two matrices on a GPU

COMPUTES = """
import torch
device = torch.device("cuda", 0)
product = torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)
assert float(product.sum()) == 256.0**3, float(product.sum())
print(torch.cuda.get_device_properties(0).uuid)
"""


def environment(bench: Bench) -> Measured:
    """The requirements of the package, with those for GPUs where there are some."""
    extra = {"extra": "gpu" if bench.gpus else ""}
    lines = [Requirement(line) for line in metadata.requires("streamrl") or ()]
    wanted = [line for line in lines if line.marker is None or line.marker.evaluate(extra)]
    if wrong := [problem for line in wanted if (problem := _problem(line))]:
        raise Failed("; ".join(wrong))
    cuda = torch_cuda()
    if bench.gpus and cuda is None:
        raise Failed(f"torch {metadata.version('torch')} is built for no CUDA, and there are {len(bench.gpus)} GPUs")
    names = sorted({gpu.name for gpu in bench.gpus})
    devices = f"CUDA {cuda}, driver {bench.driver}, {len(bench.gpus)} x {', '.join(names)}" if names else "no GPU"
    torch, sglang = metadata.version("torch"), metadata.version("sglang")
    said = f"Python {platform.python_version()}, torch {torch}, sglang {sglang}, {devices}"
    return Measured(said, f"{len(wanted)} requirements")


def _problem(wanted: Requirement) -> str | None:
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted} is not installed"
    return None if wanted.specifier.contains(found, prereleases=True) else f"{wanted.name} is {found}, not {wanted}"


def imports(bench: Bench) -> Measured:
    """The packages themselves: that their files are there does not say that they can be loaded."""
    problem = te_problem()
    if problem and (bench.gpus or not problem.startswith("is not installed")):
        raise Failed(f"{TORCH_PART} {problem}")
    if not bench.gpus:
        install(ABSENT_ON_CPU)
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # what a library raises that is not whole may be anything
            raise Failed(f"{name}: {type(error).__name__}: {str(error).partition(os.linesep)[0]}") from error
    engine = f"Transformer Engine {problem}" if problem else TORCH_PART
    return Measured(f"{len(MODULES)} modules; {engine}", "all that a run here needs")


def devices(bench: Bench) -> Measured:
    """Every GPU by its name computes, and no two names are one GPU; a run of one rank and one server has two."""
    bench.needs_cuda("every process runs on the CPU")
    found = {name: _uuid(name) for name in visible_gpus()}
    if len(set(found.values())) < len(found):
        raise Failed(f"two names are one GPU: {found}")
    placed = Trial(bench, "devices", {}).placed
    ranks, servers = placed.ranks, [server for worker in placed.workers for server in worker]
    return Measured(f"{len(found)} GPUs compute; rank on {ranks[0]}, server on {servers[0][0]}", "each its own")


def _uuid(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMPUTES], env={**os.environ, "CUDA_VISIBLE_DEVICES": name},
        capture_output=True, text=True, timeout=PROBE,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"GPU {name}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def limits(bench: Bench) -> Measured:
    """Shared memory, descriptors, locked memory."""
    weights = sum(file.stat().st_size for file in bench.model.glob("*.safetensors"))
    wanted = 2 * weights + SHARED * max(2, len(bench.gpus))
    free = shutil.disk_usage("/dev/shm").free
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = Path("/sys/class/infiniband").is_dir()
    problems = list(too_low(free, wanted, files, locked, rdma=rdma))
    if problems:
        raise Failed("; ".join(problems))
    said = f"/dev/shm {free >> 20:,} MiB free, -n {_limit(files)}, -l {_limit(locked)}"
    return Measured(said, f"{wanted >> 20:,} MiB, -n {FILES}" + (", -l unlimited" if rdma else ""))


def too_low(free: int, wanted: int, files: int, locked: int, *, rdma: bool) -> Iterator[str]:
    """A line for each limit that is. `free` and `wanted`: bytes of /dev/shm."""
    if free < wanted:
        yield f"/dev/shm has {free >> 20:,} MiB free, {wanted >> 20:,} are needed (docker: --shm-size, --ipc=host)"
    if files != resource.RLIM_INFINITY and files < FILES:
        yield f"ulimit -n (hard) is {files}, {FILES} are needed"
    if rdma and locked != resource.RLIM_INFINITY:
        yield f"ulimit -l is {locked} bytes, and RDMA needs it unlimited (docker: --ulimit memlock=-1)"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def nccl(bench: Bench) -> Measured:
    """What NCCL itself read in the environments of the learner and of the server, by their logs."""
    bench.needs_cuda("weights go by gloo, no NCCL")
    if len(bench.gpus) == 1:
        raise Skipped("one GPU: weights go by memory, and a server of one rank makes no group by NCCL")
    logs = bench.folder / "runs" / run_of("retract") / "logs"
    found = {
        name: nccl_settings((logs / f"{name}.log").read_text(errors="replace")) for name in ("learner-0", "server-0")
    }
    wanted = nccl_environment()
    for name, settings in found.items():
        if settings != wanted:
            raise Failed(f"NCCL of {name} read {settings}, not {wanted}")
    return Measured(" ".join(f"{name}={value}" for name, value in wanted.items()), "the same at both ends")


def nccl_settings(log: str) -> dict[str, str]:
    """The values of `NCCL_ENVIRONMENT` that NCCL says it has found, last ones win.

    >>> nccl_settings("host:1:2 [0] NCCL INFO NCCL_CUMEM_ENABLE set by environment to 0.")
    {'NCCL_CUMEM_ENABLE': '0'}
    """
    told = re.findall(r"NCCL INFO (\w+) set by environment to (\S+?)\.?$", log, re.MULTILINE)
    return {name: value for name, value in told if name in NCCL_ENVIRONMENT}
