"""`streamrl simulate RUN`: a run whose truth is known is calibrated, and other settings are predicted from it."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.simulate import calibration
from streamrl.lab.simulate.calibration import ALONE, calibrate
from streamrl.lab.simulate.circle import Circle, expected
from streamrl.lab.simulate.command import check_saves, checked
from streamrl.lab.simulate.figures import Figures, figures
from streamrl.lab.simulate.model import Answers, Line, Model, RecordedGroup
from streamrl.lab.simulate.server import ServerSpeed
from streamrl.lab.tune.tuned import Source
from streamrl.observe.events import EventLog, event_path
from streamrl.places import load_run
from streamrl.replay.records import Completed
from streamrl.replay.segments import MAGIC, Opening, encode_record, segment_path
from streamrl.stream.codec import encode_group
from streamrl.types import Group

STEPS = 16


def truth() -> Model:
    """Log-normal answers, a server and a learner that are about as fast as each other."""
    rng = random.Random(5)
    groups = []
    for _ in range(200):
        lengths = tuple(max(1, min(200, round(rng.lognormvariate(3.0, 0.8)))) for _ in range(4))
        groups.append(RecordedGroup(0, lengths, (1.0, 0.0) * 2, (True, False) * 2))
    speed = ServerSpeed(0.008, 0.0006, start=0.002, end=0.002, again=0.0005, latency=0.005)
    return Model(Answers(tuple(groups)), speed, Line(0.2, 5e-4), Line(0.05, 1e-4), copy=0.01)


def config(folder: Path, name: str, servers: int = 1, **replay: object) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": folder, "name": name, "steps": STEPS},
            "generate": {
                "group_size": 4, "groups_in_flight": 16, "sampling": {"max_new_tokens": 200}, "servers": servers,
            },
            "replay": {"groups_per_step": 8, "max_staleness": 2, **replay},
            "checkpoint": {"every": 0},
        }
    )  # fmt: skip


def longer(setting: Config) -> Config:
    """So long that chance is no part of what comes: two runs of 16 steps differ by a tenth in tokens/s."""
    return setting.model_copy(update={"run": setting.run.model_copy(update={"steps": 10 * STEPS})})


def record(given: Config, model: Model) -> Path:
    """A run folder as the run would have left it, written from its simulation."""
    circle, folder = Circle(given, model, seed=7), given.run_folder
    rows = circle.run()
    (folder / "journal").mkdir(parents=True)
    config_file.save(given, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row, default=float) + "\n" for row in rows))
    chunks = [MAGIC, *encode_record(Opening(time=0.0), (b"", b""))]
    for group in circle.groups:
        done = Completed(group_id=group.group_id, attempt=group.attempt, size=0, tokens=group.tokens)
        chunks += encode_record(done, tuple(encode_group(_written(group), 1 << 28)))
    segment_path(folder / "journal", 0).write_bytes(b"".join(bytes(chunk) for chunk in chunks))
    EventLog(event_path(folder, "learner"), "learner-0").close()
    with event_path(folder, "generator").open("w") as events:
        for update in circle.updates:
            worker, label = _recorded_names(update["role"])
            of_worker = {"role": worker, "tickets": update["tickets"] * given.generate.servers}
            applied = {**update, **of_worker, "event": "publish.apply", "phase": "end", "server": f"server-{label}"}
            events.write(json.dumps(applied) + "\n")
    return folder


def _recorded_names(site: str) -> tuple[str, str]:
    """`generator-0.1`, a server of a worker in the simulation -> (`generator-0`, `0-1`), as a run records them."""
    return site.partition(".")[0], site.removeprefix("generator-").replace(".", "-")


def _written(group: Group) -> Group:
    """With arrays of its own, of the types that the wire takes, and the worker's name."""
    return replace(
        group,
        worker=_recorded_names(group.worker)[0],
        samples=tuple(
            replace(
                sample,
                output_ids=np.zeros(len(sample.output_ids), np.int32),
                logprobs=np.zeros(len(sample.output_ids), np.float32),
                loss_mask=np.array(sample.loss_mask),
            )
            for sample in group.samples
        ),
    )


