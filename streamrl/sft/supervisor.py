"""The supervisor of `streamrl sft`: that of a run, with the learner as its only role."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from streamrl.config import Config
from streamrl.learner_environment import learner_environment
from streamrl.next_commands import train_line
from streamrl.observe.console import Console
from streamrl.observe.terminal import say
from streamrl.role_process import Role
from streamrl.supervisor import Supervisor


class RowsSupervisor(Supervisor):
    """One run of `streamrl sft` from start, or resume, to its end."""

    def __init__(self, config: Config, run_folder: Path, given: Path) -> None:
        """`given`: the configuration file of the command, for the one that goes on with reinforcement learning."""
        super().__init__(config, run_folder)
        self._given = given

    @property
    def roles(self) -> list[Role]:
        return [self.learner]

    def _start(self, console: Console) -> None:
        self._new_blames()
        self.learner.start()

    def _is_over(self) -> bool:
        return self.learner.exit_code == 0

    def _has_finished(self) -> bool:
        return False  # a learner that dies on its way out is started again, and ends at once

    def _hand_out(self, gpus: Sequence[str]) -> None:
        self.learner.environment |= learner_environment(self.config, os.environ)
        self.learner.environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: self.config.learner.ranks])

    def _print_closing_lines(self) -> None:
        super()._print_closing_lines()
        if (line := train_line(self.config, self.run_folder, self._given)) is not None:
            say(f"  {line}", sys.stdout)
