"""The files of an evaluation: read back as they were, whole or not at all, and a page that no answer can break."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from streamrl.evaluate import files
from streamrl.evaluate.files import SUMMARY, evaluation_folder, free_folder, read_questions, read_summary, write
from streamrl.evaluate.results import Evaluation, Judged, Question, figures

HOSTILE = "</pre><script>alert(1)</script>\u2028\ud7ff\x00 café ∑"


def judged(text: str, passed: bool) -> Judged:
    return Judged(text=text, passed=passed, reward=float(passed), parts={"exact": 1.0}, tokens=3, finish_reason="stop")


QUESTIONS = [
    Question(index=0, prompt="caf=", expected="caf", greedy=judged("caf", True), answers=(judged(HOSTILE, False),) * 2),
    Question(
        index=1,
        prompt=[{"role": "system", "content": "short"}, {"role": "user", "content": HOSTILE}],
        images=("a.png",),
        answers=(judged("yes", True), judged("no", False)),
        missing=1,
        reasons=("not finished at the deadline",),
    ),
]
EVALUATION = Evaluation(
    label="20.0", step=20, started=1.7e9, seconds=2.5, samples=2, temperature=1.0, max_new_tokens=8, complete=True,
    tasks={"copy": figures(QUESTIONS, (1, 2))},
)  # fmt: skip


class Page(HTMLParser):
    """What a browser makes of a page: its tags, and its text outside of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_an_evaluation_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = evaluation_folder(tmp_path, "20.0")
    write(folder, EVALUATION, {"copy": QUESTIONS})
    assert read_summary(folder) == EVALUATION
    assert read_questions(folder, "copy") == QUESTIONS
    summary = json.loads((folder / SUMMARY).read_text())
    assert summary["tasks"]["copy"]["figures"]["pass@2"] == {"value": 0.5, "error": 0.5, "prompts": 2}
    assert len((folder / "copy.jsonl").read_text().split("\n")) == 3  # one line each


def test_the_page_shows_every_answer_and_runs_nothing_of_it(tmp_path: Path) -> None:
    write(tmp_path / "20.0", EVALUATION, {"copy": QUESTIONS})
    page = Page((tmp_path / "20.0" / "index.html").read_text(encoding="utf-8"))
    assert page.tags.count("script") == 1  # its own
    assert page.tags.count("details") == 2
    text = "".join(page.words)
    assert text.count("alert(1)</script>") == 4  # two answers, a prompt whole and in its line
    assert "pass@1" in text
    assert "0.250 ± 0.250" in text
    assert "not finished at the deadline" in text


def test_a_crash_in_the_middle_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "render", crash)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "20.0", EVALUATION, {"copy": QUESTIONS})
    assert not (tmp_path / "20.0").exists()


def test_a_former_evaluation_is_never_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "20.0"
    for expected in ("20.0", "20.0-2", "20.0-3"):
        free = free_folder(folder)
        assert free.name == expected
        write(free, EVALUATION, {"copy": QUESTIONS})
