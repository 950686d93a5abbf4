"""`python -m streamrl.engine.launch ARGS`: SGLang's own launch_server, made to run and to end where it should.

Four things are added to `python -m sglang.launch_server ARGS`. Megatron-Core is left out, for which a server has no
use. On a machine without CUDA the stand-ins are installed, the model's own module is loaded instead of all that SGLang
has (`engine/model_modules.py`), a paused scheduler sleeps, and SGLang's processes are copies of this one: fresh
interpreters would each load torch and SGLang again. With `--lifeline PID` the server ends, with all its processes, when
process PID has ended, even by kill -9; `--scratch DIR` is removed then.
`--quantize-loads` quantises the weights that the server loads (`engine/quantised_loading.py`), with
`--speculative-algorithm NGRAM` drafts leave the policy as it is (`engine/ngram_drafts.py`), images are decoded as by
the learner (`engine/image_decoding.py`), and their features enter as many layers as the model says
(`engine/deepstack.py`): all also in fresh interpreters, which load this module and have the arguments of the first one.
The keys that the server asks for are taken from the environment (`engine/keys.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamrl.engine import (
    cpu_ngram,
    deepstack,
    image_decoding,
    latent_attention,
    mamba_kernels,
    model_modules,
    ngram_drafts,
    quantised_loading,
    sink_attention,
    stand_ins,
)
from streamrl.engine.hardware import CPU_ENVIRONMENT, has_cuda
from streamrl.engine.keys import take_keys
from streamrl.engine.shutdown import end_server
from streamrl.lifeline import watch
from streamrl.loading import without_collections

if not has_cuda():
    for name, value in CPU_ENVIRONMENT.items():  # a user may start a server, too
        os.environ.setdefault(name, value)
    stand_ins.install()


def main(arguments: list[str]) -> None:
    """Run the server in this process until it ends. `arguments` are SGLang's, and the two of this module."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lifeline", type=int)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument(quantised_loading.FLAG, action="store_true", dest="quantised")
    own, sglang_arguments = parser.parse_known_args(arguments)
    _leave_megatron_out()
    if not has_cuda():
        _compile_nothing()
        _skip_unneeded_models(sglang_arguments)

    def end(pid: int) -> None:
        """Nobody is left who would wait for a polite end."""
        end_server(os.getpid(), 0.0, own.scratch, include_root=False)
        os._exit(1)

    if own.lifeline is not None:
        watch([own.lifeline], on_death=end)

    # Imported here because it takes seconds, in which the lifeline is already watched.
    with without_collections(for_good=True):
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        if not has_cuda():
            import sglang.srt.entrypoints.http_server  # noqa: F401  all that its copies will need, loaded once

    if not has_cuda():
        _sleep_while_paused()
        if latent_attention.is_latent(_model_of(sglang_arguments)):
            latent_attention.install()
        if mamba_kernels.has_mamba(_model_of(sglang_arguments)):
            mamba_kernels.install()
            sglang_arguments = [*mamba_kernels.ARGUMENTS, *sglang_arguments]
        if sink_attention.has_sinks(_model_of(sglang_arguments)):
            if ngram_drafts.drafts(sglang_arguments):
                raise SystemExit(
                    "generate.speculation: on CPUs, drafts are not verified with sinks; allowed: no drafts"
                )
            sink_attention.install()
            sglang_arguments = [*sink_attention.ARGUMENTS, *sglang_arguments]
        _fork_processes()
    load_plugins()
    _see_as_the_learner(_model_of(sglang_arguments))
    if own.quantised:
        quantised_loading.install()
    if ngram_drafts.drafts(sglang_arguments):
        _look_drafts_up()
    try:
        run_server(prepare_server_args([*sglang_arguments, *take_keys(os.environ)]))
    finally:
        end_server(os.getpid(), 0.0, own.scratch, include_root=False)


def _see_as_the_learner(model: Path) -> None:
    if image_decoding.reads_images(model):
        image_decoding.install()
    if deepstack.has_levels(model):
        deepstack.install()


def _look_drafts_up() -> None:
    ngram_drafts.install()
    if not has_cuda():
        cpu_ngram.install()


def _compile_nothing() -> None:
    """torch loads its compiler for each function that is decorated, also where the environment switches it off."""
    if os.environ.get("TORCH_COMPILE_DISABLE") != "1":
        return
    import torch

    def compile_nothing(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = compile_nothing


def _leave_megatron_out() -> None:
    """An import of it fails as where it is not installed.

    SGLang would load it for its debug dumper, Transformer Engine with it, and could not start where that is not whole.
    """
    sys.modules["megatron"] = None  # type: ignore[assignment]


def _skip_unneeded_models(arguments: Sequence[str]) -> None:
    """SGLang would load the modules of all other models."""
    others = model_modules.unneeded(arguments, _model_of(arguments), model_modules.of_sglang())
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


def _model_of(arguments: Sequence[str]) -> Path:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, default=Path())
    model: Path = parser.parse_known_args(arguments)[0].model_path
    return model


def _sleep_while_paused() -> None:
    """SGLang's scheduler sleeps when it is idle (`sleep_on_idle`), and polls at a whole core while it is paused, which
    the learner needs."""
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self: Scheduler) -> None:
        record(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def _fork_processes() -> None:
    """Copy this process where SGLang starts one. It asks for fresh interpreters, which a CUDA context would need."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _keep_start_method


def _keep_start_method(method: str | None, force: bool = False) -> None:
    """In place of the function by which SGLang asks."""


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a process that SGLang has started afresh
    _leave_megatron_out()
    if quantised_loading.FLAG in sys.argv:
        quantised_loading.install()
    if ngram_drafts.drafts(sys.argv):
        _look_drafts_up()
    _see_as_the_learner(_model_of(sys.argv))
