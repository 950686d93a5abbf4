"""The evaluations of a run: which versions are due, and what becomes of their results.

A version is due when a multiple of `evaluate.every` lies between the step evaluated last and its own; the first one
is, so that a curve has its beginning. What has been evaluated is known by the folders in RUN/evaluations: after a crash
in the middle of an evaluation, the next version that the server gets is evaluated in its place.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.evaluate.evaluator import ORDER, Handles, evaluate, host_evaluated
from streamrl.evaluate.files import evaluated_steps, evaluation_folder, free_folder, write
from streamrl.tasks import left_out
from streamrl.tasks.environment import Environment
from streamrl.tasks.hosted import close_tasks
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)


class RunEvaluator:
    """What a generator worker evaluates its server with; `close` it.

    Usage:
        evaluator = RunEvaluator(config, run_folder)
        if evaluator.is_due(version):
            metrics = await evaluator.run(version, handles)
    """

    def __init__(self, config: Config, run_folder: Path) -> None:
        """The tasks are loaded with the first evaluation."""
        self._config = config
        self._run_folder = run_folder
        self._tasks: dict[str, Environment] = {}
        self._last = max(evaluated_steps(run_folder), default=None)

    def is_due(self, version: PolicyVersion) -> bool:
        """Whether `version` is to be evaluated."""
        every = self._config.evaluate.every
        return self._last is None or version.step // every > self._last // every

    async def run(self, version: PolicyVersion, handles: Handles) -> dict[str, float]:
        """Evaluate and write RUN/evaluations/VERSION. Returns the metrics `eval/...`.

        Raises EngineError for a server that cannot be reached: the next version is due then. An evaluation that ends
        by any other error is over. Files that cannot be written are named in the log, and cost no metrics.
        """
        former, self._last = self._last, version.step
        if not self._tasks:
            self._tasks = await host_evaluated(self._config)
            left_out.apply(self._tasks, left_out.load(self._run_folder).evaluated, ORDER)
        try:
            evaluation, questions = await evaluate(
                self._config, self._tasks, handles, version, label=str(version), step=version.step
            )
        except EngineError:
            self._last = former
            raise
        folder = free_folder(evaluation_folder(self._run_folder, str(version)))
        try:
            await asyncio.to_thread(write, folder, evaluation, questions)
        except OSError as error:
            log.error("the evaluation of version %s was not written: %s", version, error)
        return evaluation.metrics()

    async def close(self) -> None:
        """Let go of the tasks."""
        await close_tasks(self._tasks)
