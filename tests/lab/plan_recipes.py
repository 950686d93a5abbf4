"""The recipes with the shapes of their models, for the tests of `streamrl plan`."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.plan.command import model_shape
from streamrl.lab.plan.machines import Machines
from streamrl.lab.plan.plan import Plan, make_plan
from streamrl.learner.shape import ModelShape

RECIPES = Path("configs/recipes")
SHAPES = RECIPES / "shapes"

QWEN = "megatron_rl/qwen2.5-32b-dapo"
MOE = "verl/qwen3-30b-a3b-dapo"
UNEVEN = "verl/qwen3-235b-a22b-dapo"  # 94 layers on 8 stages
LORA = "verl/qwen2.5-3b-gsm8k-lora"

# recipe: its model
SHAPE_OF = {
    "gpus/one-gpu": "qwen2.5-3b",
    "gpus/two-gpus": "qwen2.5-3b",
    "megatron_rl/llama3.1-8b-dapo": "llama3.1-8b",
    "megatron_rl/llama3.1-8b-openmath": "llama3.1-8b",
    "megatron_rl/nemotron-3-nano-30b-a3b-dapo": "nemotron-3-nano-30b-a3b",
    "megatron_rl/nemotron-h-56b-dapo": "nemotron-h-56b",
    "megatron_rl/nemotron-h-8b-dapo": "nemotron-h-8b",
    "megatron_rl/nemotron-nano-12b-v2-dapo": "nemotron-nano-12b-v2",
    "megatron_rl/qwen2.5-32b-dapo": "qwen2.5-32b",
    "megatron_rl/qwen2.5-3b-dapo": "qwen2.5-3b",
    "megatron_rl/qwen2.5-distill-7b-dapo": "deepseek-r1-distill-qwen-7b",
    "megatron_rl/qwen2.5-math-7b-dapo": "qwen2.5-math-7b",
    "megatron_rl/qwen3-30b-a3b-dapo": "qwen3-30b-a3b",
    "megatron_rl/qwen3-32b-dapo": "qwen3-32b",
    "megatron_rl/qwen3-4b-dapo": "qwen3-4b",
    "megatron_rl/qwen3-8b-dapo": "qwen3-8b",
    "verl/deepseek-7b-gsm8k": "deepseek-7b",
    "verl/deepseek-7b-gsm8k-balance": "deepseek-7b",
    "verl/deepseek-7b-math": "deepseek-7b",
    "verl/deepseek-7b-math-megatron": "deepseek-7b",
    "verl/deepseek-v3-dapo": "deepseek-v3",
    "verl/deepseek-v3-gsm8k": "deepseek-v3",
    "verl/gpt-oss-20b-gsm8k": "gpt-oss-20b",
    "verl/llama3.1-8b-gsm8k": "llama3.1-8b",
    "verl/mistral-7b-gsm8k": "mistral-7b",
    "verl/moonlight-16b-gsm8k": "moonlight-16b-a3b",
    "verl/qwen2-7b-gsm8k": "qwen2.5-7b",
    "verl/qwen2-7b-gsm8k-balance": "qwen2.5-7b",
    "verl/qwen2-7b-math": "qwen2.5-7b",
    "verl/qwen2-7b-math-balance": "qwen2.5-7b",
    "verl/qwen2-7b-math-lora": "qwen2.5-7b",
    "verl/qwen2-7b-math-megatron": "qwen2.5-7b",
    "verl/qwen2-7b-math-megatron-trtllm": "qwen2.5-7b",
    "verl/qwen2-7b-math-sglang": "qwen2.5-7b",
    "verl/qwen2-7b-math-trtllm": "qwen2.5-7b",
    "verl/qwen2.5-32b-dapo": "qwen2.5-32b",
    "verl/qwen2.5-3b-gsm8k-lora": "qwen2.5-3b",
    "verl/qwen2.5-3b-gsm8k-lora-from-adapter": "qwen2.5-3b",
    "verl/qwen2.5-7b-math": "qwen2.5-7b",
    "verl/qwen3-235b-a22b-dapo": "qwen3-235b-a22b",
    "verl/qwen3-30b-a3b-dapo": "qwen3-30b-a3b",
    "verl/qwen3-30b-a3b-gsm8k-lora": "qwen3-30b-a3b",
    "verl/qwen3-8b-gsm8k": "qwen3-8b",
    "verl/qwen2.5-vl-7b-geo3k": "qwen2.5-vl-7b",
    "verl/qwen2.5-vl-7b-geo3k-balance": "qwen2.5-vl-7b",
    "verl/qwen2.5-vl-7b-geo3k-freeze-vision": "qwen2.5-vl-7b",
    "verl/qwen2.5-vl-7b-geo3k-lora": "qwen2.5-vl-7b",
    "verl/qwen2.5-vl-7b-geo3k-megatron": "qwen2.5-vl-7b",
    "verl/qwen2.5-vl-7b-geo3k-sglang": "qwen2.5-vl-7b",
    "verl/qwen3-vl-235b-a22b-geo3k": "qwen3-vl-235b-a22b",
    "verl/qwen3-vl-30b-a3b-geo3k": "qwen3-vl-30b-a3b",
    "verl/qwen3-vl-8b-geo3k": "qwen3-vl-8b",
    "verl/seed-oss-36b-gsm8k": "seed-oss-36b",
}
H100 = Machines()


def shape_of(name: str) -> ModelShape:
    return model_shape(Config(), SHAPES / f"{name}.json")


def recipe(name: str, *overrides: str) -> tuple[Config, ModelShape]:
    return config_file.load(RECIPES / f"{name}.yaml", overrides), shape_of(SHAPE_OF[name])


def planned(name: str, *overrides: str, machines: Machines = H100) -> Plan:
    return make_plan(*recipe(name, *overrides), machines)
