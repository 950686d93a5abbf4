"""The runs of a sweep, one after another: what is done is passed over, what failed is reported, the rest goes on."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.engine.server import ServerFailed
from streamrl.hub.model import with_local_models
from streamrl.lab.sweep import remaining
from streamrl.lab.sweep.plan import Job, Sweep, override
from streamrl.lab.sweep.servers import SharedServers
from streamrl.model_dtype import with_dtype
from streamrl.observe.bars import Bar
from streamrl.observe.ending import is_over
from streamrl.observe.metrics import read_metrics
from streamrl.places import RECORD, absolute, load_run, set_aside
from streamrl.whole_files import write_whole

# One run from start, or resume, to its end, with the exit code of `streamrl train`.
Train = Callable[[Config], int]

INTERRUPTED = 130  # the exit code of a run that ended at a signal

# In the sweep's folder: seconds of each run that began and ended under the sweep, without the start of its servers.
SECONDS = "seconds.json"

# What differs between a recorded run and the same one today, and does not change it.
OF_THE_SWEEP = (
    "run.folder", "run.exit_interval", "run.exit_duration", "generate.attach", "stream.keys", "observe.console"
)  # fmt: skip


class Interrupted(KeyboardInterrupt):
    """A signal ended the sweep; the same command goes on with it. No `except Exception` on its way may keep it."""


def run_jobs(sweep: Sweep, jobs: Sequence[Job], train: Train) -> list[str]:
    """Run what is not done yet. Returns the names of the jobs that failed. Raises Interrupted."""
    with Bar("sweep", "runs", sum(not is_done(job) for job in jobs)) as bar:
        return _run_jobs(sweep, jobs, train, bar)


def _run_jobs(sweep: Sweep, jobs: Sequence[Job], train: Train, bar: Bar) -> list[str]:
    failed = []
    servers = SharedServers(sweep.folder)
    try:
        for number, job in enumerate(jobs, 1):
            head = f"[{number}/{len(jobs)}] {job.name}"
            if is_done(job):
                print(f"{head}: done before", flush=True)
                continue
            print(f"{head}: to {sweep.folder / 'logs' / job.name}.log", flush=True)
            began = time.monotonic()
            reason = _run(sweep, job, servers, train)
            bar.advance()
            if reason is None:
                left = seconds_left(sweep, jobs)
                rest = f"; {remaining.in_words(left)} left" if left is not None else ""
                print(f"{head}: done in {time.monotonic() - began:.0f} s{rest}", flush=True)
                continue
            failed.append(job.name)
            print(f"{head}: FAILED: {reason}", flush=True)
            servers.stop()  # in whatever state it left them
    finally:
        servers.stop()
    return failed


def to_do(sweep: Sweep, jobs: Sequence[Job]) -> str:
    """A line: how many runs there are, how many are done, and how long the others will take."""
    return remaining.summary(len(jobs), sum(map(is_done, jobs)), seconds_left(sweep, jobs), sweep.minutes)


def seconds_left(sweep: Sweep, jobs: Sequence[Job]) -> float | None:
    """Seconds of what is not done, by the time of the finished runs; None where all is done, or no run was timed."""
    seconds = _seconds(sweep)
    left: dict[str, float] = {}
    taken: dict[str, list[float]] = {}
    for job in jobs:
        if not is_done(job):
            missing = 1 - min(1.0, steps_of(job) / job.config.run.steps)
            left[job.point.name] = left.get(job.point.name, 0.0) + missing
        elif job.name in seconds:
            taken.setdefault(job.point.name, []).append(seconds[job.name])
    return remaining.seconds_left(left, taken)


def is_done(job: Job) -> bool:
    """Whether the run has all its steps and came to its end, with the same configuration as now."""
    folder, steps = job.config.run_folder, job.config.run.steps
    if not (folder / RECORD).exists() or steps_of(job) < steps or not is_over(folder, steps):
        return False
    return not _changed(job)


def _changed(job: Job) -> list[str]:
    """The keys of the run that is there that have another value now."""
    differ = config_file.changed(load_run(job.config.run_folder), absolute(with_local_models(job.config)))
    return [key for key in differ if key not in OF_THE_SWEEP]


def steps_of(job: Job) -> int:
    """Learner steps that the run has made."""
    return max((row["step"] for row in read_metrics(job.config.run_folder)), default=0)


def command_lines(sweep: Sweep, jobs: Iterable[Job]) -> Iterator[str]:
    """One `streamrl train` a job, for machines of their own that share `sweep.folder`."""
    for job in jobs:
        yield shlex.join(["streamrl", "train", str(sweep.base), *job.overrides])


def _run(sweep: Sweep, job: Job, servers: SharedServers, train: Train) -> str | None:
    """Run one job. Returns why it failed, None when it is done."""
    log = sweep.folder / "logs" / f"{job.name}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        _check_settings(job)
        config = _attached(sweep, job, servers)
        is_new, began = steps_of(job) == 0, time.monotonic()
        with log.open("a") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = train(config)
    except (ConfigError, ServerFailed) as error:
        return str(error)
    except OSError as error:  # of the sweep's own files: a run tells of its own
        return f"{error.filename or log}: {error.strerror or error}"
    if code == INTERRUPTED:
        raise Interrupted
    if code == 0 and (config.run.exit_interval or config.run.exit_duration) and not is_done(job):
        return (
            f"ended at step {steps_of(job)} of {config.run.steps}, as it was asked to; the same sweep goes on with it"
        )
    if code != 0:
        return f"exit code {code}; {_last_line(log)}"
    if is_new:
        _keep_seconds(sweep, job, time.monotonic() - began)
    return None


def _check_settings(job: Job) -> None:
    """Steps that were made with other settings would pass for steps of these. Raises ConfigError.

    A run may go on to more steps than it had. A folder without a step is set aside.
    """
    folder = job.config.run_folder
    if (steps := steps_of(job)) == 0:
        if (folder / RECORD).exists() and _changed(job):
            set_aside(folder)
        return
    goes_on = job.config.run.steps > steps
    for key in _changed(job):
        if key != "run.steps" or not goes_on:
            was, now = (config_file.value_at(config, key) for config in (load_run(folder), job.config))
            raise ConfigError(
                f"{key}: {now}, and {steps} steps in {folder} were made with {was}; allowed: the same, without that "
                "folder, or --fresh"
            )


def _seconds(sweep: Sweep) -> dict[str, float]:
    """By the runs' names."""
    file = sweep.folder / SECONDS
    return json.loads(file.read_text()) if file.exists() else {}


def _keep_seconds(sweep: Sweep, job: Job, seconds: float) -> None:
    """Without room for it nothing is lost but what the sweep knows of how long the rest takes."""
    file = sweep.folder / SECONDS
    try:
        write_whole(file, json.dumps({**_seconds(sweep), job.name: round(seconds, 1)}, indent=1) + "\n")
    except OSError as error:
        print(f"{file} cannot be written: {error.strerror}", flush=True)


def _attached(sweep: Sweep, job: Job, servers: SharedServers) -> Config:
    """The job's configuration with the addresses of the servers that it shares, if it can share any."""
    keys = [override("stream.keys", str(sweep.folder / "keys"))] if job.config.stream.keys is None else []
    config = config_file.load(sweep.base, [*job.overrides, *keys, "observe.console=false"])
    config = with_dtype(with_local_models(config))
    addresses = servers.addresses(config)
    attach = {"attach": tuple(addresses)} if addresses else {}
    return config.model_copy(update={"generate": config.generate.model_copy(update=attach)})


def _last_line(log: Path) -> str:
    """What the run said last about itself."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("streamrl: ")]
    return lines[-1].removeprefix("streamrl: ") if lines else f"see {log}"
