"""The quickstart with each kind of interruption: weights on their way, requests in flight, one process killed, audited.

Each run takes another publish transport and loses another process, so that four runs show all of them. What they leave
behind is looked at by further checks: the log-probs, the transports, the checkpoint that a killed learner came back to.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from streamrl.lab.acceptance.check import Bench, Failed, Measured, Skipped
from streamrl.lab.acceptance.checks import TRANSPORT_OF
from streamrl.lab.acceptance.trial import Trial, Victim, ended, killed_at, record_of
from streamrl.observe.ending import saved_steps
from streamrl.observe.metrics import read_metrics
from streamrl.places import load_run

STEPS, GPU_STEPS = 24, 100  # of the tiny model: enough to kill something in the middle, however fast they are
KILL_AT = 3  # and the first checkpoint is there
MORE = 6  # steps in another layout

# Whom each run loses, by its interruption.
VICTIMS: dict[str, Victim] = {"retract": "server", "in_place": "learner", "drain": "generator", "abort": "learner"}

# With them NCCL writes into the logs of all processes what it finds in their environments.
NCCL_TELLS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}


# Of a run that is measured and not audited: a version, and a checkpoint, of a large model would fill the disk.
MEASURED: dict[str, Any] = {"run.steps": 3, "replay.max_staleness": 0, "publish.keep_every": 0, "checkpoint.every": 0}


def steps_of(bench: Bench) -> int:
    """Learner steps of each run. On one GPU both sides take turns at each."""
    return GPU_STEPS if len(bench.gpus) > 1 else STEPS


def run_of(interruption: str) -> str:
    """The name of its run."""
    return f"quickstart-{interruption}"


def run(bench: Bench, interruption: str) -> Measured:
    """Train, kill, train on to the end, audit."""
    transport, victim = TRANSPORT_OF[interruption], VICTIMS[interruption]
    settings: dict[str, Any] = {
        "run.steps": steps_of(bench), "publish.interruption": interruption, "publish.transport": transport,
    }  # fmt: skip
    with Trial(bench, run_of(interruption), settings) as trial:
        trial.start(environment=NCCL_TELLS if bench.gpus else {})
        trial.until(lambda: trial.step >= KILL_AT and bool(saved_steps(trial.folder)))
        trial.kill(victim)
        trial.finish()
        step = trial.step
    if step != steps_of(bench):
        raise Failed(f"the run ended at step {step} of {steps_of(bench)}")
    return audited(trial.folder, f"{steps_of(bench)} steps by {transport}, {victim} killed")


def audited(folder: Path, what: str) -> Measured:
    """`streamrl audit` of a run. Raises Failed with its first problem."""
    import numpy as np

    from streamrl.lab.audit.command import audit  # it imports torch: what only reads records does without

    findings = audit(folder, load_run(folder))
    if findings.problems:
        more = f" (and {len(findings.problems) - 1} more)" if len(findings.problems) > 1 else ""
        raise Failed(f"{what}: {findings.problems[0]}{more}")
    differences = np.concatenate(findings.differences)
    return Measured(
        f"{what}; {findings.audited} tokens within {differences.max():.2g} nats of Hugging Face",
        f"every promise of the audit, {findings.limits.largest:.2g} nats",
    )


def logprobs(bench: Bench) -> Measured:
    """The learner's log-probs against the server's, of tokens that both computed with the same weights."""
    if bench.own is None:
        return gap(bench, bench.folder / "runs" / measured_run(bench), "/s0")
    with ended(bench, measured_run(bench), MEASURED, model=bench.own) as trial:
        return gap(bench, trial.folder)


def measured_run(bench: Bench) -> str:
    """The run of the model that is measured, whose batches are trained again in every layout."""
    return run_of("retract") if bench.own is None else "model"


def gap(bench: Bench, folder: Path, suffix: str = "", *, allowance: float = 1.0) -> Measured:
    """`offpolicy/log_ratio` of a run's steps. Raises Failed above the limits of the audit times `allowance`."""
    from streamrl.observe.limits import LIMITS

    rows = [row for row in read_metrics(folder) if row.get(f"offpolicy/log_ratio_mean{suffix}") is not None]
    if not rows:
        raise Failed(f"no step of {folder.name} trained a token of its own version")
    mean = max(row[f"offpolicy/log_ratio_mean{suffix}"] for row in rows)
    largest = max(row[f"offpolicy/log_ratio_max{suffix}"] for row in rows)
    limits = LIMITS[bench.dtype]
    said = f"mean {mean:.2g}, largest {largest:.2g} nats in {len(rows)} steps"
    allowed = f"mean {allowance * limits.mean:g}, largest {allowance * limits.largest:g}"
    if not (mean <= allowance * limits.mean and largest <= allowance * limits.largest):
        raise Failed(f"{said}; allowed: {allowed}")
    return Measured(said, allowed)


