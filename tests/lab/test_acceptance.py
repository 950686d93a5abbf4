"""`streamrl doctor --gpu`: what each check says of something broken, and what the whole says on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

from launch import tiny_model
from streamrl import cli
from streamrl.config.file import ConfigError
from streamrl.lab.acceptance import child, command, delivery, engine, installed, layouts, quickstart, servers, trial
from streamrl.lab.acceptance.check import Bench, Check, Failed, Gpu, Skipped
from streamrl.lab.acceptance.checks import CHECKS, chosen
from streamrl.observe.events import EventLog, event_path
from streamrl.types import Batch

H200 = Gpu(name="NVIDIA H200", capability=9.0, memory=143771)
PROBES = "tests.lab.acceptance_probes"
WHOLE = 1800.0  # seconds of the whole on two cores that have much else to do


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acceptance") / "model"
    tiny_model.make(folder)
    return folder


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Bench:
    return Bench(folder=tmp_path, tiny=model, experts=model, quick=True)


def probe(name: str, *arguments: str, deadline: float = 60.0, after: str = "") -> Check:
    return Check(f"probe.{name}", name, f"{PROBES}:{name}", deadline, arguments, after)


# -- the table and the processes


def test_every_check_has_a_function_and_a_deadline_and_comes_behind_what_it_looks_at():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for place, check in enumerate(CHECKS):
        module, _, function = check.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert check.deadline > 0
        assert not check.after or check.after in names[:place]


def test_checks_are_chosen_by_name_or_group_with_those_that_they_look_at():
    assert chosen([]) == CHECKS
    assert [check.name for check in chosen(["publish.disk", "machine"])] == [
        "machine.limits", "machine.devices", "quickstart.retract", "quickstart.drain", "machine.nccl", "publish.disk",
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"^--only: publish\.dsk is no check; allowed: installed, machine, .*delivery"
    ):
        chosen(["publish.dsk"])


def test_a_check_that_looks_at_one_that_looks_at_another_brings_both():
    assert [check.name for check in chosen(["layout.tp2"])] == ["quickstart.retract", "logprobs.gap", "layout.tp2"]


def run_checks(bench: Bench, *checks: Check) -> dict[str, tuple[str, str]]:
    (bench.folder / child.BENCH).write_bytes(command.encoded(bench))
    return {each.check: (each.result, each.reason or each.figure) for each in command.run(checks, bench)}


def test_a_row_says_how_its_check_ended_and_one_that_dies_takes_nothing_along(bench):
    names = ("passes", "skips", "fails", "raises", "dies")
    found = run_checks(bench, *(probe(name) for name in names), replace_name(probe("passes", "last"), "probe.again"))
    assert found.pop("probe.dies")[1].startswith("its process ended with -9: ")
    assert found == {
        "probe.passes": ("ok", "1"),
        "probe.skips": ("skipped", "no such thing here"),
        "probe.fails": ("failed", "2, not 1"),
        "probe.raises": ("failed", "ValueError: what nobody thought of"),
        "probe.again": ("ok", "last"),
    }


def replace_name(check: Check, name: str) -> Check:
    return Check(name, check.what, check.run, check.deadline, check.arguments, check.after)


@pytest.mark.slow
def test_a_check_that_is_not_done_at_its_deadline_has_failed_and_leaves_no_process(bench, monkeypatch):
    monkeypatch.setattr(command, "GRACE", 1.0)
    found = run_checks(bench, probe("hangs", deadline=15.0))
    assert found["probe.hangs"][0] == "failed"
    assert found["probe.hangs"][1].startswith("not done in 15 s")
    left = int((bench.folder / "child").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)


ENDLESS = """
import signal
import sys
from pathlib import Path
from streamrl.lab.acceptance import command
from tests.lab.test_acceptance import probe
command.chosen = lambda names: (probe("hangs", deadline=600.0),)
command.GRACE = 1.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind & ignores it otherwise
command.main(quick=True, only=(), output=None, model=None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_acceptance_run_that_is_ended_leaves_no_process(number, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, "-c", ENDLESS], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (found := [*tmp_path.glob("streamrl-doctor-*/child")]) or not found[0].read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (check,) = psutil.Process(process.pid).children()
    left = [check, *([] if number == signal.SIGKILL else check.children())]  # a run in its place ends with its check
    process.send_signal(number)
    process.wait(60)
    gone, alive = psutil.wait_procs(left, 30)
    if number == signal.SIGKILL:
        psutil.Process(int(found[0].read_text())).kill()
    assert (len(gone), alive) == (len(left), [])


@pytest.mark.parametrize("kind", servers.SETTINGS)
def test_every_kind_of_server_is_a_configuration_that_a_machine_with_four_gpus_takes(kind, bench):
    settings = {**quickstart.MEASURED, **servers.SETTINGS[kind]}
    made = trial.Trial(replace(bench, gpus=(H200,) * 4), kind, settings)
    assert made.config.generate.tensor_parallel == settings.get("generate.tensor_parallel", 1)


def test_what_looks_at_a_check_that_has_not_passed_is_skipped(bench):
    after_fails = replace_name(probe("passes", after="probe.fails"), "probe.one")
    after_skips = replace_name(probe("passes", after="probe.skips"), "probe.two")
    found = run_checks(bench, probe("fails"), probe("skips"), after_fails, after_skips)
    assert found["probe.one"] == ("skipped", "probe.fails has failed")
    assert found["probe.two"] == ("skipped", "probe.skips has been skipped")


@pytest.mark.slow
@pytest.mark.parametrize(("checks", "code"), [(["passes", "skips"], 0), (["passes", "fails"], 1)])
def test_the_exit_code_is_1_where_a_check_has_failed_and_the_json_has_every_row(
    checks, code, bench, monkeypatch, capfd
):
    tmp_path, model = bench.folder, bench.model
    monkeypatch.setattr(command, "chosen", lambda names: tuple(map(probe, checks)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["doctor", "--gpu", "--model", str(model), "--json", str(tmp_path / "table.json")]) == code
    rows = json.loads((tmp_path / "table.json").read_text())["checks"]
    assert [row["check"] for row in rows] == [f"probe.{name}" for name in checks]
    assert rows[1]["reason"] in ("no such thing here", "2, not 1")
    captured = capfd.readouterr()
    assert all(f"probe.{name}" in captured.out for name in checks)
    assert ("1 of 2 checks failed" in captured.err) == bool(code)
    assert len(list(tmp_path.glob("streamrl-doctor-*"))) == code  # what failed can be looked at


@pytest.mark.parametrize("words", [["--quick"], ["--only", "publish"], ["--json", "x.json"], ["--model", "x"]])
def test_a_flag_of_the_acceptance_run_without_it_is_one_line(words, capsys):
    assert cli.main(["doctor", *words]) == 2
    assert capsys.readouterr().err == f"streamrl: {words[0]}: it is of the acceptance run; allowed: with --gpu\n"


def test_a_model_that_is_none_and_a_table_in_no_folder_are_one_line(tmp_path, capsys):
    assert cli.main(["doctor", "--gpu", "--model", str(tmp_path)]) == 2
    assert "is no model" in capsys.readouterr().err
    assert cli.main(["doctor", "--gpu", "--json", str(tmp_path / "none/x.json")]) == 2
    assert "--json" in capsys.readouterr().err


# -- what is installed


def test_a_requirement_that_is_missing_or_older_is_a_failure(bench, monkeypatch):
    lines = ["numpy>=2", "torch>=99", "no-such-package>=1", "sglang==0.0.1; extra == 'gpu'"]
    monkeypatch.setattr("streamrl.lab.acceptance.installed.metadata.requires", lambda name: lines)
    with pytest.raises(Failed, match=r"^torch is .*, not torch>=99; no-such-package>=1 is not installed$"):
        installed.environment(bench)


def test_gpus_with_a_torch_that_cannot_use_them_are_a_failure(bench, monkeypatch):
    monkeypatch.setattr("streamrl.lab.acceptance.installed.metadata.requires", lambda name: ["numpy>=2"])
    monkeypatch.setattr(installed, "torch_cuda", lambda: None)
    with pytest.raises(Failed, match="is built for no CUDA, and there are 1 GPUs"):
        installed.environment(replace(bench, gpus=(H200,)))


def test_half_an_installation_of_transformer_engine_is_a_failure(bench, tmp_path, monkeypatch):
    package = tmp_path / "path/transformer_engine/pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise FileNotFoundError('Could not find shared object file')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "path"), str(Path.cwd())]))
    (check,) = chosen(["installed.imports"])
    result, reason = run_checks(bench, check)[check.name]
    assert result == "failed"
    assert "transformer_engine.pytorch cannot be imported (FileNotFoundError: Could not find shared object" in reason


def test_transformer_engine_is_needed_on_gpus_alone(bench, monkeypatch):
    monkeypatch.setattr(installed, "te_problem", lambda: "is not installed")
    monkeypatch.setattr(installed, "MODULES", ("json",))
    installed.imports(bench)
    with pytest.raises(Failed, match="is not installed"):
        installed.imports(replace(bench, gpus=(H200,)))
    monkeypatch.setattr(installed, "MODULES", ("no_such_module",))
    with pytest.raises(Failed, match=r"^no_such_module: ModuleNotFoundError"):
        installed.imports(bench)


def test_limits_that_are_too_low_are_named_each():
    def found(**changes: Any) -> list[str]:
        given = {"free": 2 << 30, "wanted": 1 << 30, "files": 65536, "locked": 8 << 20, "rdma": False}
        return list(installed.too_low(**(given | changes)))

    assert found() == []
    assert found(files=-1, locked=-1, rdma=True) == []  # unlimited
    assert "/dev/shm has 64 MiB free" in found(free=64 << 20)[0]
    assert "ulimit -n (hard) is 1024" in found(files=1024)[0]
    assert "RDMA needs it unlimited" in found(rdma=True)[0]


NCCL_LINE = "node:71:71 [0] NCCL INFO {} set by environment to {}.\n"


def test_two_ends_whose_nccl_read_other_variables_are_a_failure(bench, monkeypatch):
    monkeypatch.setattr(Bench, "needs_cuda", lambda self, what: None)
    monkeypatch.setattr(installed, "nccl_environment", lambda: {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"})
    logs = bench.folder / "runs/quickstart-retract/logs"
    logs.mkdir(parents=True)
    right = NCCL_LINE.format("NCCL_CUMEM_ENABLE", 0) + NCCL_LINE.format("NCCL_NVLS_ENABLE", 0)
    (logs / "learner-0.log").write_text(NCCL_LINE.format("NCCL_DEBUG", "INFO") + right)
    (logs / "server-0.log").write_text(right)
    assert installed.nccl(bench).figure == "NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0"
    for other in (right.replace("CUMEM_ENABLE set by environment to 0", "CUMEM_ENABLE set by environment to 1"), ""):
        (logs / "server-0.log").write_text(other)
        with pytest.raises(Failed, match="NCCL of server-0 read"):
            installed.nccl(bench)


# -- Transformer Engine, in the place of which plain torch is asked


class FusedNorm(nn.Module):
    """The part of its interface that the check uses."""

    def __init__(self, hidden: int, out: int, *, eps: float, normalization: str, **_: Any) -> None:
        super().__init__()
        assert normalization == "RMSNorm"
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden))
        self.weight = nn.Parameter(torch.randn(out, hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps) @ self.weight.t()


class Packed(nn.Module):
    """Causal attention over packed sequences."""

    def __init__(self, *_: Any, attn_mask_type: str, qkv_format: str, **__: Any) -> None:
        super().__init__()
        assert (attn_mask_type, qkv_format) == ("padding_causal", "thd")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **ends: Any) -> torch.Tensor:
        assert ends["cu_seqlens_q"].tolist() == [0, 7, 71, 128]
        return engine.plain_attention(query, key, value).bfloat16().flatten(1)


class Engine:
    """transformer_engine.pytorch as plain torch, or with one layer that is wrong."""

    LayerNormLinear, DotProductAttention = FusedNorm, Packed

    @staticmethod
    def RMSNorm(hidden: int, *, eps: float, params_dtype: torch.dtype, device: str) -> nn.RMSNorm:
        return nn.RMSNorm(hidden, eps=eps, dtype=params_dtype, device=device)

    @staticmethod
    def Linear(hidden: int, out: int, *, bias: bool, params_dtype: torch.dtype, device: str) -> nn.Linear:
        return nn.Linear(hidden, out, bias=bias, dtype=params_dtype, device=device)


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr(engine, "DEVICE", "cpu")
    monkeypatch.setattr(engine, "check_engine", lambda bench: None)
    changed = type("Changed", (Engine,), {})
    monkeypatch.setattr("streamrl.lab.acceptance.engine.importlib.import_module", lambda name: changed)
    return changed


def test_layers_that_compute_what_torch_computes_pass(te, bench):
    assert engine.run(bench).expected == "0.005 and 0.02 of the largest entry"


class Unweighted(FusedNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], None, self.eps) @ self.weight.t()


class Unmasked(Packed):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
        q, k, v = (tensor.float().transpose(0, 1) for tensor in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


class NotFinite(Packed):
    def forward(self, *tensors: torch.Tensor, **ends: Any) -> torch.Tensor:
        return super().forward(*tensors, **ends).fill_(torch.nan)


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [("LayerNormLinear", Unweighted), ("DotProductAttention", Unmasked), ("DotProductAttention", NotFinite)],
)
def test_a_layer_that_computes_something_else_is_a_failure(te, bench, layer, wrong):
    setattr(te, layer, wrong)
    with pytest.raises(Failed, match=r"from torch; allowed: 0\.005 and 0\.02"):
        engine.run(bench)


def test_without_transformer_engine_its_layers_are_skipped(bench):
    with pytest.raises(Skipped, match=r"^Transformer Engine is not installed$"):
        engine.run(bench)


# -- what a run leaves


@pytest.fixture
def record(bench: Bench) -> Callable[..., Path]:
    """`record(name, rows)`: the folder of a run with these metrics."""

    def make(name: str, rows: list[dict[str, Any]]) -> Path:
        folder = bench.folder / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with trial.Trial(bench, name, {}):
            return folder

    return make


def gap_row(mean: float | None, largest: float | None, suffix: str = "") -> dict[str, Any]:
    return {
        "step": 1,
        f"offpolicy/log_ratio_mean{suffix}": mean,
        f"offpolicy/log_ratio_max{suffix}": largest,
    }


def test_log_probs_that_differ_too_much_or_were_not_computed_are_a_failure(bench, record):
    folder = record("gap", [gap_row(1e-6, 5e-5)])
    assert "mean 1e-06, largest 5e-05 nats" in quickstart.gap(bench, folder).figure
    for mean, largest in ((1e-6, 2e-4), (2e-5, 5e-5)):
        record("gap", [gap_row(1e-6, 5e-5), gap_row(mean, largest)])
        with pytest.raises(Failed, match=r"allowed: mean 1e-05, largest 0\.0001"):
            quickstart.gap(bench, folder)
    record("gap", [gap_row(None, None)])
    with pytest.raises(Failed, match="no step of gap trained a token"):
        quickstart.gap(bench, folder)
    record("quickstart-retract", [gap_row(1e-6, 1e-6, "/s1")])
    with pytest.raises(Failed, match="no step of quickstart-retract trained a token"):
        quickstart.logprobs(bench)


def test_a_model_of_the_users_is_measured_in_a_run_of_its_own_and_no_version_of_it_is_kept(bench, record, monkeypatch):
    made: list[tuple[str, Path, int]] = []

    @contextmanager
    def ended(bench: Bench, name: str, settings: dict[str, Any], *, model: Path) -> Iterator[trial.Trial]:
        folder = record(name, [gap_row(1e-6, 1e-6)])
        made.append((name, model, settings["publish.keep_every"]))
        assert folder.name == name
        yield trial.Trial(bench, name, settings, model=model)

    monkeypatch.setattr(quickstart, "ended", ended)
    monkeypatch.setattr("streamrl.lab.acceptance.servers.ended", ended)
    own = bench.folder / "own"
    shutil.copytree(bench.tiny, own)
    users = replace(bench, own=own)
    quickstart.logprobs(users)
    servers.run(users, "tp2")
    assert made == [("model", own, 0), ("server-tp2", own, 0)]
    monkeypatch.setattr(layouts, "command", lambda *_, **__: "")
    rows = [step_row(step, 1.0, 0.1) for step in range(1, layouts.STEPS + 1)]
    (users.folder / "runs/model/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record("layout-pp2", rows)
    assert "gradient norm 0.0e+00" in layouts.run(users, "pp2").figure


def published(bench: Bench, *tickets_and_times: tuple[int, float], last: int = quickstart.STEPS) -> None:
    """The record of versions that were applied with so many tickets open, so many seconds after the kill."""
    name = quickstart.run_of("drain")
    (bench.folder / "configs" / f"{name}.killed").write_text("1000.0")
    path = event_path(bench.folder / "runs" / name, "generator")
    path.unlink(missing_ok=True)
    events = EventLog(path, "generator-0")
    for place, (tickets, _) in enumerate(tickets_and_times, 1):
        version = last if place == len(tickets_and_times) else place
        with events.span("publish.apply", server="server-0", version=f"{version}.0", tickets=tickets):
            pass
    events.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = iter(at for _, at in tickets_and_times)
    for line in lines:
        if line.get("phase") == "end":
            line["time"] = 1000.0 + next(times)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_transport_has_to_reach_a_server_in_use_an_idle_one_and_one_after_the_kill(bench, record):
    record(quickstart.run_of("drain"), [])
    published(bench, (3, -2.0), (2, 1.0), (0, 2.0))
    assert "in use" in quickstart.publish(bench, "drain").figure
    for given, missing in (
        ([(0, -2.0), (0, 1.0)], "no version got into a server in use"),
        ([(3, -2.0), (2, 1.0)], "no version got into an idle server"),
        ([(3, -2.0), (0, -1.0)], "no version got after the generator was killed"),
    ):
        published(bench, *given)
        with pytest.raises(Failed, match=missing):
            quickstart.publish(bench, "drain")
    published(bench, (3, -2.0), (0, 2.0), last=9)
    with pytest.raises(Failed, match="the last version that a server has is 9, not 24"):
        quickstart.publish(bench, "drain")


def test_a_learner_that_came_back_from_no_checkpoint_or_lost_a_step_is_a_failure(bench, record):
    name, steps = quickstart.run_of("in_place"), range(1, quickstart.STEPS + 1)

    def left(versions: list[str], rows: list[int]) -> None:
        record(name, [{"step": step} for step in rows])
        path = event_path(bench.folder / "runs" / name, "learner")
        path.unlink(missing_ok=True)
        events = EventLog(path, "learner-0")
        for version in versions:
            events.emit("ready", version=version)
        events.close()

    left(["0.0", "4.1"], [*steps])
    assert "resumed as version 4.1" in quickstart.resume(bench).figure
    for versions in (["0.0"], ["0.0", "0.1"]):
        left(versions, [*steps])
        with pytest.raises(Failed, match="from no checkpoint"):
            quickstart.resume(bench)
    left(["0.0", "4.1"], [step for step in steps if step != 5])
    with pytest.raises(Failed, match="has not every step once"):
        quickstart.resume(bench)


def step_row(step: int, norm: float | None, loss: float, **more: float) -> dict[str, Any]:
    return {"step": step, "grad_norm": norm, "loss/total": loss, **more}


def test_a_layout_with_another_gradient_another_loss_or_fewer_steps_is_a_failure(bench, record, monkeypatch):
    steps = range(1, layouts.STEPS + 1)
    monkeypatch.setattr(layouts, "command", lambda *_, **__: "")
    record(quickstart.run_of("retract"), [step_row(step, 1.0, 0.1) for step in [*steps, 9]])
    record("layout-tp2", [step_row(step, 1.00001, 0.100001) for step in steps])
    assert "gradient norm 1.0e-05, loss 1.0e-06" in layouts.run(bench, "tp2").figure
    record("layout-tp2", [step_row(step, 1.0 + 0.01 * (step == 2), 0.1) for step in steps])
    with pytest.raises(Failed, match=r"gradient norm 1\.0e-02.*allowed: 0\.0001 and 1e-05"):
        layouts.run(bench, "tp2")
    record("layout-tp2", [step_row(step, 1.0, 0.2) for step in steps])
    with pytest.raises(Failed, match=r"loss 1\.0e-01"):
        layouts.run(bench, "tp2")
    record("layout-tp2", [step_row(step, None, 0.1) for step in steps])
    with pytest.raises(Failed, match="grad_norm of step 1 is not finite"):
        layouts.run(bench, "tp2")
    record("layout-tp2", [step_row(1, 1.0, 0.1)])
    with pytest.raises(Failed, match=r"steps \[1\] were retrained, \[1, 2, 3\] are recorded"):
        layouts.run(bench, "tp2")


def test_more_memory_than_planned_is_a_failure_and_the_utilisation_is_the_best_steps(bench, record, monkeypatch):
    monkeypatch.setattr(layouts, "command", lambda *_, **__: "")
    gpus = replace(bench, gpus=(H200,) * 4)
    steps = range(1, layouts.STEPS + 1)
    figures = {"memory/peak": 1 << 20, "learner/tflops": 98.9}
    record(quickstart.run_of("retract"), [step_row(step, 1.0, 0.1) for step in steps])
    record("layout-dp2", [step_row(step, 1.0, 0.1, **figures) for step in steps])
    assert layouts.run(gpus, "dp2").figure.endswith(f"98.9 TFLOP/s a rank (no peak is known of {H200.name})")
    record("layout-dp2", [step_row(step, 1.0, 0.1, **figures, **{"learner/mfu": step / 100}) for step in steps])
    assert layouts.run(gpus, "dp2").figure.endswith("MFU 3.00%")
    assert "MFU" not in layouts.run(bench, "dp2").figure
    record("layout-dp2", [step_row(step, 1.0, 0.1, **(figures | {"memory/peak": 1 << 40})) for step in steps])
    with pytest.raises(Failed, match=r"1024\.00 GiB at the peak"):
        layouts.run(gpus, "dp2")


# -- runs and batches


def test_a_run_that_does_not_start_is_a_failure_with_its_own_line(bench):
    with trial.Trial(bench, "none", {"generate.sampling.max_new_tokens": 4000}) as run:
        run.start()
        with pytest.raises(Failed, match=r"ended with 2: streamrl: .*max_new_tokens: 4000 does not fit"):
            run.reach(1)


def test_a_command_that_fails_is_a_failure_with_its_own_line(bench):
    with pytest.raises(Failed, match=r"`streamrl retrain` ended with 2: streamrl: .*nothing"):
        trial.command(bench, "nothing", "retrain", str(bench.folder / "nothing"), "--output", str(bench.folder / "x"))


def test_a_run_that_has_too_few_gpus_is_skipped_with_how_many_it_needs(bench):
    with pytest.raises(Skipped, match=r"^generate\.workers: servers need 2 GPUs, and this machine has 1$"):
        trial.Trial(replace(bench, gpus=(H200,)), "one", {"generate.tensor_parallel": 2})
    two = replace(bench, gpus=(H200,) * 2)
    assert trial.Trial(two, "two", {}).placed.ranks == (0,)
    with pytest.raises(Skipped, match=r"^generate\.workers: servers need 2 GPUs beside the 1 of the learner, and "):
        trial.Trial(two, "two", {"generate.tensor_parallel": 2})


def test_on_one_gpu_both_sides_of_a_run_take_turns(bench):
    one = replace(bench, gpus=(H200,))
    made = trial.Trial(one, "one", {"publish.transport": "broadcast"})
    assert made.config.run.shares_devices
    assert made.placed.ranks == made.placed.workers[0][0] == (0,)
    with pytest.raises(Skipped, match="one GPU: learner and server take turns, and no request is in flight for drain"):
        trial.Trial(one, "other", {"publish.interruption": "drain"})
    trial.Trial(one, quickstart.run_of("retract"), {})
    with pytest.raises(Skipped, match="one GPU: broadcast does not reach the learner's own, "):
        quickstart.publish(one, "retract")


def test_a_batch_arrives_through_a_real_service(bench, monkeypatch):
    monkeypatch.setitem(delivery.TOKENS, "small", (1, 2 * delivery.SAMPLES * delivery.LENGTH))
    assert "0.3 million tokens" in delivery.run(bench, "small").figure
    assert not [
        each for each in psutil.Process().children(recursive=True) if "streamrl.cli replay" in " ".join(each.cmdline())
    ]


def test_a_batch_with_other_numbers_or_fewer_groups_is_a_failure(bench):
    content = delivery.made_group()
    groups = [replace(content, group_id=number) for number in range(2)]
    delivery.check_batch(Batch(step=0, groups=tuple(groups)), content, 2)
    with pytest.raises(Failed, match="1 groups came, 2 were sent"):
        delivery.check_batch(Batch(step=0, groups=tuple(groups[:1])), content, 2)
    with pytest.raises(Failed, match="2 groups came, 2 were sent"):
        delivery.check_batch(Batch(step=0, groups=tuple(groups[::-1])), content, 2)
    last = content.samples[-1]
    ids = last.output_ids.copy()
    ids[-1] += 1
    other = replace(content, group_id=1, samples=(*content.samples[:-1], replace(last, output_ids=ids)), arena=None)
    with pytest.raises(Failed, match="output_ids of group 1 are not those"):
        delivery.check_batch(Batch(step=0, groups=(groups[0], other)), content, 2)


# -- the whole

NO_GPU = {
    "machine.devices": "no GPU: every process runs on the CPU",
    "layers.engine": "Transformer Engine is not installed",
    "machine.nccl": "no GPU: weights go by gloo, no NCCL",
    "layers.local": "Transformer Engine is not installed",
    "server.ep2": "no GPU: a server with ep2 has no kernels on the CPU",
    "server.dp_attention": "no GPU: a server with dp_attention has no kernels on the CPU",
    "server.ngram": "no GPU: a server with ngram has no kernels on the CPU",
    "server.fp8": "no GPU: a server with fp8 has no kernels on the CPU",
}


@pytest.mark.slow
@pytest.mark.timeout(WHOLE + 60)
def test_on_a_cpu_everything_passes_but_what_needs_a_gpu(tmp_path):
    table = tmp_path / "table.json"
    words = [sys.executable, "-m", "streamrl.cli", "doctor", "--gpu", "--quick", "--json", str(table)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WHOLE)
    rows = {row["check"]: row for row in json.loads(table.read_text())["checks"]}
    assert [row for row in rows.values() if row["result"] == "failed"] == []
    assert list(rows) == [check.name for check in CHECKS]
    assert {name: row["reason"] for name, row in rows.items() if row["result"] == "skipped"} == NO_GPU
    assert all(row["figure"] and row["expected"] for row in rows.values() if row["result"] == "ok")
    assert done.returncode == 0, done.stderr
