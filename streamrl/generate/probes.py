"""Held-out prompts, answered greedily at the start and at the end of a run: they show what was learned."""

from __future__ import annotations

import logging
from pathlib import Path

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.generate.group import ask
from streamrl.generate.inference import EngineInference
from streamrl.observe.events import EventLog
from streamrl.tasks import left_out
from streamrl.tasks.environment import Environment, Prompt
from streamrl.tasks.failures import describe
from streamrl.tasks.hosted import host_task

log = logging.getLogger(__name__)


async def answer_probes(
    config: Config, run_folder: Path, inference: EngineInference, events: EventLog, moment: str
) -> None:
    """Write one event `probe` for each of the first `generate.probes` prompts of the first task's probe split.

    Its fields: `moment` (start | end), `index`, `prompt`, `expected`, `answer`, `reward`. Of prompts that are too long
    the run asks others, or a part, as it does of trained ones. Whatever its task raises is logged, and costs a probe,
    all where the task cannot be loaded, none where it cannot be closed. Raises EngineError for a server that cannot
    be reached.
    """
    try:
        task = await _hosted(config, run_folder)
    except Exception as error:  # the policy for foreign tasks: it costs the probes, not the run
        log.warning("probes at the %s were not answered: %s", moment, describe(error))
        return
    try:
        for index in range(config.generate.probes):
            try:
                prompt, (rollout,) = await ask(task, inference, index, 1)
                events.emit(
                    "probe",
                    moment=moment,
                    index=index,
                    prompt=_shown(prompt),
                    expected=prompt.answer,
                    answer=rollout.completion.text,
                    reward=rollout.reward,
                )
            except EngineError:
                raise
            except Exception as error:  # the policy for foreign tasks: it costs the probe, not the run
                log.warning("probe %d at the %s was not answered: %s", index, moment, describe(error))
    finally:
        try:
            await task.close()
        except Exception as error:  # the policy for foreign tasks: what it holds may stay, the run goes on
            log.warning("probes at the %s: their task was not closed: %s", moment, describe(error))


async def _hosted(config: Config, run_folder: Path) -> Environment:
    """The probe split of the first task, without prompts that are too long. Raises whatever the task raises."""
    share, seed, too_long = config.task.shares[0], config.run.seed, left_out.load(run_folder).of_other_splits
    task = await host_task(share, seed, "probe", config.task)
    left_out.apply({share.key: task}, too_long, seed)
    return task


def _shown(prompt: Prompt) -> str:
    """The text, or the last thing that was said."""
    said = prompt.messages[-1]["content"] if prompt.messages else ""
    return str(said if prompt.text is None else prompt.text)
