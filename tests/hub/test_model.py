"""`model.path` by a name of the hub: from its cache, fetched into it, and one line for what cannot be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from streamrl import cli, run_folder
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.hub import child
from streamrl.hub.model import _snapshot, with_local_model, with_local_models
from streamrl.hub.repository import Repository
from streamrl.places import absolute, load_run
from tests.hub.cached import FIRST, SECOND, cache, files_of
from tests.hub.local_hub import LocalHub, serve
from tests.operations_table import GOES_ON, documented

NAME = "org/name"
IS_NO_MODEL = "model.path: ... is no model; allowed: a Hugging Face folder ..."


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def as_a_new_process() -> None:
    _snapshot.cache_clear()


@pytest.fixture
def files(model_folders: tuple[Path, Path]) -> dict[str, bytes]:
    return files_of(model_folders[0])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a configuration of `org/name` in the cache `hub`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(f"run: {{name: one}}\nmodel: {{path: {NAME}, cache: hub}}\n")
    return tmp_path


def configured(place: Path, **model: Any) -> Config:
    return Config.model_validate({"run": {"name": "one"}, "model": {"path": NAME, "cache": place / "hub", **model}})


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        with_local_model(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -- from the cache


def test_a_cached_model_is_its_snapshot_and_a_folder_of_that_name_wins(place, files):
    snapshot = cache(place / "hub", NAME, files)
    cache(place / "hub", NAME, files, SECOND, ref="fast")
    assert with_local_model(configured(place)).model.path == snapshot
    assert with_local_model(configured(place, revision=FIRST)).model.path == snapshot
    assert with_local_model(configured(place, revision="fast")).model.path.name == SECOND
    (place / NAME).mkdir(parents=True)
    assert with_local_model(configured(place)).model.path == Path(NAME)


def test_a_teacher_of_the_hub_is_its_snapshot_too_for_who_trains_and_refused_by_its_own_key(place, files):
    snapshot, teacher = cache(place / "hub", NAME, files), cache(place / "hub", "org/large", files, SECOND)
    algo = {"distillation": {"teacher": "org/large"}}
    config = configured(place).model_validate(configured(place).model_dump() | {"algo": algo})
    found = with_local_models(config)
    assert (found.model.path, found.algo.distillation.teacher) == (snapshot, teacher)
    assert found.algo.distillation.revision == SECOND
    assert with_local_models(found) == found
    assert with_local_model(config).algo == config.algo
    (place / "hub" / "models--org--large" / "refs" / "main").unlink()
    as_a_new_process()
    with pytest.raises(ConfigError, match=r"algo\.distillation\.teacher: org/large is no model; allowed: a Hugging"):
        with_local_models(config)


def test_a_model_that_is_nowhere_is_one_line_with_the_place_and_the_command_that_fetches_it(place, files, capsys):
    cache(place / "hub", NAME, files)
    assert cli.main(["train", "config.yaml", "model.revision=v2"]) == 2
    out, err = capsys.readouterr()
    documented(IS_NO_MODEL, err, 2)
    assert (out, err.count("\n")) == ("", 1)
    assert f"revision v2 is not in {place / 'hub'}, and HF_HUB_OFFLINE is set" in err
    assert f"`HF_HUB_OFFLINE=0 hf download {NAME} --revision v2 --cache-dir {place / 'hub'}`" in err
    assert not (place / "runs").exists()


def test_a_model_without_its_weights_is_one_line_that_names_them(place, files, capsys):
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "one.safetensors"}}).encode()
    del files["model.safetensors"]
    snapshot = cache(place / "hub", NAME, files)
    code = cli.main(["train", "config.yaml"])
    err = capsys.readouterr().err
    documented("model.path: ... at ... lacks ... in ..., and ...; allowed: after ...", err, code)
    assert f"lacks one.safetensors in {snapshot}, and HF_HUB_OFFLINE is set" in err
    assert cli.main(["train", "config.yaml", "--dry-run"]) == 0
    assert f"not checked: the weights of {NAME}" in capsys.readouterr().out


def test_a_plan_needs_the_configuration_of_the_model_alone(place, files, capsys):
    snapshot = cache(place / "hub", NAME, {"config.json": files["config.json"]})
    assert cli.main(["plan", "config.yaml"]) == 0
    assert "one: name in float32" in capsys.readouterr().out
    (snapshot / "config.json").unlink()
    as_a_new_process()
    assert cli.main(["plan", "config.yaml"]) == 2
    assert "lacks config.json" in capsys.readouterr().err


def test_the_run_records_the_snapshot_and_is_resumed_from_another_cache_but_not_with_another_commit(place, files):
    def made(root: str, **model: Any) -> Path:
        as_a_new_process()
        config = with_local_model(configured(place, cache=place / root, **model))
        return run_folder.make(absolute(config), fresh=False)

    snapshot = cache(place / "hub", NAME, files)
    folder = made("hub")
    recorded = load_run(folder).model
    assert (recorded.path, recorded.revision) == (snapshot, FIRST)
    assert json.loads((folder / "environment.json").read_text())["model"] == {
        "name": NAME, "revision": "main", "commit": FIRST,
    }  # fmt: skip
    cache(place / "elsewhere", NAME, files)
    made("elsewhere")
    cache(place / "hub", NAME, files, SECOND)
    with pytest.raises(ConfigError) as refused:
        made("hub")
    documented(
        "model.revision: ... of ... is commit ... now, and was ... in the run in ...; allowed: ...",
        str(refused.value), 2,
    )  # fmt: skip
    assert f"main of {NAME} is commit {SECOND} now, and was {FIRST}" in str(refused.value)
    assert f"allowed: model.revision={FIRST}, --fresh" in str(refused.value)
    made("hub", revision=FIRST)
    again = load_run(folder)
    assert with_local_model(again) == again
    with pytest.raises(ConfigError, match=r"model\.revision: main of org/name is commit b2"):
        run_folder.make(with_local_model(load_run(folder, ["model.revision=main"])), fresh=False)


def test_a_revision_of_a_folder_is_refused(place, model_folders):
    line = refusal(configured(place, path=model_folders[0], revision="v2"))
    assert line.startswith(
        f"model.revision: v2 is of a model of the hub, and model.path={model_folders[0]} is a folder"
    )


def test_a_recorded_snapshot_that_was_deleted_is_had_again_by_its_commit(place, files):
    gone = configured(place, path=place / "gone" / "models--org--name" / "snapshots" / FIRST)
    assert f"{NAME} is no model" in refusal(gone)
    assert f"--revision {FIRST}" in refusal(gone)
    cache(place / "hub", NAME, files, SECOND)
    snapshot = cache(place / "hub", NAME, files, FIRST, ref="other")
    assert with_local_model(gone).model.path == snapshot


# -- from a hub


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """One with the tiny model, and beside it what is never fetched."""
    never = {
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
        "onnx/config.json": b"{}",
        "consolidated.safetensors": b"",
    }
    with serve({**files, **never}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        yield hub


def test_what_the_cache_lacks_is_fetched_once_without_code_and_pickles_and_a_dead_hub_leaves_the_cache(
    place, files, hub, capfd
):
    cache(place / "hub", NAME, {"config.json": files["config.json"]})
    snapshot = with_local_model(configured(place)).model.path
    assert snapshot == place / "hub" / "models--org--name" / "snapshots" / FIRST
    assert {path.name for path in snapshot.iterdir()} == set(files)
    assert set(hub.fetched) == set(files) - {"config.json"}
    assert f"{NAME} at main ({FIRST}): from the hub to {place / 'hub'}" in capfd.readouterr().err
    hub.silent = True
    assert with_local_model(configured(place, hub_timeout=1.0)).model.path == snapshot
    documented("model.path: the hub cannot be reached (...): ... is commit ..., as it was fetched last",
               capfd.readouterr().err, GOES_ON)  # fmt: skip


def test_a_hub_that_never_answers_is_given_up(place, hub):
    hub.silent = True
    line = refusal(configured(place, hub_timeout=0.6))
    documented(IS_NO_MODEL, line, 2)
    assert "the hub cannot be reached: nothing arrived for 0.6 s; `hf download org/name" in line


@pytest.mark.parametrize(
    ("name", "revision", "kind"),
    [("org/unknown", None, "unknown"), ("org/gated", None, "gated"), (NAME, "v9", "revision")],
)
def test_what_the_hub_refuses_is_told_apart(place, hub, monkeypatch, *, name, revision, kind):
    answer = child._answer(Repository(name=name, revision=revision, cache=place / "hub"), "whole")
    assert answer["failure"] == kind, answer
    monkeypatch.setattr("streamrl.hub.model.fetch", lambda *_: _raise(kind, answer["reason"]))
    line = refusal(configured(place, path=name, revision=revision))
    match kind:
        case "unknown":
            documented("model.path: ... is no model; allowed: a Hugging Face folder ...", line, 2)
        case "gated":
            documented("model.path: ... is gated: ...; allowed: ...", line, 2)
        case "revision":
            documented("model.revision: ... is no branch, tag or commit of ...; allowed: ...", line, 2)


def _raise(kind: str, reason: str) -> Path:
    from streamrl.hub.download import HubError

    raise HubError(kind, reason)


@pytest.mark.slow
def test_a_run_of_a_model_of_the_hub_ends_and_is_resumed_offline(place, files, hub, tmp_path):
    """The whole command, in a process of its own, whose roles see a folder."""
    config_file.save(configured(place), place / "config.yaml")
    more = ["run.steps=1", "generate.group_size=2", "replay.groups_per_step=2", "generate.probes=0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    for offline, steps in (("0", 1), ("1", 2)):
        command = [sys.executable, "-m", "streamrl.cli", "train", "config.yaml", *more[1:], f"run.steps={steps}"]
        done = subprocess.run(
            command,
            cwd=place,
            env={**environment, "HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
    assert load_run(place / "runs" / "one").model.path.name == FIRST
