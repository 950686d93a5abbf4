"""A server whose weights are in FP8 by blocks: which weights are quantised, and what a real one makes of versions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from launch import tiny_model
from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.replay import StreamConfig
from streamrl.device import Device
from streamrl.engine import cpu_fp8, quantised_loading
from streamrl.engine.block_fp8 import dequantise, quantise
from streamrl.engine.client import EngineClient
from streamrl.engine.hardware import has_cuda
from streamrl.engine.quantised_loading import OVERRIDE, check_loaded, is_quantised, quantised, wrap
from streamrl.engine.server import Server, ServerFailed, command_line, server_arguments
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.learner.shape import read_shape
from streamrl.preflight.machine import check_machine
from streamrl.preflight.model import check_model
from streamrl.publish.broadcast_source import BroadcastSource
from streamrl.publish.delta_source import DeltaSource
from streamrl.publish.sources import make_source, make_staging
from streamrl.publish.staging import Staging
from streamrl.publish.transport import Sink, Source
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

PROMPT = [2, 3, 4, 1]
TIMEOUT = 60.0
DENSE = frozenset(
    f"model.layers.0.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
)


def config_of(model: Path, tensor_parallel: int = 1, **publish: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": "bfloat16"},
            "generate": {"quantization": "fp8", "tensor_parallel": tensor_parallel},
            "publish": {"timeout": TIMEOUT, "bucket": 1 << 16, **publish},
        }
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two models of one shape, as small as blocks of 128 allow on two ranks."""
    made = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("blocks") / f"seed{seed}"
        tokenizer = tiny_model.make_tokenizer(8)
        config = AutoConfig.for_model(
            "qwen2", vocab_size=len(tokenizer), hidden_size=256, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
            initializer_range=0.08, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
            bos_token_id=None, dtype="bfloat16",
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made.append(folder)
    return made[0], made[1]


class _Rounding(torch.nn.Module):
    """A linear layer of Hugging Face's, as FP8 kernels compute it."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.values, self.scales = quantise(layer.weight.data)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_fp8.linear(x, self.values, self.scales, self.bias)


def forward(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Log-probs [T - 1] of ids 1..T-1 by Hugging Face in bfloat16, its linear layers in FP8."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(parent), leaf, _Rounding(module))
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]


# -- which weights


def test_the_linear_layers_of_a_dense_model_are_quantised_and_nothing_else(folders):
    names = [name for name in load_file(folders[0] / "model.safetensors") if "layers.1" not in name]
    found = {name for name in names if is_quantised(name, DENSE)}
    projections = {name for name in names if re.search(r"layers\.0\..*_proj\.weight$", name)}
    assert len(projections) == 7
    assert found == projections
    assert not any("embed" in name or "lm_head" in name or "norm" in name or "bias" in name for name in found)


def test_experts_are_quantised_and_their_router_is_not(tmp_path):
    tiny_model.make(tmp_path, family="qwen3_moe")
    layers = DENSE | {"model.layers.0.mlp.experts"} - {"model.layers.0.mlp.gate_up_proj"}
    found = {name for name in load_file(tmp_path / "model.safetensors") if is_quantised(name, layers)}
    experts = {name for name in found if ".experts." in name}
    assert len(experts) == 4 * 3
    assert len(found - experts) == 4
    assert "model.layers.0.mlp.gate.weight" not in found


def test_a_quantised_weight_is_followed_by_its_scales_and_the_others_pass_untouched():
    weight, norm = torch.randn(256, 128), torch.randn(128)
    name = "model.layers.0.mlp.down_proj.weight"
    found = dict(quantised([(name, weight), ("model.norm.weight", norm)], DENSE, "cpu"))
    assert list(found) == [name, f"{name}_scale_inv", "model.norm.weight"]
    assert found["model.norm.weight"] is norm
    assert found[name].dtype == torch.float8_e4m3fn
    assert (dequantise(found[name], found[f"{name}_scale_inv"]) - weight).abs().max() < weight.abs().max() / 16


class _Layer(torch.nn.Module):
    """What SGLang's layers of experts have, which need a GPU: parameters in FP8, scales, and the blocks' size."""

    def __init__(self, block: Sequence[int] = (128, 128)) -> None:
        super().__init__()
        self.w13_weight_scale_inv = torch.nn.Parameter(torch.ones(2, 1, 1), requires_grad=False)
        self.quant_method = type("Method", (), {"weight_block_size": list(block)})()


class _Model(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.experts = layer
        self.head = torch.nn.Linear(2, 2)

    def load_weights(self, weights: object) -> None:
        for name, weight in weights:
            if name.endswith("_scale_inv"):
                self.mlp.experts.w13_weight_scale_inv.data[int(name.split(".")[2])] = weight


def test_first_weights_that_leave_a_layer_without_scales_are_refused(monkeypatch):
    checked: list[object] = []
    monkeypatch.setattr(quantised_loading, "check_loaded", lambda model: [checked.append(model), check_loaded(model)])
    model = _Model(_Layer())
    wrap(model)
    weights = [(f"mlp.experts.{expert}.gate_proj.weight", torch.randn(128, 128)) for expert in range(2)]
    with pytest.raises(ValueError, match=r"nothing was loaded into \(parts of\) mlp\.experts"):
        model.load_weights(weights[:1])
    model.load_weights(weights)
    model.load_weights(weights[:1])  # a bucket of a later version, which nobody looks through again
    assert len(checked) == 2


def test_a_model_without_layers_in_fp8_or_in_other_blocks_is_refused():
    with pytest.raises(ValueError, match="no layer in FP8 by blocks"):
        wrap(_Model(torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"experts is in blocks of \[1, 32\]"):
        wrap(_Model(_Layer(block=(1, 32))))


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False), ((10, 0), True)])
def test_a_gpu_on_which_sglang_repacks_the_weights_is_refused(monkeypatch, capability, refused):
    monkeypatch.setattr(quantised_loading, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if refused:
        with pytest.raises(ValueError, match=rf"capability {capability[0]}\.{capability[1]} .*allowed: 8\.9 or 9\.0"):
            quantised_loading._check_device()
    else:
        quantised_loading._check_device()


def test_processes_that_sglang_starts_afresh_quantise_too():
    """With CUDA they are fresh interpreters, which load the module of the first one under another name."""
    code = (
        "import sys; sys.argv[1:] = [{flag!r}]\n"
        "from streamrl.engine import quantised_loading\n"
        "quantised_loading.install = lambda: print('installed')\n"
        "import runpy; runpy.run_module('streamrl.engine.launch', run_name='__mp_main__')\n"
    )
    for flag, told in ((quantised_loading.FLAG, "installed\n"), ("--other", "")):
        run = subprocess.run(
            [sys.executable, "-c", code.format(flag=flag)], capture_output=True, text=True, timeout=120, check=True
        )
        assert run.stdout == told


# -- configuration


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"generate": {"quantization": "int4"}}, "Input should be 'fp8'"),
        (
            {"generate": {"quantization": "fp8", "attach": ["http://a:1"]}},
            "quantization: fp8 is given to servers when they are started.*allowed: null",
        ),
        (
            {"generate": {"quantization": "fp8", "server_args": {"load-format": "flash_rl"}}},
            "server_args: load_format=flash_rl is not allowed beside generate.quantization=fp8",
        ),
        (
            {"generate": {"pools": [{"name": "a", "server_args": {"quantization": "fp8"}}]}},
            "generate.server_args: quantization=fp8 is done once, .*allowed: generate.quantization=fp8",
        ),
        ({"generate": {"quantization": "fp8"}}, "model.dtype is float32; allowed: null, or model.dtype=bfloat16"),
        (
            {
                "generate": {"quantization": "fp8"},
                "model": {"dtype": "bfloat16"},
                "learner": {"lora": {"rank": 4, "publish": "adapter"}},
            },
            "not possible with learner.lora.publish=adapter",
        ),
        (
            {
                "generate": {"quantization": "fp8"},
                "model": {"dtype": "bfloat16"},
                "algo": {"weight": "none", "proximal": "recompute"},
            },
            "algo.weight: none leaves the tokens of servers in fp8 uncorrected, with algo.proximal=recompute",
        ),
    ],
)
def test_what_does_not_go_with_quantised_servers_is_refused_by_one_line(tree, told):
    with pytest.raises(ValueError, match=told):
        Config.model_validate(tree)


def test_what_needs_no_new_weights_or_has_a_loader_for_them_may_quantise_by_itself():
    servers = {"generate": {"server_args": {"quantization": "fp8"}}}
    Config.model_validate(servers | {"learner": {"lora": {"rank": 4, "publish": "adapter"}}})
    Config.model_validate({"generate": {"server_args": {"quantization": "fp8", "load-format": "flash_rl"}}})


@pytest.mark.parametrize("algo", [{"weight": "token", "proximal": "recompute"}, {"weight": "none"}])
def test_a_loss_that_counts_the_ratio_to_the_behaviour_policy_is_allowed(algo):
    Config.model_validate({"generate": {"quantization": "fp8"}, "model": {"dtype": "bfloat16"}, "algo": algo})


def test_ranks_that_would_cut_a_block_are_refused_before_anything_starts(folders, model_folders):
    shape = read_shape(folders[0])
    for ranks in (1, 2):
        check_model(config_of(folders[0], ranks), shape)
    with pytest.raises(ConfigError, match=r"needs blocks of 128 rows.*tensor_parallel=1 has 64 query heads"):
        check_model(config_of(model_folders[0]), read_shape(model_folders[0]))


@pytest.mark.skipif(has_cuda(), reason="has a GPU, which serves experts")
def test_experts_need_a_gpu(tmp_path):
    tiny_model.make(tmp_path, family="qwen3_moe")
    with pytest.raises(ConfigError, match=r"mixture of experts needs a GPU, and this machine has none"):
        check_machine(config_of(tmp_path))


def test_sglang_is_told_of_a_folder_in_fp8_by_blocks_and_of_nothing_without_the_key(folders):
    arguments = server_arguments(config_of(folders[0]), 0)
    assert arguments["json_model_override_args"] == OVERRIDE
    words = command_line({"json_model_override_args": OVERRIDE})
    assert json.loads(words[1])["quantization_config"]["weight_block_size"] == [128, 128]
    assert "json_model_override_args" not in server_arguments(Config(), 0)


# -- a real server


async def check_is(client: EngineClient, folder: Path, other: Path) -> None:
    """What the server draws has the log-probs of this folder's weights in FP8.

    Not to the last digit: where bfloat16 rounds an activation otherwise, e4m3 may round it by a whole step.
    """
    (answer,) = await client.generate(PROMPT, {"max_new_tokens": 60, "ignore_eos": True}, n=1)
    ids = [*PROMPT, *answer.output_ids]
    found = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
    own, others = ((forward(of, ids)[len(PROMPT) - 1 :] - found).abs().mean().item() for of in (folder, other))
    assert own < others / 5, (own, others)


def save_quantised(folder: Path, target: Path) -> Path:
    """The folder as others publish models in FP8 by blocks: SGLang reads it by its own loader alone."""
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if re.search(r"layers\.\d+\..*_proj\.weight$", name):
            weights[name], weights[f"{name}_scale_inv"] = quantise(weight)
        else:
            weights[name] = weight
    shutil.copytree(folder, target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


async def check_every_way(client: EngineClient, folders: tuple[Path, Path], config: Config, folder: Path) -> None:
    """First weights, then versions by each transport: the bits of a quantised folder by each of them."""
    first, second = folders
    await check_is(client, first, second)
    initial = (await client.weights_checksum())["per_engine_checksum"]
    await client.update_from_disk(str(second), "1.0")
    await check_is(client, second, first)
    by_disk = (await client.weights_checksum())["per_engine_checksum"]
    assert by_disk != initial
    await client.update_from_disk(str(save_quantised(second, folder / "quantised")), "1.1")
    assert (await client.weights_checksum())["per_engine_checksum"] == by_disk

    weights = load_file(first / "model.safetensors")
    staging = make_staging(config)  # its memory is gone with it
    staged = staging.fill(PolicyVersion(2), weights.items())
    manifest = make_source(config, Path("/nowhere"), "tcp://127.0.0.1:1").manifest(_state(config), staged)
    await make_sink(config, client, RequestGate()).apply(staged.version, manifest)
    assert (await client.weights_checksum())["per_engine_checksum"] == initial

    def sink_of(transport: str) -> Sink:
        tree = config.model_dump() | {"stream": {"curve": "off"}}
        tree["publish"]["transport"] = transport
        return make_sink(Config.model_validate(tree), client, RequestGate())

    async def publish(source: Source, sink: Sink, step: int, model: Path) -> object:
        staged = Staging(1 << 16).fill(PolicyVersion(step), load_file(model / "model.safetensors").items())
        manifest = source.manifest(_state(config), staged)
        sending = asyncio.to_thread(source.send, _state(config), staged, until(TIMEOUT))
        await asyncio.gather(sending, sink.apply(staged.version, manifest))
        return (await client.weights_checksum())["per_engine_checksum"]

    with contextlib.closing(BroadcastSource("127.0.0.1", Device("cpu", 0), TIMEOUT)) as source:
        assert await publish(source, sink_of("broadcast"), 3, second) == by_disk
    await check_is(client, second, first)
    with contextlib.closing(DeltaSource("127.0.0.1", StreamConfig(curve="off"), folder, verify_every=1)) as parcels:
        sink = sink_of("delta")  # the whole of a version, then what changed
        assert await publish(parcels, sink, 4, first) == initial
        assert await publish(parcels, sink, 5, second) == by_disk
    await check_is(client, second, first)


def _state(config: Config) -> ServerState:
    return ServerState(name="server-0", version=PolicyVersion(0), world_size=config.generate.tensor_parallel)


def until(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def check() -> None:
        assert time.monotonic() < end
        time.sleep(0.002)

    return check


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_version_is_quantised_alike_whichever_way_it_comes(serving, folders, tmp_path, ranks):
    config = config_of(folders[0], ranks, transport="memory")

    async def work(address: str) -> None:
        client = EngineClient(address, TIMEOUT)
        try:
            await check_every_way(client, folders, config, tmp_path)
        finally:
            await client.close()

    with serving(config, tmp_path) as server:
        asyncio.run(work(server.address))


@pytest.mark.slow
def test_a_server_says_in_its_log_why_it_cannot_be_quantised(model_folders, tmp_path):
    """A model whose key heads are half a block wide, with the check before the start left out."""
    server = Server(config_of(model_folders[0]), tmp_path, index=0)

    async def work() -> None:
        client = EngineClient(server.address, TIMEOUT)
        try:
            await server.ready(client, 200)
        finally:
            await client.close()
            await server.stop()

    with pytest.raises(ServerFailed, match="not divisible by weight quantization block_n = 128"):
        asyncio.run(work())
