"""Groups from a real server: whole, checked, and with a placeholder for whatever failed."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from streamrl import sampling_columns
from streamrl.config.generate import GenerateConfig
from streamrl.config.task import OverlongConfig, ScoringConfig, TaskShare
from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, WeightVersionSpan
from streamrl.engine.client import EngineClient, EngineError
from streamrl.generate.group import run_group
from streamrl.generate.inference import EngineInference, Load, completion
from streamrl.generate.requests import GroupPolicy, Place
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.events import EventLog, read_events
from streamrl.stream.codec import decode_group, encode_group
from streamrl.tasks.built_in.agent import Agent, AgentArguments
from streamrl.tasks.environment import Branch, Completion, Environment, Inference, Prompt, Rollout, Score
from streamrl.tasks.overlong import Overlong
from streamrl.tasks.registry import build_task
from streamrl.tasks.scoring import ScorerBroken, Scoring
from streamrl.tasks.turns import TurnByTurn
from streamrl.types import Group, PolicyVersion, Ticket, VersionSpan

SIZE = 4


class Task(Environment):
    """Prompts of a given text; one point for each token."""

    def __init__(self, text: str = "caf=", rollouts: int = SIZE, **sampling: Any) -> None:
        self.text, self.rollouts, self.sampling = text, rollouts, sampling

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text=self.text)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(reward=float(len(completion.output_ids)), parts={"length": float(len(completion.output_ids))})

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        completions = await inference.generate(prompt.content, self.rollouts, **self.sampling)
        return await self.score_all(prompt, completions)


def ticket(step: int = 0) -> Ticket:
    return Ticket(
        group_id=5, attempt=1, task="copy", prompt_index=5, seed=1, issued_version=PolicyVersion(step), deadline=0.0
    )


class OneServer:
    """The servers of a worker that has one."""

    def __init__(self, client: EngineClient) -> None:
        self.place = Place("server-0", PolicyVersion(0), client)

    def choose(self, group: Hashable, floor: PolicyVersion, avoid: str | None) -> Place | None:
        return self.place

    async def changed(self) -> None:
        await asyncio.sleep(0.01)


@pytest.fixture
def run(fresh_server, model_folders: tuple[Path, Path], tmp_path: Path):
    """`run(task, step_of_the_ticket, **generate)`: the group, the load and the end record of its event.

    `cut`: requests go the worker's way, on which they can be ended before their end.
    """

    def run(
        task: Environment,
        step: int = 0,
        *,
        address: str = fresh_server.address,
        longest: int = 1000,
        overlong: int = 0,
        seconds: float | None = None,
        cut: bool = False,
        scoring: Scoring | None = None,
        **generate: Any,
    ):
        config = GenerateConfig.model_validate({"sampling": {"max_new_tokens": 6}, **generate})
        load = Load()
        events = EventLog(tmp_path / "events.jsonl", "generator-0")

        async def go() -> Group:
            client = EngineClient(address, 60.0)
            try:
                deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
                every = config.stream_every
                policy = GroupPolicy(OneServer(client), "group", PolicyVersion(0), every) if cut else client
                inference = EngineInference(policy, Tokenizer(model_folders[0]), config, load, deadline=deadline)
                penalty = Overlong(OverlongConfig(buffer=overlong), longest=6)
                limits = {"longest": longest, "temperature": config.sampling.temperature, "overlong": penalty}
                return await run_group(ticket(step), task, inference, SIZE, **limits, events=events, scoring=scoring)
            finally:
                await client.close()

        group = asyncio.run(go())
        *_, end = [event for event in read_events(events.path) if event.get("phase") == "end"]
        return group, load, end

    return run


def test_a_task_lowers_the_number_of_tokens_and_does_not_raise_it(run):
    for most, longest in ((2, 2), (1_000_000, 6)):
        group, _, _ = run(Task(most_new_tokens=most))
        assert max(len(sample.output_ids) for sample in group.samples) == longest


def test_a_sequence_that_no_micro_batch_holds_is_a_placeholder(run):
    group, _, end = run(Task(), longest=3)
    assert [sample.failure for sample in group.samples] == ["too_long"] * SIZE
    assert end["failures"] == {"too_long": SIZE}
    assert "learner.tokens_per_micro_batch=3" in end["reasons"][0]


def test_an_answer_that_is_cut_has_its_place_in_the_least_micro_batch_that_is_allowed(run, model_folders):
    """Nothing is predicted from the last token: prompt + max_new_tokens - 1, as the checks before a run say."""
    prompt = len(Tokenizer(model_folders[0]).prompt_ids("caf="))
    group, _, end = run(Task(), longest=prompt + 6 - 1)
    assert "length" in {sample.finish_reason for sample in group.samples}
    assert end["failed"] == 0
    group, _, _ = run(Task(), longest=prompt + 6 - 2)
    assert "too_long" in {sample.failure for sample in group.samples}


@pytest.mark.parametrize("single", [False, True])
def test_a_group_has_its_samples_with_the_policys_log_probs_and_versions(run, model_folders, forward_logprobs, single):
    group, load, end = run(Task(), single_requests=single)
    group.check()
    assert (group.group_id, group.attempt, group.worker, len(group.samples)) == (5, 1, "generator-0", SIZE)
    assert 0.0 < group.started <= group.finished
    assert load.generated == group.tokens == end["tokens"] > 0
    assert load.busy > 0.0
    _, arena = encode_group(group, 1 << 20)
    assert np.shares_memory(np.frombuffer(arena, np.uint8), group.samples[0].output_ids)  # nothing is copied to send it
    weights = load_file(model_folders[0] / "model.safetensors")
    prompt = Tokenizer(model_folders[0]).prompt_ids("caf=")
    for sample in group.samples:
        assert np.array_equal(sample.prompt_ids, prompt)
        assert sample.loss_mask.all()
        assert sample.reward == sample.reward_parts["length"] == len(sample.output_ids)
        assert sample.spans == (VersionSpan(PolicyVersion(0), 0, len(sample.output_ids)),)
        expected = forward_logprobs(weights, [*prompt, *sample.output_ids])[len(prompt) - 1 :]
        assert np.abs(expected.numpy() - sample.logprobs).max() < 1e-4


def test_of_a_conversation_every_token_of_the_policy_has_its_log_prob_and_no_other_is_trained(
    run, model_folders, forward_logprobs
):
    class Echo(TurnByTurn):
        """Says "ed=" to whatever it receives."""

        max_turns = 3

        def prompt(self, index: int) -> Prompt:
            return Prompt(index=index, text="caf=")

        async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> str:
            return "ed="

        async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
            return Score(reward=float(len(turns)))

    group, load, _ = run(Echo())
    group.check()
    tokenizer, weights = Tokenizer(model_folders[0]), load_file(model_folders[0] / "model.safetensors")
    said = tokenizer.plain_ids("ed=").tolist()
    assert load.generated == group.trained_tokens == group.tokens - SIZE * 2 * len(said)
    for sample in group.samples:
        assert sample.reward == 3.0
        assert sample.output_ids[~sample.loss_mask].tolist() == 2 * said
        expected = forward_logprobs(weights, [*sample.prompt_ids, *sample.output_ids])[len(sample.prompt_ids) - 1 :]
        assert np.abs(expected.numpy() - sample.logprobs)[sample.loss_mask].max() < 1e-4
        assert not sample.logprobs[~sample.loss_mask].any()


class Forked(Task):
    """A note, and what is written from it: two branches."""

    max_branches = 2
    forks = 1
    note_reward: float | None = None

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        return [await self._play(inference, prompt) for _ in range(n)]

    async def _play(self, inference: Inference, prompt: Prompt) -> Rollout:
        branches = []
        for _ in range(self.forks):
            (note,) = await inference.generate("ed=", 1)
            branches.append(Branch(completion=note, reward=self.note_reward))
        (answer,) = await inference.generate(prompt.content, 1)
        return Rollout(completion=answer, reward=1.0, parts={"right": 1.0}, branches=tuple(branches))


@pytest.mark.parametrize("own", [None, 0.25])
def test_each_branch_is_a_sample_with_its_own_prompt_and_log_probs(run, model_folders, forward_logprobs, own):
    class Own(Forked):
        note_reward = own

    group, load, end = run(Own())
    group.check()
    assert (group.branches, group.size, len(group.samples)) == ((2,) * SIZE, SIZE, 2 * SIZE)
    assert load.generated == group.tokens == end["tokens"]
    tokenizer, weights = Tokenizer(model_folders[0]), load_file(model_folders[0] / "model.safetensors")
    for note, answer in group.rollouts:
        assert (note.reward, note.reward_parts) == (1.0 if own is None else own, {})
        assert (answer.reward, answer.reward_parts) == (1.0, {"right": 1.0})
        for sample, text in ((note, "ed="), (answer, "caf=")):
            assert sample.prompt_ids.tolist() == tokenizer.prompt_ids(text).tolist()
            expected = forward_logprobs(weights, [*sample.prompt_ids, *sample.output_ids])[len(sample.prompt_ids) - 1 :]
            assert np.abs(expected.numpy() - sample.logprobs).max() < 1e-4
    decoded = decode_group(*encode_group(group, 1 << 20))
    assert decoded.branches == group.branches


def test_a_rollout_with_a_branch_too_many_or_one_that_is_too_long_fails_as_a_whole(run):
    class Many(Forked):
        forks = 2

    group, _, end = run(Many())
    assert [sample.failure for sample in group.samples] == ["branches"] * SIZE
    assert (group.branches, end["failures"]) == ((), {"branches": SIZE})
    assert end["reasons"] == ["group 5: a rollout of 3 branches; allowed: task.max_branches=2"]
    group, _, end = run(Forked(), longest=3)
    assert ([sample.failure for sample in group.samples], group.branches) == (["too_long"] * SIZE, ())
    assert len(end["reached"]) == SIZE


def test_an_answer_near_the_cut_loses_reward_and_says_so_in_a_part(run):
    group, _, _ = run(Task(), overlong=4)
    for sample in group.samples:
        tokens = len(sample.output_ids)
        assert sample.reward_parts["overlong"] == -max(tokens - 2, 0) / 4
        assert sample.reward == tokens + sample.reward_parts["overlong"]
    assert min(sample.reward_parts["overlong"] for sample in group.samples) == -1


@pytest.mark.parametrize(("single", "every"), [(False, 0), (False, 8), (True, 0)])
def test_what_is_not_finished_at_the_deadline_is_a_placeholder_and_its_length_is_told(run, single, every):
    class Late(Task):
        """Two samples that are finished when the deadline comes, two that have a long way to go."""

        async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
            drawing = inference._sampling.drawing
            ignoring = {"ignore_eos": True}  # the tiny model ends an answer after a few tokens
            inference._sampling.drawing = lambda own: replace(
                drawing(own), parameters={**drawing(own).parameters, **ignoring}
            )
            now = asyncio.get_running_loop().time
            began = now()
            completions = await inference.generate(prompt.content, 2, max_new_tokens=64, stop_token_ids=[])
            inference.deadline = now() + max(1.0, now() - began)  # in the time of 64 tokens, more than 2 and not 1900
            completions += await inference.generate(prompt.content, 2, max_new_tokens=1900, stop_token_ids=[])
            return await self.score_all(prompt, completions)

    group, _, end = run(Late(), seconds=60, cut=True, single_requests=single, stream_every=every)
    group.check()
    assert [sample.failure for sample in group.samples] == ["", "", "deadline", "deadline"]
    assert end["failed"] == 2
    assert "not finished at the deadline" in end["reasons"]
    told = single or every > 0  # answers of one request that come at once are known at their end alone
    assert all(reached > 2 for reached in end["reached"]) if told else end["reached"] == [0, 0]


def test_a_task_that_hangs_costs_its_group_not_the_worker(run, monkeypatch):
    class Hangs(Task):
        async def score(self, prompt: Prompt, completion: Completion) -> Score:
            await asyncio.sleep(3600)
            raise AssertionError

    monkeypatch.setattr("streamrl.generate.group.SCORING_TIME", 0.5)
    group, _, end = run(Hangs(), seconds=1.0)
    assert [sample.failure for sample in group.samples] == ["deadline"] * SIZE
    assert any("TimeoutError" in reason for reason in end["reasons"])


def test_a_prompt_that_the_server_refuses_becomes_placeholders(run):
    group, load, end = run(Task("abcdefgh" * 20_000))
    group.check()
    assert [sample.finish_reason for sample in group.samples] == ["placeholder"] * SIZE
    assert [sample.failure for sample in group.samples] == ["server"] * SIZE
    assert end["failed"] == SIZE
    assert "status 400" in end["reasons"][0]
    assert load.generated == 0


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Task(rollouts=SIZE - 1), "3 rollouts, 4 were asked for"),
        (Task(frequency_penalty=0.5), "sampling override 'frequency_penalty'"),
    ],
)
def test_a_task_that_fails_costs_its_group_not_the_run(run, task, reason):
    group, _, end = run(task)
    group.check()
    assert [sample.failure for sample in group.samples] == ["task"] * SIZE
    assert any(reason in text for text in end["reasons"])


@pytest.mark.parametrize("every", [0, 2])
def test_a_task_draws_in_its_own_way_and_the_samples_carry_how(run, model_folders, every):
    own = {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 12, "stop": ["h", "=a"]}
    group, _, end = run(Task(**own), cut=True, stream_every=every)
    assert end["failed"] == 0, end
    for sample in group.samples:
        assert sampling_columns.problem(sample, vocabulary=10) is None
        assert set(sampling_columns.temperatures(sample, 1.0)) == {0.7}
        sets = sampling_columns.kept_sets(sample)
        assert (sets.counts > 0).all()
        assert sets.counts.min() < 10
        assert (sample.logprobs <= 0).all()
        ids = sample.output_ids.tolist()
        texts = Tokenizer(model_folders[0]).text([ids[:end] for end in range(1, len(ids) + 1)])
        stops = [end for end, text in enumerate(texts, 1) if "h" in text or "=a" in text]
        assert stops in ([], [len(ids)])
        assert sample.finish_reason == "stop" if stops else sample.finish_reason in ("stop", "length")
    counts = encode_group(group, 1 << 20)
    assert decode_group(*counts).samples[0].extras.keys() == group.samples[0].extras.keys()


def test_tokens_older_than_the_ticket_allows_are_never_trained(run):
    group, _, end = run(Task(), step=1)
    assert [sample.failure for sample in group.samples] == ["malformed"] * SIZE
    assert "tokens of version 0.0, its ticket needs 1.0" in end["reasons"][0]


def test_a_server_that_cannot_be_reached_is_not_a_failed_sample(run):
    with pytest.raises(EngineError):
        run(Task(), address="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("spans", "logprob_of", "reason"),
    [
        ([("3.0", 0, 1)], 8, "do not cover"),
        ([("4.0-partial", 0, 2)], 8, "not of the form STEP.INCARNATION"),
        ([("3.0", 0, 2)], 1, "log-probs of other tokens"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(spans, logprob_of, reason):
    meta = AnswerMeta(
        id="r",
        finish_reason=FinishReason(type="stop"),
        weight_versions=tuple(WeightVersionSpan(*span) for span in spans),
        output_token_logprobs=[(-0.1, 7, None), (-0.2, logprob_of, None)],
    )
    arrays = np.empty(2, np.int32), np.empty(2, np.float32)
    with pytest.raises(ValueError, match=reason):
        completion(np.array([1], np.int32), Answer([7, 8], meta), "text", arrays)


class Raises(Task):
    """Scores all answers but the first `judged` ones, and raises on those."""

    lowest_reward = -1.0

    def __init__(self, error: Exception, judged: int) -> None:
        super().__init__()
        self.error, self.left = error, judged

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        self.left -= 1
        if self.left >= 0:
            return Score(reward=1.0)
        raise self.error


def test_an_answer_on_which_the_scorer_raises_is_trained_with_the_lowest_reward(run):
    group, _, end = run(Raises(KeyError("x"), judged=1))
    assert [sample.reward for sample in group.samples] == [1.0, -1.0, -1.0, -1.0]
    assert [sample.failure for sample in group.samples] == [""] * SIZE
    assert (end["failed"], end["unscored"]) == (0, SIZE - 1)
    assert "KeyError: 'x'" in end["reasons"][0]
    assert "test_group.py:" in end["reasons"][0]


def test_an_answer_whose_scorer_fails_by_infrastructure_is_masked(run):
    group, _, end = run(Raises(TimeoutError("service"), judged=1))
    assert [sample.failure for sample in group.samples] == ["", "scorer", "scorer", "scorer"]
    assert (end["failures"], end["unscored"]) == ({"scorer": 3}, 3)


def test_a_scorer_that_raises_on_every_answer_of_a_group_masks_it(run):
    group, _, end = run(Raises(KeyError("x"), judged=0))
    assert [sample.failure for sample in group.samples] == ["scorer"] * SIZE
    assert (end["failures"], end["unscored"]) == ({"scorer": SIZE}, SIZE)


class OneGroup(Agent):
    """An agent that lets go of its endpoint behind its first group."""

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        try:
            return await super().rollout_group(inference, prompt, n)
        finally:
            await self.close()


def test_an_agent_that_never_asks_is_no_fault_of_the_server_and_ends_the_run(run, tmp_path):
    arguments = AgentArguments(task=TaskShare(name="copy"), command="false")
    task = OneGroup(arguments, build_task(arguments.task, 1, "train"), 1, "train")
    with pytest.raises(ScorerBroken, match="the agent's command ended with code 1"):
        run(task, scoring=Scoring(ScoringConfig(window=1)))
    events = list(read_events(tmp_path / "events.jsonl"))
    (end,) = [event for event in events if event.get("phase") == "end"]
    assert end["failures"] == {"task": SIZE}
    (told,) = [event for event in events if event["event"] == "scorer.failed"]
    assert "the agent's command ended with code 1" in told["reason"]


def test_a_scorer_that_fails_too_often_raises_the_users_own_exception_and_line_and_tells_it_once(run, tmp_path):
    scoring = Scoring(ScoringConfig(window=2 * SIZE, most_failed=1.0))
    run(Raises(KeyError("x"), judged=0), scoring=scoring)
    with pytest.raises(ScorerBroken, match=r"failed on 8 of its last 8 .*KeyError: 'x' \(.*test_group\.py:\d+\)$"):
        run(Raises(KeyError("x"), judged=0), scoring=scoring)
    told = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "scorer.failed"]
    assert [(event["task"], "KeyError: 'x'" in event["reason"]) for event in told] == [("copy", True)]
