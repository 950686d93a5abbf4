"""Runs that are started from Python: the script of the README, the notebook, and what a program may do to its run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM

import streamrl
from launch import tiny_model
from streamrl import cli
from streamrl.api.run import State
from streamrl.observe.ending import saved_steps
from tests.documented_commands import ROOT, blocks

DEADLINE = 240.0  # seconds; a start of SGLang on two busy cores may take one of them
SMALL = {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 4, "learning_rate": 1e-3}
ROWS = [{"prompt": f"{a}{b}=", "answer": f"{b}{a}"} for a in "abcdefgh" for b in "abcdefgh"]


@pytest.fixture
def beside_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which `models/tiny` is, as in a clone after `make demo`."""
    tiny_model.make(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block(page: str, name: str) -> str:
    """The Python block of a page that begins with the name of a file."""
    found = [text for language, text in blocks(ROOT / page) if language == "python" and text.startswith(f"# {name}\n")]
    (text,) = found
    return text


def right(completions, answer, **_):
    return [
        sum(a == b for a, b in zip(text, two, strict=False)) / 2 for text, two in zip(completions, answer, strict=True)
    ]


def test_the_script_of_the_readme_trains_and_ends_with_a_model(beside_models):
    script = block("README.md", "train.py")
    assert script == block("docs/python.md", "train.py")
    (beside_models / "train.py").write_text(script)
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\d+) (0\.\d+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in rows] == list(range(1, 21))
    folder = done.stdout.strip().splitlines()[-1]
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 10
    assert "streamrl: reward reward: pickled by value into" in done.stderr


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(beside_models):
    notebook = nbformat.read(ROOT / "docs" / "first-run.ipynb", as_version=4)
    NotebookClient(notebook, timeout=DEADLINE, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    printed = "".join(output["text"] for output in notebook.cells[-3].outputs if output.get("name") == "stdout")
    rows = re.findall(r"^(\d+) [\d.]+ [\d.]+$", printed, re.MULTILINE)
    assert [int(step) for step in rows] == [1, 2, 3, 4, 5, 6], notebook.cells[-3].outputs
    last = notebook.cells[-1].outputs[-1]
    assert "runs/notebook/model" in last["data"]["text/plain"]


@pytest.mark.slow
def test_a_run_is_stopped_by_a_callback_that_raises_resumed_and_followed_to_its_end(beside_models):
    seen: list[int] = []
    saved: list[Path] = []

    def on_step(row):
        seen.append(row["step"])
        if row["step"] == 3:
            raise LookupError("enough")

    run = streamrl.train("models/tiny", ROWS, right, steps=8, on_step=on_step, on_checkpoint=saved.append, **SMALL)
    with pytest.raises(LookupError, match="enough"):
        run.wait(DEADLINE)
    assert run.state is State.INTERRUPTED
    assert seen == [1, 2, 3]
    assert saved_steps(run.folder), "the stop saved what there was"
    assert saved == []  # nothing is called any more once a callback has raised
    with pytest.raises(FileNotFoundError, match="its newest checkpoint is"):
        _ = run.model_path
    run.resume().wait(DEADLINE)
    assert (run.state, run.metrics.latest["step"]) == (State.DONE, 8)
    assert saved[-1] == run.folder / "checkpoints" / "step_8"
    assert run.model_path.is_dir()
    again = streamrl.train("models/tiny", ROWS, right, steps=8, **SMALL)
    assert again.wait(DEADLINE).state is State.DONE  # nothing was left to do


@pytest.mark.slow
@pytest.mark.parametrize("page_class", ["Guessing", "double"])
def test_the_environment_and_the_tool_of_the_page_train(beside_models, page_class, capsys):
    names: dict[str, object] = {"__name__": "page"}
    for file in ("tools.py", "guessing.py"):
        exec(compile(block("docs/python.md", file), file, "exec"), names)
    given = (
        {"environment": names["Guessing"]}
        if page_class == "Guessing"
        else {"tools": [names["double"]], "reward": right}
    )
    run = streamrl.train("models/tiny", ROWS, steps=3, name=page_class, max_turns=2, publish__keep_every=1,
                         journal__keep="all", **given, **SMALL)  # fmt: skip
    assert run.wait(DEADLINE).metrics.latest["step"] == 3
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out


SCRIPT = """
import streamrl
ROWS = [{"prompt": f"{a}{b}=", "answer": f"{b}{a}"} for a in "abcdefgh" for b in "abcdefgh"]
run = streamrl.train("models/tiny", ROWS, lambda completions, **_: [float(len(c)) for c in completions], steps=%d,
                     group_size=4, groups_per_step=4, max_new_tokens=4)
print("started", flush=True)
%s
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_interrupted_saves_and_one_that_is_killed_leaves_no_process(beside_models, number):
    (beside_models / "train.py").write_text(SCRIPT % (1000, "run.wait()"))
    script = subprocess.Popen([sys.executable, "train.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + DEADLINE
    metrics = beside_models / "runs" / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert script.poll() is None, script.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    family = psutil.Process(script.pid).children(recursive=True)
    script.send_signal(number)
    output, _ = script.communicate(timeout=DEADLINE)
    assert family
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in output
        assert saved_steps(beside_models / "runs" / "run")


@pytest.mark.slow
def test_a_script_that_ends_without_waiting_ends_with_its_run(beside_models):
    (beside_models / "train.py").write_text(SCRIPT % (3, ""))
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert saved_steps(beside_models / "runs" / "run")[-1] == 3
