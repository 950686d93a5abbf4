"""On-policy distillation on the real loop: a random student comes near a random teacher of another family and size."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import tiny_model
from streamrl import cli
from streamrl.observe.metrics import read_metrics

STEPS = 40


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Sharp enough that it has something to say: the weights of `tiny_model` are next to none."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    tiny_model.make(folder, seed=7, family="qwen3", layers=3)
    file = folder / "model.safetensors"
    draw = torch.Generator().manual_seed(7)
    weights = {
        name: 0.3 * torch.randn(tensor.shape, generator=draw) if tensor.ndim > 1 else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_student_comes_near_its_teacher_without_a_reward_and_trains_again_bit_for_bit(
    make_run, teacher, tmp_path, capsys
):
    run = make_run(steps=STEPS).start(
        f"algo.distillation.teacher={teacher}",
        "algo.distillation.rewards=false",
        "generate.group_size=8",
        "replay.groups_per_step=16",
        "generate.groups_in_flight=32",
        "learner.optimizer.lr=3.0e-3",
    )
    code, output = run.finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    distances = [row["distillation/kl"] for row in rows]
    assert sum(distances[-5:]) < 0.5 * sum(distances[:5]), distances
    assert sum(row["staleness/mean"] > 0 for row in rows) > STEPS // 2
    assert cli.main(["audit", str(run.folder)]) == 0, capsys.readouterr().out
    assert cli.main(["retrain", str(run.folder), "--output", str(tmp_path / "again")]) == 0
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in capsys.readouterr().out
