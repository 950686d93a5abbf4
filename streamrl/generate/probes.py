"""Held-out prompts, answered greedily at the start and at the end of a run: they show what was learned."""

from __future__ import annotations

import logging

from streamrl.config import Config
from streamrl.observe.events import EventLog
from streamrl.tasks import parsing
from streamrl.tasks.environment import Inference, Prompt
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.failures import ScorerRaised
from streamrl.tasks.hosted import host_task

log = logging.getLogger(__name__)


async def answer_probes(config: Config, inference: Inference, events: EventLog, moment: str) -> None:
    """Write one event `probe` for each of the first `generate.probes` prompts of the first task's probe split.

    Its fields: `moment` (start | end), `index`, `prompt`, `expected`, `answer`, `reward`. One that its task cannot play
    is logged, and the next one is asked.
    """
    task = await host_task(config.task.shares[0], config.run.seed, "probe", config.task.scoring)
    parsing.apply([task], config.task)
    try:
        for index in range(config.generate.probes):
            try:
                prompt = await task.fetch(index)
                rollouts = await task.rollout_group(inference, prompt, 1)
            except (NotPlayed, ScorerRaised) as error:
                log.warning("probe %d at the %s was not answered: %s", index, moment, error)
                continue
            for rollout in rollouts:
                events.emit(
                    "probe",
                    moment=moment,
                    index=index,
                    prompt=_shown(prompt),
                    expected=prompt.answer,
                    answer=rollout.completion.text,
                    reward=rollout.reward,
                )
    finally:
        await task.close()


def _shown(prompt: Prompt) -> str:
    """The text, or the last thing that was said."""
    said = prompt.messages[-1]["content"] if prompt.messages else ""
    return str(said if prompt.text is None else prompt.text)
