"""Junk answers through every reward: none crashes, none hangs, none is worth more than nothing.

    python -m benchmarks.fuzz_rewards [--answers 100000] [--seed 0] [--quick] [--json PATH]

An answer is a valid form (tags, box, line, formula, expression, call of a tool) filled with what is wrong, and then
often changed, cut, spliced with another or repeated; or random text. The right answers are chosen so that no junk
holds them by chance. The rewards take turns: each gets a like share of the answers. A scorer that raises costs its
sample and is counted; an environment that raises, or an answer worth more than 0, ends the run with the text itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamrl.config.task import TaskConfig
from streamrl.lab.output import output_file
from streamrl.tasks.built_in.reasoning_gym import BEHAVED
from streamrl.tasks.environment import FAILED, Completion, Environment, Prompt
from streamrl.tasks.registry import build_task

# A number that no junk has by chance.
GOLD = "\\frac{7919}{7907}"

# In seconds, as a run has them; beyond them an answer is counted as failed.
LIMITS = {"score_processes": 2, "score_timeout": 5.0, "start_timeout": 120.0}

# Seconds that a batch of answers may take before the run counts as hung: every single answer has its own deadline.
LONGEST = 120.0

# Answers that are judged at the same time, as groups of a run are.
BATCH = 64

_FORMS = ("<answer>{}</answer>", "\\boxed{{{}}}", "Answer: {}", "${}$", "{}", "\\[{}\\]", "The answer is {}.")
_PIECES = (
    *("\\frac{1}{0}", "\\frac{", "\\sqrt{-1}", "x^2", "1/0", "9^{9^9}", "10!", "\\infty", "\\text{red}", "\\{1, 2\\}"),
    *("[1, 2)", "1,2,3", "0.1e9", "-", "--5", "((((", "))))", "{}", "}{", "\\", "\\\\", "\x00", "\u202e", "NaN", "inf"),
    *("None", "True", "[]", "banana", "1 + 1", "2 * (3", "4 == 4", "%d", "{row}", "\\int_0^1 x dx", "\\sum", "x=1"),
    *("</answer>", "<answer>", "\\boxed{", "Answer:", "\n", "\n\n", "\t", "é", "漢字", "١٢٣", "①", "½", "1" * 400),
)
_REWARD = "def reward(text, answer, row, finish_reason):\n    return float(text.strip() == answer)\n"


def answer(chance: random.Random) -> str:
    """One junk answer."""
    if chance.random() < 0.1:
        return "".join(chr(chance.choice((chance.randrange(128), chance.randrange(0xD800)))) for _ in range(40))
    content = " ".join(_piece(chance) for _ in range(chance.randrange(1, 4)))
    text = chance.choice(_FORMS).format(content)
    match chance.randrange(5):
        case 0:
            return text[: chance.randrange(len(text) + 1)]
        case 1:
            return text + chance.choice(_FORMS).format(_piece(chance))
        case 2:
            return text * chance.randrange(1, 9)
        case 3 if text:
            place = chance.randrange(len(text))
            return text[:place] + chance.choice(_PIECES) + text[place + 1 :]
    return text


def _piece(chance: random.Random) -> str:
    return chance.choice(_PIECES) if chance.random() < 0.7 else str(chance.randrange(-99, 1000))


def rewards(folder: Path, only: Sequence[str] = ()) -> dict[str, Environment]:
    """Every reward by its name, or `only` these; the right answers of their questions are in no junk.

    folder: where the files that they need are written.
    """
    (folder / "mine.py").write_text(_REWARD)
    rows = [{"prompt": f"{index}?", "answer": GOLD, "target": 918_273, "nums": [7919, 7907, index]} for index in (2, 3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(folder / "rows.jsonl"), "cache": str(folder / "cache"), **LIMITS}
    forms = {f"math {form}": {"form": form} for form in ("whole", "tagged", "boxed", "line")}
    shares = {
        **{name: ("jsonl", source | args) for name, args in forms.items()},
        "text": ("jsonl", source | {"form": "tagged", "judge": "text"}),
        "countdown": ("countdown", source),
        "user": ("jsonl", source | {"reward": f"{folder / 'mine.py'}:reward"}),
        "strings": ("copy", {"length": 64, "alphabet": "‡†"}),
    }
    shares |= {f"gym {dataset}": ("reasoning_gym", {"dataset": dataset}) for dataset in BEHAVED}
    return {name: _task(task, args) for name, (task, args) in shares.items() if name in only or not only}


def _task(name: str, args: dict[str, object]) -> Environment:
    return build_task(TaskConfig.model_validate({"name": name, "args": args}), seed=1, split="train")


def is_right_by_chance(prompt: Prompt, text: str) -> bool:
    """Whether junk can be worth something: a short answer of a puzzle (`3`, `True`) comes up in it.

    The strings give a share for the right length alone.
    """
    gold = prompt.answer or ""
    if prompt.text is not None:
        return len(text.strip()) == len(gold)
    return "entry" in prompt.metadata and gold.strip().lower() in text.lower()


async def fuzz(answers: int, seed: int, only: Sequence[str] = (), batch: int = BATCH) -> dict[str, Counter[str]]:
    """What came of the answers, by reward: `nothing`, `failed`, or `chance` for those left out.

    only: these rewards instead of all. batch: answers that are judged at the same time.
    Raises RuntimeError, which names the text, for a crash, a hang, or a score above 0.
    """
    chance = random.Random(seed)
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tasks = rewards(Path(folder), only)
        turns = list(tasks.items())
        try:
            for number in range(0, answers, batch):
                name, task = turns[number // batch % len(turns)]
                texts = [answer(chance) for _ in range(min(batch, answers - number))]
                prompt = task.prompt(chance.randrange(1000))
                outcomes.setdefault(name, Counter()).update(await _judged(name, task, prompt, texts))
        finally:
            await asyncio.gather(*(task.close() for task in tasks.values()))
    return outcomes


async def _judged(name: str, task: Environment, prompt: Prompt, texts: list[str]) -> Counter[str]:
    """The outcomes of one batch."""
    junk = [text for text in texts if not is_right_by_chance(prompt, text)]
    try:
        async with asyncio.timeout(LONGEST):
            rollouts = await task.score_all(prompt, [_completion(text) for text in junk])
    except Exception as error:
        raise RuntimeError(f"{name}, prompt {prompt.index}: one of {junk}") from error
    for rollout in rollouts:
        if rollout.reward > 0:
            raise RuntimeError(f"{name}, prompt {prompt.index}: {rollout.reward} for {rollout.completion.text!r}")
    failed = sum(FAILED in rollout.parts for rollout in rollouts)
    return Counter(nothing=len(junk) - failed, failed=failed, chance=len(texts) - len(junk))


def _completion(text: str) -> Completion:
    none = np.empty(0, np.int32)
    logprobs = np.empty(0, np.float32)
    return Completion(text=text, prompt_ids=none, output_ids=none, logprobs=logprobs, spans=(), finish_reason="stop")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="10,000 answers")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    answers = 10_000 if options.quick else options.answers
    began = time.perf_counter()
    outcomes = asyncio.run(fuzz(answers, options.seed))
    seconds = time.perf_counter() - began
    total = sum(outcomes.values(), Counter())
    print(f"{'reward':28} {'nothing':>8} {'failed':>8} {'by chance':>10}")
    for name, counts in outcomes.items():
        print(f"{name:28} {counts['nothing']:8} {counts['failed']:8} {counts['chance']:10}")
    print(f"{answers} answers in {seconds:.0f} s: no crash, no hang, none above 0; {total['failed']} failed alone")
    if options.json:
        figures = {"benchmark": "fuzz_rewards", "answers": answers, "seconds": seconds, "outcomes": outcomes}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
