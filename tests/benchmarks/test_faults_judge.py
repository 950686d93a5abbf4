"""The judge of the fault benchmark finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.fault_roles import Saved, Start, Trained, record_path
from benchmarks.faults import Verdict, judge, make_config
from streamrl.types import Ledger

P = 8


def trained(step: int, ids: list[int] | None = None, *, time: float = 0.0, digest: int = 0, oldest: int = 0) -> Trained:
    ids = ids or list(range(P * step, P * step + P))
    return Trained(
        step=step,
        time=time or float(step),
        group_ids=tuple(ids),
        prompts=tuple(("copy", group_id) for group_id in ids),
        digests=tuple(digest for _ in ids),
        oldest=max(oldest, step - 2),
        placeholders=0,
    )


@pytest.fixture
def verdict(tmp_path):
    """`verdict(record, steps, damaged)`: of a learner whose last checkpoint has the groups of so many steps."""

    def run(record: list[Start | Trained], steps: int, damaged: tuple[float, ...] = (), below: int = 0) -> Verdict:
        folder: Path = tmp_path
        record_path(folder).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in record))
        ledger = Ledger(below=below or P * steps, cursors={"copy": below or P * steps})
        (folder / "checkpoint.json").write_bytes(msgspec.json.encode(Saved(f"{steps}.0", 0.0, ledger, (steps,))))
        return judge(folder, make_config(folder, "fifo", "resume"), list(damaged), Verdict())

    return run


BEGIN = Start(version="0.0", checkpoint=0.0)


def test_a_run_that_keeps_its_promises_holds(verdict):
    again = [BEGIN, trained(0), trained(1), trained(2), Start(version="1.1", checkpoint=1.5), trained(1), trained(2)]
    found = verdict(again, steps=3)
    assert found.holds
    assert (found.steps, found.again, found.compared) == (3, 2, 2)


def test_a_group_that_no_step_trained_is_lost(verdict):
    found = verdict([BEGIN, trained(0), trained(1)], steps=3)
    assert (found.lost > 0, found.twice, found.reordered) == (True, 0, 0)


def test_a_group_that_two_steps_trained_is_trained_twice(verdict):
    found = verdict([BEGIN, trained(0), trained(1, [*range(8, 15), 7])], steps=2)
    assert found.twice > 0


def test_a_group_that_the_checkpoint_does_not_know_would_be_trained_twice(verdict):
    assert verdict([BEGIN, trained(0), trained(1)], steps=2, below=15).twice == 1


def test_another_order_and_other_groups_in_a_repeated_step_are_reordered(verdict):
    assert verdict([BEGIN, trained(0, [1, 0, *range(2, 8)])], steps=1).reordered > 0
    repeated = [BEGIN, trained(0), Start(version="0.1", checkpoint=0.0), trained(0, time=5.0, digest=1)]
    assert verdict(repeated, steps=1).reordered == 1
    assert verdict(repeated, steps=1, damaged=(3.0,)).reordered == 0  # nothing else can be asked of a damaged journal


def test_a_token_beyond_the_bound_breaks_it(verdict):
    steps = [trained(step) for step in range(5)]
    steps[4] = msgspec.structs.replace(steps[4], oldest=1)
    assert verdict([BEGIN, *steps], steps=5).broken == 1
