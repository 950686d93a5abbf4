"""Which run a folder belongs to: a random id, made with the folder, that every greeting and every record carries.

    RUN/run.json   {"id": "9f86d081884c7d65", "adopted": false}

The first process that needs the id makes it; of several at once one does. Two runs that meet on one address, and a
journal or a checkpoint that was copied from another run, are distinguished by it. A copy of a whole run folder is the
same run. A folder from before there were ids is adopted once: what is in it without an id is its own.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

import msgspec

from streamrl.config.file import ConfigError
from streamrl.stream.keys import write_once

log = logging.getLogger(__name__)

FILE = "run.json"

_BYTES = 8  # of a random id: two of a million runs are the same once in 40 million such millions


class AnotherRun(ConfigError):
    """A peer, or a part of a run folder, is of another run; the text names both ids and the way out."""


class RunIdentity(msgspec.Struct, frozen=True):
    """What RUN/run.json says.

    >>> RunIdentity(id="9f86d081884c7d65").owns("9f86d081884c7d65"), RunIdentity(id="a", adopted=True).owns(None)
    (True, True)
    """

    id: str
    adopted: bool = False  # the folder is older than its id: records without one are its own

    def owns(self, said: str | None) -> bool:
        """Whether a record that says it is of run `said` (None: of a time without ids) is of this run."""
        return self.adopted if said is None else said == self.id

    def check(self, what: object, said: str | None) -> None:
        """Raise AnotherRun unless this run owns `what`, a file or a folder of it that says it is of run `said`."""
        if not self.owns(said):
            whose = "a run without an id" if said is None else f"run {said}"
            raise AnotherRun(
                f"{what} is of {whose}, and its run folder is of run {self.id}; allowed: what the run itself wrote, "
                "or a new run (--fresh)"
            )


def run_identity(run_folder: Path, given: str | None = None) -> RunIdentity:
    """The identity of a run, made where the folder has none. `given`: the id that it must have (`run.id`).

    Raises ConfigError where the folder has another id than `given`, or a file that cannot be read or written.
    """
    path = run_folder / FILE
    if not path.exists():
        _make(path, given)
    try:
        identity = msgspec.json.decode(path.read_bytes(), type=RunIdentity)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(
            f'{path}: {error}; allowed: {{"id": "..."}} with the id that RUN/checkpoints/step_N/checkpoint.json names'
        ) from None
    if given not in (None, identity.id):
        raise AnotherRun(f"run.id: {given} differs from {identity.id} of {path}; allowed: the same, or no run.id")
    return identity


def _make(path: Path, given: str | None) -> None:
    adopted = (path.parent / "config.yaml").exists()  # a new folder gets its id before its configuration
    identity = RunIdentity(id=given or secrets.token_hex(_BYTES), adopted=adopted)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = write_once(path, msgspec.json.encode(identity), 0o644)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; allowed: a run folder that can be written") from None
    if adopted and written:
        log.warning("%s is from before runs had ids: it is adopted as run %s", path.parent, identity.id)
