"""The soft penalty on long answers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from streamrl.config import Config
from streamrl.config.task import OverlongConfig
from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import Completion, Prompt, Rollout
from streamrl.tasks.overlong import Overlong


def rollout(tokens: int) -> Rollout:
    ids = np.zeros(tokens, np.int32)
    answer = Completion(text="", prompt_ids=ids, output_ids=ids, logprobs=ids, spans=(), finish_reason="stop")
    return Rollout(completion=answer, reward=1.0, parts={"exact": 1.0})


def test_the_penalty_grows_in_a_straight_line_over_the_buffer_and_ends_at_the_cut():
    overlong = Overlong(OverlongConfig(buffer=4, penalty=2.0), longest=10)
    assert [overlong.penalty(tokens) for tokens in (0, 6, 7, 8, 9, 10, 30)] == [0, 0, -0.5, -1, -1.5, -2, -2]


def test_it_is_a_part_of_the_reward_and_leaves_the_others():
    overlong = Overlong(OverlongConfig(buffer=4), longest=10)
    penalised = overlong.penalised(rollout(9))
    assert (penalised.reward, penalised.parts) == (0.25, {"exact": 1.0, "overlong": -0.75})
    assert overlong.penalised(rollout(2)).parts == {"exact": 1.0, "overlong": 0.0}


def test_of_a_conversation_the_longest_turn_counts_and_nothing_that_others_said(scripted):
    def penalty(*turns: str) -> float:
        async def talk() -> Completion:
            question = {"role": "user", "content": "a question of many words"}
            conversation = Conversation(scripted([[turn] for turn in turns]), Prompt(index=0, messages=(question,)))
            for place in range(len(turns)):
                if place:
                    conversation.add([{"role": "tool", "content": "an output longer than any turn"}])
                await conversation.generate()
            return conversation.completion

        whole = asyncio.run(talk())
        assert len(whole.output_ids) > 10
        overlong = Overlong(OverlongConfig(buffer=4), longest=10)
        return overlong.penalised(Rollout(completion=whole, reward=0.0)).reward

    assert penalty("xyz", "xy", "xyzxyz") == 0.0
    assert penalty("x", "xyzxyzxyz", "xy") == penalty("x", "xy", "xyzxyzxyz") == -0.75


def test_without_a_buffer_a_rollout_is_left_as_it_is():
    original = rollout(10)
    assert Overlong(OverlongConfig(), longest=10).penalised(original) is original


def test_a_buffer_longer_than_the_answer_is_refused():
    with pytest.raises(ValueError, match=r"task\.overlong\.buffer: 17 is above generate\.sampling\.max_new_tokens=16"):
        Config.model_validate({"task": {"overlong": {"buffer": 17}}})
    assert Overlong.of(Config.model_validate({"task": {"overlong": {"buffer": 16}}})).longest == 16
