"""Agents that were written for Megatron-RL, played on a real tokenizer with given answers."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.task import ScoringConfig, TaskConfig, TaskShare
from streamrl.tasks.call_clock import CLOCK
from streamrl.tasks.environment import EXACT, FAILED, Environment, Rollout
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.failures import ScorerLate
from streamrl.tasks.hosted import host_task
from streamrl.tasks.megatron_rl import (
    GenericGenerationArgs,
    GroupedRolloutGenerator,
    LLMChatMessage,
    RewardOnlyAgent,
    TokenRollout,
)
from streamrl.tasks.megatron_rl.policy import PolicyInterface, Recorder
from streamrl.tasks.registry import build_task
from streamrl.tasks.turns import TURNS
from tests.documented_commands import ROOT, blocks

AGENTS = Path(__file__).with_name("megatron_agents.py")
END = "<|im_end|>"


def task(name: str, split: str = "train", **args: Any) -> Environment:
    return build_task(TaskShare(name=f"{AGENTS}:{name}", args=args), seed=1, split=split)


def play(environment: Environment, inference: Any, n: int, index: int = 0) -> list[Rollout]:
    return asyncio.run(environment.rollout_group(inference, environment.prompt(index), n))


def said(*texts: str) -> list[list[str]]:
    return [[text, END] for text in texts]


def asked(inference: Any) -> list[str]:
    """The word of each request."""
    return [inference.tokenizer.text([ids.tolist()])[0] for ids in inference.asked]


def word_of(environment: Environment, index: int = 0) -> str:
    return environment.prompt(index).messages[0]["content"]


def test_an_agent_of_rewards_gives_a_sample_for_each_episode_with_the_tokens_that_were_drawn(scripted):
    environment = task("Spelled")
    right = word_of(environment)
    inference = scripted([["a", "b", END], [right, END], ["zz", END]])
    rollouts = play(environment, inference, 3)
    assert [rollout.reward for rollout in rollouts][1:] == [1.0, 0.0]
    assert [rollout.parts[EXACT] for rollout in rollouts][1:] == [1.0, 0.0]
    assert len(rollouts[0].completion.output_ids) == 3  # "ab" is one token of the tokenizer
    assert rollouts[0].completion.logprobs.tolist() == [-1, -2, -3]
    assert all(rollout.completion.loss_mask.all() for rollout in rollouts)


def test_the_prompt_of_an_index_is_the_same_again_and_another_for_another_index():
    one, other = task("Spelled", length=6), task("Spelled", length=6)
    words = [word_of(one, index) for index in range(8)]
    assert len(set(words)) == 8
    assert [word_of(other, index) for index in reversed(range(8))] == words[::-1]


def test_turns_of_one_episode_are_one_sample_and_their_rewards_are_added_up(scripted):
    environment = task("Twice")
    first = word_of(environment)
    inference = scripted([["a", "b", END], [first, END], ["zz", END], ["zz", END]])
    rollouts = play(environment, inference, 2)
    assert all(rollout.parts[TURNS] == 2 for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.reward == rollout.parts["turn_1"] + rollout.parts["turn_2"]
        assert not rollout.completion.loss_mask.all()
        assert not rollout.completion.logprobs[~rollout.completion.loss_mask].any()
    # The second request repeats the tokens that were drawn, "a" and "b", which the tokenizer would make one of.
    assert inference.asked[2][len(inference.asked[0]) :].tolist()[:3] == rollouts[0].completion.output_ids[:3].tolist()


@pytest.mark.parametrize("name", ["Prepared", "Asking", "Tokens"])
def test_all_samples_of_a_group_have_one_prompt(name, scripted):
    environment = task(name)
    inference = scripted(said("zz", "yy", "xx"))
    rollouts = play(environment, inference, 3, index=5)
    assert [rollout.completion.text for rollout in rollouts] == ["zz", "yy", "xx"]
    assert [rollout.reward for rollout in rollouts] == [0.0] * 3
    assert len(set(asked(inference))) == 1
    again = scripted(said("zz", "yy", "xx"))
    play(task(name), again, 3, index=5)
    assert asked(again) == asked(inference)
    play(task(name), other := scripted(said("zz", "yy", "xx")), 3, index=6)
    assert asked(other) != asked(inference)


def test_of_a_pair_the_chosen_one_earns_one_and_the_rejected_one_nothing(scripted):
    environment = task("Shorter")
    rollouts = play(environment, scripted(said("zz", "aabbccddeeffgghh", "yy", "yy")), 4)
    assert sorted(rollout.reward for rollout in rollouts) == [0.0, 0.0, 1.0, 1.0]
    texts = [rollout.completion.text for rollout in rollouts]
    assert sorted(texts) == sorted(["zz", "aabbccddeeffgghh", "yy", "yy"])
    (odd,) = play(environment, scripted(said("zz", "yy")), 1)
    assert odd.reward == 1.0


def test_both_players_of_a_game_are_samples(scripted):
    rollouts = play(task("Duel"), scripted(said("zz", "yy", "xx", "ww")), 4)
    assert [rollout.reward for rollout in rollouts] == [0.5] * 4
    assert {rollout.completion.text for rollout in rollouts} == {"zz", "yy", "xx", "ww"}


def test_held_out_prompts_are_those_of_the_agents_evaluation(scripted):
    probe = task("Spelled", "probe", evaluation_prompts=5)
    assert probe.size == 5
    assert [word_of(probe, index) for index in range(5)] == ["aa", "ab", "ac", "ad", "ae"]
    rollouts = play(probe, scripted(said("ac", "zz")), 2, index=2)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]


def test_an_agent_that_only_evaluates_is_asked_for_one_prompt_at_a_time_and_never_trained(scripted):
    probe = task("Exam", "probe", evaluation_prompts=8)
    assert probe.size == 8
    rollouts = play(probe, scripted(said("ac", "zz")), 2, index=2)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"^task\.name: Exam only evaluates; allowed: "):
        task("Exam")


def test_what_an_agent_raises_costs_its_sample_the_reward_and_masks_what_it_masks(scripted):
    rollouts = play(task("Spelled", breaks_on="x"), scripted(said("x", "zz")), 2)
    assert rollouts[0].parts == {FAILED: 1.0}
    assert "the agent broke" in rollouts[0].failure
    assert rollouts[0].completion.text == "x"
    assert rollouts[1].failure is None
    masked, placeholder, fine = play(task("Tokens", marks=True), scripted(said("h", "g", "zz")), 3)
    assert masked.masked
    assert placeholder.parts == {FAILED: 1.0}
    assert "no g" in placeholder.failure
    assert fine.failure is None
    (unanswered,) = play(task("Spelled"), scripted([]), 1)
    assert unanswered.completion.finish_reason == "abort"
    assert unanswered.masked


class Lost(RuntimeError):
    """No server is left."""


@pytest.mark.parametrize("name", ["Spelled", "Asking", "Shorter"])
def test_what_the_policy_raises_is_no_failure_of_a_sample(name, scripted):
    inference = scripted(said("zz", "yy", "xx"))
    answer, calls = inference.generate, itertools.count(1)

    async def generate(*prompt: Any, **sampling: Any) -> Any:
        if next(calls) == 4:
            raise Lost
        return await answer(*prompt, **sampling)

    inference.generate = generate
    with pytest.raises(Lost):
        play(task(name), inference, 4)


class Marked(GroupedRolloutGenerator):
    """Masks the last of its rollouts, and has lost the first one."""

    async def prepare_group_rollout(self, request):
        raise NotImplementedError

    async def get_grouped_rollouts(self, request):
        prompt = request.inference_interface.prepare_request("ab", request.generation_args)
        answers = [await request.inference_interface.agenerate(prompt) for _ in range(request.rollouts_per_group)]
        rollouts = [TokenRollout(trajectory=[answer.token_ids], reward=1.0) for answer in answers]
        rollouts[0].trajectory, rollouts[-1].rollout_status = [], "masked"
        return [rollouts]


def test_each_rollout_has_its_own_answer_whatever_became_of_it(scripted):
    marked = Marked.as_choice()
    lost, fine, masked = play(marked(marked.Arguments(), 1, "train"), scripted(said("x", "y", "z")), 3)
    assert (lost.completion.text, fine.completion.text, masked.completion.text) == ("x", "y", "z")
    assert (lost.parts, fine.failure, masked.masked) == ({FAILED: 1.0}, None, True)


class Silent(RewardOnlyAgent):
    """Asks nothing."""

    async def prepare_group_rollout(self, request):
        raise KeyError("no prompt")


def test_an_agent_that_asks_nothing_loses_its_group_and_one_that_cannot_be_made_is_refused(scripted):
    silent = Silent.as_choice()
    environment = silent(silent.Arguments(), 1, "train")
    with pytest.raises((NotPlayed, KeyError)):
        play(environment, scripted([]), 2)
    with pytest.raises(ValueError, match=r"^task\.args: Spelled cannot be made: .*length") as refused:
        task("Spelled", length="long")
    assert "\n" not in str(refused.value)


def test_a_conversation_in_other_words_is_one_of_its_own_and_two_with_the_same_words_are_told_apart(scripted):
    inference = scripted([["a", "b", END], ["ab", END], *said("x", "y", "z")])

    async def calls() -> Recorder:
        recorder = Recorder(inference)
        interface = PolicyInterface(recorder)
        first = interface.prepare_request("g", interface_args())
        one, other = await interface.agenerate(first), await interface.agenerate(first)
        more = LLMChatMessage(role="user", content="h")
        for reply in (other.response, one.response, LLMChatMessage(role="assistant", content="in other words")):
            await interface.agenerate(interface.prepare_request([*first.prompt, reply, more], interface_args()))
        return recorder

    recorder = asyncio.run(calls())
    assert [len(each.conversation.turns) for each in recorder.asked] == [2, 2, 1]
    assert [each.conversation.turns[-1].text for each in recorder.asked] == ["y", "x", "z"]
    assert recorder.asked[0].conversation.completion.output_ids[:2].tolist() != (
        recorder.asked[1].conversation.completion.output_ids[:2].tolist()
    )


def interface_args() -> Any:
    return GenericGenerationArgs(temperature=0.5)  # the run's own is drawn with


def test_an_agent_runs_in_a_process_of_its_own(scripted):
    async def played() -> list[Rollout]:
        share = TaskShare(name=f"{AGENTS}:Twice")
        environment = await host_task(share, 1, "train", TaskConfig(scoring=ScoringConfig(processes=1)))
        try:
            prompt = await environment.fetch(3)
            return await environment.rollout_group(scripted(said("zz", "yy", "xx", "ww")), prompt, 2)
        finally:
            await environment.close()

    rollouts = asyncio.run(played())
    assert [rollout.parts[TURNS] for rollout in rollouts] == [2.0, 2.0]
    assert all(np.isfinite(rollout.completion.logprobs).all() for rollout in rollouts)


def test_a_group_that_waits_for_the_turn_of_another_is_not_late(scripted):
    async def played() -> list[list[Rollout] | BaseException]:
        share = TaskShare(name=f"{AGENTS}:HangsFirst")
        environment = await host_task(share, 1, "train", TaskConfig(scoring=ScoringConfig(processes=1, timeout=2.0)))
        try:
            prompts = [await environment.fetch(index) for index in range(8)]
            groups = [environment.rollout_group(scripted(said("zz")), prompt, 1) for prompt in prompts]
            return await asyncio.gather(*groups, return_exceptions=True)
        finally:
            await environment.close()

    first, *others = asyncio.run(played())
    assert isinstance(first, ScorerLate)  # the others waited for it, all of that time
    assert [rollout.failure for (rollout,) in others] == [None] * 7


def test_each_play_of_a_group_is_timed_by_itself(scripted):
    told = list[bool]()

    async def played() -> None:
        CLOCK.set(told.append)
        environment = task("Asking")
        await environment.rollout_group(scripted(said("zz", "yy", "xx")), environment.prompt(0), 3)

    asyncio.run(played())
    assert told == [False, True, True, True, True]  # it waits for its turn, has it, and begins three plays


def test_the_agent_of_the_page_is_a_task(scripted, tmp_path):
    page = ROOT / "docs" / "environments.md"
    (text,) = [text for _, text in blocks(page) if text.startswith("# vowels.py")]
    assert re.search(r"from streamrl\.tasks\.megatron_rl import RewardOnlyAgent", text)
    (tmp_path / "vowels.py").write_text(text)
    share = TaskShare(name=f"{tmp_path}/vowels.py:Vowels", args={})
    for split in ("train", "probe"):
        environment = build_task(share, 1, split)
        vowels = "".join(letter for letter in word_of(environment) if letter in "aeiou")
        right, wrong = play(environment, scripted([[vowels, END] if vowels else [END], ["zz", END]]), 2)
        assert (right.reward, wrong.reward) == (1.0, 0.0)
