"""The probes of a run: a prompt that cannot be played costs the others nothing."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.config import Config
from streamrl.generate import probes
from streamrl.observe.events import EventLog, read_events
from streamrl.tasks.built_in.copy import Copy
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.failures import ScorerRaised


@pytest.mark.parametrize("error", [NotPlayed("no space"), ScorerRaised("OSError: no space", masked=True)])
def test_a_probe_that_cannot_be_played_is_told_and_the_next_one_is_asked(
    error, scripted, tmp_path, monkeypatch, caplog
):
    class Twice(Copy):
        async def rollout_group(self, inference, prompt, n):
            if prompt.index == 0:
                raise error
            return await super().rollout_group(inference, prompt, n)

    async def hosted(*_):
        return Twice(Copy.Arguments(), 1, "probe")

    monkeypatch.setattr(probes, "host_task", hosted)
    events = EventLog(tmp_path / "events.jsonl", "generator-0")
    config = Config.model_validate({"generate": {"probes": 2}})
    asyncio.run(probes.answer_probes(config, scripted([["caf", "<|im_end|>"]]), events, "start"))
    events.close()
    (probe,) = [each for each in read_events(tmp_path / "events.jsonl") if each["event"] == "probe"]
    assert probe["index"] == 1
    assert "probe 0 at the start was not answered: " in caplog.text
    assert "no space" in caplog.text
