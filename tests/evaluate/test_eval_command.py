"""`streamrl eval`: what it refuses, and a kept version whose exact pass rates a Hugging Face forward pass gives."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from launch import tiny_model
from streamrl.cli import main
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.evaluate.files import evaluation_folder, read_questions, read_summary

DEADLINE = 300.0  # seconds; the start of a server on busy cores
SAMPLES = 256
ALPHABET = "abcdefgh"
TRAINING = 8  # steps, after which the tiny model is right about every second time


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has kept no version yet."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_model.make(folder / "tiny")
    config = Config.model_validate(
        {
            "run": {"name": "run", "folder": folder, "start_timeout": DEADLINE},
            "model": {"path": folder / "tiny"},
            "task": {"name": "copy", "args": {"length": 1, "alphabet": ALPHABET, "held_out": 0.9}},
            "evaluate": {"samples": SAMPLES, "k": [1, 2, 8]},
            "generate": {"sampling": {"max_new_tokens": 4}},
        }
    )
    (folder / "run").mkdir()
    config_file.save(config, folder / "run" / "config.yaml")
    return folder / "run"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "eval takes either CONFIG [key=value ...] or --run-folder RUN"),
        (["--run-folder", "{}", "generate.router=http://h"], "generate.router: http://h is not allowed"),
        (["--run-folder", "{}", "evaluate.k=[999]"], "evaluate.k: 999 needs as many answers, samples=256"),
        (
            ["--run-folder", "{}"],
            "no version was kept (publish.keep_every), nor a trained model written (checkpoint.export); allowed:",
        ),
        (["--run-folder", "{}", "--model", "{}"], "is no model; allowed: a Hugging Face folder"),
        (["--run-folder", "{}", "--model", "{}", "--version", "1.0"], "--version: names the weights of a run"),
        (["{}/config.yaml", "--version", "1.0"], "--version: names the weights of a run"),
        (["{}/config.yaml", "--output", "{}"], "exists; allowed: a new folder"),
        (["{}/config.yaml", "evaluate.tasks=[{{name: copy, args: {{long: 1}}}}]"], "task.args.long"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert main(["eval", *(argument.format(run_folder) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_version_that_was_not_kept_is_refused_with_those_that_were(
    run_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for version in ("3.0", "10.0"):
        (run / "weights" / version).mkdir(parents=True)
    (run / "config.yaml").write_text((run_folder / "config.yaml").read_text())
    assert main(["eval", "--run-folder", str(run), "--version", "4.0"]) == 2
    assert "--version: 4.0 was not kept; allowed: 3.0, 10.0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_pass_rates_of_a_kept_version_are_those_of_its_exact_distribution(run_folder: Path) -> None:
    version = run_folder / "weights" / "3.0"
    tiny_model.make(version)
    model = _partly_trained(version)
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", "eval", "--run-folder", str(run_folder)],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    folder = evaluation_folder(run_folder, "3.0")
    summary, questions = read_summary(folder), read_questions(folder, "copy")
    chances = [_chance(model, question.expected or "") for question in questions]
    assert len(chances) == 7
    assert 0.2 < sum(chances) / len(chances) < 0.8  # else the test would show little
    spread = math.sqrt(sum(chance * (1 - chance) / SAMPLES for chance in chances))
    found = summary.tasks["copy"]
    assert abs(found.figures["pass@1"].value - sum(chances) / 7) < 4 * spread / 7
    for k in (2, 8):
        expected = sum(1 - (1 - chance) ** k for chance in chances) / 7
        slope = max(k * (1 - chance) ** (k - 1) for chance in chances)  # carries the error of a chance on
        assert abs(found.figures[f"pass@{k}"].value - expected) < 4 * slope * spread / 7
    assert found.figures["greedy"].value == sum(_is_greedy(model, q.expected or "") for q in questions) / 7
    assert (summary.label, summary.step, found.answers, found.unanswered) == ("3.0", 3, 7 * (SAMPLES + 1), 0.0)
    assert "pass@8" in done.stdout
    assert (folder / "index.html").exists()
    assert not (run_folder / "logs").exists()  # the server's own files are not the run's


def _ids(symbol: str) -> torch.Tensor:
    """`x=x` and the end, as the tiny tokenizer numbers them: the end 0, "=" 1, the letters from 2."""
    letter = 2 + ALPHABET.index(symbol)
    return torch.tensor([[letter, 1, letter, 0]])


def _partly_trained(folder: Path) -> PreTrainedModel:
    """Train the tiny model to copy one letter, not to the end, and write it back."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    ids = torch.cat([_ids(symbol) for place, symbol in enumerate(ALPHABET) for _ in range(place + 1)])  # unevenly
    labels = ids.clone()
    labels[:, :2] = -100
    for _ in range(TRAINING):
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    return model


def _logprobs(model: PreTrainedModel, symbol: str) -> torch.Tensor:
    """Log-probs [2, V] of what follows `x=` and `x=x`."""
    with torch.no_grad():
        return torch.log_softmax(model(_ids(symbol)).logits[0, 1:3], -1)


def _chance(model: PreTrainedModel, symbol: str) -> float:
    """That the model answers `x=` by `x` and its end."""
    return float(_logprobs(model, symbol).gather(1, _ids(symbol)[0, 2:, None]).sum().exp())


def _is_greedy(model: PreTrainedModel, symbol: str) -> bool:
    return bool((_logprobs(model, symbol).argmax(-1) == _ids(symbol)[0, 2:]).all())
