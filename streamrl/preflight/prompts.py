"""The prompts of a run's tasks, in tokens: which are too long, and the longest of the others, beside which answers fit.

Every prompt of a data set is looked at, of a longer or an endless one a sample. Only those are tokenised that may be
too long, or the longest: a token of these tokenisers has a byte at least, so that a long prompt cannot hide behind a
short text. Those with images are all tokenised, each image as many tokens as the image processor makes of it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.config.file import ConfigError
from streamrl.generate.prompt_images import PromptImage, PromptImages
from streamrl.generate.tokenizer import Tokenizer
from streamrl.tasks.environment import Environment, Prompt, message_text
from streamrl.tasks.failures import describe
from streamrl.tasks.left_out import OfTask

# Prompts of one task that are looked at: those of a longer data set are a sample of it, spread over all of it.
MOST = 50_000

# Prompts of a task without an end that are looked at.
ENDLESS = 256

# For one task; then the prompts read so far must do. A start of a server takes longer.
SECONDS = 10.0

# Prompts of one task that are tokenised, those with the most bytes.
TOKENISED = 64

# A chat template may write more around one text than around another with as many messages: as often, and some bytes
# more, than it does around the first one. Plain text gets a token of the model's own (a BOS) without a byte.
AROUND, BYTES_AROUND = 2, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """The longest prompt. Example: `Longest(tokens=7, whose="prompt 12 of copy")`."""

    tokens: int
    whose: str  # for a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen of several tasks."""

    longest: Longest  # of the prompts that fit; of a task without such ones, of all
    of_tasks: dict[str, OfTask]
    image_bytes: int = 0  # of the images of one prompt, at most


def tokenizer_of(
    folder: Path,
    key: str = "model.path",
    variables: Mapping[str, Any] | None = None,
    images: PromptImages | None = None,
) -> Tokenizer:
    """The tokenizer of a model.

    `key`: of the configuration that names it. `variables`: further ones of its chat template. `images`: of its prompts.

    Raises ConfigError where the folder has none.
    """
    try:
        return Tokenizer(folder, variables, images=images)
    except Exception as error:  # the tokenizers library raises Exception itself for a file that it cannot read
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key}: {folder}: no tokenizer ({reason}); allowed: with tokenizer.json") from None


def unread_variables(tokenizer: Tokenizer) -> list[str]:
    """A line for each of `task.chat_template_kwargs` that the chat template does not read, for who starts a run."""
    return [
        f"task.chat_template_kwargs: the model's chat template reads no variable {name!r}"
        for name in tokenizer.unread_variables
    ]


async def measure_prompts(
    tasks: Mapping[str, Environment],
    tokenizer: Tokenizer,
    limit: int,
    recorded: Mapping[str, OfTask],
    cut: str | None = None,
) -> Seen:
    """Count the tokens of all tasks' prompts, of which those with more than `limit` are too long.

    `recorded`: what the run that goes on leaves out, which stays as it is. `cut`: the side at which those that are too
    long are cut to the limit, so that they fit; None: they are not. Raises ConfigError for a prompt that a task or the
    model's chat template cannot make, and for a task that has another number of prompts than is recorded.
    """
    longest = Longest(tokens=0, whose="a prompt")
    of_tasks: dict[str, OfTask] = {}
    image_bytes = 0
    for name, task in tasks.items():
        before = recorded.get(name)
        _check_size(name, task, before)
        lengths = await _measure(name, task, tokenizer, limit if before is None else before.limit, cut)
        found = lengths.longest()
        longest = max(longest, found, key=lambda each: each.tokens)
        of_tasks[name] = before or lengths.of_task(task)
        image_bytes = max(image_bytes, lengths.image_bytes)
    return Seen(longest=longest, of_tasks=of_tasks, image_bytes=image_bytes)


def _check_size(name: str, task: Environment, recorded: OfTask | None) -> None:
    # None: recorded when a task around another one did not know how many prompts that has.
    if recorded is not None and recorded.size not in (None, task.size):
        raise ConfigError(
            f"task.args: {name} has {task.size} prompts, and had {recorded.size} when the run began; allowed: the same "
            "data, --fresh, or another run.name"
        )


