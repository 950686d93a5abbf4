"""What the scripts of a cluster ask about a run folder.

python -m launch.folder prepare CONFIG      make it, or check that it may be resumed; print its path
python -m launch.folder wait CONFIG         until another node has prepared it for this very configuration
python -m launch.folder complete RUN        exit code 0 when the run has done all of its steps, 2 without a run, else 1
python -m launch.folder ready RUN ROLE      exit code 0 when ROLE (generator-3) is ready since this container's start
python -m launch.folder ready RUN ROLE 1795290000.5    the same since a time, in seconds since the epoch
python -m launch.folder keys FOLDER         make the keys of a run before it starts, for a Secret
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import psutil

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.engine.nodes import has_joined
from streamrl.model_dtype import with_dtype
from streamrl.observe.events import event_path, parse_record
from streamrl.observe.metrics import read_metrics
from streamrl.places import RECORD, absolute, load_run
from streamrl.stream.keys import KeysUnusable, bearer_token, service_keys

POLL = 0.5  # seconds between two looks for what another node does


def prepare(config: Config) -> Path:
    """The run folder, made or checked. Raises ConfigError."""
    from streamrl import run_folder

    return run_folder.prepare(config, fresh=False)


def wait(config: Config) -> Path:
    """The run folder, once it holds `config`, with steps for epochs. Raises ConfigError after `run.start_timeout` s."""
    record = config.run_folder / RECORD
    config = absolute(config)
    deadline = time.monotonic() + config.run.start_timeout
    while not record.exists() or not _is_of(load_run(record.parent), with_dtype(config)):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{record}: not there, or of another configuration, after run.start_timeout="
                f"{config.run.start_timeout:g} s; allowed: one that node 0 prepares on a shared file system"
            )
        time.sleep(POLL)
    return config.run_folder


def _is_of(recorded: Config, config: Config) -> bool:
    """Whether a record is of this configuration. How many steps epochs are is known to node 0 alone."""
    open_keys = {"run.steps", "run.epochs"} if config.run.epochs is not None else set()
    return set(config_file.changed(recorded, config)) <= open_keys


def is_complete(run_folder: Path) -> bool:
    """Whether every step of the run has its row of metrics; the learner's exit tells whether its end is saved."""
    steps = config_file.load(run_folder / "config.yaml").run.steps
    return max((row["step"] for row in read_metrics(run_folder)), default=0) >= steps


def is_ready(run_folder: Path, role: str, since: float) -> bool:
    """Whether a role has written the event `ready` after `since`, in seconds since the epoch.

    A further node of a server (`generator-3-node-1`) writes no events: whether it has joined since then.
    """
    name, _, index = role.rpartition("-")
    if name.endswith("-node"):
        if int(index) > 0:
            return has_joined(run_folder, f"server-{name.split('-')[1]}", int(index), since)
        name, _, index = name.removesuffix("-node").rpartition("-")
    path = event_path(run_folder, name, int(index))
    if not path.exists():
        return False
    with path.open("rb") as lines:
        told = (parse_record(line) for line in lines if b'"ready"' in line)  # of a million others, after days
        return any(event and event["event"] == "ready" and event["time"] >= since for event in told)


def make_keys(folder: Path) -> None:
    """All the keys of a run; those that are there already stay."""
    service_keys(folder)
    for name in ("api", "admin"):
        bearer_token(folder, name)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.folder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", choices=("prepare", "wait", "complete", "ready", "keys"))
    parser.add_argument("path", type=Path)
    parser.add_argument("role", nargs="?", help="such as generator-3")
    parser.add_argument("since", nargs="?", type=float, help="seconds since the epoch")
    options = parser.parse_args()
    if (options.question == "ready") != (options.role is not None):
        parser.error("ready, and nothing else, takes a ROLE")
    if options.role is not None and not re.fullmatch(r"\S+-\d+", options.role):
        parser.error(f"{options.role} is no role; allowed: such as generator-3")
    try:
        match options.question:
            case "prepare" | "wait":
                print((prepare if options.question == "prepare" else wait)(config_file.load(options.path)))
            case "complete":
                return 0 if is_complete(options.path) else 1
            case "ready":
                since = psutil.Process(1).create_time() if options.since is None else options.since
                return 0 if is_ready(options.path, options.role, since) else 1
            case "keys":
                make_keys(options.path)
    except ConfigError as error:
        for line in error.lines:
            print(f"streamrl: {line}", file=sys.stderr)
        return 2
    except KeysUnusable as error:
        print(f"streamrl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
