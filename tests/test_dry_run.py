"""`streamrl train --dry-run`: what would start on which GPUs, with everything checked and nothing written."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import tiny_model
from streamrl import cli, supervisor
from streamrl.config.file import load
from streamrl.device_map import device_map

RECIPES = Path("configs/recipes").absolute()
NAMES = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("[!ps]*/*.yaml"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with the recipes' shapes, in which nothing may be started."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a role was started")

    monkeypatch.setattr("streamrl.role_process.Role.start", refuse)
    monkeypatch.setattr(supervisor.Supervisor, "run", refuse)
    (tmp_path / "configs").symlink_to(RECIPES.parent)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(place: Path) -> Path:
    tiny_model.make(place / "model")
    return place / "model"


def needed(recipe: str) -> int:
    config = load(RECIPES / recipe)
    servers = sum(pool.workers * pool.gpus for pool in config.generate.each_pool)
    return max(config.learner.ranks, servers) if config.run.shares_devices else config.learner.ranks + servers


def gpus_of(output: str) -> dict[str, list[str]]:
    """The GPUs of every process of the table: `generator-0 server 1` -> ["4", "5"]."""
    found, role = {}, ""
    for line in output.splitlines():
        if row := re.fullmatch(r"  (\S+-\d+)  .*", line):
            role = row[1]
        elif row := re.fullmatch(r"    ((?:server|rank) \d+)\s+(\S+)  .*", line):
            found[f"{role} {row[1]}"] = row[2].split(",")
    return found


def test_the_recipes_are_found():
    assert len(NAMES) > 20


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_is_printed_with_the_gpus_of_the_device_map_and_nothing_is_written(recipe, place, capsys):
    count, config = needed(recipe), load(RECIPES / recipe)
    assert cli.main(["train", str(RECIPES / recipe), "--dry-run", "--gpus", str(count)]) == 0
    output = capsys.readouterr().out
    placed = device_map(config, count)
    expected = {f"learner-0 rank {rank}": [str(gpu)] for rank, gpu in enumerate(placed.ranks)}
    for index, servers in enumerate(placed.workers):
        expected |= {f"generator-{index} server {place}": [*map(str, gpus)] for place, gpus in enumerate(servers)}
    assert gpus_of(output) == expected
    assert len({gpu for gpus in expected.values() for gpu in gpus}) == count
    for name in ("replay-0", "generator-0", "learner-0"):
        assert f"  {name}: " in output
    assert [path.name for path in place.iterdir()] == ["configs"]


@pytest.mark.parametrize("recipe", [name for name in NAMES if needed(name) > 1])
def test_a_recipe_with_a_gpu_too_few_is_one_line(recipe, place, capsys):
    assert cli.main(["train", str(RECIPES / recipe), "--dry-run", "--gpus", str(needed(recipe) - 1)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"streamrl: (\S+:\d+: )?(learner\.ranks|generate\.workers): .* allowed: .*\n", captured.err)


def test_a_layout_that_the_recipes_model_does_not_have_is_one_line(place, capsys):
    recipe = str(RECIPES / "verl/qwen3-8b-gsm8k.yaml")
    changes = ["generate.tensor_parallel=3", "generate.workers=1"]
    assert cli.main(["train", recipe, "--dry-run", "--gpus", "16", *changes]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("streamrl: override generate.tensor_parallel: 3 does not divide 32 attention heads")


def test_a_model_that_is_here_is_checked_with_its_prompts(model, capsys):
    command = ["train", "configs/quickstart.yaml", f"model.path={model}", "--dry-run", "--gpus", "2"]
    assert cli.main(command) == 2
    assert "model.dtype: float32 cannot be served on a GPU" in capsys.readouterr().err
    command.append("model.dtype=auto")
    assert cli.main([*command, "generate.sampling.max_new_tokens=4000"]) == 2
    assert "generate.sampling.max_new_tokens: 4000 does not fit" in capsys.readouterr().err
    assert cli.main(command) == 0
    assert gpus_of(capsys.readouterr().out) == {"generator-0 server 0": ["1"], "learner-0 rank 0": ["0"]}


def test_a_model_that_is_nowhere_is_one_line(place, capsys):
    assert cli.main(["train", "configs/quickstart.yaml", "--dry-run", "--gpus", "2"]) == 2
    assert "models/tiny is no model" in capsys.readouterr().err


def test_other_gpus_than_this_machines_are_for_a_dry_run_alone(model, capsys):
    assert cli.main(["train", "configs/quickstart.yaml", f"model.path={model}", "--gpus", "2"]) == 2
    assert capsys.readouterr().err == (
        "streamrl: --gpus: 2 is of a machine that is not this one; allowed: with --dry-run\n"
    )


def test_on_a_machine_without_gpus_every_process_is_on_the_cpu(model, capsys):
    critic = "algo.advantage.estimator=gae"
    assert (
        cli.main(["train", "configs/quickstart.yaml", f"model.path={model}", critic, "--dry-run", "--gpus", "0"]) == 0
    )
    output = capsys.readouterr().out
    assert "ranks: 1, a critic on each" in output
    assert gpus_of(output) == {"generator-0 server 0": ["-"], "learner-0 rank 0": ["-"]}
    assert "CUDA_VISIBLE_DEVICES" not in output


def test_the_commands_are_those_that_train_starts(model, capsys):
    overrides = [f"model.path={model}", "model.dtype=bfloat16", "learner.ranks=2"]
    overrides += ["generate.servers=2", "generate.tensor_parallel=2"]
    assert cli.main(["train", "configs/quickstart.yaml", *overrides, "--dry-run", "--gpus", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    started = supervisor.Supervisor(
        load(Path("configs/quickstart.yaml"), overrides),
        model.parent / "runs/quickstart",
        ("0", "1", "2", "3", "4", "5"),
    )
    assert started.learner.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert started.generators[0].environment["CUDA_VISIBLE_DEVICES"] == "2,3,4,5"
    for role in started.roles:
        (line,) = [line for line in lines if line.startswith(f"  {role.name}: ")]
        assert line.endswith(" ".join(role.command).replace(str(os.getpid()), "PID"))
        if gpus := role.environment.get("CUDA_VISIBLE_DEVICES"):
            assert f"CUDA_VISIBLE_DEVICES={gpus} " in line


@pytest.fixture
def dry(model: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`dry(override...)`: exit code and errors of a dry run of the quickstart."""

    def run(*words: str) -> tuple[int, str]:
        code = cli.main(["train", "configs/quickstart.yaml", f"model.path={model}", "--dry-run", *words])
        return code, capsys.readouterr().err

    return run


