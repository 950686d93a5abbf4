"""`generate.speculation`: SGLang's arguments of it, and what would change what is drawn or trained, in one line."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.senseless import warnings
from streamrl.engine.client import EngineClient
from streamrl.engine.server import ServerFailed, server_arguments
from streamrl.generate.attached_drafts import check_drafts as check_attached
from streamrl.learner.shape import read_shape
from streamrl.preflight import drafts

EAGLE = {"algorithm": "eagle3", "draft_model": "draft"}
NGRAM = {"algorithm": "ngram"}


def config_of(speculation: dict, **sections: dict) -> Config:
    generate = {**sections.pop("generate", {}), "speculation": speculation}
    return Config.model_validate({"generate": generate, **sections})


@pytest.mark.parametrize(
    ("speculation", "arguments"),
    [
        ({}, {}),
        (NGRAM, {"algorithm": "NGRAM", "ngram_max_bfs_breadth": 10, "num_draft_tokens": 12}),
        (
            {**NGRAM, "top_k": 2, "draft_tokens": 4},
            {"algorithm": "NGRAM", "ngram_max_bfs_breadth": 2, "num_draft_tokens": 4},
        ),
        (
            EAGLE,
            {
                "algorithm": "EAGLE3", "draft_model_path": "draft", "num_steps": 3, "eagle_topk": 1,
                "num_draft_tokens": 4,
            },
        ),
        (
            {"algorithm": "standalone", "draft_model": "small", "steps": 5, "top_k": 4, "draft_tokens": 8},
            {
                "algorithm": "STANDALONE", "draft_model_path": "small", "num_steps": 5, "eagle_topk": 4,
                "num_draft_tokens": 8,
            },
        ),
        (
            {"algorithm": "nextn", "steps": 1},
            {"algorithm": "NEXTN", "num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 2},
        ),
    ],
)  # fmt: skip
def test_the_section_is_sglangs_arguments(speculation, arguments):
    found = server_arguments(config_of(speculation), 0)
    assert {name: value for name, value in found.items() if name.startswith("speculative_")} == {
        f"speculative_{name}": value for name, value in arguments.items()
    }
    assert found.get("max_running_requests") == (48 if arguments else None)


def test_a_user_may_say_how_many_answers_a_server_with_drafts_draws_at_once():
    config = config_of(NGRAM, generate={"server_args": {"max-running-requests": 256}})
    assert server_arguments(config, 0)["max_running_requests"] == 256


@pytest.mark.parametrize(
    ("speculation", "sections", "told"),
    [
        ({"algorithm": "medusa"}, {}, "'ngram', 'standalone', 'eagle', 'eagle3' or 'nextn'"),
        ({"algorithm": "eagle"}, {}, "draft_model: null is no draft for algorithm=eagle; allowed: a Hugging Face"),
        (
            {**NGRAM, "draft_model": "draft"},
            {},
            "draft_model: draft is not used by algorithm=ngram; allowed: null, or algorithm=standalone, eagle, eagle3",
        ),
        ({"algorithm": "nextn", "draft_model": "draft"}, {}, "draft_model: draft is not used by algorithm=nextn"),
        ({**NGRAM, "steps": 3}, {}, "steps: 3 is not used by algorithm=ngram"),
        ({**EAGLE, "draft_tokens": 3}, {}, "cannot be had with steps=3 and top_k=1; allowed: 4, or null"),
        ({**EAGLE, "top_k": 2, "draft_tokens": 99}, {}, "with steps=3 and top_k=2; allowed: 2 to 11, or null"),
        ({**EAGLE, "steps": 0}, {}, "greater than or equal to 1"),
        (
            NGRAM,
            {"generate": {"attach": ["http://a:1"]}},
            "speculation.algorithm: ngram is corrected in servers that a worker starts",
        ),
        (EAGLE, {"generate": {"sampling": {"top_p": 0.9}}}, "speculation.algorithm: eagle3 returns no kept sets"),
        (
            NGRAM,
            {"generate": {"pools": [{"name": "a"}, {"name": "b", "sampling": {"min_p": 0.1}}]}},
            "speculation.algorithm: ngram returns no kept sets",
        ),
        (
            EAGLE,
            {"generate": {"server_args": {"enable-deterministic-inference": True}}},
            "server_args has enable_deterministic_inference",
        ),
        (
            NGRAM,
            {"generate": {"tensor_parallel": 2, "server_args": {"enable_dp_attention": True, "dp_size": 2}}},
            "is not possible with enable_dp_attention in server_args (SGLang 0.5.23); allowed: eagle, eagle3, nextn",
        ),
        (
            EAGLE,
            {"generate": {"quantization": "fp8"}, "model": {"dtype": "bfloat16"}},
            "a model that quantization=fp8 would be said of as well; allowed: ngram, or quantization=null",
        ),
        (
            {},
            {"generate": {"server_args": {"speculative_algorithm": "EAGLE"}}},
            "server_args: speculative_algorithm=EAGLE is not allowed; allowed: generate.speculation.algorithm",
        ),
        (
            NGRAM,
            {"generate": {"server_args": {"speculative-algo": "EAGLE"}}},
            "allowed: generate.speculation.algorithm",
        ),
        (
            EAGLE,
            {"generate": {"server_args": {"speculative-accept-threshold-acc": 0.9}}},
            "speculative_accept_threshold_acc=0.9 keeps drafts that the policy would not have drawn",
        ),
        (EAGLE, {"publish": {"transport": "disk"}}, "publish.transport: disk loads each version into the draft"),
        (
            {"algorithm": "standalone", "draft_model": "small"},
            {"learner": {"lora": {"rank": 4, "publish": "adapter"}}},
            "standalone is not possible with learner.lora.publish=adapter",
        ),
        (NGRAM, {"learner": {"router_replay": True}}, "ngram returns no experts"),
        ({**EAGLE, "top_k": 2}, {"learner": {"router_replay": True}}, "top_k: 2 moves the tokens that are kept"),
        (NGRAM, {"evaluate": {"min_p": 0.1}}, "evaluate.min_p: 0.1 is nothing that drafts are verified by"),
    ],
)
def test_what_would_change_what_is_drawn_or_trained_is_refused_in_a_line(speculation, sections, told):
    with pytest.raises(ValidationError) as refused:
        config_of(speculation, **sections)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("speculation", "sections"),
    [
        (NGRAM, {"publish": {"transport": "disk"}}),
        (NGRAM, {"generate": {"quantization": "fp8"}, "model": {"dtype": "bfloat16"}}),
        (EAGLE, {"learner": {"router_replay": True}}),
        (EAGLE, {"generate": {"attach": ["http://a:1"]}}),
        (EAGLE, {"publish": {"transport": "disk"}, "learner": {"lora": {"rank": 4, "publish": "adapter"}}}),
        (EAGLE, {"generate": {"server_args": {"speculative_accept_threshold_single": 1.0}}}),
        ({**EAGLE, "top_k": 2, "draft_tokens": 11}, {}),
    ],
)
def test_what_does_not_is_allowed(speculation, sections):
    config_of(speculation, **sections)


def test_a_draft_without_an_algorithm_is_told():
    (line,) = warnings(config_of({"draft_model": "draft"}))
    assert line == "generate.speculation.draft_model: draft has no effect without generate.speculation.algorithm"


def test_a_version_is_loaded_into_the_policy_and_not_into_a_draft_beside_it(monkeypatch):
    bodies: list[dict] = []

    async def post(client: EngineClient, path: str, body: dict, timeout: float | None = None) -> bytes:
        bodies.append(body)
        return b""

    async def update() -> None:
        client = EngineClient("http://a:1", timeout=1.0)
        await client.begin_weight_update(1.0)
        how = {"version": "1.0", "flush_cache": True, "timeout": 1.0}
        await client.update_from_distributed([], [], [], group="g", **how)
        await client.update_from_tensor([], load_format="l", **how)
        await client.close()

    monkeypatch.setattr(EngineClient, "_post", post)
    asyncio.run(update())
    assert [body["selector"] for body in bodies] == ["target"] * 3


# -- attached servers


@pytest.mark.parametrize(
    ("speculation", "arguments", "told"),
    [
        ({}, {"speculative_algorithm": "EAGLE"}, "with speculative_algorithm=EAGLE, .* is null; allowed: the same"),
        (EAGLE, {"speculative_algorithm": None}, "runs with speculative_algorithm=None, .* is eagle3"),
        (EAGLE, {"speculative_algorithm": "EAGLE"}, "is eagle3; allowed: the same at both ends"),
        (
            EAGLE,
            {"speculative_algorithm": "EAGLE3", "speculative_accept_threshold_single": 0.3},
            "speculative_accept_threshold_single=0.3, and keeps drafts",
        ),
        (EAGLE, {"speculative_algorithm": "EAGLE3", "device": "cpu"}, "runs on a CPU, where drafts keep the most"),
    ],
)
def test_an_attached_server_with_other_drafts_is_refused(speculation, arguments, told):
    with pytest.raises(ServerFailed, match=told):
        check_attached(arguments, config_of(speculation).generate.speculation, "http://a:1")


@pytest.mark.parametrize(("speculation", "found"), [({}, None), (EAGLE, "EAGLE3"), ({"algorithm": "nextn"}, "EAGLE")])
def test_an_attached_server_with_the_same_drafts_is_taken(speculation, found):
    arguments = {"speculative_algorithm": found, "device": "cuda", "speculative_accept_threshold_acc": 1.0}
    check_attached(arguments, config_of(speculation).generate.speculation, "http://a:1")


# -- before anything starts


def test_a_draft_is_a_folder_with_the_policys_vocabulary(model_folders, tmp_path):
    shape, folder = read_shape(model_folders[0]), tmp_path / "draft"

    def check() -> None:
        speculation = {"algorithm": "standalone", "draft_model": folder}
        drafts.check_drafts(config_of(speculation, model={"path": model_folders[0]}), shape)

    with pytest.raises(ConfigError, match=r"generate\.speculation\.draft_model: .*draft is no model"):
        check()
    shutil.copytree(model_folders[1], folder)
    check()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4}))
    with pytest.raises(ConfigError, match=r"draft has 4 tokens, and the policy \d+; allowed: a draft"):
        check()


def test_layers_of_multi_token_prediction_are_in_the_folder_that_is_to_draft_by_them(model_folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model_folders[0], tmp_path / "model"))
    shape, config = read_shape(folder), config_of({"algorithm": "nextn"}, model={"path": folder})
    with pytest.raises(ConfigError, match=r"nextn drafts by layers of multi-token prediction, and .* has none"):
        drafts.check_drafts(config, shape)
    drafts.check_drafts(config, shape, weights=False)
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.{shape.layers}.eh_proj.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    drafts.check_drafts(config, shape)


def test_a_machine_without_a_gpu_drafts_by_a_table_that_it_can_compile(monkeypatch):
    monkeypatch.setattr(drafts, "has_cuda", lambda: False)
    with pytest.raises(ConfigError, match=r"eagle3 needs a GPU, and this machine has none: .*; allowed: ngram, null"):
        drafts.check_machine(config_of(EAGLE))
    drafts.check_machine(config_of(EAGLE, generate={"attach": ["http://a:1"]}))
    monkeypatch.setattr(drafts.shutil, "which", lambda name: None if name == "ninja" else name)
    with pytest.raises(ConfigError, match=r"ngram is compiled by SGLang when it is first used.* has no ninja; allowed"):
        drafts.check_machine(config_of(NGRAM))
    monkeypatch.setattr(drafts.shutil, "which", str)
    drafts.check_machine(config_of(NGRAM))
    monkeypatch.setattr(drafts, "has_cuda", lambda: True)
    drafts.check_machine(config_of(EAGLE))


@pytest.mark.parametrize(
    ("model", "lacking"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "attention sinks"),
        ({"architectures": ["NemotronHForCausalLM"], "mamba_num_heads": 8}, r"states of Mamba-2 layers"),
    ],
)
def test_what_cannot_verify_drafts_without_a_gpu_is_refused_before_a_server_starts(
    model, lacking, monkeypatch, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(model))
    monkeypatch.setattr(drafts, "has_cuda", lambda: False)
    monkeypatch.setattr(drafts.shutil, "which", str)
    config = config_of(NGRAM, model={"path": tmp_path})
    with pytest.raises(ConfigError, match=rf"ngram on a machine without a GPU: .* with {lacking} there; allowed: null"):
        drafts.check_machine(config)
    drafts.check_machine(config_of({}, model={"path": tmp_path}))
    monkeypatch.setattr(drafts, "has_cuda", lambda: True)
    drafts.check_machine(config)
