"""The task `jsonl`: questions and answers from a file or a data set, judged by mathematical equality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from pydantic import Field

from streamrl.tasks.arguments import ARGUMENTS, TaskArguments, not_among
from streamrl.tasks.environment import EXACT, Completion, Environment, Message, Prompt, Score
from streamrl.tasks.math_reward import MathReward
from streamrl.tasks.order import digest, item_at

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class JsonlArguments(TaskArguments):
    """Arguments of `jsonl`."""

    path: str = Field(description="file or pattern of files (.jsonl, .json, .parquet, .csv), or a data set's hub name")
    subset: str | None = Field(None, description="configuration of a hub data set; null: its default")
    split: str = Field("train", description="split of a hub data set")
    cache: str | None = Field(None, description="folder for the converted data; null: that of the datasets library")
    prompt: str = Field("prompt", description="column of the questions: text, or a list of chat messages")
    answer: str = Field("answer", description="column of the right answers")
    answer_after: str | None = Field(None, description="mark behind which the right answer stands, such as '####'")
    suffix: str = Field("", description="text put behind every question")
    system: str | None = Field(None, description="system message of the chat; null: none")
    chat: bool = Field(True, description="ask through the model's chat template; false: plain text")
    score_processes: int = Field(2, ge=1, description="processes that judge answers")
    score_timeout: float = Field(5.0, gt=0, description="seconds that judging one answer may take")
    start_timeout: float = Field(60.0, gt=0, description="seconds that a judging process may take to be ready")


class Jsonl(Environment):
    """The rows of one split, each once an epoch, in an order that (seed, epoch) gives.

    Rows with the same question are always in the same split. Reward 1 for a right answer, else 0.
    """

    def __init__(self, arguments: JsonlArguments, seed: int, split: str) -> None:
        self._arguments = arguments
        self._seed = seed
        self._data = _load(arguments)
        self._rows = _rows_of(self._data, arguments, held_out=split == "probe")
        self.size = len(self._rows)
        self._judge: MathReward | None = None

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`; one epoch has `size` of them."""
        row = int(self._rows[item_at(index, self.size, self._seed)])
        entry = self._data[row]
        answer = str(entry[self._arguments.answer])
        if self._arguments.answer_after is not None:
            answer = answer.rpartition(self._arguments.answer_after)[2].strip()
        question = entry[self._arguments.prompt]
        if not self._arguments.chat:
            return Prompt(index=index, text=question + self._arguments.suffix, answer=answer, metadata={"row": row})
        return Prompt(index=index, messages=self._messages(question), answer=answer, metadata={"row": row})

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        if self._judge is None:
            self._judge = MathReward(
                processes=self._arguments.score_processes,
                timeout=self._arguments.score_timeout,
                start_timeout=self._arguments.start_timeout,
            )
        right = float(await self._judge.is_right(completion.text, prompt.answer or ""))
        return Score(reward=right, parts={EXACT: right})

    async def close(self) -> None:
        if self._judge is not None:
            await self._judge.close()

    def _messages(self, question: str | list[Message]) -> tuple[Message, ...]:
        if isinstance(question, str):
            turns = [Message(role="user", content=question + self._arguments.suffix)]
        else:
            last = question[-1]
            turns = [*question[:-1], Message(role=last["role"], content=last["content"] + self._arguments.suffix)]
        if self._arguments.system is not None:
            turns.insert(0, Message(role="system", content=self._arguments.system))
        return tuple(turns)


def _load(arguments: JsonlArguments) -> datasets.Dataset:
    """The whole data set, memory-mapped, with its columns checked."""
    datasets.disable_progress_bars()
    path = Path(arguments.path)
    try:
        if path.suffix in _FORMATS:
            data = datasets.load_dataset(
                _FORMATS[path.suffix], data_files=arguments.path, split="train", cache_dir=arguments.cache
            )
        else:
            data = datasets.load_dataset(
                arguments.path, arguments.subset, split=arguments.split, cache_dir=arguments.cache
            )
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"{ARGUMENTS}.path: {arguments.path!r} cannot be loaded ({' '.join(str(error).split())[:200]}); allowed: a "
            f"file of type {', '.join(_FORMATS)} or a data set's hub name; nearest known key: {ARGUMENTS}.path"
        ) from None
    for key, column in (("prompt", arguments.prompt), ("answer", arguments.answer)):
        if column not in data.column_names:
            raise ValueError(not_among(f"{ARGUMENTS}.{key}", column, data.column_names))
    if not arguments.chat and data.features[arguments.prompt] != datasets.Value("string"):
        raise ValueError(
            f"{ARGUMENTS}.chat: false is not allowed where column {arguments.prompt!r} holds no plain text; "
            f"allowed: true; nearest known key: {ARGUMENTS}.chat"
        )
    return data


def _rows_of(data: datasets.Dataset, arguments: JsonlArguments, held_out: bool) -> np.ndarray:
    """The row numbers of one split, int64 [N]: the questions with the lowest digests are held out."""
    digests = np.array([digest(_canonical(question)) for question in data[arguments.prompt]], np.uint64)
    distinct = np.unique(digests)
    if len(distinct) < 2:
        raise ValueError(
            f"{ARGUMENTS}.path: {arguments.path!r} holds {len(distinct)} different prompts; allowed: at least 2, one "
            f"to train and one to probe; nearest known key: {ARGUMENTS}.path"
        )
    probes = min(max(1, round(arguments.held_out * len(distinct))), len(distinct) - 1)
    return np.flatnonzero((digests < distinct[probes]) == held_out)


def _canonical(question: Any) -> str:
    return question if isinstance(question, str) else json.dumps(question, sort_keys=True)
