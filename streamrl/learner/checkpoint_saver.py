"""Writes checkpoints while training goes on: a staged copy, a thread on each rank, one rename at the end.

    start:    every rank stages a copy of its shards on the host (training waits)
    a thread: every rank writes and sums its file ──▶ rank 0 writes index and description, syncs, renames, prunes

    .step_20.saving ──rename──▶ step_20        step_18 ──rename──▶ .step_18.old ──▶ gone

A kill at any point leaves the former checkpoints as they are; what is half written is removed by the next
learner. The threads speak over a process group of their own, so that training's collectives are not disturbed.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from streamrl.config.learner import CheckpointConfig
from streamrl.learner import checkpoint
from streamrl.learner.checkpoint import Checkpoint, State
from streamrl.learner.checkpoint_files import FileSum, SummedWriting, files_of, sum_of
from streamrl.learner.mapping import named_weights
from streamrl.learner.parallel import Ranks
from streamrl.learner.shared_rows import local
from streamrl.types import Ledger, PolicyVersion
from streamrl.whole_files import replace_folder, set_aside, sync, sync_folder

log = logging.getLogger(__name__)

# The folder with the Hugging Face weights inside a checkpoint, so that both appear and go together.
EXPORT = "huggingface"

_JOIN = 0.1  # seconds between looks at the deadline


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or not in time; the text says which and why."""


