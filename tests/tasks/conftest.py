"""A real tokenizer with a chat template, and a policy that says what the test has written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2Tokenizer

from streamrl.generate.tokenizer import Tokenizer
from streamrl.tasks.cut import Cut
from streamrl.tasks.environment import Completion, Message, Prompt
from streamrl.types import PolicyVersion, VersionSpan

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END, START = "<|im_end|>", "<|im_start|>"


class Scripted:
    """The inference handle with a real tokenizer and given answers; every token's log-prob is its own number.

    Answers are token by token as they are written, not as a tokenizer would cut their text.
    """

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[Sequence[str]], versions: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.asked: list[np.ndarray] = []
        self.at_least: list[PolicyVersion | None] = []
        self.cuts: list[tuple[Prompt, Cut]] = []
        self._answers: Iterator[Sequence[str]] = iter(answers)
        self._versions = iter(versions)

    async def generate(
        self,
        prompt: str | list[Message] | np.ndarray,
        n: int,
        *,
        images: Sequence[str] = (),
        at_least: PolicyVersion | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        prompt_ids = prompt if isinstance(prompt, np.ndarray) else self.prompt_ids(prompt)
        await asyncio.sleep(0)
        return [self._answer(prompt_ids, at_least) for _ in range(n)]

    def prompt_ids(self, prompt: str | Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        return self.tokenizer.prompt_ids(prompt, tools)

    async def ids_of(self, prompt: Prompt) -> np.ndarray:
        return self.prompt_ids(prompt.content)

    async def hold_images(self, references: Sequence[str]) -> None: ...

    def cut_prompt(self, prompt: Prompt, cut: Cut) -> None:
        self.cuts.append((prompt, cut))

    def added_ids(
        self,
        said: Sequence[Message],
        added: str | Sequence[Message],
        last: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> np.ndarray:
        if isinstance(added, str):
            return self.tokenizer.plain_ids(added)
        return self.tokenizer.added_ids(said, added, last, tools)

    def _answer(self, prompt_ids: np.ndarray, at_least: PolicyVersion | None) -> Completion:
        self.asked.append(prompt_ids)
        self.at_least.append(at_least)
        pieces = next(self._answers, None)
        if pieces is None:
            return Completion.failed(prompt_ids)
        ids = np.concatenate([self.tokenizer.plain_ids(piece) for piece in pieces])
        return Completion(
            text=self.tokenizer.text([ids.tolist()])[0],
            prompt_ids=prompt_ids,
            output_ids=ids,
            logprobs=-(1 + np.arange(len(ids), dtype=np.float32)),
            spans=(VersionSpan(PolicyVersion(next(self._versions, 0)), 0, len(ids)),),
            finish_reason="stop" if pieces[-1] == END else "length",
        )


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, and "ab" besides; a chat template of Qwen's kind."""
    folder = tmp_path_factory.mktemp("chat")
    letters = [chr(number) for number in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {token: place for place, token in enumerate(["<|endoftext|>", *letters, "ab"])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[("a", "b")], eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_folder: Path) -> Tokenizer:
    """The tokenizer of `chat_folder`."""
    return Tokenizer(chat_folder)


@pytest.fixture
def scripted(chat_tokenizer: Tokenizer) -> Callable[..., Scripted]:
    """`scripted(answers, versions=())`: an inference handle; each answer is a list of pieces of text."""
    return lambda answers, versions=(): Scripted(chat_tokenizer, answers, versions)


@pytest.fixture(scope="session")
def completion() -> Callable[[str], Completion]:
    """An answer of this text, special tokens and all."""

    def make(text: str) -> Completion:
        ids = np.zeros(1, np.int32)
        return Completion(
            text=text, marked=text, prompt_ids=ids, output_ids=ids, logprobs=np.zeros(1, np.float32), spans=(),
            finish_reason="stop",
        )  # fmt: skip

    return make