@dataclass(kw_only=True, slots=True)
class _Lengths:
    """Lengths of a task's prompts: tokens of those that may be too long, bytes of the others until these are most."""

    name: str
    tokenizer: Tokenizer
    limit: int  # tokens
    cut: str | None = None
    looked: int = 0
    image_bytes: int = 0
    whole: bool = False  # were all prompts looked at?
    too_long: dict[int, int] = field(default_factory=dict)  # index -> tokens
    fitting: Longest | None = None  # the longest that was tokenised and fits
    short: list[tuple[int, Prompt]] = field(default_factory=list)  # that fit for sure, the ones with the most bytes
    around: dict[int, int] = field(default_factory=dict)  # messages -> bytes that the chat template writes around them

    def add(self, index: int, prompt: Prompt, images: Sequence[PromptImage] = ()) -> None:
        self.looked += 1
        if images:
            self.image_bytes = max(self.image_bytes, sum(len(image.file) for image in images))
            self._tokenise(index, prompt, images)
            return
        if _bytes(prompt) + self._around(prompt) > self.limit:
            self._tokenise(index, prompt)
            return
        self.short.append((index, prompt))
        if len(self.short) > 2 * TOKENISED:
            self.short = self._most_bytes()

    def longest(self) -> Longest:
        """The longest prompt of those that fit; of all where none does."""
        for index, prompt in self._most_bytes():
            self._tokenise(index, prompt)
        self.short = []
        if self.cut is not None and self.too_long:
            return Longest(tokens=self.limit, whose=f"prompt {min(self.too_long)} of {self.name}, cut,")
        if self.fitting is not None:
            return self.fitting
        index = max(self.too_long, key=self.too_long.__getitem__)
        return Longest(tokens=self.too_long[index], whose=f"prompt {index} of {self.name}")

    def of_task(self, task: Environment) -> OfTask:
        return OfTask(
            limit=self.limit,
            looked=self.looked,
            too_long=len(self.too_long),
            shortest=min(self.too_long.values(), default=0),
            longest=max(self.too_long.values(), default=0),
            size=task.size,
            left_out=() if self.cut is not None else tuple(sorted(self.too_long)) if self.whole else None,
            whole=self.whole,
            cut=self.cut,
        )

    def _most_bytes(self) -> list[tuple[int, Prompt]]:
        return heapq.nlargest(TOKENISED, self.short, key=lambda each: _bytes(each[1]))

    def _tokenise(self, index: int, prompt: Prompt, images: Sequence[PromptImage] = ()) -> None:
        whose, known = f"prompt {index} of {self.name}", self.tokenizer.images
        try:
            ids = self.tokenizer.prompt_ids(prompt.content, prompt.tools)
            tokens = len(ids if known is None or not images else known.expanded(ids, images))
        except ValueError as error:
            raise ConfigError(f"model.path: {whose} cannot be tokenised: {error}") from None
        if not tokens:
            raise ConfigError(
                f"model.path: the tokenizer makes no token of {whose}, and nothing would predict an answer's first "
                "one; allowed: prompts in the model's vocabulary"
            )
        if tokens > self.limit:
            self.too_long[index] = tokens
        elif self.fitting is None or tokens > self.fitting.tokens:
            self.fitting = Longest(tokens=tokens, whose=whose)

    def _around(self, prompt: Prompt) -> int:
        """Bytes that the model sees at most of a prompt besides its text."""
        messages = len(prompt.messages or ())
        if messages not in self.around:
            try:
                written = len(self.tokenizer.rendered(prompt.content, prompt.tools).encode()) - _bytes(prompt)
            except ValueError:
                return self.limit + 1  # it is tokenised, which says what is wrong with it
            self.around[messages] = AROUND * max(0, written) + BYTES_AROUND
        return self.around[messages]


async def _measure(name: str, task: Environment, tokenizer: Tokenizer, limit: int, cut: str | None) -> _Lengths:
    """The first prompt, and further ones as long as there is time."""
    count = ENDLESS if task.size is None else task.size
    if count < 1:
        raise ConfigError(f"task.name: {name} has no prompts: its size is {count}; allowed: above 0, or None (endless)")
    lengths = _Lengths(name=name, tokenizer=tokenizer, limit=limit, cut=cut)
    deadline = time.monotonic() + SECONDS
    for index in range(0, count, -(-count // MOST)):
        try:
            prompt = await task.fetch(index)
        except Exception as error:  # whatever code of the user's raises
            raise ConfigError(f"task.name: prompt {index} of {name} cannot be made: {describe(error)}") from error
        lengths.add(index, prompt, await _images(f"prompt {index} of {name}", prompt, tokenizer))
        if time.monotonic() > deadline:
            break
    lengths.whole = lengths.looked == task.size
    return lengths


async def _images(whose: str, prompt: Prompt, tokenizer: Tokenizer) -> Sequence[PromptImage]:
    """None where the model has no images, or those are not known here."""
    if not prompt.images or tokenizer.images is None:
        return ()
    try:
        return await tokenizer.images.load(prompt.images)
    except ValueError as error:
        raise ConfigError(f"task.name: {whose}: {error}") from None


def _bytes(prompt: Prompt) -> int:
    """Bytes of the text, without what a chat template writes around it."""
    texts = [prompt.text] if prompt.text is not None else [message_text(message) for message in prompt.messages or ()]
    return sum(len(text.encode()) for text in texts)
