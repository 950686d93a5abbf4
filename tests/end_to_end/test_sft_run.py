"""`streamrl sft` as a user runs it: killed, interrupted, on two ranks, looked at, and followed by `streamrl train`."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch import tiny_model
from streamrl.config.task import TaskShare
from streamrl.observe.ending import saved_model, saved_steps
from streamrl.observe.metrics import read_metrics
from streamrl.tasks.registry import build_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

DEADLINE = 600.0  # seconds of one command; a start of SGLang on two busy cores may take a hundred
STEPS = 30
SAME = ("step", "loss/total", "loss/held_out", "tokens/trained", "grad_norm", "lr", "rows/epoch")
CONFIG = """
run: {{name: run, folder: {folder}, steps: {steps}}}
model: {{path: {model}}}
task: {{name: copy}}
generate: {{group_size: 8, groups_in_flight: 8, probes: 1, sampling: {{max_new_tokens: 8}}}}
replay: {{groups_per_step: 8}}
learner: {{optimizer: {{lr: 2.0e-3}}}}
checkpoint: {{every: 4}}
sft: {{batch: 16, evaluate_every: 10, data: {{path: {folder}/rows.jsonl, chat: false, cache: {folder}/cache}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, 300 rows of the copy task, and a configuration."""
    folder = tmp_path_factory.mktemp("sft")
    tiny_model.make(folder / "model")
    task = build_task(TaskShare(name="copy"), 1, "train")
    prompts = [task.prompt(index) for index in range(300)]
    rows = [json.dumps({"prompt": prompt.text, "answer": prompt.answer}) + "\n" for prompt in prompts]
    (folder / "rows.jsonl").write_text("".join(rows))
    text = CONFIG.format(folder=folder, steps=STEPS, model=folder / "model")
    (folder / "config.yaml").write_text(text)
    return folder


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "streamrl.cli", words[0], str(folder / "config.yaml"), *words[1:]]


def run(folder: Path, *words: str) -> str:
    """Its output; it ends well."""
    done = subprocess.run(command(folder, *words), capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(folder: Path, *words: str, at: int) -> subprocess.Popen[str]:
    """The command, once its run `folder / run.name` has made `at` steps."""
    name = next(word.partition("=")[2] for word in words if word.startswith("run.name="))
    process = subprocess.Popen(
        command(folder, *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + DEADLINE
    while len(list(read_metrics(folder / name))) < at:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def rows_of(folder: Path) -> list[dict]:
    return [{name: row.get(name) for name in SAME} for row in read_metrics(folder)]


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, str]:
    """The run that nobody disturbs, and its output."""
    output = run(folder, "sft", "run.name=whole")
    return folder / "whole", output


def test_it_learns_writes_its_model_and_says_how_to_go_on(whole, folder):
    run_folder, output = whole
    rows = rows_of(run_folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss/total"] < 0.7 * rows[0]["loss/total"]
    measured = [row["loss/held_out"] for row in rows if row["loss/held_out"] is not None]
    assert len(measured) == 3
    assert measured[-1] < measured[0]
    assert saved_model(run_folder).step == STEPS
    assert "nats/token" in output
    lines = [line.strip() for line in output.splitlines() if "# " in line]
    printed = [shlex.split(line, comments=True)[1:] for line in lines if line.split()[0].endswith("streamrl")]
    assert {words[0] for words in printed} == {"eval", "report", "sft", "train"}
    model = str(run_folder / "model")
    assert ["train", str(folder / "config.yaml"), "run.name=whole-2", f"model.path={model}"] in printed
    for words in (["report"], ["top", "--once"], ["journal"], ["trace"], ["group"]):
        more = ["1"] if words == ["group"] else []
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", words[0], str(run_folder), *words[1:], *more],
            capture_output=True, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, words
        assert done.returncode == 0 or words[0] in ("journal", "group"), (words, done.stderr)
    again = run(folder, "sft", "run.name=whole")
    assert "reinforcement learning from it" in again


def test_a_run_that_is_killed_and_started_again_equals_the_undisturbed_one_bit_for_bit(whole, folder):
    process = started(folder, "sft", "run.name=killed", at=random.randrange(2, STEPS - 5))
    process.kill()
    process.communicate()
    run(folder, "sft", "run.name=killed")
    assert rows_of(folder / "killed") == rows_of(whole[0])
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (folder / "killed", whole[0]))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_an_interrupted_run_saves_and_exits_with_130_and_the_printed_command_goes_on(whole, folder):
    process = started(folder, "sft", "run.name=interrupted", at=3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, output
    done = len(rows_of(folder / "interrupted"))
    assert saved_steps(folder / "interrupted")[-1] == done < STEPS
    assert "interrupted; this resumes the run:" in output
    words = shlex.split(output.splitlines()[-1].rpartition("this resumes the run: ")[2])
    assert words[-2:] == ["sft", str(folder / "interrupted" / "config.yaml")]
    resumed = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", *words[-2:]], timeout=DEADLINE, check=False, capture_output=True
    )
    assert resumed.returncode == 0
    assert rows_of(folder / "interrupted") == rows_of(whole[0])


def test_two_ranks_train_the_same_numbers_up_to_rounding(whole, folder):
    run(folder, "sft", "run.name=ranks", "learner.ranks=2", "run.steps=6")
    for ours, theirs in zip(rows_of(folder / "ranks"), rows_of(whole[0])[:6], strict=True):
        assert ours["loss/total"] == pytest.approx(theirs["loss/total"], rel=1e-4)
        assert ours["tokens/trained"] == theirs["tokens/trained"]


def test_what_is_not_of_rows_refuses_their_run_in_one_line(whole, folder):
    for words in (
        ["train", "run.name=whole"],
        ["train", "run.name=other", "algo.loss=streamrl.algo.cross_entropy:CrossEntropy"],
    ):
        done = subprocess.run(command(folder, *words), capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_reinforcement_learning_goes_on_from_its_model_far_above_a_random_one(folder):
    run(folder, "sft", "run.name=warm", "run.steps=150", "sft.evaluate_every=0")
    run(folder, "train", "run.name=from-warm", "run.steps=1", f"model.path={folder / 'warm' / 'model'}")
    run(folder, "train", "run.name=from-random", "run.steps=1")
    warm, cold = (next(iter(read_metrics(folder / name)))["reward/mean"] for name in ("from-warm", "from-random"))
    assert cold < 0.4
    assert warm > cold + 0.3
