"""A role of a run is one process at a time, whatever became of its supervisor; and its folder is one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from streamrl.api import launching
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.reward_model import RewardModelConfig
from streamrl.locks import claim
from streamrl.run_folder import make, prepare
from streamrl.stream.identity import AnotherRun, run_identity
from streamrl.tasks.left_out import LeftOut
from tests.limited_files import limited_files
from tests.operations_table import GOES_ON, documented

HOLDER = """
import sys, time
from pathlib import Path
from streamrl.locks import claim
claim(Path(sys.argv[1]), "replay-0", 5)
print("claimed", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that is the run's replay service."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_of_a_role_is_refused_after_its_patience(holder, tmp_path):
    with pytest.raises(ConfigError) as refused:
        claim(tmp_path, "replay-0", timeout=0.3)
    documented("...: another process is ... of this run and does not end; allowed: one of each", str(refused.value), 2)
    os.close(claim(tmp_path, "learner-0", timeout=0.3))  # another role is free


def test_a_start_beside_the_roles_of_a_cluster_changes_nothing(model_folders, tmp_path, monkeypatch):
    """They hold locks of their own; the run's is the one of this command."""
    monkeypatch.setattr(launching, "_check", lambda *_, **__: LeftOut())
    run = {"folder": tmp_path, "name": "one", "start_timeout": 0.3}
    config = Config.model_validate({"run": run, "model": {"path": model_folders[0]}})
    folder = make(config, fresh=False)
    (folder / "replay.address").write_text("tcp://127.0.0.1:1")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    lock = claim(folder, "replay-0", 0)
    other = config.model_copy(update={"generate": config.generate.model_copy(update={"workers": 2})})
    with pytest.raises(ConfigError, match="another process is replay-0 of this run"), launching.launched(other):
        pass
    os.close(lock)
    assert {path: path.read_bytes() for path in before} == before


def test_a_role_is_free_once_the_process_that_had_it_is_killed(holder, tmp_path):
    claimed = threading.Event()

    def wait() -> None:
        os.close(claim(tmp_path, "replay-0", timeout=20))
        claimed.set()

    threading.Thread(target=wait).start()
    time.sleep(0.3)
    assert not claimed.is_set()
    holder.send_signal(signal.SIGKILL)
    assert claimed.wait(10)


@pytest.fixture
def config(model_folders, tmp_path):
    tree = {"run": {"folder": tmp_path / "runs", "name": "one"}, "model": {"path": model_folders[0]}}
    return Config.model_validate(tree)


def with_id(config, run):
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run})})


def test_roles_that_prepare_the_folder_at_once_on_a_shared_file_system_agree_on_the_run(config, tmp_path):
    config_file.save(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "launch.folder", "prepare", str(tmp_path / "config.yaml")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    roles = [subprocess.Popen(command, **pipes) for _ in range(4)]
    said = [role.communicate(timeout=120) for role in roles]
    assert [role.returncode for role in roles] == [0] * 4, said
    assert not run_identity(config.run_folder).adopted
    assert not any("adopted" in err for _, err in said)


def test_a_new_folder_is_a_new_run_and_a_resumed_one_the_same(config):
    first = run_identity(prepare(config, fresh=False))
    assert run_identity(prepare(config, fresh=False)) == first
    second = run_identity(prepare(config, fresh=True))
    assert second.id != first.id
    assert run_identity(config.run_folder.with_name("one.1")) == first


def test_a_start_without_room_leaves_what_the_folder_says_of_its_machine(config, monkeypatch):
    folder = make(config, fresh=False)
    said = (folder / "environment.json").read_text()
    monkeypatch.setattr("streamrl.run_folder._environment", lambda _: {"command": "x" * 400_000})
    with limited_files(300_000), pytest.raises(ConfigError, match="File too large"):
        make(config, fresh=False)
    assert (folder / "environment.json").read_text() == said


def test_a_fresh_start_waits_for_the_roles_of_the_former_one_which_write_by_the_folders_name(config, tmp_path):
    folder = prepare(config, fresh=False)
    words = f"""
import time
from pathlib import Path
from streamrl.locks import claim
claim(Path({str(folder)!r}), "learner-0", 5)
print("claimed", flush=True)
time.sleep(3)
(Path({str(folder)!r}) / "checkpoints" / "step_40").mkdir()
"""
    with subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True) as former:
        assert former.stdout.readline() == "claimed\n"
        prepare(config, fresh=True)
    assert list((folder / "checkpoints").iterdir()) == []
    assert (folder.with_name("one.1") / "checkpoints" / "step_40").is_dir()


def test_a_run_from_before_the_id_is_adopted_when_it_is_resumed(config, caplog):
    (prepare(config, fresh=False) / "run.json").unlink()
    for _ in range(2):
        assert run_identity(prepare(config, fresh=False)).adopted
    documented("... is from before runs had ids: it is adopted as run ...", caplog.text, GOES_ON)
    assert [record.getMessage() for record in caplog.records if "adopted as run" in record.getMessage()] == [
        f"{config.run_folder} is from before runs had ids: it is adopted as run {run_identity(config.run_folder).id}"
    ]


def test_the_configured_id_is_that_of_the_folder_or_refused(config):
    assert run_identity(prepare(with_id(config, "mine"), fresh=False)).id == "mine"
    prepare(config, fresh=False)
    with pytest.raises(AnotherRun, match=r"run.id: yours differs from mine of .*run.json") as refused:
        prepare(with_id(config, "yours"), fresh=False)
    documented("run.id: ... differs from ... of ...run.json...", str(refused.value), 2)


def with_reward_model(tmp_path, **changes):
    tree = {"path": tmp_path / "judge", **changes}
    rewards = [{"name": "of_task"}, {"name": "reward_model"}]
    return Config.model_validate(
        {"run": {"folder": tmp_path / "runs"}, "reward_model": tree, "task": {"rewards": rewards}}
    )


def test_a_resumed_run_has_its_reward_model_in_other_processes_and_no_other_reward_model(tmp_path):
    (tmp_path / "judge").mkdir()
    make(with_reward_model(tmp_path), fresh=False)
    others = {"path": tmp_path, "label": 1, "chat_template": False, "dtype": "bfloat16"}
    for key, value in others.items():
        with pytest.raises(ConfigError, match=rf"^reward_model\.{key}: .* differs from"):
            make(with_reward_model(tmp_path, **{key: value}), fresh=False)
    changed = {
        "workers": 2, "gpus": 0, "threads": 2, "host": "0.0.0.0", "tokens_per_batch": 99, "batch_wait": 1,
        "most_waiting": 9, "timeout": 90, "retry": 2, "patience": 999, "restarts": 9,
    }  # fmt: skip
    assert changed.keys() | others.keys() == RewardModelConfig.model_fields.keys()
    make(with_reward_model(tmp_path, **changed), fresh=False)


def with_pools(tmp_path, *pools):
    return Config.model_validate({"run": {"folder": tmp_path}, "generate": {"pools": pools}})


def test_a_resumed_run_has_other_workers_in_its_pools_and_no_other_pools(tmp_path):
    large, small = {"name": "large", "workers": 1}, {"name": "small", "sampling": {"temperature": 0.5}}
    make(with_pools(tmp_path, large, small), fresh=False)
    make(with_pools(tmp_path, {**large, "workers": 2}, {**small, "server_args": {"log_level": "error"}}), fresh=False)
    for pools in ([large], [small, large], [large, {**small, "sampling": {"temperature": 0.6}}]):
        with pytest.raises(ConfigError, match=r"^generate\.pools: .* differs from"):
            make(with_pools(tmp_path, *pools), fresh=False)
