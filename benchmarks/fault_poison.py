"""A foreign worker with the run's keys that sends groups which no learner can train.

    python -m benchmarks.fault_poison RUN    OUT_OF_VOCABULARY groups or more with a token that the model does not
                                             know, which the door refuses; then LONG groups, which it accepts, and
                                             which are too long for a learner that starts with
                                             `learner.tokens_per_micro_batch=ROW`

Its line to the service is a real worker's, and so are the groups, but for what is wrong with them. It tells its prompts
in `RUN/events/foreign-0.jsonl`, and ends once its groups are answered for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.fault_roles import make_group, poisoned, serve_tickets
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.observe.events import EventLog, event_path, read_events
from streamrl.types import Group, PolicyVersion, Ticket

INDEX = 9  # of a worker that the run does not have
OUT_OF_VOCABULARY = 3
LONG = 2
ROW = 64  # tokens: more than a group of the quickstart needs, and fewer than a long one has
PATIENCE = 60.0  # seconds
ROLE = "foreign"


class Foreigner:
    """What it answers to its tickets."""

    def __init__(self, config: Config, run_folder: Path) -> None:
        self._config = config
        self._events = EventLog(event_path(run_folder, ROLE), f"{ROLE}-0")
        self._service = event_path(run_folder, "replay")
        self._left = LONG
        self._long: set[int] = set()  # ids of the long groups

    async def answer(self, ticket: Ticket, version: Callable[[], PolicyVersion]) -> Group:
        """Groups that the door refuses, then long ones, then none at all."""
        group = make_group(ticket, version(), self._config.generate.group_size, f"generator-{INDEX}")
        if len(self._groups_of("group.refused")) < OUT_OF_VOCABULARY:
            group = poisoned(group)
        elif self._left:
            self._left -= 1
            self._long.add(ticket.group_id)
            group = _long(group)
        else:
            await asyncio.Event().wait()
        fields = {"group_id": ticket.group_id, "attempt": ticket.attempt, "prompt_index": ticket.prompt_index}
        self._events.emit("group", phase="end", **fields)
        return group

    def is_done(self) -> bool:
        return not self._left and self._long <= set(self._groups_of("group.accepted"))

    def _groups_of(self, event: str) -> list[int]:
        """The ids of its groups of which the service has told this."""
        return [
            each["group_id"]
            for each in read_events(self._service)
            if each["event"] == event and each["worker"] == f"generator-{INDEX}"
        ]


def _long(group: Group) -> Group:
    """The group with a prompt that fills more than ROW, of a token that every model knows."""
    prompt = np.ones(2 * ROW, np.int32)
    known = np.ones(4, np.int32)
    samples = tuple(
        replace(
            sample,
            prompt_ids=prompt,
            output_ids=known,
            logprobs=np.full(len(known), -1, np.float32),
            loss_mask=np.ones(len(known), np.bool_),
            spans=(replace(sample.spans[0], end=len(known)),),
        )
        for sample in group.samples
    )
    return replace(group, samples=samples)


async def poison(config: Config, run_folder: Path) -> bool:
    """Whether the service has answered for everything in PATIENCE seconds."""
    foreigner = Foreigner(config, run_folder)
    few = config.generate.model_copy(update={"groups_in_flight": LONG})
    serving = asyncio.create_task(
        serve_tickets(config.model_copy(update={"generate": few}), run_folder, INDEX, foreigner.answer)
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while not foreigner.is_done() and not serving.done():
                await asyncio.sleep(0.05)
    if serving.done():
        serving.result()
    serving.cancel()
    return foreigner.is_done()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    options = parser.parse_args()
    config = config_file.load(options.run_folder / "config.yaml")
    return 0 if asyncio.run(poison(config, options.run_folder)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
