"""Conversations of several turns: the ids that were sampled, and nothing else, are what is trained."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from streamrl.moe_routing import OUTPUT, PROMPT, UNKNOWN, fold, unfold
from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import Completion, Message, Prompt
from streamrl.types import PolicyVersion, Sample, VersionSpan

END = "<|im_end|>"
QUESTION = Prompt(index=0, messages=(Message(role="user", content="q?"),))
TOOL = Message(role="tool", content="42")


def play(inference, prompt: Prompt, *added) -> Conversation:
    """A turn, and another one behind each thing that is added."""

    async def go() -> Conversation:
        conversation = Conversation(inference, prompt)
        await conversation.generate()
        for said in added:
            conversation.add(said)
            await conversation.generate()
        return conversation

    return asyncio.run(go())


def test_tokens_of_the_policy_stay_as_they_were_sampled_though_a_tokenizer_would_cut_them_otherwise(scripted):
    inference = scripted([["a", "b", END], ["ab", END]])
    whole = play(inference, QUESTION, [TOOL]).completion
    sampled = [*inference.tokenizer.plain_ids("a"), *inference.tokenizer.plain_ids("b")]
    assert whole.output_ids[:2].tolist() == sampled
    assert len(inference.tokenizer.plain_ids("ab")) == 1  # what a decoded and tokenised text would have become
    second = inference.asked[1]
    assert second.tolist() == [*whole.prompt_ids, *whole.output_ids[: len(second) - len(whole.prompt_ids)]]


def test_a_conversation_reads_as_the_chat_template_would_write_it(scripted):
    inference = scripted([["ab", END], ["done", END]])
    conversation = play(inference, QUESTION, [TOOL])
    rendered = inference.tokenizer.prompt_ids([*QUESTION.messages, Message(role="assistant", content="ab"), TOOL])
    assert inference.asked[1].tolist() == rendered.tolist()
    assert conversation.messages[1:] == (
        Message(role="assistant", content="ab"),
        TOOL,
        Message(role="assistant", content="done"),
    )


def test_an_answer_that_was_cut_gets_its_end_from_the_template_and_it_is_not_trained(scripted):
    inference = scripted([["ab"], ["c", END]])
    whole = play(inference, QUESTION, [TOOL]).completion
    (end,) = inference.tokenizer.plain_ids(END)
    assert whole.output_ids[1] == end
    assert not whole.loss_mask[1]


def test_what_others_said_is_masked_with_log_prob_0_and_the_version_that_was_current(scripted):
    inference = scripted([["ab", END], ["c", END]], versions=[3, 5])
    whole = play(inference, QUESTION, [TOOL]).completion
    added = len(whole.output_ids) - 4
    assert whole.loss_mask.tolist() == [True] * 2 + [False] * added + [True] * 2
    assert whole.logprobs.tolist() == [-1, -2] + [0] * added + [-1, -2]
    assert whole.spans == (
        VersionSpan(PolicyVersion(3), 0, 2 + added),
        VersionSpan(PolicyVersion(5), 2 + added, 4 + added),
    )
    assert inference.at_least == [None, PolicyVersion(3)]
    assert "42" in inference.tokenizer.text([whole.output_ids[~whole.loss_mask].tolist()])[0]
    sample(whole).check()


def test_inexact_tokens_stay_so_and_do_not_become_one_span_with_exact_ones(scripted):
    class Updated:
        """The first turn's request met an update in place."""

        def __init__(self, inference):
            self._inference = inference

        def __getattr__(self, name):
            return getattr(self._inference, name)

        async def generate(self, *request, **options):
            (turn,) = await self._inference.generate(*request, **options)
            if len(self._inference.asked) > 1:
                return [turn]
            spans = (VersionSpan(PolicyVersion(4), 0, 1), VersionSpan(PolicyVersion(5), 1, 2, exact=False))
            return [dataclasses.replace(turn, spans=spans)]

    whole = play(Updated(scripted([["ab", END], ["c", END]], versions=[4, 5])), QUESTION, [TOOL]).completion
    added = len(whole.output_ids) - 4
    assert whole.spans == (
        VersionSpan(PolicyVersion(4), 0, 1),
        VersionSpan(PolicyVersion(5), 1, 2 + added, exact=False),
        VersionSpan(PolicyVersion(5), 2 + added, 4 + added),
    )
    sample(whole).check()


