"""The run folder: made for a new run, checked for one that is resumed, claimed by one supervisor at a time."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from streamrl import preflight
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.refused import Refusals
from streamrl.config.senseless import warnings
from streamrl.hub.model import recorded_model
from streamrl.hub.repository import model_of
from streamrl.locks import await_roles, locked
from streamrl.model_dtype import with_dtype
from streamrl.places import RECORD, absolute, load_run, set_aside
from streamrl.preflight.epochs import with_steps
from streamrl.recorded.formats import FORMATS
from streamrl.stream.identity import run_identity
from streamrl.tasks import left_out
from streamrl.tasks.left_out import LeftOut
from streamrl.whole_files import write_whole

# Keys that may change when a run is resumed: none of them alters what recorded data means.
RESUMABLE = (
    "run.id", "run.folder", "run.steps", "run.exit_interval", "run.exit_duration", "run.placement", "run.restarts",
    "run.start_timeout", "run.stop_timeout", "run.silence_timeout", "run.progress_timeout", "replay.address",
    "generate.workers", "generate.attach", "generate.groups_in_flight", "generate.request_timeout",
    "generate.server_args", "generate.threads", "generate.heartbeat", "generate.probes", "generate.restarts",
    "generate.single_requests", "generate.servers", "generate.router", "generate.least_in_flight",
    "generate.submission", "generate.requests_in_flight", "generate.lag", "generate.speculation.",
    "generate.stream_every", "generate.score", "stream.", "replay.lease", "replay.group_timeout", "replay.max_attempts",
    "replay.host", "replay.release", "journal.", "learner.ranks", "learner.layout.", "learner.threads", "learner.tick",
    "learner.recompute", "learner.tokens_per_micro_batch", "learner.collective_timeout", "learner.overlap",
    "learner.gradient_accumulation_fusion", "learner.moe_permute_fusion", "learner.tp_comm_overlap",
    "learner.bad_steps", "learner.bad_groups", "learner.empty_steps", "learner.peak_tflops",
    "learner.params_metrics", "learner.profile.", "checkpoint.",
    "publish.transport", "publish.folder", "publish.bucket", "publish.timeout", "publish.keep_every",
    "publish.at_once", "publish.verify_every", "publish.mismatch", "evaluate.", "observe.", "model.shape",
    "model.cache", "model.hub_timeout", "task.max_branches", "task.scoring.", "sft.epochs",
    "reward_model.workers", "reward_model.gpus", "reward_model.threads", "reward_model.host",
    "reward_model.tokens_per_batch", "reward_model.batch_wait", "reward_model.most_waiting", "reward_model.timeout",
    "reward_model.retry", "reward_model.patience", "reward_model.restarts",
)  # fmt: skip


def prepare(config: Config, *, fresh: bool) -> Path:
    """Check a configuration and make its run folder, or check that an existing one may be resumed. Returns it.

    Raises ConfigError for what cannot run (`preflight/`), before anything is written, and as `make` does.
    """
    config = with_dtype(absolute(config), fresh=fresh)
    found = preflight.check(config, fresh=fresh)
    return make(with_steps(config, found), fresh=fresh, left_out_prompts=found)


def make(config: Config, *, fresh: bool, left_out_prompts: LeftOut | None = None) -> Path:
    """Make the run folder of a checked configuration, or check that an existing one may be resumed. Returns it.

    `fresh` keeps an existing folder under the next free name, NAME.1, NAME.2, and starts a new one. `left_out_prompts`:
    what the checks found of them. Raises ConfigError for a changed key that would alter what the recorded data means.
    """
    config = absolute(config)
    folder = config.run_folder
    if fresh and folder.exists():
        await_roles(folder, config.run.start_timeout)
        set_aside(folder)
    record = folder / RECORD
    if record.exists():
        _check_resumable(load_run(folder), config)
    try:
        for name in ("events", "journal", "checkpoints", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if left_out_prompts is not None:
            left_out.save(folder, left_out_prompts)
        run_identity(folder, config.run.id)  # before its configuration: a folder with that alone is an old one
        config_file.save(config, record)
        write_whole(folder / "environment.json", json.dumps(_environment(config), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"run.folder: {folder}: {error.strerror}; allowed: a folder that can be written") from None
    return folder


def check(config: Config, *, fresh: bool) -> None:
    """Whether `lock` and `make` would do; nothing is written. Raises ConfigError as they do."""
    config = absolute(config)
    folder, file = config.run_folder, _lock_file(config)
    if file.exists():
        os.close(_locked(config, file, os.O_RDWR))
    if not fresh and (folder / RECORD).exists():
        _check_resumable(load_run(folder), config)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"run.folder: {there} cannot be written; allowed: a folder that can be written")


def _check_resumable(recorded: Config, config: Config) -> None:
    """Refuse changed keys that would alter what the recorded data means. Raises ConfigError, a line for each."""
    if recorded.trains_rows != config.trains_rows:
        command = "sft" if recorded.trains_rows else "train"
        raise ConfigError(
            f"run.name: {config.run.name} is a run of `streamrl {command}`, in {config.run_folder}; allowed: another "
            "run.name, or --fresh"
        )
    same_model = _is_same_model(recorded, config)
    decays = config.learner.optimizer.decay != "constant"  # over run.steps, which then are part of the data's meaning
    decays |= config.algo.advantage.has_critic and config.critic.optimizer.decay != "constant"
    refusals = Refusals()
    for path in config_file.changed(recorded, config):
        if same_model and path in ("model.path", "model.revision"):
            continue
        if path == "generate.pools" and _fixed_of_pools(recorded) == _fixed_of_pools(config):
            continue
        if not path.startswith(RESUMABLE) or (path == "run.steps" and decays):
            refusals.add(
                f"{path}: {config_file.value_at(config, path)} differs from {config_file.value_at(recorded, path)} of "
                f"the run in {config.run_folder}; allowed: the same value, --fresh, or another run.name"
            )
    refusals.tell()


def _fixed_of_pools(config: Config) -> list[dict[str, Any]]:
    """For each pool what may not change when a run is resumed."""
    return [
        {key: value for key, value in pool.items() if not f"generate.{key}".startswith(RESUMABLE)}
        for pool in config.generate.pools
    ]


def _is_same_model(recorded: Config, config: Config) -> bool:
    """Whether both have one commit of one model of the hub, in any caches. Raises ConfigError for another commit."""
    then, now = model_of(recorded.model.path), model_of(config.model.path)
    if then is None or now is None or then.name != now.name:
        return False
    if then.revision != now.revision:
        asked = (recorded_model(config) or {}).get("revision", now.at)
        raise ConfigError(
            f"model.revision: {asked} of {now.name} is commit {now.at} now, and was {then.at} in the run in "
            f"{config.run_folder}; allowed: model.revision={then.at}, --fresh, or another run.name"
        )
    return True


def lock(config: Config) -> int:
    """Claim the run folder for this process. Returns the file that holds the claim, open until the process ends.

    Raises ConfigError when another process has it. The file is beside the folder, which may be renamed.
    """
    path = _lock_file(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder: {path}: {error.strerror}; allowed: a folder that can be written") from None
    return _locked(config, path, os.O_RDWR | os.O_CREAT)


def _lock_file(config: Config) -> Path:
    return config.run.folder / f".{config.run.name}.lock"


def _locked(config: Config, path: Path, flags: int) -> int:
    try:
        handle = locked(path, flags)
    except OSError as error:
        raise ConfigError(f"run.folder: {path}: {error.strerror}; allowed: a folder that can be written") from None
    if handle is None:
        raise ConfigError(
            f"run.name: {config.run_folder} is in use by another `streamrl train`; allowed: another run.name"
        )
    return handle


def _environment(config: Config) -> dict[str, object]:
    """Packages, commit, host, command line and model of this start, its warnings, and the records' formats."""
    packages = (
        "streamrl",
        "torch",
        "megatron-core",
        "sglang",
        "transformers",
        "transformer-engine",
        "pyzmq",
        "msgspec",
    )
    installed = {name for distribution in metadata.distributions() if (name := distribution.name)}
    git = shutil.which("git")
    commit = subprocess.run(
        [git or "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    ).stdout.strip() if git else ""  # fmt: skip
    return {
        "packages": {name: metadata.version(name) for name in packages if name in installed},
        "python": platform.python_version(),
        "commit": commit,
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
        "model": recorded_model(config),
        "warnings": warnings(config),
        "formats": FORMATS,
    }
