"""An evaluation as one HTML page: the figures, and every prompt with its answers. Nothing is loaded from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from streamrl.evaluate.results import Evaluation, Judged, Question, TaskFigures
from streamrl.tasks.environment import Message

_SHORT = 110  # characters of a prompt in its line; the whole of it is inside

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --line: #e3e7ee; --back: #f6f7f9; --card: #fff;
  --good: #16895a; --bad: #d05246; --none: #b4bac4; --accent: #3a5bd0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #2b323d; --back: #12161c;
  --card: #1a2029; --good: #3fbf88; --bad: #ec7a6e; --none: #566070; --accent: #8ea6ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 2.5rem 1.25rem 5rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; letter-spacing: -.01em; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.15rem; }
.soft { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { width: 100%; border-collapse: collapse; margin-top: 1.5rem; font-variant-numeric: tabular-nums; }
.table { overflow-x: auto; margin-top: 1.5rem; } .table table { margin: 0; }
th, td { padding: .6rem .9rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
tr + tr td { border-top: 1px solid var(--line); }
td small { color: var(--soft); }
nav { display: flex; gap: .4rem; margin-bottom: .75rem; flex-wrap: wrap; }
nav button { font: inherit; font-size: .85rem; color: inherit; padding: .2rem .75rem; cursor: pointer;
  border: 1px solid var(--line); border-radius: 99px; background: var(--card); }
nav button[aria-pressed=true] { border-color: var(--accent); color: var(--accent); }
details { border-bottom: 1px solid var(--line); content-visibility: auto; contain-intrinsic-size: auto 2.6rem; }
details:last-child { border: 0; }
summary { display: flex; gap: .9rem; align-items: center; padding: .55rem .9rem; cursor: pointer; list-style: none; }
summary .text { flex: 1; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
summary .number { color: var(--soft); min-width: 3ch; font-variant-numeric: tabular-nums; }
.dots { display: flex; gap: 3px; flex-wrap: wrap; justify-content: flex-end; max-width: 16rem; }
.dots i { width: 9px; height: 9px; border-radius: 3px; background: var(--none); }
.dots .good { background: var(--good); } .dots .bad { background: var(--bad); }
.dots .greedy { border-radius: 99px; margin-right: 4px; }
.inside { padding: 0 .9rem 1rem; }
pre { margin: .4rem 0; padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--back);
  border-radius: 7px; font: 13px/1.5 ui-monospace, monospace; border-left: 3px solid var(--line); }
pre.good { border-color: var(--good); } pre.bad { border-color: var(--bad); }
.label { margin-top: .8rem; font-size: .8rem; color: var(--soft); }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("nav button")) button.onclick = () => {
  for (const other of button.parentNode.children) other.setAttribute("aria-pressed", other === button);
  for (const row of button.closest("section").querySelectorAll("details"))
    row.hidden = button.value !== "all" && row.dataset.kind !== button.value;
};
"""

# The filters: value of a question, and what is written on the button.
_KINDS = {"all": "all", "mixed": "sometimes right", "solved": "always right", "unsolved": "never right"}


