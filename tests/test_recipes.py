"""Every recipe resolves to the numbers that it says it reproduces."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.config.file import load, value_at

RECIPES = Path("configs/recipes")
SCREEN = 40  # lines

MEGATRON_RL = {
    "model.dtype": "bfloat16",
    "generate.group_size": 16,
    "replay.groups_per_step": 64,
    "replay.filter.signal": True,
    "algo.advantage.std": "population",
    "algo.advantage.eps": 1e-4,
    "algo.eps_low": 0.2,
    "algo.eps_high": 0.28,
    "algo.kl": 0.0,
    "algo.aggregation": "token_mean",
    "learner.passes": 1,
    "learner.mini_batches": 1,
    "learner.optimizer.lr": 1e-6,
    "learner.optimizer.warmup_steps": 0,
    "learner.optimizer.beta1": 0.9,
    "learner.optimizer.beta2": 0.95,
    "learner.optimizer.eps": 1e-8,
    "learner.optimizer.weight_decay": 0.0,
    "learner.optimizer.clip_grad": 1.0,
    "learner.optimizer.distributed": True,
    "task.name": "dapo_math",
    "evaluate.every": 20,
    "evaluate.prompts": 32,
    "checkpoint.every": 20,
}
VERL = {
    "generate.group_size": 5,
    "replay.groups_per_step": 1024,
    "learner.mini_batches": 4,
    "algo.eps_low": 0.2,
    "algo.eps_high": 0.2,
    "algo.dual_clip": 3.0,
    "algo.kl": 0.001,
    "algo.weight_cap": 2.0,
    "algo.aggregation": "token_mean",
    "learner.optimizer.lr": 1e-6,
}
VERL_DAPO = VERL | {
    "generate.group_size": 16,
    "replay.groups_per_step": 512,
    "learner.mini_batches": 16,
    "algo.eps_high": 0.28,
    "algo.dual_clip": 10.0,
    "algo.kl": 0.0,
    "task.name": "dapo_math",
    "task.overlong.buffer": 4096,
}
ONE_UPDATE = VERL | {"replay.groups_per_step": 64, "learner.mini_batches": 1, "task.name": "gsm8k"}
FOUR_UPDATES = MEGATRON_RL | {"learner.mini_batches": 4}


def layout(tensor: int = 1, pipeline: int = 1, expert: int = 1, generator: int = 1) -> dict[str, Any]:
    return {
        "learner.layout.tensor": tensor,
        "learner.layout.pipeline": pipeline,
        "learner.layout.expert": expert,
        "generate.tensor_parallel": generator,
    }


def lora(rank: int, alpha: float) -> dict[str, Any]:
    return {"learner.lora.rank": rank, "learner.lora.alpha": alpha}


# recipe: what it is known by
NUMBERS: dict[str, dict[str, Any]] = {
    "megatron_rl/qwen2.5-32b-dapo": MEGATRON_RL
    | layout(tensor=8, generator=8)
    | {
        "run.steps": 300,
        "learner.layout.sequence": True,
        "learner.recompute": "selective",
        "learner.tokens_per_micro_batch": 11999,
    },
    "megatron_rl/qwen2.5-3b-dapo": MEGATRON_RL | layout(tensor=2) | {"learner.tokens_per_micro_batch": 8192},
    "megatron_rl/qwen2.5-math-7b-dapo": MEGATRON_RL | layout() | {"learner.tokens_per_micro_batch": 4096},
    "megatron_rl/qwen2.5-distill-7b-dapo": MEGATRON_RL
    | layout(tensor=2)
    | {"generate.group_size": 8, "replay.groups_per_step": 128, "learner.tokens_per_micro_batch": 8192},
    "megatron_rl/qwen3-4b-dapo": FOUR_UPDATES | layout() | {"learner.tokens_per_micro_batch": 32768},
    "megatron_rl/qwen3-8b-dapo": FOUR_UPDATES | layout() | {"learner.tokens_per_micro_batch": 32768},
    "megatron_rl/qwen3-32b-dapo": FOUR_UPDATES
    | layout(tensor=4, generator=4)
    | {"learner.tokens_per_micro_batch": 8192},
    "megatron_rl/qwen3-30b-a3b-dapo": FOUR_UPDATES
    | layout(tensor=4, expert=2, generator=4)
    | {"learner.tokens_per_micro_batch": 8192},
    "megatron_rl/llama3.1-8b-dapo": MEGATRON_RL | layout(tensor=8) | {"learner.optimizer.lr": 3e-7},
    "megatron_rl/llama3.1-8b-openmath": MEGATRON_RL
    | layout(tensor=8)
    | {"learner.optimizer.lr": 3e-7, "task.name": "openmath", "generate.group_size": 32, "algo.kl": 0.01},
    "gpus/one-gpu": ONE_UPDATE | {"run.placement": "shared", "publish.transport": "memory", "replay.max_staleness": 0},
    "gpus/two-gpus": ONE_UPDATE | {"run.placement": "separate", "replay.max_staleness": 1},
    "verl/qwen2-7b-math": VERL | layout(tensor=2, pipeline=2, generator=2),
    "verl/qwen2.5-7b-math": VERL | layout(tensor=2, pipeline=2, generator=4),
    "verl/qwen3-8b-gsm8k": VERL | {"task.name": "gsm8k"},
    "verl/llama3.1-8b-gsm8k": VERL | {"task.name": "gsm8k"},
    "verl/mistral-7b-gsm8k": VERL | {"task.name": "gsm8k"},
    "verl/deepseek-7b-math": VERL,
    "verl/qwen2.5-7b-gsm8k-lora": VERL | lora(64, 32) | {"learner.optimizer.lr": 3e-6},
    "verl/qwen2.5-7b-gsm8k-lora-wide": VERL | lora(256, 512),
    "verl/qwen3-30b-a3b-gsm8k-lora": VERL | lora(32, 64) | {"learner.optimizer.lr": 3e-6},
    "verl/qwen2.5-32b-dapo": VERL_DAPO | layout(tensor=8, generator=8),
    "verl/qwen3-30b-a3b-dapo": VERL_DAPO | layout(tensor=4, expert=8, generator=4),
    "verl/qwen3-235b-a22b-dapo": VERL_DAPO | layout(tensor=4, pipeline=8, expert=4, generator=8),
}


def recipe(name: str) -> Config:
    return load(RECIPES / f"{name}.yaml")


def test_every_recipe_has_its_numbers_here():
    folders = [folder for folder in RECIPES.iterdir() if folder.name != "parts"]
    files = {f"{file.parent.name}/{file.stem}" for folder in folders for file in folder.glob("*.yaml")}
    assert files == NUMBERS.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_recipe_resolves_to_the_numbers_of_what_it_reproduces(name):
    config = recipe(name)
    assert {path: value_at(config, path) for path in NUMBERS[name]} == NUMBERS[name]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_recipe_reads_in_one_screen_and_fits_its_ranks(name):
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) <= SCREEN
    config = recipe(name)
    layout = config.learner.layout
    assert config.run.name == Path(name).name
    assert config.learner.ranks % (layout.tensor * layout.pipeline * layout.context) == 0
    assert config.generate.sampling.max_new_tokens < config.learner.tokens_per_micro_batch


def test_the_math_mix_asks_gsm8k_and_math_in_proportion_to_their_prompts():
    assert {share.name: share.weight for share in recipe("verl/qwen2-7b-math").task.shares} == {
        "gsm8k": 7473,
        "math": 7500,
    }
