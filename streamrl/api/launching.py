"""One start of a run on this machine: its checks, its claim on the run folder, its supervisor, which has yet to run.

configuration ──checks──▶ claim ──▶ run folder ──▶ Supervisor.run()
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl import preflight, run_folder
from streamrl.api.inputs import FOLDER, Inputs
from streamrl.config import Config, senseless
from streamrl.locks import await_roles
from streamrl.model_dtype import with_dtype
from streamrl.observe.prometheus import check_address
from streamrl.places import absolute
from streamrl.preflight import machine
from streamrl.preflight.epochs import with_steps
from streamrl.preflight.model import attached_towers
from streamrl.supervisor import Supervisor
from streamrl.tasks.left_out import LeftOut


@contextmanager
def launched(config: Config, *, fresh: bool = False, inputs: Inputs | None = None) -> Iterator[Supervisor]:
    """The supervisor of a run that was made, or is resumed, for as long as the run folder is claimed.

    fresh: keep an existing folder as NAME.1. inputs: what the run brings along, written into its folder.
    Raises ConfigError before anything is written.
    """
    config = with_dtype(absolute(preflight.local_model(config)), fresh=fresh)
    left_out = _check(config, inputs, fresh=fresh)
    config = with_steps(config, left_out)
    claim = run_folder.lock(config)
    try:
        check_address(config)
        if inputs is not None and not fresh:
            inputs.check(config.run_folder / FOLDER)
        await_roles(config.run_folder, config.run.start_timeout)  # else a run of a cluster would lose its address
        folder = run_folder.make(config, fresh=fresh, left_out_prompts=left_out)
        if inputs is not None:
            inputs.write(folder / FOLDER)
        of_machine = (*machine.crowding(config), *machine.rounding(config))
        remarks = (*of_machine, *attached_towers(config), *left_out.lines())
        senseless.warn([*senseless.warnings(config), *remarks])
        yield Supervisor(config, folder)
    finally:
        os.close(claim)


def _check(config: Config, inputs: Inputs | None, *, fresh: bool) -> LeftOut:
    """The checks of a start, with the inputs in a folder of their own: the run's is not made yet."""
    if inputs is None:
        return preflight.check_start(config, fresh=fresh)
    with tempfile.TemporaryDirectory(prefix="streamrl-") as folder:
        inputs.write(Path(folder))
        return preflight.check_start(inputs.placed(config, Path(folder)), fresh=fresh)