def render(evaluation: Evaluation, questions: Mapping[str, Sequence[Question]]) -> str:
    """The page. All text of prompts and answers is escaped: an answer cannot become a part of the page."""
    title = f"Evaluation of {escape(evaluation.label)}"
    sections = "".join(_section(task, asked) for task, asked in questions.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>\n<h1>{title}</h1>\n{_line(evaluation)}\n{_table(evaluation)}\n{sections}\n"
        f"<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _line(evaluation: Evaluation) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(evaluation.started))
    parts = [
        f"{evaluation.samples} answers a prompt",
        f"temperature {evaluation.temperature:g}",
        f"up to {evaluation.max_new_tokens} tokens",
        f"{evaluation.seconds:.1f} s",
        when,
    ]
    if not evaluation.complete:
        parts.append("cut off by its deadline")
    return f'<p class="soft">{" · ".join(parts)}</p>'


def _table(evaluation: Evaluation) -> str:
    """One row a task: value and standard error of each figure."""
    names = list(dict.fromkeys(name for task in evaluation.tasks.values() for name in task.figures))
    head = "".join(f"<th>{escape(name)}</th>" for name in ("task", "prompts", *names, "unanswered"))
    rows = "".join(_row(task, found, names) for task, found in evaluation.tasks.items())
    return f'<div class="card table"><table><tr>{head}</tr>{rows}</table></div>'


def _row(task: str, found: TaskFigures, names: Sequence[str]) -> str:
    cells = [escape(task), str(found.prompts)]
    for name in names:
        figure = found.figures.get(name)
        error = "" if figure is None or figure.error is None else f" <small>± {figure.error:.3f}</small>"
        cells.append("–" if figure is None else f"{figure.value:.3f}{error}")
    cells.append(f"{found.unanswered:.1%}")
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _section(task: str, questions: Sequence[Question]) -> str:
    counts = {kind: sum(_kind(question) == kind for question in questions) for kind in _KINDS}
    counts["all"] = len(questions)
    buttons = "".join(
        f'<button value="{kind}" aria-pressed="{str(kind == "all").lower()}">{text} {counts[kind]}</button>'
        for kind, text in _KINDS.items()
    )
    rows = "".join(_question(question) for question in questions)
    return f'<section><h2>{escape(task)}</h2><nav>{buttons}</nav><div class="card">{rows}</div></section>\n'


def _kind(question: Question) -> str:
    """Which filter shows a question, by its sampled answers."""
    if question.right == 0:
        return "unsolved"
    return "solved" if question.right == len(question.answers) else "mixed"


def _question(question: Question) -> str:
    text = " ".join(_plain(question.prompt).split())
    short = text if len(text) <= _SHORT else text[:_SHORT] + "…"
    dots = "".join(_dots(question))
    inside = "".join(_inside(question))
    return (
        f'<details data-kind="{_kind(question)}"><summary><span class="number">{question.index}</span>'
        f'<span class="text">{escape(short)}</span><span class="dots">{dots}</span></summary>'
        f'<div class="inside">{inside}</div></details>\n'
    )


def _dots(question: Question) -> Iterator[str]:
    """One mark an answer: the greedy one first, round; missing ones grey."""
    if question.greedy is not None:
        yield f'<i class="greedy {_class(question.greedy)}" title="greedy"></i>'
    for answer in question.answers:
        yield f'<i class="{_class(answer)}"></i>'
    yield "<i></i>" * question.missing


def _inside(question: Question) -> Iterator[str]:
    """The whole prompt, what was expected, and every answer."""
    yield f'<div class="label">prompt</div><pre>{escape(_plain(question.prompt))}</pre>'
    for image in question.images:
        if image.startswith("data:"):
            yield f'<div class="label">image <img alt="" src="{escape(image)}"></div>'
        else:
            yield f'<div class="label">image {escape(image)}</div>'
    if question.expected is not None:
        yield f'<div class="label">expected</div><pre>{escape(question.expected)}</pre>'
    if question.greedy is not None:
        yield _answer("greedy answer", question.greedy)
    for number, answer in enumerate(question.answers, start=1):
        yield _answer(f"answer {number}", answer)
    for reason in question.reasons:
        yield f'<div class="label">missing: {escape(reason)}</div>'


def _answer(name: str, answer: Judged) -> str:
    parts = "".join(f" · {escape(part)} {value:g}" for part, value in answer.parts.items())
    label = f"{name} · reward {answer.reward:g}{parts} · {answer.tokens} tokens · {escape(answer.finish_reason)}"
    return f'<div class="label">{label}</div><pre class="{_class(answer)}">{escape(answer.text)}</pre>'


def _class(answer: Judged) -> str:
    return "good" if answer.passed else "bad"


def _plain(prompt: str | list[Message]) -> str:
    """A prompt as text; the turns of a conversation under their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {_content(message['content'])}" for message in prompt)


def _content(content: object) -> str:
    """What a turn says; of a turn of several parts its text, and a mark for each image."""
    if not isinstance(content, list):
        return str(content)
    return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
