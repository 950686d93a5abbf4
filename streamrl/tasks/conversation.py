"""A conversation with the policy, kept as the token sequence that it is: turns of the policy, and messages of others.

    prompt ids │ answer, as sampled │ what was added │ answer, as sampled │ ...
                  mask True            mask False       mask True

A policy's token is never decoded and tokenised again: the next request repeats the ids that were sampled, and only
what was added goes through the tokenizer, on its own. So the recorded log-probs are those of the tokens that are
trained, whatever the tokenizer would have made of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from streamrl import sampling_columns
from streamrl.moe_routing import OUTPUT, PROMPT, UNKNOWN, fold
from streamrl.tasks.environment import Completion, Inference, Message, Prompt
from streamrl.types import PolicyVersion, VersionSpan


class Conversation:
    """One sample of several turns, while it grows.

    Usage:
        conversation = Conversation(inference, prompt)
        turn = await conversation.generate()
        conversation.add([Message(role="tool", content="42")])
        await conversation.generate()
        conversation.completion.loss_mask
    """

    def __init__(self, inference: Inference, prompt: Prompt, tools: Sequence[dict[str, Any]] = ()) -> None:
        """`tools`: functions that the chat template tells the policy of. Raises ValueError for a prompt without ids."""
        self._inference = inference
        self._prompt = prompt
        tools = tools or prompt.tools
        self._tools: dict[str, Any] = {"tools": tools} if tools else {}
        self._history: list[Message] = list(prompt.messages or ())
        self._prompt_ids = inference.prompt_ids(prompt.content, **self._tools)
        self._parts: list[tuple[np.ndarray, Completion | None]] = []  # token ids, and the answer that they are of
        self._text = ""
        self._before: tuple[int, int, str] | None = None  # parts, messages and text before what was added last
        self.turns: list[Completion] = []  # the policy's, each with the ids before it as its prompt

    @property
    def ids(self) -> np.ndarray:
        """Every token so far, int32 [P + T]."""
        return np.concatenate([self._prompt_ids, *(ids for ids, _ in self._parts)])

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far; empty where the prompt is plain text. Texts of answers are for reading alone."""
        return tuple(self._history)

    @property
    def version(self) -> PolicyVersion | None:
        """The newest version that has answered; None before the first token."""
        return next((turn.spans[-1].version for turn in reversed(self.turns) if turn.spans), None)

    @property
    def ended(self) -> bool:
        """Whether the last answer was not given to its end: the sample has failed."""
        return bool(self.turns) and self.turns[-1].finish_reason == "abort"

    async def generate(self, **sampling: Any) -> Completion:
        """The policy's next turn. `sampling` as in `Inference.generate`.

        No later turn is of an older version than an earlier one.
        """
        (turn,) = await self._inference.generate(
            self.ids, 1, images=self._prompt.images, at_least=self.version, **sampling
        )
        self.turns.append(turn)
        self._parts.append((turn.output_ids, turn))
        self._text += turn.text
        if self._prompt.messages is not None:
            self._history.append(Message(role="assistant", content=turn.text))
        return turn

    def add(self, added: str | Sequence[Message]) -> None:
        """What others say to the policy's last turn; the next `generate` answers it.

        Text for a prompt of plain text, messages for one of messages. Raises ValueError for the other form, before
        the first turn, and where the chat template refuses the messages.
        """
        ids = self.added_ids(added)
        self._before = len(self._parts), len(self._history), self._text
        self._parts.append((ids, None))
        if isinstance(added, str):
            self._text += added
        else:
            self._history.extend(added)
            self._text += "".join(f"\n[{message['role']}] {message['content']}\n" for message in added)

    def take_back(self) -> None:
        """Undo the last `add`, which nobody has answered."""
        if self._before is not None and self._parts[-1][1] is None:
            parts, messages, self._text = self._before
            del self._parts[parts:], self._history[messages:]

    def added_ids(self, added: str | Sequence[Message]) -> np.ndarray:
        """int32 [A]: the tokens that `add` puts behind the policy's last turn. Raises ValueError as it does."""
        if not self.turns or self._parts[-1][1] is None:
            raise ValueError("the last message has no answer yet")
        if isinstance(added, str) is not (self._prompt.messages is None):
            raise ValueError("a prompt of plain text is followed by text, one of messages by messages")
        last = self.turns[-1].output_ids
        end = int(last[-1]) if len(last) else None
        return self._inference.added_ids(self._history[:-1], added, end, **self._tools)

    @property
    def completion(self) -> Completion:
        """The whole conversation as one answer to its prompt; `text` is that of all messages, in order.

        Tokens that the policy did not write have the mask False, the log-prob 0, and the version that was current.
        A conversation whose last turn was cut off has failed as a whole.
        """
        if not self.turns or self.ended:
            return Completion.failed(self._prompt_ids, self.turns[-1].failure if self.turns else "task")
        return Completion(
            text=self._text,
            prompt_ids=self._prompt_ids,
            output_ids=np.concatenate([ids for ids, _ in self._parts]).astype(np.int32),
            logprobs=np.concatenate([_zeros(ids) if of is None else of.logprobs for ids, of in self._parts]),
            spans=self._spans(),
            finish_reason=self.turns[-1].finish_reason,
            extras={**self._routing(), **self._sampling()},
            loss_mask=np.concatenate([np.full(len(ids), of is not None) for ids, of in self._parts]),
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        """Spans of all turns, each going on over what was added behind it."""
        spans: list[VersionSpan] = []
        end = 0
        for ids, of in self._parts:
            for span in of.spans if of is not None else ():
                spans = _joined(spans, replace(span, start=end + span.start, end=end + span.end))
            end += len(ids)
            if of is None and len(ids) and spans:
                spans = _joined(spans, replace(spans[-1], start=end - len(ids), end=end))
        return tuple(spans)

    def _sampling(self) -> dict[str, np.ndarray]:
        """How each turn's tokens were drawn; empty where all were as the run is configured."""
        return sampling_columns.joined([(len(ids), {} if of is None else of.extras) for ids, of in self._parts])

    def _routing(self) -> dict[str, np.ndarray]:
        """The experts of every token as the turn that first read it has them; empty for a dense model.

        A turn tells those of the tokens before it too, which are the only ones there are of what was added.
        """
        routed = [turn for turn in self.turns if OUTPUT in turn.extras and PROMPT in turn.extras]
        if not routed:
            return {}
        output = len(self.ids) - len(self._prompt_ids)
        experts = np.full((len(self.ids), routed[0].extras[OUTPUT].shape[1]), UNKNOWN, np.int16)
        read = 0
        for turn in routed:
            before = turn.extras[PROMPT].reshape(-1, experts.shape[1])[: len(turn.prompt_ids)]
            of_turn = np.concatenate([before, turn.extras[OUTPUT]])
            experts[read : len(of_turn)] = of_turn[read:]
            read = len(of_turn) - 1  # its last token is read by the next turn
        return fold(experts[:-1], len(self._prompt_ids), output)


def _zeros(ids: np.ndarray) -> np.ndarray:
    return np.zeros(len(ids), np.float32)


def _joined(spans: list[VersionSpan], span: VersionSpan) -> list[VersionSpan]:
    """The spans with one more, which goes on with the last where it has the same version and is as exact."""
    if spans and (spans[-1].version, spans[-1].exact) == (span.version, span.exact):
        return [*spans[:-1], replace(spans[-1], end=span.end)]
    return [*spans, span]
