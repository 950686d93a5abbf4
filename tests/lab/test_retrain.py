"""`streamrl retrain --set`: the same data trained otherwise, on a record that no server was needed for."""

import dataclasses
import math
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from launch import tiny_model
from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.replay import JournalConfig
from streamrl.lab import retrain
from streamrl.lab.audit.command import audit
from streamrl.lab.retrain import caveats
from streamrl.learner.trainer import Trainer
from streamrl.observe.metrics import read_metrics
from streamrl.places import load_run
from streamrl.replay import history
from streamrl.replay.journal import Journal
from streamrl.replay.records import Completed, Consumed, Quarantined
from streamrl.replay.segments import Entry, Opening, scan
from streamrl.stream.codec import encode_group
from streamrl.types import Group

STEPS, GROUPS = 3, 2
SYMBOLS = 10  # of the tiny model's tokenizer


@pytest.fixture(scope="module")
def recorded(make_group, tmp_path_factory) -> Path:
    return _record(tmp_path_factory.mktemp("recorded"), make_group)


def _record(folder: Path, make_group, poison: int | None = None) -> Path:
    """The folder of a run of three steps, as far as `retrain` reads it: configuration and journal, no weights.

    `poison`: the group with a token that the model does not know, which the learner of that run put in quarantine.
    """
    tiny_model.make(folder / "model", 1)
    run = folder / "run"
    (run / "journal").mkdir(parents=True)
    config = Config.model_validate(
        {
            "run": {"name": "run", "folder": folder, "steps": STEPS},
            "model": {"path": folder / "model"},
            "replay": {"groups_per_step": GROUPS},
            "journal": {"keep": "all"},
            "learner": {"optimizer": {"lr": 1e-3}},
        }
    )
    config_file.save(config, run / "config.yaml")
    journal = Journal(run / "journal", JournalConfig(), b"")
    for step in range(STEPS):
        _append(journal, make_group, step, poison)
    journal.commit()
    journal.close()
    return run


def _append(journal: Journal, make_group, step: int, poison: int | None = None) -> None:
    """The groups of a step, and its batch."""
    ids = tuple(range(step * GROUPS, (step + 1) * GROUPS))
    for group_id in ids:
        group = _of_the_tiny_model(make_group(group_id), 1 << 20 if group_id == poison else 0)
        frames = [bytes(frame) for frame in encode_group(group, 1 << 20)]
        journal.append_group(Completed(group_id=group_id, attempt=0, size=1, tokens=1), frames)
    journal.append(Consumed(step=step, group_ids=ids))
    if poison in ids:
        journal.append(Quarantined(step=step, group_id=poison, attempt=0, reason="IndexError"))


