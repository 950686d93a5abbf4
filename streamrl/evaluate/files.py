"""The folder of an evaluation: summary.json, a TASK.jsonl with every answer for each task, index.html to look at.

    RUN/evaluations/20.0/summary.json     the figures with their standard errors
                         copy.jsonl       one prompt a line, with all its answers
                         index.html       the same in a browser, without a server or a network

It appears whole or not at all: a crash in the middle of an evaluation leaves none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from streamrl.evaluate.page import render
from streamrl.evaluate.results import Evaluation, Question
from streamrl.types import PolicyVersion
from streamrl.whole_files import drafted_folder

SUMMARY = "summary.json"


def evaluation_folder(run_folder: Path, label: str) -> Path:
    """Where the evaluation of `label` (a version, or a model folder's name) is written."""
    return run_folder / "evaluations" / label


def free_folder(folder: Path) -> Path:
    """`folder`, or with the next number behind it where an evaluation is there: 20.0, 20.0-2, 20.0-3."""
    names = itertools.chain([folder.name], (f"{folder.name}-{number}" for number in itertools.count(2)))
    return next(free for name in names if not (free := folder.with_name(name)).exists())


def evaluated_steps(run_folder: Path) -> list[int]:
    """The steps of a run's versions that have been evaluated, ascending."""
    steps = set()
    for summary in (run_folder / "evaluations").glob(f"*/{SUMMARY}"):
        try:
            step = PolicyVersion.parse(summary.parent.name.partition("-")[0]).step
            if read_summary(summary.parent).step == step:
                steps.add(step)
        except (ValueError, msgspec.DecodeError):  # an evaluation of other weights, or none
            continue
    return sorted(steps)


def write(folder: Path, evaluation: Evaluation, questions: Mapping[str, Sequence[Question]]) -> None:
    """Write everything to a new folder. Raises OSError."""
    line = msgspec.json.Encoder()
    with drafted_folder(folder, replaces=False) as draft:
        for task, asked in questions.items():
            (draft / f"{task}.jsonl").write_bytes(b"".join(line.encode(question) + b"\n" for question in asked))
        (draft / "index.html").write_text(render(evaluation, questions), encoding="utf-8")
        (draft / SUMMARY).write_bytes(msgspec.json.format(line.encode(evaluation), indent=1) + b"\n")


def read_summary(folder: Path) -> Evaluation:
    """The figures of a folder. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Evaluation)


def read_questions(folder: Path, task: str) -> list[Question]:
    """The prompts of a task with their answers. Raises OSError, msgspec.DecodeError."""
    decoder = msgspec.json.Decoder(Question)
    return [decoder.decode(line) for line in (folder / f"{task}.jsonl").read_bytes().splitlines()]
