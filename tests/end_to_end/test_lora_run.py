"""Runs that train low-rank adapters: published as adapters or merged, every token is what its version says."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.random_models import random_adapter
from streamrl import cli
from streamrl.config.learner import LoraConfig
from streamrl.observe.metrics import read_metrics
from streamrl.publish.peft import write_adapter
from streamrl.recorded.weights import kept_versions
from streamrl.replay.journal import recorded_batches
from streamrl.types import PolicyVersion

LORA = ("learner.lora.rank=4", "learner.optimizer.lr=1.0e-2")


@pytest.mark.slow
@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_a_run_with_adapters_learns_from_the_versions_that_it_stamps(make_run, tmp_path, capsys, publish):
    run = make_run(steps=6)
    code, output = run.start(*LORA, f"learner.lora.publish={publish}").finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["staleness/max"] <= 2 for row in rows)
    steps = {span.version.step for sample in _samples(run.folder) for span in sample.spans}
    assert len(steps) > 2, "one version generated everything"
    assert cli.main(["audit", str(run.folder)]) == 0
    assert f"tokens audited {sum(row['tokens/trained'] for row in rows)}" in capsys.readouterr().out
    assert cli.main(["retrain", str(run.folder), "--output", str(tmp_path / "again")]) == 0
    assert "bit for bit" in capsys.readouterr().out


def _samples(folder: Path):
    return [sample for batch in recorded_batches(folder / "journal") for sample in batch.samples]


@pytest.mark.slow
def test_a_run_begins_with_the_adapter_that_it_is_given(make_run, tiny_model, tmp_path, capsys):
    given = random_adapter(tiny_model, seed=3)  # large enough that a server without them gives other log-probs
    write_adapter(tmp_path / "adapter", given.items(), LoraConfig(rank=4), tiny_model)
    run = make_run(steps=2)
    code, output = run.start(
        *LORA, "learner.lora.publish=adapter", f"learner.lora.adapter={tmp_path / 'adapter'}"
    ).finish()
    assert code == 0, output
    start = kept_versions(run.folder)[PolicyVersion(0)]
    taken = load_file(start / "adapter_model.safetensors")
    assert all(taken[name].equal(tensor) for name, tensor in given.items())
    assert any(span.version.step == 0 for sample in _samples(run.folder) for span in sample.spans)
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out