def test_plain_text_goes_on_without_a_chat_template(scripted):
    inference = scripted([["ab"], ["c"]], versions=[1, 1])
    whole = play(inference, Prompt(index=0, text="x="), "y=").completion
    assert inference.tokenizer.text([inference.asked[1].tolist()]) == ["x=aby="]
    assert whole.loss_mask.tolist() == [True, False, False, True]
    assert whole.spans == (VersionSpan(PolicyVersion(1), 0, 4),)
    assert whole.text == "aby=c"


def test_a_turn_that_was_not_answered_fails_the_whole_sample(scripted):
    conversation = play(scripted([["ab", END]]), QUESTION, [TOOL])
    assert conversation.ended
    assert conversation.completion.finish_reason == "abort"
    assert len(conversation.completion.output_ids) == 0


@pytest.mark.parametrize(
    ("prompt", "said", "reason"),
    [(QUESTION, "text", "plain text is followed by text"), (Prompt(index=0, text="x="), [TOOL], "one of messages")],
)
def test_text_and_messages_do_not_mix(scripted, prompt, said, reason):
    with pytest.raises(ValueError, match=reason):
        play(scripted([["ab", END], ["c", END]]), prompt, said)


def test_two_observations_in_a_row_are_refused(scripted):
    conversation = play(scripted([["ab", END], ["c", END]]), QUESTION)
    conversation.add([TOOL])
    with pytest.raises(ValueError, match="no answer yet"):
        conversation.add([TOOL])


def test_each_token_has_the_experts_of_the_turn_that_read_it_first(scripted):
    inference = scripted([["ab"], ["c"]])
    conversation = play(inference, Prompt(index=0, text="x="), "y=")
    first, second = conversation.turns
    with_experts(first, [[1], [2]])  # x =, and its one output token is read only with the next turn
    with_experts(second, [[9], [9], [4], [5], [6]])  # x = ab y = c
    whole = sample(conversation.completion)
    assert unfold(whole).ravel().tolist() == [1, 2]
    assert whole.extras[OUTPUT].ravel().tolist() == [4, 5, 6, UNKNOWN]


def test_experts_that_a_turn_has_not_told_are_not_those_of_a_later_one(scripted):
    inference = scripted([["a", "b", "c"], ["d"]])
    conversation = play(inference, Prompt(index=0, text="x="), "y=")
    first, second = conversation.turns
    with_experts(first, [[1], [2], [UNKNOWN], [4]])  # x = a b, and c is read with the next turn
    with_experts(second, [[9], [9], [9], [9], [5], [6], [7]])  # x = a b c y =
    whole = sample(conversation.completion)
    assert whole.extras[OUTPUT].ravel().tolist() == [UNKNOWN, 4, 5, 6, 7, UNKNOWN]


def with_experts(turn: Completion, rows: list[list[int]]) -> None:
    """Give a turn the experts of all but its last token."""
    read = len(turn.prompt_ids) + len(turn.output_ids) - 1
    turn.extras.update(fold(np.array(rows[:read], np.int16), len(turn.prompt_ids), len(turn.output_ids)))
    assert PROMPT in turn.extras


def sample(completion: Completion) -> Sample:
    return Sample(
        prompt_ids=completion.prompt_ids,
        output_ids=completion.output_ids,
        logprobs=completion.logprobs,
        loss_mask=completion.loss_mask,
        spans=completion.spans,
        reward=0.0,
        extras=completion.extras,
    )
