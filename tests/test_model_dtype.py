"""`model.dtype: auto`: what the machine is fast in, decided once and kept by the run."""

from __future__ import annotations

import pytest

from launch import description, folder
from streamrl import cli, model_dtype
from streamrl.config import Config, file
from streamrl.config.file import ConfigError
from streamrl.engine import hardware
from streamrl.engine.server import ServerFailed
from streamrl.lab import evaluation
from streamrl.model_dtype import with_dtype
from streamrl.places import load_run
from streamrl.preflight import machine as preflight_machine
from streamrl.run_folder import prepare
from tests.operations_table import GOES_ON, documented

FAST, SLOW = "fpu sse2 avx2 avx512f avx512_bf16", "fpu sse2 avx2 avx512f f16c"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(flags, gpus)`: from now on this is one with such a CPU, whose two cores say the same."""
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")

    def be(flags: str, *, gpus: bool = False) -> None:
        core = f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: {flags}\nbogomips\t: 1\n\n"
        (tmp_path / "cpuinfo").write_text(2 * core)
        for module in (model_dtype, preflight_machine):
            monkeypatch.setattr(module, "has_cuda", lambda: gpus)
        model_dtype._say.cache_clear()

    be(SLOW)
    return be


@pytest.fixture
def config(model_folders, tmp_path):
    run = {"folder": tmp_path / "runs", "name": "one"}
    return Config.model_validate({"run": run, "model": {"path": model_folders[0], "dtype": "auto"}})


def given_dtype(config: Config, dtype: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


@pytest.fixture
def told(machine, config, capsys):
    return machine, config, capsys


@pytest.mark.parametrize(
    ("flags", "gpus", "said"),
    [
        (FAST, False, "bfloat16, on a CPU with avx512_bf16"),
        (f"{SLOW} amx_tile amx_bf16", False, "bfloat16, on a CPU with amx_bf16"),
        (SLOW, False, "float32, on a CPU without instructions for bfloat16"),
        ("avx512_bf16_other", False, "float32, on a CPU without instructions for bfloat16"),
        (SLOW, True, "bfloat16, on GPUs"),
    ],
)
def test_auto_is_what_the_machine_is_fast_in_and_said_once(flags, gpus, said, told):
    machine, config, capsys = told
    machine(flags, gpus=gpus)
    assert {with_dtype(config).model.dtype for _ in range(2)} == {said.partition(",")[0]}
    assert capsys.readouterr().err == f"streamrl: model.dtype: auto is {said}\n"


def test_a_machine_that_says_nothing_of_its_cpu_takes_float32(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "nowhere")
    assert hardware.bfloat16_instructions() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_that_is_given_stays_on_any_machine(dtype, machine, config, capsys):
    given = given_dtype(config, dtype)
    for flags in (FAST, SLOW):
        machine(flags)
        assert with_dtype(given) is given
    assert capsys.readouterr().err == ""


def test_a_start_in_bfloat16_on_a_cpu_without_instructions_for_it_is_warned_of_and_goes_on(
    machine, config, model_folders, tmp_path, capsys
):
    machine(SLOW)
    model = f"model.path={model_folders[0]}"
    words = ["configs/quickstart.yaml", "model.dtype=bfloat16", model, f"run.folder={tmp_path}", "run.name=none"]
    assert cli.main(["train", *words, "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert told.count("model.dtype") == 1
    documented("model.dtype: bfloat16 on a CPU without instructions for it...", told, GOES_ON)
    assert cli.main(["train", *words, "--dry-run", "--gpus", "2"]) == 0
    assert "model.dtype" not in capsys.readouterr().err  # of a machine that is made up
    assert not list(preflight_machine.rounding(given_dtype(config, "float32")))
    for flags, gpus in ((FAST, False), (SLOW, True)):
        machine(flags, gpus=gpus)
        assert not list(preflight_machine.rounding(given_dtype(config, "bfloat16")))


def test_an_evaluation_in_bfloat16_on_such_a_cpu_is_warned_of_too(told, model_folders, tmp_path, monkeypatch):
    machine, config, capsys = told

    async def fail(*_: object) -> None:
        raise ServerFailed("no server in this test")

    monkeypatch.setattr(evaluation, "_evaluate", fail)
    file.save(given_dtype(config, "bfloat16"), tmp_path / "config.yaml")
    for flags, warned in ((SLOW, 1), (FAST, 0)):
        machine(flags)
        assert cli.main(["eval", "--run-folder", str(tmp_path), "--model", str(model_folders[0])]) == 1
        assert capsys.readouterr().err.count("model.dtype: bfloat16 on a CPU without instructions") == warned


def test_the_record_has_the_dtype_and_a_resume_on_another_machine_keeps_it(machine, config, capsys):
    machine(FAST)
    run = prepare(config, fresh=False)
    assert load_run(run).model.dtype == "bfloat16"
    machine(SLOW)
    capsys.readouterr()
    assert prepare(config, fresh=False) == run
    assert load_run(run).model.dtype == "bfloat16"
    assert capsys.readouterr().err == f"streamrl: model.dtype: auto is bfloat16, as in {run}\n"
    assert folder.wait(config) == run  # as another node finds it
    assert load_run(prepare(config, fresh=True)).model.dtype == "float32"


def test_a_dtype_other_than_the_recorded_one_is_refused_as_ever(machine, config):
    prepare(config, fresh=False)
    with pytest.raises(ConfigError, match=r"model\.dtype: bfloat16 differs from float32"):
        prepare(given_dtype(config, "bfloat16"), fresh=False)


def test_a_dry_run_and_a_plan_say_what_auto_is_on_the_machine_that_they_are_told_of(
    machine, model_folders, tmp_path, capsys
):
    model = f"model.path={model_folders[0]}"
    words = ["configs/quickstart.yaml", "model.dtype=auto", model, f"run.folder={tmp_path}", "run.name=none"]
    assert cli.main(["train", *words, "--dry-run"]) == 0
    assert "auto is float32, on a CPU without" in capsys.readouterr().err
    assert cli.main(["train", *words, "--dry-run", "--gpus", "2"]) == 0
    assert "auto is bfloat16, on GPUs" in capsys.readouterr().err
    model_dtype._say.cache_clear()
    assert cli.main(["plan", *words, "--prompt", "8"]) == 0
    assert "in bfloat16;" in capsys.readouterr().out
    assert cli.main(["plan", *words, "--prompt", "8", "--gpus-per-host", "0", "--host-memory", "16"]) == 0
    assert "in float32;" in capsys.readouterr().out


def test_the_nodes_of_a_cluster_are_given_a_dtype(tmp_path):
    (tmp_path / "run.yaml").write_text("config: config.yaml\nfolder: /shared/runs\n")
    (tmp_path / "config.yaml").write_text("model: {dtype: auto}\n")
    with pytest.raises(ConfigError, match=r"model\.dtype: auto is of the machine .* allowed: float32, bfloat16"):
        description.load(tmp_path / "run.yaml")
