"""Runs with several pools, and with workers that come and go."""

import signal
import subprocess
import sys

import pytest

from streamrl import cli
from streamrl.observe.events import event_path, read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.history import recorded_batches

LONG = 5000  # steps; more than anyone waits for


@pytest.mark.slow
def test_two_pools_with_a_temperature_each_one_attached_by_host_name_and_answers_cut_by_updates(
    make_run, fresh_server, model_folders, capsys
):
    run = make_run(steps=LONG)
    far = fresh_server.address.replace("127.0.0.1", "localhost")
    pools = f"generate.pools=[{{name: own}}, {{name: far, attach: ['{far}'], sampling: {{temperature: 0.7}}}}]"
    settings = (pools, "publish.interruption=abort", "generate.sampling.max_new_tokens=64")
    run.start(f"model.path={model_folders[0]}", *settings)
    run.wait_for(lambda: run.steps() >= 1)
    for worker in ("generator-0", "generator-1"):
        run.wait_for(lambda worker=worker: len(_groups_of(run, worker)) > 8)
    groups = _interrupted(run)
    assert {(group.worker, group.temperature) for group in groups} == {("generator-0", 1.0), ("generator-1", 0.7)}
    assert not any(sample.is_placeholder for group in groups for sample in group.samples)
    assert all(row["staleness/max"] <= 2 for row in read_metrics(run.folder))
    for index, pool in enumerate(("own", "far")):
        ready = [
            event for event in read_events(event_path(run.folder, "generator", index)) if event["event"] == "ready"
        ]
        assert [event["pool"] for event in ready] == [pool]
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_worker_joins_a_run_and_leaves_it_and_neither_costs_a_group(make_run, capsys):
    run = make_run(steps=LONG).start()
    run.wait_for(lambda: run.steps() >= 2)
    command = [sys.executable, "-m", "streamrl.cli", "generator", "--run-folder", str(run.folder), "--index", "7"]
    with (run.folder / "logs" / "generator-7.log").open("wb") as log:
        joining = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        run.wait_for(lambda: len(_groups_of(run, "generator-7")) > 4)
        joining.send_signal(signal.SIGTERM)
        joining.wait(60)
    finally:
        if joining.poll() is None:
            joining.kill()
    assert joining.returncode == 0
    left, steps = len(_groups_of(run, "generator-7")), run.steps()
    run.wait_for(lambda: run.steps() >= steps + 3)
    groups = _interrupted(run)
    assert {group.worker for group in groups} == {"generator-0", "generator-7"}
    assert not any(sample.is_placeholder for group in groups for sample in group.samples)
    assert len(_groups_of(run, "generator-7")) == left
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out


def _interrupted(run):
    """The groups that it has trained on until now."""
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    return [group for batch in recorded_batches(run.folder / "journal") for group in batch.groups]


def _groups_of(run, worker):
    """What the replay service has accepted from it."""
    events = read_events(event_path(run.folder, "replay"))
    return [event for event in events if event["event"] == "group.accepted" and event["worker"] == worker]
