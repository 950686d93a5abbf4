"""Real runs of models that transformers builds: audited, trained again from their record, converted."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from launch import tiny_model
from streamrl.observe.metrics import read_metrics
from tests.documented_commands import ROOT
from tests.end_to_end.test_family_run import DEADLINE, streamrl

STEPS = 10
SMALL = (
    f"run.steps={STEPS}",
    "generate.group_size=4",
    "generate.groups_in_flight=8",
    "replay.groups_per_step=4",
    "journal.keep=all",
)


@pytest.mark.slow
@pytest.mark.timeout(4 * DEADLINE)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", ("publish.transport=delta",)),
        ("olmo2", ("learner.ranks=2",)),
        ("granite", ("model.dtype=bfloat16",)),
    ],
)
def test_a_run_is_audited_trained_again_bit_for_bit_and_its_checkpoint_converted(
    family, settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tiny_model.make(tmp_path / "model", family=family)
    given = ("run.name=run", "model.path=model", "model.implementation=transformers", *SMALL, *settings)
    streamrl("train", str(ROOT / "configs/quickstart.yaml"), *given)
    assert len(list(read_metrics(tmp_path / "runs" / "run"))) == STEPS
    assert "tokens audited" in streamrl("audit", "runs/run")
    again = streamrl("retrain", "runs/run", "--output", "again")
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in again
    streamrl("convert", f"runs/run/checkpoints/step_{STEPS}", "converted")
    converted, written = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("converted", "runs/run/model")
    )
    assert converted.keys() == written.keys()
    assert all(torch.equal(converted[name], written[name]) for name in written)