@pytest.fixture(scope="module")
def kept(recorded, tmp_path_factory) -> Path:
    """The same run, which has kept the weights of its last step: those that the record gives."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    assert _retrain(recorded, folder.parent / "first") == 0
    shutil.copytree(recorded, folder)
    shutil.copytree(folder.parent / "first" / "model", folder / "weights" / f"{STEPS}.0")
    shutil.copy(folder.parent / "first" / "metrics.jsonl", folder)
    return folder


@pytest.mark.parametrize("name", ["2", "2026.10", "true", "null"])
def test_the_folder_may_have_any_name(name, recorded, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(retrain, "_check", lambda run, before, config, changed: seen.append(config))
    monkeypatch.setattr(retrain.preflight, "check_layout", lambda *_: pytest.fail("enough is seen"))
    with pytest.raises(pytest.fail.Exception):
        _retrain(recorded, tmp_path / "parent: #1" / name)
    assert [(config.run.name, config.run.folder) for config in seen] == [(name, tmp_path / "parent: #1")]


def test_without_a_change_of_meaning_the_weights_are_equal_bit_for_bit(kept, tmp_path, capsys):
    assert _retrain(kept, tmp_path / "again", "checkpoint.export=false", "learner.tick=2.0") == 0
    output = capsys.readouterr().out
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in output
    assert "off-policy" not in output


def test_a_run_that_was_shortened_afterwards_is_trained_to_the_step_that_it_has_now(kept, tmp_path, capsys):
    short = tmp_path / "run"
    shutil.copytree(kept, short)
    config = (short / "config.yaml").read_text()
    assert f"steps: {STEPS}\n" in config
    (short / "config.yaml").write_text(config.replace(f"steps: {STEPS}\n", f"steps: {STEPS - 1}\n"))
    assert _retrain(short, tmp_path / "again", "checkpoint.export=false") == 0
    assert "journal" not in capsys.readouterr().err


def test_a_journal_whose_begin_was_deleted_under_another_setting_is_refused_and_audited_from_where_it_begins(
    kept, make_group, tmp_path, capsys, monkeypatch
):
    later = tmp_path / "run"
    shutil.copytree(kept, later)
    for file in (later / "journal").iterdir():
        file.unlink()
    (later / "journal" / "000003.journal").touch()
    journal = Journal(later / "journal", JournalConfig(keep="resume"), b"")
    for step in (1, 2):
        _append(journal, make_group, step)
    journal.commit()
    journal.close()
    (later / "journal" / "000003.journal").unlink()
    assert _retrain(later, tmp_path / "again") == 2
    assert "journal.keep: all, but the first groups of" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    findings = audit(later, load_run(later))
    assert (findings.first, findings.batches) == (1, 2)
    assert not [problem for problem in findings.problems if "was due" in problem or "before group" in problem]
    written = (later / "journal" / "000004.journal").read_bytes()
    assert written.count(b"\xa4keep\xa6resume") == 1  # where no setting has deleted them, they are lost
    monkeypatch.setattr(history, "scan", lambda *of: map(_kept_all, scan(*of)))
    assert any("where step 0 was due" in problem for problem in audit(later, load_run(later)).problems)


def test_a_batch_that_was_handed_out_and_not_trained_before_the_run_was_ended_is_not_trained(
    kept, make_group, tmp_path, capsys
):
    ended = tmp_path / "run"
    shutil.copytree(kept, ended)
    config = (ended / "config.yaml").read_text()
    (ended / "config.yaml").write_text(config.replace(f"steps: {STEPS}\n", f"steps: {STEPS + 2}\n"))
    journal = Journal(ended / "journal", JournalConfig(), b"")
    _append(journal, make_group, STEPS)
    journal.commit()
    journal.close()
    assert _retrain(ended, tmp_path / "again", "checkpoint.export=false") == 0
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in capsys.readouterr().out


def test_kept_weights_that_lack_a_tensor_are_not_equal(kept, tmp_path, capsys):
    cut = tmp_path / "run"
    shutil.copytree(kept, cut)
    file = cut / "weights" / f"{STEPS}.0" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file)
    assert _retrain(cut, tmp_path / "again", "checkpoint.export=false") == 1
    assert f"step {STEPS}: no, 1 tensors differ, first model.norm.weight" in capsys.readouterr().out


def test_a_signal_ends_it_with_its_own_code_and_blames_nothing(kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", _then_sigterm(Trainer.train_step))
    with pytest.raises(SystemExit) as ended:
        _retrain(kept, tmp_path / "again", "checkpoint.export=false")
    assert ended.value.code == 128 + signal.SIGTERM
    assert "journal" not in capsys.readouterr().err
    assert len(list(read_metrics(tmp_path / "again"))) == 1


def _then_sigterm(train_step):
    def step(trainer, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer, batch)

    return step


def test_a_quarantined_group_is_trained_as_the_placeholders_that_it_was(make_group, tmp_path):
    """With the group as it was recorded the model would be asked for a token that it does not have."""
    run = _record(tmp_path, make_group, poison=3)
    assert _retrain(run, tmp_path / "again", "learner.tick=1.0") == 0
    rows = list(read_metrics(tmp_path / "again"))
    assert [row["quarantined"] for row in rows] == [0, 1, 0]
    assert rows[1]["tokens/trained"] == rows[0]["tokens/trained"] / GROUPS
    assert not (tmp_path / "again" / "quarantine").exists(), "it is known, and not found again"


def test_another_weight_rule_and_learning_rate_see_the_same_data_and_give_other_weights(kept, tmp_path, capsys):
    assert _retrain(kept, tmp_path / "other", "algo.weight=none", "learner.optimizer.lr=3.0e-2") == 0
    output = capsys.readouterr().out
    assert "learner.optimizer.lr: 0.03, in the run 0.001" in output
    assert "algo.weight: none, in the run token" in output
    assert 0 < float(re.search(rf"distance to the run's weights of step {STEPS}: (\S+) of", output)[1]) < 2
    assert "off-policy: every answer was drawn by the weights of the recorded run" in output
    assert re.search(r"effective sample size at the end: [01]\.\d+, in the run [01]\.\d+", output)
    before, after = (list(read_metrics(folder)) for folder in (kept, tmp_path / "other"))
    for name in ("step", "reward/mean", "tokens/trained", "staleness/mean", "length/mean"):
        assert [row[name] for row in after] == [row[name] for row in before]
    assert [row["lr"] for row in after] == [0.03] * STEPS


def test_another_order_of_the_same_sums_gives_the_same_weights_up_to_rounding(kept, tmp_path, capsys):
    assert _retrain(kept, tmp_path / "split", "learner.tokens_per_micro_batch=16") == 0
    output = capsys.readouterr().out
    assert float(re.search(r"distance to the run's weights of step \d+: (\S+) of", output)[1]) < 1e-4
    assert "off-policy" not in output


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("replay.groups_per_step=8", "replay.groups_per_step: 8 would change what the recorded data means; allowed: 2"),
        ("generate.sampling.temperature=0.5", "generate.sampling.temperature: 0.5 would change what the recorded"),
        ("run.seed=7", "run.seed: 7 would change what the recorded data means; allowed: 1"),
        ("model.path=models/other", "models/other would change what the recorded data means"),
        ("learner.router_replay=true", "learner.router_replay: true needs routes that"),
        ("algo.wieght=none", "algo.wieght: unknown key (given none)"),
    ],
)
def test_a_key_that_would_change_what_the_data_means_is_refused_by_name(recorded, tmp_path, capsys, change, line):
    assert _retrain(recorded, tmp_path / "never", change) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_the_caveats_warn_where_most_of_the_data_is_another_policys():
    assert any("WARNING" in line for line in caveats(0.3))
    assert not any("WARNING" in line for line in caveats(0.9))


def _kept_all(entry):
    """An entry as a run with `journal.keep: all` writes it."""
    if isinstance(entry, Entry) and isinstance(entry.record, Opening):
        return dataclasses.replace(entry, record=replace(entry.record, keep="all"))
    return entry


def _retrain(run: Path, output: Path, *changes: str) -> int:
    return cli.main(["retrain", str(run), "--output", str(output), *(["--set", *changes] if changes else [])])


def _of_the_tiny_model(group: Group, first: int = 0) -> Group:
    """The group with tokens that the tiny model knows, from `first` on, each as likely as every other."""
    samples = tuple(
        replace(
            sample,
            prompt_ids=sample.prompt_ids % SYMBOLS,
            output_ids=sample.output_ids % SYMBOLS + first,
            logprobs=np.full(len(sample.output_ids), -math.log(SYMBOLS), np.float32),
        )
        for sample in group.samples
    )
    return replace(group, samples=samples)
