"""The task `megatron_rl`: the data sets and rewards of Megatron-RL's examples, by the names of their agents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from streamrl.config.megatron_rl import AgentArguments, AgentName
from streamrl.tasks import answers, countdown
from streamrl.tasks.arguments import OnDisk, TaskArguments
from streamrl.tasks.built_in.countdown import QUESTION, Countdown
from streamrl.tasks.environment import EXACT, Completion, Prompt, Score, message_text
from streamrl.tasks.math_reward import MathReward
from streamrl.tasks.questions import PARSED, PARTIAL, Questions, QuestionsArguments
from streamrl.tasks.rows import value_at
from streamrl.tasks.starter import Starter

ASKS_FOR = {
    "tagged": "Think step by step, and write the final answer between <answer> and </answer>, without an equals sign: "
    "<answer> 3\\sqrt{2} </answer>.",
    "boxed": "Think step by step, and write the final answer within \\boxed{}, such as \\boxed{3\\sqrt{2}}.",
}

# What DAPO-Math-17k's questions say of the form of the answer, which is another one here.
_LINE_FORM = re.compile(r"The last line of your response [^\n]*\n\n|\nRemember to put your answer [^\n]*")

_EQUATIONS = "CountdownAgent"

# Of each agent, arguments of `Questions`: which rows, which columns.
SOURCES: Mapping[str, Mapping[str, Any]] = {
    "DAPOAgent": {
        "path": "BytedTsinghua-SIA/DAPO-Math-17k",
        "prompt": "prompt",
        "answer": "reward_model.ground_truth",
        "train_count": 16893,
        "held_out_count": 1024,
    },
    "AIMEAgent": {
        "path": "Maxwell-Jia/AIME_2024",
        "prompt": "Problem",
        "answer": "Answer",
        "evaluation_only": True,
    },
    "GSM8KAgent": {
        "path": "openai/gsm8k",
        "subset": "main",
        "test_split": "test",
        "prompt": "question",
        "answer": "answer",
        "answer_after": "####",
    },
    "OpenMathInstructAgent": {
        "path": "nvidia/OpenMathInstruct-2",
        "prompt": "problem",
        "answer": "expected_answer",
        "train_count": 327680,
        "held_out_count": 1024,
    },
    "BigMathAgent": {
        "path": "SynthLabsAI/Big-Math-RL-Verified",
        "prompt": "problem",
        "answer": "answer",
        "train_count": -1024,
        "held_out_count": 1024,
    },
    _EQUATIONS: {
        **Countdown.defaults,
        "template": QUESTION,
        "distinct": False,
        "train_count": 327680,
        "held_out_count": 1024,
    },
}


class MegatronRLArguments(TaskArguments, AgentArguments):
    """Arguments of `megatron_rl`."""

    agent: AgentName = Field("DAPOAgent", description="whose data set and reward")
    hf_dataset_name: Annotated[str | None, OnDisk("data")] = Field(
        None, description="hub name of the data set, or a file with its columns; null: that of the agent"
    )
    instruction: str | None = Field(
        None, description="text behind a question, after a line break; null: that of the form"
    )
    train_count: int | None = Field(
        None, description="rows that are trained, the first ones; null: as the agent has it"
    )
    held_out_count: int | None = Field(None, ge=1, description="rows behind them that are held out; null: the agent's")
    test_file: Path | None = Field(None, description="file with the held-out rows, where the agent has a test split")
    cache: Path | None = Field(None, description="folder for the converted data; null: that of the datasets library")
    score_processes: int = Field(2, ge=1, description="processes that judge answers")
    score_timeout: float = Field(5.0, gt=0, description="seconds that judging one answer may take")

    @property
    def has_equations(self) -> bool:
        """Whether the answers are equations, and no mathematics to be compared."""
        return self.agent == _EQUATIONS

    @property
    def wrong_reward(self) -> float:
        """The reward of an answer in the right form that earns no more."""
        return (0.1 if self.has_equations else 0.0) if self.format_reward is None else self.format_reward

    @property
    def questions(self) -> QuestionsArguments:
        """As `Questions` takes them."""
        given = {
            "path": _arrow_files(self.dataset_file, self.split) if self.dataset_file else self.hf_dataset_name,
            "split": self.split,
            "train_count": self.train_count,
            "held_out_count": self.held_out_count,
            "test_path": None if self.test_file is None else str(self.test_file),
            "cache": None if self.cache is None else str(self.cache),
            "chat": self.chat,
            "suffix": self._suffix,
            "score_processes": self.score_processes,
            "score_timeout": self.score_timeout,
        }
        source = dict(SOURCES[self.agent])
        if self.train_count is not None:  # rows by their place, and none of another split
            source.pop("test_split", None)
        return QuestionsArguments.model_validate(
            {**source, **{key: value for key, value in given.items() if value is not None}}
        )

    @property
    def _suffix(self) -> str:
        if self.instruction is not None or self.has_equations:
            return f"\n{self.instruction}" if self.instruction else ""
        return "\n" + ASKS_FOR[self.answer_format or ("tagged" if self.agent != "GSM8KAgent" else "boxed")]


class MegatronRL(Questions):
    """Reward: 1 for a right answer at the end of a text that was not cut; `partial_end_reward` with text behind it;
    `format_reward` for a cut text or a wrong answer; `negative_reward` without one.

    The last <answer> counts, and the last box where there is none, whichever was asked for.
    """

    Arguments = MegatronRLArguments  # type: ignore[assignment]
    starter = Starter(shown=("agent", "answer_format", "format_reward"), max_new_tokens=1024)

    def __init__(self, arguments: MegatronRLArguments, seed: int, split: str) -> None:
        super().__init__(arguments.questions, seed, split)
        self._rewards = arguments
        self.lowest_reward = min(arguments.wrong_reward, arguments.negative_reward, arguments.partial_end_reward)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        found = _last_line(completion.text) if self._rewards.has_equations else _last_answer(completion.text)
        if found is None:
            return Score(reward=self._rewards.negative_reward, parts={EXACT: 0.0, PARSED: 0.0, PARTIAL: 0.0})
        right = await self._is_right(prompt, found.answer)
        cut = completion.finish_reason == "length" and not self._rewards.has_equations
        partial = right and (cut or found.trailing)
        parts = {EXACT: float(right and not partial), PARSED: 1.0, PARTIAL: float(partial)}
        if right and not partial:
            return Score(reward=1.0, parts=parts)
        rewards = self._rewards
        return Score(reward=rewards.partial_end_reward if right and not cut else rewards.wrong_reward, parts=parts)

    async def _is_right(self, prompt: Prompt, answer: str) -> bool:
        gold = prompt.answer or ""
        if self._rewards.has_equations:
            numbers = value_at(prompt.metadata["values"], self._arguments.numbers)
            return countdown.verdict(answer, numbers, int(gold)) is True
        self._math = self._math or MathReward(**self._limits)
        return await self._math.verdict(answer, gold, as_text=True) is True

    def _question(self, row: dict[str, Any], index: int) -> str:
        question = super()._question(row, index)
        text = question if isinstance(question, str) else message_text(question[0])
        return _LINE_FORM.sub("", text)


def _last_answer(text: str) -> answers.Found | None:
    """The last <answer>, or else the last box; anything but space behind it is trailing."""
    return answers.last_between(text) or answers.outermost_box(text)


def _last_line(text: str) -> answers.Found | None:
    """The last <answer> of the last line; whatever is behind it does not count."""
    found = answers.last_between(text.rpartition("\n")[2])
    return None if found is None else answers.Found(found.answer, trailing=False)


def _arrow_files(folder: Path, split: str | None) -> str:
    """The Arrow files of a folder: those that have the split in their names, where there are any."""
    named = f"*{split or 'train'}*.arrow"
    return str(folder / (named if any(folder.glob(named)) else "*.arrow"))
