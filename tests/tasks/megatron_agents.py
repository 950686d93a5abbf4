"""An agent of each kind, as it is written for Megatron-RL, but for the line that imports its names."""

import asyncio
import random
from typing import ClassVar

import numpy as np

from streamrl.tasks.megatron_rl import (
    ContrastiveRollout,
    ContrastiveRolloutGenerator,
    EpisodeResult,
    EvaluationAgent,
    GroupedRolloutGenerator,
    GroupRolloutParams,
    Head2HeadRolloutRequest,
    LLMChatMessage,
    RewardEvaluationResult,
    RewardOnlyAgent,
    RewardOnlyEvaluationResponse,
    Rollout,
    RolloutGenerator,
    TokenizedRolloutGenerator,
    TokenRollout,
)

LETTERS = "abcdefgh"


def word(length=2):
    return "".join(random.choice(LETTERS) for _ in range(length))


def rightness(said, wanted):
    right = sum(one == other for one, other in zip(said.strip(), wanted, strict=False))
    return right / max(len(said.strip()), len(wanted))


class Spelled(RewardOnlyAgent):
    """A word that is to be repeated."""

    env_id: str = "spelled"
    length: int = 2
    breaks_on: str = "never"

    async def get_prompt(self, validation=False):
        golden = {"word": word(self.length), "problem_id": "7"}
        return golden["word"], golden

    async def get_reward(self, response, golden, finish_reason):
        if response == self.breaks_on:
            raise RuntimeError("the agent broke")
        return rightness(response, golden["word"])

    async def evaluation_prompts(self, num_prompts, validation=False):
        assert validation
        words = [f"{one}{other}" for one in LETTERS for other in LETTERS]
        return [(each, {"word": each}) for each in words[:num_prompts]]


class Twice(RewardOnlyAgent):
    """Two words, one after the other; each turn has a reward."""

    env_id: str = "twice"
    max_turns: int = 2

    async def get_prompt(self, validation=False):
        words = [word(), word()]
        return words[0], words

    async def get_observation(self, turn_idx, response, conversation, golden):
        assert len(conversation) == 2 * turn_idx + 1
        return (None, True) if response.response.content == "" else (golden[turn_idx + 1], False)

    async def get_trajectory_reward(self, responses, conversation, golden):
        assert len(conversation) == 2 * len(responses)
        said = zip(responses, golden, strict=False)
        return [rightness(response.response.content, wanted) / 2 for response, wanted in said]


class Prepared(GroupedRolloutGenerator):
    """Begins its groups itself, and gives token ids."""

    env_id: str = "prepared"

    async def prepare_group_rollout(self, request):
        asked = word()

        async def run_episode():
            prompt = request.inference_interface.prepare_request(asked, request.generation_args)
            response = await self.get_rollout_response(request, prompt)
            return EpisodeResult(responses=[response], conversation=[*prompt.prompt, response.response])

        async def build_rollout(episode):
            (response,) = episode.responses
            return TokenRollout(
                trajectory=[response.token_ids],
                reward=rightness(response.response.content, asked),
                generation_mask=[[place >= response.prompt_length for place in range(len(response.token_ids))]],
                logprobs=[response.logprobs],
                env_id=self.env_id,
            )

        return GroupRolloutParams(run_episode=run_episode, build_rollout=build_rollout)


class Asking(RolloutGenerator):
    """Gives rollouts of text, each of a prompt that it draws late."""

    async def get_reward_rollouts(self, request):
        return list(await asyncio.gather(*(self._one(request) for _ in range(request.num_rollouts))))

    async def _one(self, request):
        await asyncio.sleep(0)
        asked = word()
        prompt = request.inference_interface.prepare_request(asked, request.generation_args)
        response = await request.inference_interface.agenerate(prompt)
        return Rollout(trajectory=[response.raw_text], reward=rightness(response.response.content, asked))


class HangsFirst(Asking):
    """Its first play asks nothing, and does not end."""

    plays: ClassVar[int] = 0

    async def get_reward_rollouts(self, request):
        HangsFirst.plays += 1
        if HangsFirst.plays == 1:
            await asyncio.sleep(1e9)
        return await super().get_reward_rollouts(request)


class Tokens(TokenizedRolloutGenerator):
    """Gives rollouts of token ids. With `marks` an answer "h" is masked, and "g" is a placeholder."""

    marks: bool = False

    async def get_reward_rollouts(self, request):
        asked = "".join(np.random.choice(list(LETTERS), 2))
        prompt = request.inference_interface.prepare_request(asked, request.generation_args)
        response = await request.inference_interface.agenerate(prompt)
        said = response.response.content
        if self.marks and said == "g":
            return [TokenRollout(trajectory=[], reward=0.0, rollout_status="placeholder", failure_reason="no g")]
        status = "masked" if self.marks and said == "h" else "ok"
        named = {"completion_ids": [response.completion_id], "rollout_status": status}
        return [TokenRollout(trajectory=[response.token_ids], reward=rightness(said, asked), **named)]


class Shorter(ContrastiveRolloutGenerator):
    """Of two answers to one prompt the one that is nearer to it is chosen."""

    async def get_contrastive_rollouts(self, request):
        return [await self._pair(request) for _ in range(request.num_rollouts)]

    async def _pair(self, request):
        asked = word()
        prompt = request.inference_interface.prepare_request(asked, request.generation_args)
        answers = await asyncio.gather(*(request.inference_interface.agenerate(prompt) for _ in range(2)))
        said = sorted((answer.response.content for answer in answers), key=lambda text: rightness(text, asked))
        return ContrastiveRollout(chosen_trajectory=[said[1]], rejected_trajectory=[said[0]])


class Duel(RolloutGenerator):
    """Two players repeat a word; who is nearer to it wins."""

    async def get_reward_rollouts(self, request: Head2HeadRolloutRequest) -> list[Rollout]:
        asked = word()
        answers = []
        for player in request.inference_interface:
            prompt = player.prepare_request([LLMChatMessage(role="user", content=asked)], request.generation_args)
            answers.append(await player.agenerate(prompt))
        near = [rightness(answer.response.content, asked) for answer in answers]
        rewards = [0.5 + (near[0] - near[1]) / 2, 0.5 + (near[1] - near[0]) / 2]
        said = zip(answers, rewards, strict=True)
        return [Rollout(trajectory=[answer.raw_text], reward=reward) for answer, reward in said]


class Exam(EvaluationAgent):
    """Evaluates the words of two letters that begin with an a."""

    env_id: str = "exam"

    async def run_evaluation(self, request):
        words = [f"a{letter}" for letter in LETTERS][: request.num_prompts]
        if request.rank_info is not None:
            rank, ranks = request.rank_info
            words = words[rank::ranks]
        results = []
        for each in words:
            prompt = request.inference_interface.prepare_request(each, request.generation_args)
            answer = await request.inference_interface.agenerate(prompt)
            reward = rightness(answer.response.content, each)
            results.append(RewardEvaluationResult(prompt=each, response=answer.response, reward=reward))
        return RewardOnlyEvaluationResponse(results=results, env_id=self.env_id)