@dataclass(slots=True)
class _Save:
    """A checkpoint on its way to the disk."""

    target: Path
    description: dict[str, Any]  # of `checkpoint.json`, but for the files
    plan: _Plan
    deadline: float  # time.monotonic()
    thread: threading.Thread | None = None
    error: BaseException | None = None
    oldest: int | None = None  # `Saver.oldest` when it was complete

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.saving")

    @property
    def is_done(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class Saver:
    """The checkpoints of a run, written one after another.

        saver = Saver(run_folder / "checkpoints", ranks, config.checkpoint)
        saver.start(version, state, ledger)      # all ranks; returns when the copy is staged
        for saved in saver.finished(): ...       # rank 0, after any step: these are complete on disk

    `start` and the constructor are collective; the rest each rank calls for itself.
    """

    def __init__(self, root: Path, ranks: Ranks, settings: CheckpointConfig, run: str) -> None:
        """root: RUN/checkpoints of the run with id `run`. Removes what a killed learner left half written there."""
        self._root = root
        self._ranks = ranks
        self._settings = settings
        self._run = run
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.timeout))
        self._under_way: _Save | None = None
        self._finished: list[Checkpoint] = []
        if ranks.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            checkpoint.clean(root)
        ranks.barrier()
        self._oldest = self._oldest_on_disk()

    @property
    def oldest(self) -> int | None:
        """The step of the oldest checkpoint that a run may resume from: those kept by `keep_every` do not count,
        because the journal must not keep every group since the first of them. None when there is none.

        Of the checkpoints that `finished` has seen: one whose name a crash may still undo does not count.
        """
        return self._oldest

    def start(
        self,
        version: PolicyVersion,
        state: State,
        ledger: Ledger | None = None,
        export: Callable[[Path], None] | None = None,
    ) -> None:
        """Begin to write `root/step_N`. All ranks call; a save that is under way is waited for first.

        ledger: rank 0's, which groups are in the weights. export: called on all ranks with the folder into which
        rank 0 is to write the weights in Hugging Face's format. Returns when training may change the weights,
        or, without `checkpoint.background`, when the checkpoint is complete. Raises CheckpointError.
        """
        self._wait()
        target = self._root / f"step_{version.step}"
        deadline = time.monotonic() + self._settings.timeout
        description = {
            "run": self._run,
            "version": str(version),
            "fixed": state.fixed,
            "layout": self._ranks.layout,
            "ledger": ledger,
        }
        save = _Save(target, description, _Plan(), deadline)
        if self._ranks.rank == 0:
            shutil.rmtree(save.partial, ignore_errors=True)
            save.partial.mkdir(parents=True)
        self._ranks.barrier()
        save.plan = _staged(state, save.partial)
        if export is not None:
            export(save.partial / EXPORT)
        save.thread = threading.Thread(target=self._write, args=(save,), name=f"checkpoint-{version.step}", daemon=True)
        self._under_way = save
        save.thread.start()
        if not self._settings.background:
            self._wait()

    def finished(self) -> list[Checkpoint]:
        """The checkpoints that have become complete since the last call, oldest first; empty but on rank 0.

        Raises CheckpointError when a write has failed or has taken longer than `checkpoint.timeout`.
        """
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def wait(self) -> list[Checkpoint]:
        """`finished`, after the end of the write that is under way."""
        self._wait()
        return self.finished()

    def settled(self, seconds: float) -> bool:
        """Whether no write is under way, after a wait of so many seconds at most."""
        save = self._under_way
        if save is not None and save.thread is not None:
            save.thread.join(seconds)
        return save is None or save.is_done

    def close(self) -> None:
        """Let the write that is under way come to its end, so that the rank may leave its process groups.

        On the way out a failure is logged: an error that ended the learner must not be hidden by it.
        """
        try:
            self._wait()
        except CheckpointError as error:
            log.error("%s", error)

    def _wait(self) -> None:
        while (save := self._under_way) is not None:
            assert save.thread is not None
            save.thread.join(_JOIN)
            self._collect()

    def _collect(self) -> None:
        """Take up the write that is under way if it has ended. Raises CheckpointError as `finished` says."""
        save = self._under_way
        if save is not None and save.is_done:
            self._under_way = None
            if save.error is not None:
                raise CheckpointError(f"{save.target} was not written: {save.error}") from save.error
            self._oldest = save.oldest
            if self._ranks.rank == 0:
                self._finished.append(checkpoint.read(save.target))
        elif save is not None and time.monotonic() > save.deadline:
            raise CheckpointError(
                f"{save.target} was not written in checkpoint.timeout={self._settings.timeout:g} seconds"
            )

    def _write(self, save: _Save) -> None:
        """The thread: this rank's file, then rank 0's part; every rank is told how that went."""
        try:
            written = _attempt(save.plan.write)
            everyone: list[Any] | None = [None] * self._ranks.world if self._ranks.rank == 0 else None
            dist.gather_object(written, everyone, dst=0, group=self._group)
            outcome = [_attempt(lambda: self._complete(save, everyone)) if everyone is not None else None]
            dist.broadcast_object_list(outcome, src=0, group=self._group)
            if isinstance(outcome[0], Exception):
                save.error = outcome[0]
            else:
                save.oldest = outcome[0]
        except Exception as error:  # handed to `finished`, which raises it on the training thread
            save.error = error
        finally:
            save.plan = _Plan()  # the staged copy

    def _complete(self, save: _Save, written: list[Any]) -> int | None:
        """Rank 0: make a checkpoint of the files that all ranks have written, and prune the older ones.

        Returns what `oldest` is from now on.
        """
        for rank, result in enumerate(written):
            if isinstance(result, Exception):
                raise CheckpointError(f"rank {rank}: {type(result).__name__}: {result}")
        save.plan.write_index([results for results, _ in written], save.partial)
        sums = {name: each for _, files in written for name, each in files.items()}
        sums |= {name: sum_of(save.partial / name) for name in files_of(save.partial) if name not in sums}
        (save.partial / checkpoint.DESCRIPTION).write_bytes(checkpoint.describe(**save.description, files=sums))
        sync_folder(save.partial)
        replace_folder(save.target, save.partial, durable=True, remove=checkpoint.remove)
        oldest = self._oldest_on_disk()
        self._prune()
        return oldest

    def _oldest_on_disk(self) -> int | None:
        newest = checkpoint.complete(self._root)[-self._settings.keep :]
        return checkpoint.step_of(newest[0]) if newest else None

    def _prune(self) -> None:
        every = self._settings.keep_every
        for folder in checkpoint.complete(self._root)[: -self._settings.keep]:
            if not (every and checkpoint.step_of(folder) % every == 0):
                _discard(folder)


