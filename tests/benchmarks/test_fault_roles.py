"""The scripted learner of the fault benchmark packs as the real one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.fault_roles import POISON, PackingPlanner, make_group, poisoned
from benchmarks.faults import make_config
from streamrl.config.file import ConfigError
from streamrl.trainable import untrainable
from streamrl.types import Batch, PolicyVersion, Ticket

V0 = PolicyVersion(0)
BREAKS = """
import streamrl.learner.packing as packing

def fails(sample, step):
    raise ValueError("the packing fails")

packing.token_ages = fails
"""


def batch_of(tokens: int, groups: int = 3) -> Batch:
    tickets = [
        Ticket(group_id=index, task="copy", prompt_index=index, seed=1, issued_version=V0, deadline=0.0)
        for index in range(groups)
    ]
    return Batch(step=0, groups=tuple(make_group(ticket, V0, 4, "generator-0", tokens) for ticket in tickets))


def test_every_trained_token_has_a_place_in_the_rows_of_the_real_packing(tmp_path: Path) -> None:
    planner = PackingPlanner(make_config(tmp_path, "fifo", "resume"))
    planner.plan(batch_of(tokens=32))
    planner.rehearse(batch_of(tokens=32))


def test_what_the_real_packing_refuses_the_scripted_learner_refuses(tmp_path: Path) -> None:
    planner = PackingPlanner(make_config(tmp_path, "fifo", "resume"))
    with pytest.raises(ConfigError, match=r"learner\.tokens_per_micro_batch: 512 tokens are too few for group 0"):
        planner.plan(batch_of(tokens=600))


def test_poison_is_well_formed_and_untrainable(tmp_path: Path) -> None:
    planner = PackingPlanner(make_config(tmp_path, "fifo", "resume"))
    (group,) = batch_of(tokens=32, groups=1).groups
    assert untrainable(group, planner.limits) is None
    bad = poisoned(group)
    bad.check()
    assert POISON in bad.samples[-1].output_ids
    assert "not below the vocabulary" in str(untrainable(bad, planner.limits))
    assert msgspec.structs.replace(bad, samples=group.samples) == group


@pytest.mark.slow
def test_groups_that_servers_generate_again_which_are_ahead_of_the_step_are_trained(tmp_path: Path) -> None:
    """Without a journal all that the killed learner had trained is generated again: this seed kills it first."""
    command = [sys.executable, "-m", "benchmarks.faults", "--kills", "1", "--keep", "none", "--seed", "1"]
    command += ["--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["kills"] == {"learner": 1}
    assert figures["again"] > 0


def test_a_packing_that_fails_fails_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    command = [sys.executable, "-m", "benchmarks.faults", "--kills", "1", "--folder", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode != 0
    assert "learner ended by itself" in done.stderr
    assert "ValueError: the packing fails" in (tmp_path / "run" / "logs" / "learner.log").read_text()
