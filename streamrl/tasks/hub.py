"""The known data sets of the hub: what each of them has instead of the defaults of `QuestionsArguments`.

`task.args` of a run changes any of it: another mirror or a local copy is `path`, another instruction is `suffix`.
"""

from __future__ import annotations

from typing import Any

BOXED = "\n\nReason step by step, and put the final answer within \\boxed{}."

_COUNTDOWN = (
    "Using the numbers {nums}, write an expression that equals {target}. Use + - * / and parentheses, and each number "
    "exactly once. Give the expression alone within <answer> and </answer>, such as <answer>(1 + 2) / 3</answer>."
)

DATA_SETS: dict[str, dict[str, Any]] = {
    # 7473 rows to train, 1319 held out
    "gsm8k": {
        "path": "openai/gsm8k",
        "subset": "main",
        "test_split": "test",
        "prompt": "question",
        "answer": "answer",
        "answer_after": "####",
        "suffix": BOXED,
        "form": "boxed",
    },
    # 7500 rows to train, 5000 held out
    "math": {
        "path": "DigitalLearningGmbH/MATH-lighteval",
        "test_split": "test",
        "prompt": "problem",
        "answer": "solution",
        "answer_boxed": True,
        "suffix": BOXED,
        "form": "boxed",
    },
    # 16893 prompts to train, 1024 held out; the questions say "Answer:" themselves, and each is there 100 times
    "dapo_math": {
        "path": "BytedTsinghua-SIA/DAPO-Math-17k",
        "prompt": "prompt",
        "answer": "reward_model.ground_truth",
        "distinct": True,
        "held_out_count": 1024,
        "form": "line",
        "reward_wrong": -1.0,
        "reward_unparsed": -1.0,
    },
    "aime_2024": {
        "path": "HuggingFaceH4/aime_2024",
        "evaluation_only": True,
        "prompt": "problem",
        "answer": "answer",
        "suffix": BOXED,
        "form": "boxed",
    },
    # several solutions to each problem
    "openmath": {
        "path": "nvidia/OpenMathInstruct-2",
        "split": "train_1M",
        "distinct": True,
        "prompt": "problem",
        "answer": "expected_answer",
        "suffix": BOXED,
        "form": "boxed",
    },
    "big_math": {
        "path": "SynthLabsAI/Big-Math-RL-Verified",
        "prompt": "problem",
        "answer": "answer",
        "suffix": BOXED,
        "form": "boxed",
    },
    "countdown": {
        "path": "Jiayi-Pan/Countdown-Tasks-3to4",
        "template": _COUNTDOWN,
        "answer": "target",
        "numbers": "nums",
        "judge": "countdown",
        "form": "tagged",
        "distinct": True,
        "reward_wrong": 0.1,
    },
    # 2101 rows to train, 601 held out; for vision-language models
    "geo3k": {
        "path": "hiyouga/geometry3k",
        "test_split": "test",
        "prompt": "problem",
        "images": "images",
        "answer": "answer",
        "suffix": BOXED,
        "form": "boxed",
    },
}