@dataclass(slots=True)
class _Plan:
    """What this rank writes: Megatron's writer, the copies, and on rank 0 the index of all ranks' shards."""

    writer: FileSystemWriterAsync | None = None
    buckets: list[WriteBucket] | None = None
    index: Metadata | None = None

    def write(self) -> tuple[list[Any], dict[str, FileSum]]:
        """Write the copies into this rank's file. Returns torch's results, for the index, and the file's checksum."""
        results: list[Any] = []
        sums: dict[str, FileSum] = {}
        assert self.writer is not None
        for bucket in self.buckets or []:
            answers: queue.Queue[tuple[int, Any]] = queue.Queue()
            begun: queue.Queue[int] = queue.Queue()
            begun.put(0)
            writing = SummedWriting(self.writer.transforms)
            # Megatron calls this in a forked process. A thread does as well, and dies with its learner.
            FileSystemWriterAsync.write_preloaded_data([writing], 0, bucket, answers, begun, True)
            _, answer = answers.get_nowait()
            if isinstance(answer, Exception):
                raise answer
            results += answer
            sums[Path(bucket[0]).name] = writing.sum
        self.buckets = None  # the copies; the index is still needed
        return results, sums

    def write_index(self, results: list[list[Any]], folder: Path) -> None:
        """Rank 0, when every rank has written."""
        assert self.writer is not None
        assert self.index is not None
        _refuse_holes(self.index)
        self.writer.finish(self.index, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))


class _Staging(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the plan of who writes what; the writing is the Saver's."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.plan = _Plan()

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, planned: tuple[Any, ...]) -> AsyncRequest:
        self.plan = _Plan(writer, writer.write_buckets, planned[1])
        return AsyncRequest(None, (), [])


def _staged(state: State, folder: Path) -> _Plan:
    """A copy on the host of what this rank is to write, and small files that are written at once. Collective."""
    # Megatron's own queue is a server process, which would outlive a rank that is killed. Nothing is put into it.
    filesystem_async._results_queue = queue.Queue()
    strategy = _Staging()
    # What several data-parallel ranks have alike, as weights, is shared out among them by size.
    copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = {**state.sharded(loading=False), "random": state.random(), "counts": state.counts()}
    dist_checkpointing.save(
        wanted, str(folder), FullyParallelSaveStrategyWrapper(strategy, copies), async_sharded_save=True
    )
    plan, live = strategy.plan, _live_storages(state)
    plan.buckets = [
        (path, key, (others, [(item, _on_host(tensor, live)) for item, tensor in tensors]))
        for path, key, (others, tensors) in plan.buckets or []
    ]
    return plan


def _refuse_holes(index: Metadata) -> None:
    """Neither Megatron nor torch looks whether the parts of a tensor that is not cut in a regular grid are the tensor.

    Raises CheckpointError: the missing values would be as they happened to be, after a resume.
    """
    for name, tensor in index.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if written != tensor.size.numel():
                raise CheckpointError(f"{written} of {tensor.size.numel()} values of {name} would be written")


def _live_storages(state: State) -> set[int]:
    """Addresses of the storages that training or a reference changes. Others on the host are copies already."""
    tensors = [local(weight) for each in state.all for chunk in each.chunks for _, weight in named_weights(chunk)]
    tensors += [tensor for each in state.all for tensor in each.optimizer.tensors()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _on_host(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    return tensor.to("cpu", copy=tensor.untyped_storage().data_ptr() in live)


def _discard(folder: Path) -> None:
    """Remove a checkpoint without a moment in which half of it has its name."""
    former = set_aside(folder)
    sync(folder.parent)
    checkpoint.remove(former)


def _attempt(action: Callable[[], Any]) -> Any:
    """What `action` returns, or the exception that it raised: another rank must receive it."""
    try:
        return action()
    except Exception as error:
        return error
