"""`streamrl journal RUN`: what it shows, what it finds, what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.replay import JournalConfig
from streamrl.lab.journal_export import export
from streamrl.recorded.journal import RunJournal, batches
from streamrl.replay.journal import Journal
from streamrl.replay.records import Began, Completed, Consumed, Dropped, Saved
from streamrl.replay.segments import scan, segment_path
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion
from tests.operations_table import documented

MakeGroup = Callable[..., Group]


@pytest.fixture
def run(tmp_path: Path, make_group: MakeGroup) -> Path:
    """A run folder whose journal has two segments: group 0 committed, 1 consumed, 2 dropped and then completed."""
    folder = tmp_path / "run"
    folder.mkdir()
    config_file.save(Config.model_validate({}), folder / "config.yaml")
    journal = Journal(folder / "journal", JournalConfig.model_validate({}), b"")
    append_group(journal, make_group(0))
    append_group(journal, make_group(1, tokens=0))
    journal.append(Consumed(step=0, group_ids=(0,)))
    journal.roll(b"")
    append_group(journal, make_group(2))
    journal.append(Dropped(group_id=2, attempt=0, reason="too old", same_prompt=True, prompt_index=2))
    append_group(journal, make_group(2, attempt=1))
    journal.append(Consumed(step=1, group_ids=(1,)))
    journal.append(Saved(oldest=1))
    journal.commit()
    journal.close()
    return folder


def append_group(journal: Journal, group: Group) -> None:
    frames = [bytes(frame) for frame in encode_group(group, 1 << 20)]
    journal.append_group(Completed(group_id=group.group_id, attempt=group.attempt, size=1, tokens=1), frames)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_segments_states_and_steps_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["journal", str(run)]) == 0
    told = capsys.readouterr().out
    assert "2 segments" in told
    assert "groups: waiting 0, issued 0, completed 1, consumed 1, committed 1" in told
    assert "dropped 1" in told
    assert "steps 0 to 1" in told


def test_a_whole_journal_is_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["journal", str(run), "--verify"]) == 0
    assert "every record and every frame matches its checksum" in capsys.readouterr().out


@pytest.mark.parametrize("apart", [290, pytest.param(29, marks=pytest.mark.slow)])
def test_damage_anywhere_fails_the_verification_and_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], apart: int
) -> None:
    path = segment_path(run / "journal", 0)
    content = path.read_bytes()
    for position in range(0, len(content), apart):
        flip(path, position)
        assert cli.main(["journal", str(run), "--verify"]) == 1
        assert "segment 000000: " in capsys.readouterr().out
        path.write_bytes(content)


def test_the_torn_tail_of_the_newest_segment_is_told_and_is_no_damage(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = segment_path(run / "journal", 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["journal", str(run), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "segment 000001: torn tail of" in told
    assert "every record" in told


def test_groups_of_a_history_that_was_given_up_are_told_from_those_that_have_their_ids_and_attempts_now(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    """The learner started before the oldest step that the journal goes on from: every id begins at attempt 0 again."""
    journal = Journal(tmp_path / "journal", JournalConfig.model_validate({}), b"")
    append_group(journal, make_group(0))
    append_group(journal, make_group(1))
    journal.append(Dropped(group_id=1, attempt=0, reason="no signal", same_prompt=True, prompt_index=1))
    append_group(journal, make_group(1, attempt=1))
    journal.append(Consumed(step=0, group_ids=(0, 1)))
    journal.append(Saved(oldest=1))
    journal.append(Began(version=PolicyVersion(0, 1), next_step=0))
    append_group(journal, make_group(0))
    append_group(journal, make_group(1))
    journal.append(Consumed(step=0, group_ids=(0, 1)))
    journal.commit()
    journal.close()
    found = [(each.group_id, each.attempt, each.state, each.reason, each.steps) for each in RunJournal(tmp_path).groups]
    assert found == [
        (0, 0, "replaced", None, ()),
        (1, 0, "dropped", "no signal", ()),
        (1, 1, "replaced", None, ()),
        (0, 0, "consumed", None, (0,)),
        (1, 0, "consumed", None, (0,)),
    ]


def test_lines_of_json_hold_every_sample_and_what_became_of_it(
    run: Path, tmp_path: Path, make_group: MakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "groups.jsonl"
    assert cli.main(["journal", str(run), "--export", str(output)]) == 0
    assert "8 samples written" in capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    fates = [(row["group_id"], row["attempt"], row["sample"], row["state"], row["step"]) for row in rows]
    assert fates == [
        (0, 0, 0, "committed", 0),
        (0, 0, 1, "committed", 0),
        (1, 0, 0, "consumed", 1),
        (1, 0, 1, "consumed", 1),
        (2, 0, 0, "dropped", None),
        (2, 0, 1, "dropped", None),
        (2, 1, 0, "completed", None),
        (2, 1, 1, "completed", None),
    ]
    sample = make_group(0).samples[1]
    assert rows[1]["output_ids"] == sample.output_ids.tolist()
    assert np.asarray(rows[1]["logprobs"], np.float32).tobytes() == sample.logprobs.tobytes()
    assert rows[1]["versions"] == [{"version": "0.0", "start": 0, "end": 5, "exact": True}]
    assert (rows[1]["reward"], rows[1]["reward_parts"]) == (1.0, {"exact": 1.0})
    assert rows[4]["reason"] == "too old"
    assert [row["rollout"] for row in rows] == [0, 1] * 4


def test_rows_sorted_by_step_position_and_sample_are_in_the_order_of_the_batches(
    run: Path, tmp_path: Path, make_group: MakeGroup
) -> None:
    journal = Journal(run / "journal", JournalConfig.model_validate({}), b"")
    for group_id in (3, 4, 5):
        append_group(journal, make_group(group_id))
    journal.append(Consumed(step=2, group_ids=(5, 3)))
    journal.append(Consumed(step=3, group_ids=(2, 4, 5), reused=(5,)))
    journal.commit()
    journal.close()
    output = tmp_path / "groups.jsonl"
    export(RunJournal(run), output, [])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    uses = [
        (step, position, row["sample"], row["group_id"])
        for row in rows
        for step, position in zip(row["steps"], row["positions"], strict=True)
    ]
    trained = [
        (batch.step, position, sample, group.group_id)
        for batch in batches(run)
        for position, group in enumerate(batch.groups)
        for sample in range(len(group.samples))
    ]
    assert sorted(uses) == trained
    assert [group_id for *_, group_id in trained] == [0, 0, 1, 1, 5, 5, 3, 3, 2, 2, 4, 4, 5, 5]
    first = {row["group_id"]: (row["step"], row["position"]) for row in rows if row["state"] != "dropped"}
    assert first == {0: (0, 0), 1: (1, 0), 2: (3, 0), 3: (2, 1), 4: (3, 1), 5: (2, 0)}
    assert [row["position"] for row in rows if row["state"] == "dropped"] == [None, None]


def test_parquet_holds_the_same_as_the_lines_of_json(run: Path, tmp_path: Path) -> None:
    lines, table = tmp_path / "groups.jsonl", tmp_path / "groups.parquet"
    for output in (lines, table):
        assert cli.main(["journal", str(run), "--export", str(output)]) == 0
    rows = pyarrow.parquet.read_table(table).to_pylist()
    for row in rows:
        row["reward_parts"] = dict(row["reward_parts"])
    for row, line in zip(rows, lines.read_text().splitlines(), strict=True):
        expected = json.loads(line)
        np.testing.assert_allclose(row.pop("logprobs"), expected.pop("logprobs"), rtol=1e-6)
        assert row == expected


def test_groups_that_came_after_the_records_were_read_are_left_to_the_next_export(
    run: Path, tmp_path: Path, make_group: MakeGroup
) -> None:
    read = RunJournal(run)
    journal = Journal(run / "journal", JournalConfig.model_validate({}), b"")
    append_group(journal, make_group(3))
    journal.commit()
    journal.close()
    assert export(read, tmp_path / "groups.jsonl", []) == 8
    assert export(RunJournal(run), tmp_path / "groups.jsonl", []) == 10


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("groups.csv", "allowed: a file that ends in .jsonl or .parquet"),
        ("there.jsonl", "there.jsonl exists; allowed: a new file"),
        ("nowhere/groups.jsonl", "nowhere is no folder"),
    ],
)
def test_an_export_that_cannot_be_written_is_refused_in_one_line(
    run: Path, tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.jsonl").touch()
    assert cli.main(["journal", str(run), "--export", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_the_export_of_a_damaged_journal_leaves_out_the_group_that_is_gone_and_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = segment_path(run / "journal", 0)
    flip(path, next(entry.end - 1 for entry in scan(0, path) if isinstance(entry.record, Completed)))
    output = tmp_path / "groups.jsonl"
    code = cli.main(["journal", str(run), "--export", str(output)])
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    documented("... groups cannot be read and are left out, the first: ...", err, code)
    assert len(output.read_text().splitlines()) == 6
    assert "6 samples written" in out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_without_a_journal_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file.save(Config.model_validate({}), tmp_path / "config.yaml")
    assert cli.main(["journal", str(tmp_path)]) == 2
    assert "no segments" in capsys.readouterr().err
