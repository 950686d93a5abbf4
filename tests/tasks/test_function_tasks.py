"""Tasks made of functions: rows and rewards, tools, and environments, played on a real tokenizer with given answers."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest

from streamrl.config.task import TaskConfig
from streamrl.generate.tokenizer import Tokenizer
from streamrl.tasks.environment import EXACT, FAILED
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.functions.episodes import CALLS, ENVIRONMENT, Episodes, check_environment
from streamrl.tasks.functions.loading import task_of
from streamrl.tasks.functions.rewards import RewardFunction
from streamrl.tasks.functions.task import NUMBER, FunctionArguments, FunctionTask
from streamrl.tasks.functions.tools import tools_of
from streamrl.tasks.hosted import host_task
from streamrl.tasks.turns import TURNS
from tests.tasks.conftest import CHAT_TEMPLATE, Scripted
from tests.tasks.hosting import completion, go

END = "<|im_end|>"


def right(completions, answer, **_):
    return [float(_text(each) == expected) for each, expected in zip(completions, answer, strict=True)]


def _text(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


@pytest.fixture
def task(tmp_path):
    """`task(base, prompts, **members)`: a task over rows `{prompt, answer}`, the first of which is asked first."""

    def make(base, prompts, **members):
        rows = [{"prompt": prompt, "answer": "ab", NUMBER: number} for number, prompt in enumerate(prompts)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = FunctionArguments(path=str(tmp_path / "rows.jsonl"), max_turns=3, cache=str(tmp_path / "cache"))
        return type("Task", (base,), {"rewards": [RewardFunction(right)], **members})(arguments, 1, "train")

    return make


def play(task, inference, n=1):
    return asyncio.run(task.rollout_group(inference, task.prompt(0), n))


CHAT = [[{"role": "user", "content": "say ab"}], [{"role": "user", "content": "say it"}]]


def test_plain_prompts_are_asked_as_they_are_and_a_group_is_judged_at_once(task, scripted):
    sizes = []

    def counted(completions, **_):
        sizes.append(len(completions))
        return [0.0] * len(completions)

    own = task(FunctionTask, ["x=", "y="], rewards=[RewardFunction(right), RewardFunction(counted)])
    rollouts = play(own, scripted([["ab", END], ["b", END]]), n=2)
    assert [each.reward for each in rollouts] == [1.0, 0.0]
    assert rollouts[0].parts == {EXACT: 1.0, "right": 1.0, "counted": 0.0}
    assert sizes == [2]
    assert own.prompt(0).text in ("x=", "y=")


def test_a_conversation_is_judged_by_its_messages(task, scripted):
    own = task(FunctionTask, CHAT)
    (rollout,) = play(own, scripted([["ab", END]]))
    assert rollout.reward == 1.0
    assert own.prompt(0).messages[0]["role"] == "user"


def test_an_answer_that_was_not_given_is_not_judged_and_one_without_any_reward_is_masked(task, scripted):
    first, second = play(task(FunctionTask, ["x=", "y="]), scripted([["ab", END]]), n=2)
    assert (first.reward, second.completion.finish_reason) == (1.0, "abort")
    silent = task(FunctionTask, ["x=", "y="], rewards=[RewardFunction(lambda text: None)])
    (rollout,) = play(silent, scripted([["ab", END]]))
    assert rollout.masked
    assert "every reward function gave None" in rollout.failure


def test_a_reward_that_raises_costs_its_answer_the_lowest_reward(task, scripted):
    broken = task(FunctionTask, ["x=", "y="], rewards=[RewardFunction(lambda text: 1 / 0)])
    (rollout,) = play(broken, scripted([["ab", END]]))
    assert (rollout.reward, rollout.parts, rollout.masked) == (0.0, {FAILED: 1.0}, False)


def double(text: str) -> str:
    """Say it twice."""
    return text + text


def test_tools_are_called_until_a_turn_has_no_call(task, scripted):
    own = task(Episodes, CHAT, tools=tools_of([double]), environment=None)
    assert not own.judges_groups
    call = '<tool_call>{"name": "double", "arguments": {"text": "a"}}</tool_call>'
    inference = scripted([[*call, END], ["ab", END]])
    (rollout,) = play(own, inference)
    assert (rollout.reward, rollout.parts) == (1.0, {EXACT: 1.0, TURNS: 2.0, CALLS: 1.0})
    assert "[tool] aa" in rollout.completion.text
    assert '"double"' in inference.tokenizer.text([inference.asked[0].tolist()])[0]  # the template tells of it


def test_a_conversation_whose_template_knows_no_tools_is_judged_by_what_follows_its_question(task, scripted):
    judged = []

    def notes(completions, **_):
        judged.extend(completions)
        return [0.0] * len(completions)

    own = task(Episodes, CHAT, tools=tools_of([double]), environment=None, rewards=[RewardFunction(notes)])
    inference = scripted([["ab", END]])
    told, prompt_ids = [], inference.prompt_ids

    def without_tools(content, *, tools=()):
        if tools:
            raise ValueError("the chat template does not tell of tools")
        told.append(content)
        return prompt_ids(content)

    inference.prompt_ids = without_tools
    play(own, inference)
    assert [message["role"] for message in told[0]] == ["system", "user"]
    ((answer,),) = judged
    assert (answer["role"], answer["content"]) == ("assistant", "ab")


@pytest.mark.parametrize("call", ["no tool", '<tool name="nothing">x</tool>', "<tool_call>{</tool_call>"])
def test_a_call_that_cannot_be_made_is_answered_and_never_ends_the_run(task, scripted, call):
    own = task(Episodes, ["x=", "y="], tools=tools_of([double]), environment=None)
    (rollout,) = play(own, scripted([[*call.replace(" ", "_"), END], ["ab", END], ["ab", END]]))
    assert rollout.failure is None


class Doors:
    """Opens when it is told its row's answer."""

    opened = 0

    def reset(self, answer: str):
        self.answer = answer
        return "door?"

    def step(self, text: str):
        done = text == self.answer
        return ("shut", 0.25, done) if not done else ("open", 0.5, done)

    def close(self):
        Doors.opened += 1


