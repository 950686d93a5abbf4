"""What `streamrl report` reads from a run folder, and what it puts into the page."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from streamrl import cli
from streamrl.config.algo import AlgoConfig
from streamrl.lab.report import command, curves, groups, samples, settings, time_use
from streamrl.lab.report.groups import read_groups
from streamrl.lab.report.notes import Notes
from streamrl.lab.report.page import embed
from streamrl.lab.report.runs import Run, read_runs
from streamrl.lab.report.samples import Shown, pieces
from streamrl.observe.bars import Bar
from streamrl.observe.events import event_path
from streamrl.observe.taken_off import TAKEN_OFF
from tests.lab.report_run import BEGIN, GROUPS, NASTY, STEPS, group, make_model, record_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bytes"
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    return read(record_run(tmp_path_factory.mktemp("runs") / "one", model))


def read(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_page_is_one_file_that_asks_for_nothing_else(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert cli.main(["report", str(run.folder), "-o", str(target), "--ratios", "no"]) == 0
    page = target.read_text()
    before, after = page.split('<script type="application/json" id="data">')
    style_and_script = before + after.split("</script>", 1)[1]
    # where the library says what it is
    assert re.findall(r"https?://[^\"' ]+", style_and_script) == ["https://github.com/leeoniya/uPlot"]
    assert "Copyright (c) 2022 Leon Sorokin" in style_and_script
    assert not re.search(r"<(link|img|iframe)|\bsrc=|\bimport\b|url\(", style_and_script)
    assert "default-src 'none'" in page


def test_an_installed_package_has_every_part_of_the_page_with_its_licence() -> None:
    globs = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["streamrl"]
    packed = {path for each in globs for path in Path("streamrl").glob(each)}
    parts = {path for path in Path("streamrl/lab/report").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert parts | set(Path("streamrl/lab/report/third_party").glob("*/LICENSE")) <= packed


def test_no_text_of_a_run_can_end_the_element_that_holds_it(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    command.main([run.folder], target, ratios="no")
    shown = data_of(target)["runs"][0]
    assert "".join(shown["samples"]["steps"][0]["answers"][0]["tokens"]) == NASTY
    assert shown["settings"]["environment"]["command"] == [NASTY]
    assert not set("<>&\u2028") & set(embed({NASTY: NASTY}))
    assert json.loads(embed({NASTY: [NASTY, float("nan"), 1.5]})) == {NASTY: [NASTY, None, 1.5]}


def test_without_a_place_the_page_is_in_the_first_runs_folder(model: Path, tmp_path: Path) -> None:
    one, other = (record_run(tmp_path / name, model, steps=1) for name in ("one", "other"))
    assert cli.main(["report", str(one), str(other), "--ratios", "no"]) == 0
    assert [run["name"] for run in data_of(one / "report.html")["runs"]] == ["one", "other"]
    assert not (other / "report.html").exists()


def test_a_folder_that_is_no_run_and_a_run_twice_are_one_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ([str(tmp_path)], [str(run.folder), str(run.folder)], [str(run.folder), "-o", str(tmp_path / "a/b")]):
        assert cli.main(["report", *wrong, "--ratios", "no"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_step_of_a_short_run_is_a_point(run: Run) -> None:
    found = curves.describe(run)
    assert found["step"] == list(range(1, STEPS + 1))
    assert found["tokens"] == [100 * step for step in range(1, STEPS + 1)]
    assert found["seconds"] == [10.0 * step for step in range(1, STEPS + 1)]
    assert found["metrics"]["reward/mean"] == {"y": [curves.brief(step / STEPS) for step in range(1, STEPS + 1)]}
    assert found["metrics"]["offpolicy/ess"]["y"] == [0.9, None, *[0.9] * (STEPS - 2)]
    assert found["staleness"]["s2"] == [0.6] * STEPS


def test_a_long_run_has_means_with_their_extremes_beside_them(run: Run) -> None:
    count = 10_000
    values = np.random.default_rng(0).normal(size=count).tolist()
    rows = [{"step": step + 1, "time": BEGIN + step, "reward/mean": value} for step, value in enumerate(values)]
    found = curves.describe(Run("long", run.folder, run.config, {}, rows, BEGIN), runs=8)
    reward, size = found["metrics"]["reward/mean"], found["steps_a_point"]
    assert len(reward["y"]) == len(found["step"]) <= curves.ALL_POINTS // 8
    assert found["step"][-1] == count
    assert reward["y"][1] == pytest.approx(np.mean(values[size : 2 * size]), rel=1e-4)
    assert min(reward["low"]) == curves.brief(min(values))
    assert max(reward["high"]) == curves.brief(max(values))


def test_curves_that_are_zero_throughout_are_left_out_and_each_evaluated_task_has_its_own(run: Run) -> None:
    found = {panel["title"]: panel for panel in curves.panels([{"curves": curves.describe(run)}])}
    assert "KL to the reference" not in found
    assert found["Evaluation of copy"]["metrics"][0]["name"] == "eval/copy/pass@1"
    assert found["Reward"]["metrics"][0]["meaning"]


def test_parts_of_the_reward_and_tasks_have_panels_of_eight_and_hints_have_their_steps(run: Run) -> None:
    parts = {f"reward/part/p{index}": 1.0 for index in range(9)}
    tasks = {"task/easy/reward/mean": 0.5, "task/easy/pass_rate": 0.5, "task/easy/groups": 1.0}
    troubled = {"offpolicy/ess": 0.2, "length/cut": 0.1}
    rows = [{"step": step, "time": BEGIN + step, **parts, **tasks, **troubled} for step in range(1, 13)]
    other = Run("other", run.folder, run.config, {}, rows, BEGIN)
    found = curves.panels([{"curves": curves.describe(other)}])
    assert [len(panel["metrics"]) for panel in found if panel["title"] == "Reward parts"] == [8, 1]
    titles = {panel["title"] for panel in found}
    assert {"Reward by task", "Pass rate by task", "Groups by task", "Answers cut at the length limit"} <= titles
    (hint,) = command.describe(other, 1, "no", Bar("report", "parts"))["hints"]
    assert hint["steps"] == "from step 10"
    assert hint["text"] == "the effective sample size is 0.20"
    assert hint["link"] == "docs/operations.md#it-does-not-learn"


def test_what_became_of_the_groups_is_counted_over_all_of_them(run: Run, model: Path) -> None:
    found = read_groups(run).describe()
    assert found is not None
    rows = {row["name"]: row for row in found["fates"]}
    assert {name: row["groups"] for name, row in rows.items()} == {
        "generated": STEPS * (GROUPS + 1),
        "trained": STEPS * GROUPS,
        "dropped": STEPS,
        "no signal": STEPS,
    }
    every = [group(each, 0, model) for each in range(STEPS * (GROUPS + 1))]
    assert rows["generated"]["tokens"] == sum(each.tokens for each in every)
    assert rows["generated"]["length"] == pytest.approx(sum(each.tokens for each in every) / len(every) / 5, abs=0.01)
    assert rows["trained"]["pass_rate"] == 0.2


def test_lengths_and_ages_are_those_of_the_samples(run: Run, model: Path) -> None:
    found = read_groups(run)
    lengths: Counter[int] = Counter()
    ages: Counter[int] = Counter()
    for each in range(STEPS * (GROUPS + 1)):
        step, place = divmod(each, GROUPS + 1)
        if place < GROUPS:
            for sample in group(each, step, model).samples:
                lengths[len(sample.output_ids)] += 1
                ages.update((step - sample.token_steps()[sample.loss_mask]).tolist())
    assert found.lengths[groups.TRAINED] == lengths
    assert found.ages == ages
    assert set(ages) == {0, 1, 2}


def test_of_many_groups_a_part_is_read_spread_evenly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUPS", 6)
    found = read_groups(run)
    assert found.read == 6
    assert len(found.recorded) == STEPS * (GROUPS + 1)


def test_long_answers_share_bins() -> None:
    binned = groups._binned(Counter({0: 1, 1: 2, 30_000: 3}))
    assert binned["width"] == 128
    assert binned["counts"] == [(0, 3), (30_000 // 128 * 128, 3)]


def test_shown_answers_are_few_spread_over_training_from_best_to_worst(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "STEPS", 3)
    shown = samples.choose(run, read_groups(run))
    by_step: dict[int, list[Shown]] = {}
    for each in shown:
        by_step.setdefault(each.step, []).append(each)
    assert list(by_step) == [0, 2, STEPS - 1]
    for answers in by_step.values():
        assert [each.sample.reward for each in answers] == sorted(
            (each.sample.reward for each in answers), reverse=True
        )
        assert (answers[0].sample.reward, answers[-1].sample.reward, len(answers)) == (1.0, 0.0, samples.SAMPLES)
        assert answers[0].advantage == pytest.approx(-answers[-1].advantage, abs=1e-6)
        assert answers[0].advantage > 1


@pytest.mark.parametrize(
    "algo",
    [
        {"advantage": {"estimator": "gae"}},
        {"distillation": {"teacher": "teacher", "rewards": False}, "kl": 0.0},
    ],
    ids=["critic", "teacher"],
)
def test_answers_whose_tokens_have_advantages_of_their_own_have_none_of_their_group(run: Run, algo: Any) -> None:
    config = run.config.model_copy(update={"algo": AlgoConfig.model_validate(algo)})
    own = dataclasses.replace(run, config=config)
    shown = samples.choose(own, read_groups(own))
    assert {each.advantage for each in shown} == {None}
    described = samples.describe(own, shown, "")["steps"]
    assert {answer["advantage"] for step in described for answer in step["answers"]} == {None}


def test_rewards_are_shown_as_trained_where_the_kl_took_something_off(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    algo = run.config.algo.model_copy(update={"kl_reward": 0.1})
    run = dataclasses.replace(run, folder=folder, config=run.config.model_copy(update={"algo": algo}))
    found = read_groups(run)
    lost = [
        (each.group_id, [3.0 * sample.reward for sample in loaded.samples])
        for each in found.by_step[0]
        if (loaded := found.load(each)) is not None
    ]
    with event_path(folder, "learner").open("a") as file:
        file.write(
            json.dumps({"time": BEGIN, "role": "learner-0", "event": TAKEN_OFF, "step": 0, "groups": lost}) + "\n"
        )
    shown = [each for each in samples.choose(run, found) if each.step == 0]
    assert (shown[0].sample.reward, shown[-1].sample.reward) == (0.0, 1.0)  # 1 has become -2
    assert shown[0].advantage > 1
    answers = samples.describe(run, shown, "")["steps"][0]["answers"]
    assert [(answer["reward"], answer["parts"].get("kl_reward")) for answer in (answers[0], answers[-1])] == [
        (0.0, None),
        (-2.0, -3.0),
    ]


def test_long_answers_are_cut_and_fewer_steps_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "TOKENS", 10)
    monkeypatch.setattr(samples, "ALL_TOKENS", 100)
    shown = samples.choose(run, read_groups(run))
    described = samples.describe(run, shown, "")
    assert len(described["steps"]) == 2
    answer = described["steps"][0]["answers"][0]
    assert answer["length"] > 10
    assert all(len(answer[name]) == 10 for name in ("tokens", "ids", "logprobs"))
    assert [place for place, value in enumerate(answer["logprobs"]) if value is None] == answer["untrained"] == [1]


def test_a_character_of_several_tokens_is_at_its_last_one(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode("aé漢b").ids
    assert pieces(ids, tokenizer) == ["a", "", "é", "", "", "漢", "b"]
    assert pieces([5, 6], None) == ["5 ", "6 "]


def test_ratios_are_those_of_the_weights_that_the_step_began_with(run: Run) -> None:
    shown = samples.choose(run, read_groups(run))
    assert command.add_ratios(run, shown, "yes").startswith("by a Hugging Face forward pass")
    for each in (shown[0], shown[-1]):
        sample = each.sample
        reference = AutoModelForCausalLM.from_pretrained(run.folder / "weights" / f"{each.step}.0")
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.output_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(ids).logits[0], -1)
        start = len(sample.prompt_ids)
        expected = [logprobs[start + place - 1, token].item() for place, token in enumerate(sample.output_ids)]
        assert each.ratios is not None
        np.testing.assert_allclose(each.ratios, np.array(expected) - sample.logprobs, atol=1e-5)


def test_ratios_that_cannot_be_had_say_why(run: Run, model: Path, tmp_path: Path) -> None:
    shown = samples.choose(run, read_groups(run))
    assert "--ratios no" in command.add_ratios(run, shown, "no")
    bare = Run("bare", tmp_path, run.config, {}, [])
    assert "publish.keep_every" in command.add_ratios(bare, shown, "auto")


def test_what_the_roles_did_fills_the_time_that_they_lived(run: Run) -> None:
    found = time_use.describe(run)
    assert found is not None
    whole = found["seconds"]
    assert whole == pytest.approx(10 * STEPS + 1, abs=2)
    learner = next(line for line in found["roles"] if line["name"] == "learner-0")
    assert learner["seconds"]["train"] == pytest.approx(5 * STEPS)
    assert learner["seconds"]["wait"] == pytest.approx(2.5 * STEPS)
    for line in (*found["roles"], found["held"]):
        for phase, shares in line["slices"].items():
            assert sum(shares) * whole / time_use.SLICES == pytest.approx(line["seconds"][phase], abs=0.2)
    assert sum(found["held"]["seconds"].values()) == pytest.approx(whole, abs=0.01)


def test_many_generators_share_a_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_use, "GENERATORS", 0)
    found = time_use.describe(run)
    assert found is not None
    assert [line["name"] for line in found["roles"]][-1] == "1 generators, mean"


def test_restarts_and_failures_are_of_note_and_like_ones_are_one_line(run: Run) -> None:
    notes = {(note.event, note.role): note for note in run.notes}
    again = notes["process.again", "generator-0"]
    assert (again.grade, again.is_mark) == ("bad", True)
    assert "no last word" in again.text
    failed = notes["publish.failed", "replay-0"]
    assert (failed.count, failed.last - failed.time) == (2, 1.0)
    assert failed.text.endswith("again")
    assert [note.time for note in run.notes] == sorted(note.time for note in run.notes)


def test_what_was_damaged_refused_or_could_not_be_trained_or_measured_is_of_note() -> None:
    told = (
        ("learner-0", "checkpoint.damaged", {"told": "step_60 is set aside"}),
        ("learner-0", "learner.quarantined", {"step": 4, "group_id": 9, "reason": "no token"}),
        ("replay-0", "replay.refused", {"peer": "generator", "name": "generator-0", "reason": "another run"}),
        ("generator-0", "evaluate", {"phase": "begin"}),
        ("generator-0", "evaluate", {"phase": "end", "failed": "no answer"}),
        ("generator-0", "mismatch", {"phase": "end"}),
    )
    notes = Notes()
    for time, (role, event, fields) in enumerate(told):
        notes.feed({"time": float(time), "role": role, "event": event, **fields})
    assert [(note.event, note.text) for note in notes.in_order()] == [
        ("checkpoint.damaged", "step_60 is set aside"),
        ("learner.quarantined", "group 9 of step 4 cannot be trained: no token"),
        ("replay.refused", "generator generator-0 was refused: another run"),
        ("evaluate", "evaluate: no answer"),
    ]


def test_a_run_says_whether_it_is_complete_was_killed_or_goes_on(run: Run, model: Path, tmp_path: Path) -> None:
    assert (run.status, run.is_well) == ("the run is complete", True)
    killed = record_run(tmp_path / "killed", model, steps=2, end=False)
    with (killed / "metrics.jsonl").open("ab") as rows:
        rows.write(b'{"step": 3, "rew')
    assert (read(killed).status, read(killed).is_well) == ("ended without a last word", False)
    assert len(read(killed).rows) == 2
    assert command.main([killed], ratios="no") == 0
    (killed / "locks").mkdir()
    with (killed / "locks" / "replay-0").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (read(killed).status, read(killed).is_well) == ("going on", True)


def test_a_run_that_has_only_begun_has_a_page(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run.folder / "config.yaml").read_text())
    assert command.main([tmp_path]) == 0
    shown = data_of(tmp_path / "report.html")["runs"][0]
    assert (shown["status"], shown["groups"], shown["time"], shown["figures"]) == ("not begun", None, None, [])


def test_a_page_has_no_key_of_a_server(model: Path, tmp_path: Path) -> None:
    secret = {"api-key": "sk-hidden", "admin_api_key": None, "mem_fraction_static": 0.5}
    run = read(record_run(tmp_path / "run", model, steps=1, generate__server_args=secret))
    run.environment["command"] = ["streamrl", "train", "run.steps=1", "generate.server_args={api-key: 'sk-''hidden'}"]
    shown = settings.describe(run)
    assert "sk-" not in json.dumps(shown)
    assert shown["environment"]["command"][2:] == ["run.steps=1", f"generate.server_args={settings.LEFT_OUT}"]
    assert "mem_fraction_static" in shown["file"]
    other = read(record_run(tmp_path / "other" / "run", model, steps=1, generate__server_args={"api_key": "sk-other"}))
    assert "sk-" not in json.dumps(settings.differences([run, other]))


def test_only_the_keys_that_differ_are_on_top(model: Path, tmp_path: Path) -> None:
    folders = [
        record_run(tmp_path / name / "run", model, steps=1, replay__max_staleness=bound)
        for name, bound in (("a", 1), ("b", 4))
    ]
    runs = read_runs(folders)
    assert [run.name for run in runs] == ["a/run", "b/run"]
    assert [(row["key"], row["values"]) for row in settings.differences(runs)] == [
        ("replay.max_staleness", ["1.0", "4.0"])
    ]
    assert settings.differences(runs[:1]) == []
    changed = {row["key"] for row in settings.describe(runs[1])["changed"]}
    assert "replay.max_staleness" in changed
    assert "replay.order" not in changed
