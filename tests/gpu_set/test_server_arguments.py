"""Every argument that a server gets on a GPU machine is one that the pinned SGLang's own parser takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs, prepare_server_args

from streamrl.config import Config
from streamrl.config.file import load
from streamrl.engine import hardware, server
from streamrl.engine.server import command_line, server_arguments

RECIPES = sorted(path for path in Path("configs/recipes").glob("*/*.yaml") if path.parent.name != "parts")
FURTHER: list[dict[str, Any]] = [
    {"generate": {"server_args": {"quantization": "fp8", "load_format": "flash_rl", "kv_cache_dtype": "fp8_e4m3"}}},
    {"generate": {"quantization": "fp8", "server_args": {"kv_cache_dtype": "fp8_e4m3"}}},
    {"generate": {"tensor_parallel": 8, "server_args": {"ep_size": 8, "moe_a2a_backend": "deepep"}}},
    {"generate": {"tensor_parallel": 8, "server_args": {"enable_dp_attention": True, "dp_size": 8}}},
    {"generate": {"speculation": {"algorithm": "ngram", "top_k": 4, "draft_tokens": 8}}},
    {"generate": {"speculation": {"algorithm": "standalone", "draft_model": "small"}}},
    {"generate": {"speculation": {"algorithm": "eagle", "draft_model": "draft", "top_k": 4, "draft_tokens": 8}}},
    {"generate": {"speculation": {"algorithm": "eagle3", "draft_model": "draft"}}, "learner": {"router_replay": True}},
    {"generate": {"speculation": {"algorithm": "nextn", "steps": 1}}},
    {"generate": {"server_args": {"mem-fraction-static": 0.85, "enable_metrics": True}}},
    {"learner": {"lora": {"rank": 16, "publish": "adapter"}}},
    {"learner": {"router_replay": True}},
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a GPU, for `has_cuda` alone: what is installed here is a build of torch for CUDA."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server.has_cuda()


def parsed(arguments: dict[str, Any]) -> ServerArgs:
    return prepare_server_args(command_line({**arguments, "port": 30000}))


def assert_taken(config: Config, model: Path) -> ServerArgs:
    """Parse a configuration's arguments; every one of them is then what was asked for."""
    asked = server_arguments(config, 0) | {"model_path": str(model)}
    given = parsed(asked)
    for name, value in asked.items():
        held = getattr(given, name)
        if isinstance(value, dict) and isinstance(held, str):
            held = json.loads(held)  # the parser keeps what is JSON as it was written
        assert value is None or (list(held) == list(value) if isinstance(value, list | tuple) else held == value), name
    return given


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_arguments_of_a_recipe_are_sglangs(path, cuda, model_folder):
    assert "cpu" not in command_line(server_arguments(load(path), 0))
    assert_taken(load(path), model_folder("qwen2"))


@pytest.mark.parametrize("settings", FURTHER, ids=str)
def test_what_a_configuration_may_ask_for_besides_is_sglangs(settings, cuda, model_folder):
    config = Config.model_validate({"model": {"path": model_folder("qwen2"), "dtype": "bfloat16"}, **settings})
    assert_taken(config, model_folder("qwen2"))


def test_an_argument_that_sglang_does_not_have_is_refused(cuda, model_folder, capsys):
    config = Config.model_validate(
        {"model": {"path": model_folder("qwen2")}, "generate": {"server_args": {"no_such_argument": 1}}}
    )
    with pytest.raises(SystemExit):
        assert_taken(config, model_folder("qwen2"))
    assert "--no-such-argument" in capsys.readouterr().err