def test_an_environment_is_reset_with_its_row_and_stepped_until_it_is_done(task, scripted):
    before = Doors.opened
    own = task(Episodes, ["x=", "x="], rewards=[], environment=staticmethod(Doors))
    inference = scripted([["b", END], ["ab", END]])
    (rollout,) = play(own, inference)
    assert rollout.reward == 0.75
    assert rollout.parts == {EXACT: 0.0, TURNS: 2.0, ENVIRONMENT: 0.75}
    assert Doors.opened == before + 1
    assert inference.tokenizer.text([inference.asked[0].tolist()]) == ["x=door?"]


class Game:
    """As TRL has them: methods are tools, and the reward comes at the end."""

    def reset(self, **row):
        self.guessed = ""

    def guess(self, text: str) -> str:
        """Guess."""
        self.guessed = text
        return "noted"

    async def get_reward(self):
        return float(self.guessed == "ab")


def test_public_methods_of_an_environment_without_step_are_its_tools(task, scripted):
    own = task(Episodes, CHAT, rewards=[], environment=staticmethod(Game))
    (rollout,) = play(own, scripted([[*'<tool name="guess">', "ab", *"</tool>", END], ["b", END]]))
    assert (rollout.reward, rollout.parts[CALLS], rollout.parts[EXACT]) == (1.0, 1.0, 1.0)


def test_an_environment_that_raises_costs_its_own_sample_alone(task, scripted):
    class Broken(Doors):
        def step(self, text):
            if text == "b":
                raise OSError("no door")
            return super().step(text)

    own = task(Episodes, ["x=", "x="], rewards=[], environment=staticmethod(Broken))
    first, second = play(own, scripted([["b", END], ["ab", END]]), n=2)
    assert "no door" in first.failure
    assert second.reward == 0.5


def test_an_environment_that_cannot_be_made_costs_its_own_sample_alone(task, scripted):
    made = []

    class Rare(Doors):
        def __init__(self):
            made.append(self)
            if len(made) == 2:  # the first one is made to see whether it can be played
                raise OSError("no licence")

    own = task(Episodes, ["x=", "x="], rewards=[], environment=staticmethod(Rare))
    first, second = play(own, scripted([["ab", END]]), n=2)
    assert "no licence" in first.failure
    assert first.completion.failure == "task"
    assert second.reward == 0.5


def test_a_task_whose_environment_can_never_be_made_has_failed_itself(task, scripted):
    def none():
        raise OSError("no licence")

    own = task(Episodes, ["x=", "x="], rewards=[], environment=Doors)
    type(own).environment = staticmethod(none)
    with pytest.raises(NotPlayed, match="no licence"):
        play(own, scripted([]), n=2)


def test_an_environment_that_cannot_be_closed_costs_nothing_and_is_logged(task, scripted, caplog):
    class Open(Doors):
        async def close(self):
            raise OSError("the door is stuck")

    own = task(Episodes, ["x=", "x="], rewards=[], environment=staticmethod(Open))
    (rollout,) = play(own, scripted([["ab", END]]))
    assert (rollout.reward, rollout.failure) == (0.5, None)
    assert "Open was not closed: OSError: the door is stuck" in caplog.text


REFUSES = "{% for message in messages if '!' in message['content'] %}{{ raise_exception('no !') }}{% endfor %}"