def publish(bench: Bench, interruption: str) -> Measured:
    """What the run says of its transport: into a server in use, into an idle one, and after the kill."""
    name = run_of(interruption)
    transport, victim = TRANSPORT_OF[interruption], VICTIMS[interruption]
    record = record_of(bench, name)
    used = record.config.publish.transport
    if len(bench.gpus) == 1 and used != transport:
        raise Skipped(f"one GPU: {transport} does not reach the learner's own, the run published by {used}")
    applied = [event for event in record.events("generator", "publish.apply") if "error" not in event]
    busy = [event["seconds"] for event in applied if event["tickets"]]
    idle = [event["seconds"] for event in applied if not event["tickets"]]
    killed = killed_at(bench, name)
    after = [event for event in applied if event["time"] > killed]
    for found, what in ((busy, "into a server in use"), (idle, "into an idle server"), (after, f"after the {victim}")):
        if not found:
            raise Failed(f"{transport}: no version got {what}" + (" was killed" if found is after else ""))
    last = max(int(event["version"].partition(".")[0]) for event in applied)
    if last != steps_of(bench):
        raise Failed(f"{transport}: the last version that a server has is {last}, not {steps_of(bench)}")
    return Measured(
        f"in use {1e3 * statistics.median(busy):.0f} ms ({len(busy)}), idle {1e3 * statistics.median(idle):.0f} ms "
        f"({len(idle)}), {len(after)} after the {victim} was killed",
        "each at least once, up to the last version",
    )


def resume(bench: Bench) -> Measured:
    """A killed learner came back to a checkpoint, and trained every step."""
    name = run_of("in_place")
    record = record_of(bench, name)
    versions = [str(event["version"]) for event in record.events("learner", "ready")]
    if versions[-1].startswith("0."):
        raise Failed(f"the learner came back as version {versions[-1]}: from no checkpoint")
    steps = [int(row["step"]) for row in record.rows()]
    if steps != list(range(1, steps_of(bench) + 1)):
        raise Failed(f"metrics.jsonl has not every step once: {steps}")
    return Measured(
        f"killed, resumed as version {versions[-1]}, all {steps_of(bench)} steps", "from a checkpoint, every step once"
    )


def reshard(bench: Bench) -> Measured:
    """The same run goes on in another layout, from the checkpoint that one rank wrote."""
    record = record_of(bench, run_of("in_place"))
    more = [f"run.steps={steps_of(bench) + MORE}", "learner.ranks=2", "learner.layout.tensor=2"]
    with record as trial:
        trial.start(*more)
        trial.finish()
    versions = [str(event["version"]) for event in trial.events("learner", "ready")]
    if not versions[-1].startswith(f"{steps_of(bench)}."):
        raise Failed(f"two ranks began at version {versions[-1]}, not at step {steps_of(bench)}")
    return audited(trial.folder, f"1 rank to TP 2 at step {steps_of(bench)}, {trial.step} steps")
