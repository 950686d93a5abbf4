"""One benchmark under a profiler: what its first process spends its time on.

    python -m benchmarks.profiled torch|cprofile FILE benchmarks.NAME [its arguments]

    cprofile  FILE.pstats (for pstats and snakeviz), and the functions that take longest
    torch     FILE.trace.json (for Perfetto), and the operators that take longest, on a GPU its kernels too

The exit code is the benchmark's own.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import runpy
import sys
from pathlib import Path

LINES = 25  # of the printed table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("torch", "cprofile"))
    parser.add_argument("file", type=Path, metavar="FILE", help="without its ending")
    parser.add_argument("module", help="benchmarks.NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    options = parser.parse_args()
    sys.argv = [options.module, *options.arguments]
    profile = with_torch if options.way == "torch" else with_cprofile
    return profile(options.module, options.file)


def run(module: str) -> int:
    """Run it as `python -m` does, processes that it spawns included. Returns its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def with_cprofile(module: str, file: Path) -> int:
    """Calls and seconds of every Python function."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        return run(module)
    finally:
        profile.disable()
        profile.dump_stats(f"{file}.pstats")
        pstats.Stats(profile).sort_stats("cumulative").print_stats(LINES)


def with_torch(module: str, file: Path) -> int:
    """Calls and seconds of every operator of torch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as recorded:
        code = run(module)
    print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=LINES))
    recorded.export_chrome_trace(f"{file}.trace.json")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