def near(predicted: Figures, actual: Figures) -> None:
    """The bars of `--validate`."""
    assert predicted.trained == pytest.approx(actual.trained, rel=0.1)
    assert predicted.staleness_mean == pytest.approx(actual.staleness_mean, abs=0.3)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(config(tmp_path_factory.mktemp("runs"), "known"), truth())


@pytest.mark.slow
def test_a_calibrated_model_predicts_settings_that_were_not_recorded(recorded: Path) -> None:
    model = calibrate([recorded])
    for replay in ({}, {"max_staleness": 0}, {"max_staleness": 1}, {"max_staleness": 4}, {"order": "ready"}):
        setting = config(recorded.parent, "other", **replay)
        near(expected(setting, model), figures(Circle(longer(setting), truth(), 2).run()))


def test_a_run_with_several_servers_a_worker_predicts_its_own_record(tmp_path: Path) -> None:
    slow = dataclasses.replace(truth(), learner=Line(0.02, 1e-5))  # generation is the limit
    given = config(tmp_path, "servers", servers=2)
    run = record(given, slow)
    near(expected(longer(given), calibrate([run])), figures(Circle(longer(given), slow, 2).run()))


def test_a_run_with_tools_predicts_the_tokens_that_it_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "CALLS", 60)  # a coarse fit: the learner is the limit
    known = truth()
    groups = tuple(
        dataclasses.replace(group, trained=tuple(length - length // 3 for length in group.lengths))
        for group in known.answers.groups
    )
    slow = dataclasses.replace(known, answers=Answers(groups), learner=Line(0.2, 5e-3))
    given = config(tmp_path, "tools")
    run = record(given, slow)
    near(expected(longer(given), calibrate([run])), figures(Circle(longer(given), slow, 2).run()))
    assert cli.main(["simulate", str(run), "generate.sampling.max_new_tokens=100"]) == 2
    assert "max_new_tokens: 100 would cut turns, and" in capsys.readouterr().err


def test_a_run_behind_a_router_is_read_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    behind = config_file.load(
        None,
        ["generate.attach=[http://a:1]", "generate.router=http://b:1", f"run.folder={tmp_path}", "run.name=behind"],
    )
    behind.run_folder.mkdir()
    config_file.save(behind, behind.run_folder / "config.yaml")
    assert cli.main(["simulate", str(behind.run_folder), "replay.max_staleness=1"]) == 2
    assert "0 learner steps are too few to calibrate" in capsys.readouterr().err
    source = Source(behind.run_folder / "config.yaml", (), behind.run_folder)
    assert source.load().generate.router is None
    assert config_file.load(source.path, source.given).generate.attach == ()


def test_a_run_whose_pools_have_servers_of_two_kinds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = "generate.pools=[{name: small}, {name: large, tensor_parallel: 2}]"
    mixed = config_file.load(None, [pools, f"run.folder={tmp_path}", "run.name=mixed"])
    mixed.run_folder.mkdir()
    config_file.save(mixed, mixed.run_folder / "config.yaml")
    assert cli.main(["simulate", str(mixed.run_folder)]) == 2
    said = capsys.readouterr().err
    assert "mixed: generate.pools: tensor_parallel is 2 in large, and 1 for the servers that are modelled" in said
    assert len(said.splitlines()) == 1


def test_what_the_model_knows_of_pools_and_publishing_is_a_setting(recorded: Path) -> None:
    own = load_run(recorded, ALONE)
    pools = "generate.pools=[{name: a, workers: 2, sampling: {max_new_tokens: 100}}, {name: b, groups_in_flight: 4}]"
    assert checked(recorded, own, [pools]).workers == 3
    by_memory = own.model_copy(update={"publish": own.publish.model_copy(update={"transport": "memory"})})
    words = ["publish.transport=memory", "publish.at_once=2"]
    assert checked(recorded, by_memory, words).publish.at_once == 2


def test_checkpoints_may_be_varied_once_one_was_saved(tmp_path: Path) -> None:
    own = config(tmp_path, "saved")
    more = own.model_copy(update={"checkpoint": own.checkpoint.model_copy(update={"every": 4})})
    with EventLog(event_path(own.run_folder, "learner"), "learner-0").span("learner.save", step=1):
        pass
    check_saves([own.run_folder], own, [own, more])


def test_a_worker_of_another_name_is_taken_for_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CALLS", 12)  # a coarse fit
    run = record(config(tmp_path, "foreign"), truth())
    recorded = list(calibration.recorded_groups(run))
    named = [replace(group, worker="somebody's own") for group in recorded]
    monkeypatch.setattr(calibration, "recorded_groups", lambda _: named)
    assert calibrate([run]).server.rate(16) > 0


def test_the_command_prints_a_row_for_each_setting_and_writes_them(
    recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    words = ["simulate", str(recorded), "publish.every=2", "--vary", "replay.max_staleness=1,4", "--json", str(output)]
    assert cli.main(words) == 0
    written = json.loads(output.read_text())
    assert list(written) == [
        "as recorded",
        "the model of it",
        "publish.every=2 replay.max_staleness=1",
        "publish.every=2 replay.max_staleness=4",
    ]
    assert written["as recorded"]["trained"] == pytest.approx(written["the model of it"]["trained"], rel=0.1)
    printed = capsys.readouterr().out
    assert "replay.max_staleness=4" in printed
    assert "ms a decoding step" in printed


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("learner.optimizer.lr=1", "learner.optimizer.lr: its effect is not modelled"),
        ("generate.sampling.max_new_tokens=500", "max_new_tokens: 500 is above the recorded 200"),
        ("publish.every=9", "publish.every: 9 would deadlock"),
        ("checkpoint.every=4", "checkpoint.every: 4 saves checkpoints, and"),
        (
            "generate.pools=[{name: a}, {name: b, threads: 4}]",
            "generate.pools: threads is 4 in b, and 1 for the servers",
        ),
        (
            "generate.pools=[{name: a, sampling: {max_new_tokens: 500}}]",
            "max_new_tokens: 500 is above the recorded 200",
        ),
    ],
)
def test_what_the_model_cannot_know_is_refused_in_one_line(
    recorded: Path, word: str, refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", str(recorded), word]) == 2
    said = capsys.readouterr().err
    assert refused in said
    assert len(said.splitlines()) == 1


def test_what_computing_caches_again_takes_is_not_known_of_a_run_that_kept_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = config(tmp_path, "kept")
    kept = kept.model_copy(update={"publish": kept.publish.model_copy(update={"interruption": "in_place"})})
    kept.run_folder.mkdir()
    config_file.save(kept, kept.run_folder / "config.yaml")
    assert cli.main(["simulate", str(kept.run_folder), "publish.interruption=retract"]) == 2
    assert "publish.interruption: retract computes caches again, and" in capsys.readouterr().err


def test_a_run_that_recorded_too_little_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = config(tmp_path, "short")
    short.run_folder.mkdir()
    config_file.save(short, short.run_folder / "config.yaml")
    assert cli.main(["simulate", str(short.run_folder)]) == 2
    assert "0 learner steps are too few to calibrate" in capsys.readouterr().err
    assert cli.main(["simulate"]) == 2
    assert "either RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--validate", "--vary", "publish.every=1,2"], "--vary: --validate has no use for it; allowed: without"),
        (["--validate", "2", "--also", "run"], "--also: --validate has no use for it"),
        (["--fleet", "fleet.yaml", "--validate"], "--validate: --fleet has no use for it"),
        (["--fleet", "fleet.yaml", "--vary", "publish.every=1,2"], "--vary: --fleet has no use for it"),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "run", *words]) == 2
    assert capsys.readouterr().err.startswith(f"streamrl: {line}")
