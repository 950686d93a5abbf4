"""The longest prompt of a run's tasks, in tokens: what an answer has to fit beside.

Every prompt of a data set is looked at, of an endless task a number of them. Only those with the most bytes are
tokenised: a token of these tokenisers has a byte at least, so that a long prompt cannot hide behind a short text.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.generate.tokenizer import Tokenizer
from streamrl.tasks.environment import Environment, Prompt, message_text
from streamrl.tasks.failures import describe

# Prompts of one task that are looked at: those of a longer data set are a sample of it, spread over all of it.
MOST = 50_000

# Prompts of a task without an end that are looked at.
ENDLESS = 256

# For one task; then the prompts read so far must do. A start of a server takes longer.
SECONDS = 10.0

# Prompts of one task that are tokenised, those with the most bytes.
TOKENISED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """The longest prompt. Example: `Longest(tokens=7, whose="prompt 12 of copy")`."""

    tokens: int
    whose: str  # for a message


def tokenizer_of(folder: Path) -> Tokenizer:
    """That of the model. Raises ConfigError where the folder has none."""
    try:
        return Tokenizer(folder)
    except Exception as error:  # the tokenizers library raises Exception itself for a file that it cannot read
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.path: {folder}: no tokenizer ({reason}); allowed: with tokenizer.json") from None


async def longest_prompt(tasks: Mapping[str, Environment], tokenizer: Tokenizer) -> Longest:
    """Of all tasks. Raises ConfigError for a prompt that a task or the model's chat template cannot make."""
    found = [await _longest(name, task, tokenizer) for name, task in tasks.items()]
    return max(found, key=lambda longest: longest.tokens)


async def _longest(name: str, task: Environment, tokenizer: Tokenizer) -> Longest:
    longest = Longest(tokens=0, whose=f"a prompt of {name}")
    for prompt in heapq.nlargest(TOKENISED, await _prompts(name, task), key=_bytes):
        whose = f"prompt {prompt.index} of {name}"
        try:
            tokens = len(tokenizer.prompt_ids(prompt.content))
        except ValueError as error:
            raise ConfigError(f"model.path: {whose} cannot be tokenised: {error}") from None
        if not tokens:
            raise ConfigError(
                f"model.path: the tokenizer makes no token of {whose}, and nothing would predict an answer's first "
                "one; allowed: prompts in the model's vocabulary"
            )
        if tokens > longest.tokens:
            longest = Longest(tokens=tokens, whose=whose)
    return longest


async def _prompts(name: str, task: Environment) -> list[Prompt]:
    """The first one, and further ones as long as there is time; those with the most bytes of them."""
    count = ENDLESS if task.size is None else task.size
    if count < 1:
        raise ConfigError(f"task.name: {name} has no prompts: its size is {count}; allowed: above 0, or None (endless)")
    deadline = time.monotonic() + SECONDS
    found: list[Prompt] = []
    for index in range(0, count, -(-count // MOST)):
        try:
            found.append(await task.fetch(index))
        except Exception as error:  # whatever code of the user's raises
            raise ConfigError(f"task.name: prompt {index} of {name} cannot be made: {describe(error)}") from error
        if len(found) > 2 * TOKENISED:
            found = heapq.nlargest(TOKENISED, found, key=_bytes)
        if time.monotonic() > deadline:
            break
    return found


def _bytes(prompt: Prompt) -> int:
    """Of the text, without what a chat template writes around it."""
    texts = [prompt.text] if prompt.text is not None else [message_text(message) for message in prompt.messages or ()]
    return sum(len(text.encode()) for text in texts)