def test_a_run_folder_that_cannot_be_resumed_so_is_one_line_and_stays_as_it_is(dry, model):
    from streamrl import run_folder

    config = load(Path("configs/quickstart.yaml"), [f"model.path={model}"])
    run_folder.make(config, fresh=False)
    before = sorted(path.stat().st_mtime_ns for path in model.parent.rglob("*"))
    code, errors = dry("algo.eps_low=0.1")
    assert code == 2
    assert errors.startswith("streamrl: override algo.eps_low: 0.1 differs from 0.2")
    assert dry("algo.eps_low=0.1", "--fresh")[0] == 0
    assert dry("run.steps=7")[0] == 0
    assert sorted(path.stat().st_mtime_ns for path in model.parent.rglob("*")) == before


def test_a_run_in_use_is_one_line(dry):
    Path("runs").mkdir()
    with Path("runs/.quickstart.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, errors = dry()
    assert code == 2
    assert "is in use by another `streamrl train`" in errors
    assert dry()[0] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_line(dry, place):
    shutil.rmtree(place / "runs", ignore_errors=True)
    place.chmod(0o500)
    try:
        code, errors = dry()
    finally:
        place.chmod(0o700)
    assert code == 2
    assert "run.folder: " in errors


def test_a_folder_below_a_file_is_one_line(dry, place):
    (place / "taken").touch()
    code, errors = dry(f"run.folder={place}/taken")
    assert code == 2
    assert errors.startswith(f"streamrl: override run.folder: {place}/taken cannot be written")


def test_of_a_complete_run_nothing_would_start(dry, monkeypatch, capsys):
    monkeypatch.setattr(supervisor.Supervisor, "is_complete", lambda self: True)
    assert cli.main(["train", "configs/quickstart.yaml", "model.path=model", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "all steps are done" in output
    assert "streamrl.cli" not in output