@pytest.mark.parametrize(("method", "texts"), [("reset", ["b", "ab"]), ("step", ["b", "b", "ab"])])
def test_an_observation_that_the_template_refuses_costs_its_own_sample_alone(
    task, chat_folder, tmp_path, method, texts
):
    said = iter(["!"])

    class Loud(Doors):
        def reset(self, answer):
            super().reset(answer)
            return next(said, None) if method == "reset" else None

        def step(self, text):
            return (next(said, "") if method == "step" else "", 0.25, text == "ab")

    folder = shutil.copytree(chat_folder, tmp_path / "refuses")
    (folder / "chat_template.jinja").write_text(REFUSES + CHAT_TEMPLATE)
    own = task(Episodes, CHAT, rewards=[], environment=staticmethod(Loud))
    loud, quiet = play(own, Scripted(Tokenizer(folder), [[text, END] for text in texts]), n=2)
    assert "no !" in loud.failure
    assert (quiet.failure, quiet.parts[TURNS]) == (None, 2.0)


def test_a_policy_that_is_lost_ends_the_other_samples_of_its_group_first(task, scripted):
    before, inference = Doors.opened, scripted([])
    asked = []

    async def generate(*_, **__):
        asked.append(inference)
        if len(asked) < 3:
            await asyncio.sleep(1e9)
        raise ConnectionError("lost")

    async def lost():
        inference.generate = generate
        with pytest.raises(ConnectionError, match="lost"):
            await own.rollout_group(inference, own.prompt(0), 3)
        return asyncio.all_tasks() - {asyncio.current_task()}

    own = task(Episodes, ["x=", "x="], rewards=[], environment=staticmethod(Doors))
    assert asyncio.run(lost()) == set()
    assert Doors.opened == before + 3


@pytest.mark.parametrize("flag", [bool, np.bool_, int, np.int64])
@pytest.mark.parametrize(
    "form",
    [
        lambda said, reward, done, no: (said, reward, done),
        lambda said, reward, done, no: (said, reward, done, {}),
        lambda said, reward, done, no: (said, reward, done, no, {}),
        lambda said, reward, done, no: (said, reward, no, done, {}),
    ],
)
def test_a_step_says_that_it_is_done_in_each_form_with_flags_of_numpy_and_numbers_too(task, scripted, form, flag):
    class Flagged(Doors):
        def step(self, text):
            said, reward, done = super().step(text)
            return form(said, reward, flag(done), flag(False))

    own = task(Episodes, ["x=", "x="], rewards=[], environment=staticmethod(Flagged))
    (rollout,) = play(own, scripted([["b", END], ["ab", END]]))
    assert (rollout.failure, rollout.reward, rollout.parts[TURNS]) == (None, 0.75, 2.0)


@pytest.mark.parametrize("said", ["open", ("open", 0.5, 2), ("open", 0.5, "no"), ("open", 0.5, None, True, {})])
def test_a_step_of_another_form_says_which_are_allowed(task, scripted, said):
    class Odd(Doors):
        def step(self, text):
            return said

    own = task(Episodes, ["x=", "x="], rewards=[], environment=staticmethod(Odd))
    (rollout,) = play(own, scripted([["b", END]]))
    assert f"step gave {str(said)!r}; allowed: (observation, reward, done)" in rollout.failure


def test_an_environment_in_which_nothing_can_be_done_is_refused():
    class Without:
        def reset(self):
            return None

    with pytest.raises(ValueError, match="Without has neither step nor public methods"):
        check_environment(Without, {})
    with pytest.raises(ValueError, match="object has no method reset"):
        check_environment(object, {})


def test_rows_with_one_prompt_are_different_questions_by_their_numbers(task):
    assert task(Episodes, ["x="] * 40, rewards=[], environment=staticmethod(Doors)).size == 38


def test_functions_of_a_file_run_in_processes_of_their_own(tmp_path):
    (tmp_path / "mine.py").write_text("def exact(completions, **_):\n    return [1.0] * len(completions)\n")
    (tmp_path / "task.py").write_text(
        "from streamrl.tasks.functions.loading import task_of\n\n"
        f"Task = task_of(__file__, rewards=[({str(tmp_path / 'mine.py:exact')!r}, 2.0)])\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x="}\n{"prompt": "y="}\n')
    share = TaskConfig(name=f"{tmp_path}/task.py:Task", args={"path": str(tmp_path / "rows.jsonl")})

    async def judge():
        environment = await host_task(share, 1, "train", TaskConfig())
        try:
            prompt = await environment.fetch(0)
            return prompt, await environment.score_all(prompt, [completion("ab"), completion("b")])
        finally:
            await environment.close()

    prompt, rollouts = go(judge())
    assert prompt.text in ("x=", "y=")
    assert [each.reward for each in rollouts] == [2.0, 2.0]


def test_two_functions_of_one_name_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def exact(text):\n    return 1.0\n")
    where = (f"{tmp_path}/mine.py:exact", 1.0)
    with pytest.raises(ValueError, match="reward: exact is there twice"):
        task_of(str(tmp_path / "task.py"), rewards=[where, where])
