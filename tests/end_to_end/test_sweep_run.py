"""A sweep of real runs on one server that all of them share."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from streamrl import cli
from streamrl.config import file as config_file
from streamrl.observe.metrics import read_metrics
from tests.shared_memory import assert_none_is_left, nobodys

DEADLINE = 500.0  # seconds; three starts of real roles, one after another
STEPS = 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_share_one_server_the_second_begins_with_the_initial_weights_and_nothing_is_left(
    tiny_model, tmp_path, capsys
):
    file = _sweep(tmp_path, tiny_model)
    before = nobodys()
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", "sweep", str(file)], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "sweeps" / "both"
    runs = [folder / "runs" / f"max_staleness_{bound}-seed1" for bound in (0, 2)]
    attached = {config_file.load(run / "config.yaml").generate.attach for run in runs}
    assert len(attached) == 1
    assert (folder / "logs" / "server-0.log").read_text().count("The server is fired up") == 1
    for run in runs:
        assert len(list(read_metrics(run))) == STEPS
        assert not list((run / "logs").glob("server-*.log"))
        assert cli.main(["audit", str(run)]) == 0, capsys.readouterr().out
    assert "one seed, so that no figure has an interval" in done.stdout
    assert (folder / "reward.svg").exists()
    assert_none_is_left(before)
    port = int(next(iter(attached))[0].rpartition(":")[2])
    assert port not in {each.laddr.port for each in psutil.net_connections() if each.status == psutil.CONN_LISTEN}
    again = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", "sweep", str(file)], capture_output=True, text=True, timeout=DEADLINE
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("done before") == 2


def _sweep(folder: Path, model: Path) -> Path:
    base = {
        "run": {"steps": STEPS, "stop_timeout": 30},
        "model": {"path": str(model)},
        "task": {"name": "copy"},
        "generate": {"group_size": 4, "groups_in_flight": 8, "probes": 0, "sampling": {"max_new_tokens": 8}},
        "replay": {"groups_per_step": 4},
        "learner": {"optimizer": {"lr": 1e-3}},
        "journal": {"keep": "all"},
        "publish": {"keep_every": 1},
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    sweep = {"base": "base.yaml", "folder": str(folder / "sweeps"), "grid": {"replay.max_staleness": [0, 2]}}
    (folder / "both.yaml").write_text(yaml.safe_dump(sweep))
    return folder / "both.yaml"
