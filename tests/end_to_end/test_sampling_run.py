"""Agents that own their sampling: the learner and the audit replay what truncation kept, from the journal alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl import cli, sampling_columns
from streamrl.observe.metrics import read_metrics
from streamrl.recorded.journal import batches
from streamrl.replay.records import Completed
from streamrl.sampling_columns import COUNTS, IDS, TEMPERATURE
from streamrl.stream.codec import decode_group, encode_group
from tests.rewritten_journal import copy_with_journal

STEPS = 4
DEADLINE = 240.0  # seconds
VOCABULARY = 28  # letters, "=" and the end: about 0.05 of a random policy's probability is two of them
TASK = '''
import asyncio

from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import Environment, Prompt, Score


class TwoTurns(Environment):
    """The first turn is drawn colder, and ends with a vowel; the second one as the run is configured."""

    runs_inline = True
    has_turns = True

    def __init__(self, arguments, seed, split):
        pass

    def prompt(self, index):
        return Prompt(index=index, text=chr(97 + index % 26) + "qz=")

    async def score(self, prompt, completion):
        return Score(reward=float(completion.text.count("e") + completion.text.count("a")))

    async def rollout_group(self, inference, prompt, n):
        async def play():
            conversation = Conversation(inference, prompt)
            await conversation.generate(temperature=0.7, min_p=0.1, stop=["a", "e", "i", "o", "u"])
            if not conversation.ended:
                conversation.add("xy=")
                await conversation.generate()
            return conversation.completion

        return await self.score_all(prompt, await asyncio.gather(*(play() for _ in range(n))))
'''


@pytest.fixture(scope="module")
def run(make_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    make = [sys.executable, "-m", "streamrl.launch.tiny_model", str(folder / "model"), "--symbols", "26"]
    subprocess.run(make, check=True, timeout=DEADLINE)
    (folder / "turns.py").write_text(TASK)
    run = make_run(steps=STEPS).start(
        f"model.path={folder / 'model'}", f"task.name={folder / 'turns.py'}:TwoTurns", "generate.stream_every=2",
        "generate.sampling={top_p: 0.95, top_k: 64, max_new_tokens: 12}", "algo.kl=0.01", "algo.entropy=0.01",
        "evaluate={every: 2, prompts: 2, samples: 2, temperature: 0.6, top_p: 0.7, top_k: 5}",
    )  # fmt: skip
    code, output = run.finish()
    assert code == 0, output
    return run


@pytest.mark.slow
def test_log_probs_over_the_kept_sets_are_audited_and_retrained_bit_for_bit(run, tmp_path, capsys):
    samples = [sample for batch in batches(run.folder) for sample in batch.samples if not sample.is_placeholder]
    trained = sum(row["tokens/trained"] for row in read_metrics(run.folder))
    assert trained > 0
    for sample in samples:
        assert sampling_columns.problem(sample, VOCABULARY) is None
        sets = sampling_columns.kept_sets(sample)
        assert ((sets.counts > 0) == sample.loss_mask).all()
        assert set(sampling_columns.temperatures(sample, 1.0)) <= {0.7, 1.0}
    counts = np.concatenate([sampling_columns.kept_sets(sample).counts for sample in samples])
    assert 0 < (counts[counts > 0] < VOCABULARY).mean() <= 1
    assert any(sample.token_steps().max() > 0 for sample in samples), "no sample of an updated policy"
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out
    output = capsys.readouterr().out
    print(output)
    assert f"tokens audited {trained}" in output
    assert cli.main(["retrain", str(run.folder), "--output", str(tmp_path / "again")]) == 0
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("missing", [{COUNTS, IDS}, {TEMPERATURE}])
def test_the_same_run_is_found_wrong_without_the_columns(run, missing, tmp_path: Path, capsys):
    def change(record, frames):
        if not isinstance(record, Completed):
            return record, frames
        group = decode_group(*frames)
        samples = tuple(
            replace(each, extras={name: column for name, column in each.extras.items() if name not in missing})
            for each in group.samples
        )
        frames = [bytes(frame) for frame in encode_group(replace(group, samples=samples, arena=None), 1 << 30)]
        return replace(record, size=sum(map(len, frames))), frames

    copy = copy_with_journal(run.folder, tmp_path, change)
    assert cli.main(["audit", str(copy)]) == 1
    assert "tokens differ from their stamped version by more than 0.0001" in capsys.readouterr().out
