"""The quickstart as jobs of a real Slurm: told to end in the middle, queued again, and whole at the end.

The scripts are those that `launch.render` wrote, started by the lines that it printed. The cluster is
`tests/launch/slurm_cluster.py`, which says what has to be installed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import tiny_model
from streamrl import cli
from streamrl.observe.events import event_path, read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.history import recorded_batches
from tests.launch.slurm_cluster import Cluster, cluster, free_ports

REPOSITORY = Path(__file__).parents[2]

NODES = {"first": 4, "second": 4, "third": 4}  # cores of each, all of which a job takes

STEPS = 150  # of the quickstart

GROUPS = 32  # of a step

PATIENCE = 500.0  # seconds for anything that must come; two busy cores start a server for one minute

STAND_IN = """#!/usr/bin/env bash
# Replaces the interpreter: a role writes down its node and lives until it is told to end.
case "$*" in
*launch.folder*) exit ;;
*"cli replay"*) role=replay ;;
*"cli learner"*) role=learner ;;
*"cli generator"*) role=generator ;;
esac
trap 'exit 75' TERM
echo "$role $SLURMD_NODENAME" >> {folder}/calls
for _ in {{1..600}}; do sleep 0.1 & wait "$!"; done
"""


class Jobs:
    """One run of the quickstart on the cluster."""

    def __init__(self, slurm: Cluster, folder: Path, /, **description: Any) -> None:
        self.slurm = slurm
        self.run = folder / "runs" / "quickstart"
        self.scripts = folder / "launch"
        described = {
            "config": str(REPOSITORY / "configs/quickstart.yaml"),
            "override": [f"model.path={folder}/model"],
            "folder": str(folder / "runs"),
            "learner": {"nodes": 1, "gpus": 0, "cpus": 4},
            "generators": {"nodes": 1, "gpus": 0, "cpus": 4},
            "python": sys.executable,
            "port": free_ports(1)[0],
        }
        described["override"] += description.pop("override", [])
        (folder / "run.yaml").write_text(yaml.safe_dump(described | description))
        render = [sys.executable, "-m", "launch.render", "slurm", str(folder / "run.yaml"), "-o", str(self.scripts)]
        told = subprocess.run(render, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=PATIENCE)
        self._lines = told.stdout.partition("start it with:\n")[2]

    def submit(self) -> list[str]:
        """The numbers of the jobs: of run.sbatch, or of learner.sbatch and generators.sbatch."""
        self.slurm.run("bash", "-ec", self._lines, cwd=REPOSITORY)
        return sorted(set(self.slurm.run("squeue", "--noheader", "--format=%F").split()), key=int)

    def signal_tree(self, job: str, *options: str) -> None:
        self.slurm.run("scancel", *options, "--signal=TERM", job)

    def preempt(self, job: str) -> None:
        """By another one that wants its node for a moment, and is more urgent."""
        node = self.slurm.job(job)["NodeList"]
        urgent = ["--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=sleep 1"]
        self.slurm.run("sbatch", *urgent)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self._told()
            time.sleep(0.2)

    def wait_for(self, job: str, state: str, restarts: int = 0) -> None:
        """Until a job is in this state, and has been queued again so often."""
        self.wait(lambda: self.slurm.state(job) == (state, restarts))

    def steps(self) -> int:
        return sum(1 for _ in read_metrics(self.run))

    def ready(self, worker: int) -> int:
        """How often a worker has been ready."""
        path = event_path(self.run, "generator", worker)
        return sum(event["event"] == "ready" for event in read_events(path)) if path.exists() else 0

    def assert_whole(self, incarnations: list[int]) -> None:
        """It has learned, with nothing lost or trained twice; `incarnations` of the learner, by step."""
        rows = list(read_metrics(self.run))
        assert [row["version"] for row in rows] == [f"{step}.{n}" for step, n in enumerate(incarnations, 1)]
        assert cli.main(["journal", str(self.run), "--verify"]) == 0
        groups = [group.group_id for batch in recorded_batches(self.run / "journal") for group in batch.groups]
        assert groups == list(range(GROUPS * STEPS))
        assert cli.main(["audit", str(self.run)]) == 0
        rewards = [row["reward/mean"] for row in rows]
        assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.4

    def _told(self) -> str:
        """The ends of all logs."""
        logs = [*self.scripts.glob("*.log"), *self.run.glob("logs/*.log")]
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(logs))


@pytest.fixture
def slurm() -> Iterator[Cluster]:
    with cluster(NODES) as made:
        yield made


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """What the roles write that `tmp_path/python` replaces."""
    (tmp_path / "python").write_text(STAND_IN.format(folder=tmp_path))
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "runs/quickstart/logs").mkdir(parents=True)
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


@pytest.mark.slow
def test_a_job_starts_each_role_on_its_node_is_queued_again_when_told_to_end_and_stays_cancelled(
    slurm, tmp_path, calls
):
    learner, override = {"nodes": 2, "gpus": 0, "cpus": 4}, ["learner.ranks=2"]
    jobs = Jobs(slurm, tmp_path, learner=learner, override=override, python=str(tmp_path / "python"))
    (job,) = jobs.submit()
    expected = ["generator third", "learner first", "learner second", "replay first"]
    jobs.wait(lambda: sorted(calls.read_text().splitlines()) == expected)
    jobs.signal_tree(job)
    jobs.wait_for(job, "PENDING", restarts=1)

    jobs.wait(lambda: sorted(calls.read_text().splitlines()) == sorted(2 * expected))
    slurm.run("scancel", job)
    jobs.wait(lambda: slurm.state(job)[0] in ("CANCELLED", "PENDING"))
    assert slurm.state(job) == ("CANCELLED", 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_allocation_is_told_to_end_is_queued_again_and_comes_to_its_last_step(slurm, tmp_path):
    tiny_model.make(tmp_path / "model")
    jobs = Jobs(slurm, tmp_path)
    (job,) = jobs.submit()
    jobs.wait((jobs.run / "replay.address").exists)
    jobs.signal_tree(job, "--batch")  # while learner and generator still start
    jobs.wait_for(job, "PENDING", restarts=1)
    assert jobs.steps() == 0

    stops = []
    for restarts, options in ((2, ["--batch"]), (3, [])):  # the script alone is told, then every process but that
        jobs.wait(lambda: jobs.steps() >= 30 * (len(stops) + 1))
        jobs.signal_tree(job, *options)
        jobs.wait_for(job, "PENDING", restarts=restarts)
        stops.append(jobs.steps())
    first, second = stops
    assert first < second < STEPS
    jobs.wait_for(job, "COMPLETED", restarts=3)
    jobs.assert_whole([0] * first + [1] * (second - first) + [2] * (STEPS - second))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_jobs_of_their_own_are_preempted_come_back_and_end_with_the_learner(slurm, tmp_path):
    tiny_model.make(tmp_path / "model")
    generators, override = {"nodes": 2, "gpus": 0, "cpus": 4}, ["generate.workers=2"]
    jobs = Jobs(slurm, tmp_path, generators=generators, override=override, slurm={"separate": True})
    learner, pool = jobs.submit()
    first, second = f"{pool}_0", f"{pool}_1"
    jobs.wait(lambda: jobs.steps() >= 10 and jobs.ready(0) == jobs.ready(1) == 1)
    jobs.preempt(first)
    jobs.wait_for(first, "PENDING", restarts=1)
    assert slurm.state(learner) == slurm.state(second) == ("RUNNING", 0)

    jobs.wait(lambda: jobs.steps() >= 60)
    jobs.signal_tree(learner, "--batch")
    jobs.wait_for(learner, "PENDING", restarts=1)
    stopped = jobs.steps()
    assert stopped < STEPS
    jobs.wait(lambda: slurm.state(second)[1] == 1)  # the replay service has told it of the end
    jobs.wait(lambda: all(slurm.state(job)[0] == "COMPLETED" for job in (learner, first, second)))
    jobs.assert_whole([0] * stopped + [1] * (STEPS - stopped))
