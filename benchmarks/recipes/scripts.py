"""Every script of the sources: the recipe after it, or why there is none."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.recipes.rules import RuleError
from streamrl.learner.families._missing import MISSING

MEGATRON_LM, VERL = "Megatron-LM", "verl"
COMMITS = {
    MEGATRON_LM: "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    VERL: "b178a3cd56f58b2d502255daba591e92833930a7",
}
FOLDERS = {MEGATRON_LM: "examples/rl/model_configs", VERL: "examples/grpo_trainer"}


@dataclass(frozen=True)
class Origin:
    """The script that a recipe is after; `environment` is the file that Megatron-RL's scripts are told besides.

    With `published` the numbers are those of the command in Megatron-RL's README, whose results are reported; the
    script differs in them.
    """

    source: str
    script: str
    environment: str = ""
    published: bool = False


def _megatron(script: str, environment: str = "dapo", *, published: bool = False) -> Origin:
    environment = f"examples/rl/environment_configs/{environment}.yaml"
    return Origin(MEGATRON_LM, f"{FOLDERS[MEGATRON_LM]}/{script}.sh", environment, published)


def _verl(script: str) -> Origin:
    return Origin(VERL, f"{FOLDERS[VERL]}/run_{script}.sh")


ORIGINS = {
    "megatron_rl/llama3.1-8b-dapo": _megatron("llama3p1_8b_instruct"),
    "megatron_rl/llama3.1-8b-openmath": _megatron("llama3p1_8b_instruct", "openmathinstructv2"),
    "megatron_rl/nemotron-3-nano-30b-a3b-dapo": _megatron("nemotron6_3b_moe"),
    "megatron_rl/nemotron-h-56b-dapo": _megatron("nemotron5_56b"),
    "megatron_rl/nemotron-h-8b-dapo": _megatron("nemotron5_8b"),
    "megatron_rl/nemotron-nano-12b-v2-dapo": _megatron("nemotron5p5_12b_H"),
    "megatron_rl/qwen2.5-32b-dapo": _megatron("qwen_2p5_32b", published=True),
    "megatron_rl/qwen2.5-3b-dapo": _megatron("qwen_2p5_3b"),
    "megatron_rl/qwen2.5-distill-7b-dapo": _megatron("qwen_2p5_distill_7b"),
    "megatron_rl/qwen2.5-math-7b-dapo": _megatron("qwen_2p5_math_7b"),
    "megatron_rl/qwen3-30b-a3b-dapo": _megatron("qwen3_30b_a3b_moe"),
    "megatron_rl/qwen3-32b-dapo": _megatron("qwen3_32b"),
    "megatron_rl/qwen3-4b-dapo": _megatron("qwen3_4b"),
    "megatron_rl/qwen3-8b-dapo": _megatron("qwen3_8b"),
    "verl/deepseek-7b-gsm8k": _verl("deepseek7b_llm"),
    "verl/deepseek-7b-gsm8k-balance": _verl("deepseek7b_llm_seq_balance"),
    "verl/deepseek-7b-math": _verl("deepseek7b_llm_math"),
    "verl/deepseek-7b-math-megatron": _verl("deepseek7b_llm_math_megatron"),
    "verl/deepseek-v3-dapo": _verl("deepseek671b_math_megatron_96gb"),
    "verl/deepseek-v3-gsm8k": _verl("deepseek671b_math_megatron_80gb"),
    "verl/gpt-oss-20b-gsm8k": _verl("gptoss_20b"),
    "verl/moonlight-16b-gsm8k": _verl("moonlight16b_math_megatron"),
    "verl/qwen2-7b-gsm8k": _verl("qwen2-7b"),
    "verl/qwen2-7b-gsm8k-balance": _verl("qwen2-7b_seq_balance"),
    "verl/qwen2-7b-math": _verl("qwen2-7b_math"),
    "verl/qwen2-7b-math-balance": _verl("qwen2-7b_seq_balance_math_megatron"),
    "verl/qwen2-7b-math-lora": _verl("qwen2-7b_math_megatron_lora"),
    "verl/qwen2-7b-math-megatron": _verl("qwen2-7b_math_megatron"),
    "verl/qwen2-7b-math-megatron-trtllm": _verl("qwen2-7b_math_megatron_trtllm"),
    "verl/qwen2-7b-math-sglang": _verl("qwen2-7b_sgl_megatron"),
    "verl/qwen2-7b-math-trtllm": _verl("qwen2-7b_math_trtllm"),
    "verl/qwen2.5-3b-gsm8k-lora": _verl("qwen2_5-3b_gsm8k_grpo_lora"),
    "verl/qwen2.5-3b-gsm8k-lora-from-adapter": _verl("qwen2_5-3b_gsm8k_grpo_lora_from_adapter"),
    "verl/qwen2.5-7b-math": _verl("qwen2_5-7b_math_megatron_diff_tp"),
    "verl/qwen2.5-vl-7b-geo3k": _verl("qwen2_5_vl-7b"),
    "verl/qwen2.5-vl-7b-geo3k-balance": _verl("qwen2_5_vl-7b_seq_balance"),
    "verl/qwen2.5-vl-7b-geo3k-freeze-vision": _verl("qwen2_5_vl-7b_freeze_vision"),
    "verl/qwen2.5-vl-7b-geo3k-lora": _verl("qwen2_5_vl-7b_lora"),
    "verl/qwen2.5-vl-7b-geo3k-megatron": _verl("qwen2_5_vl-7b-megatron"),
    "verl/qwen2.5-vl-7b-geo3k-sglang": _verl("qwen2_5_vl-7b-sglang"),
    "verl/qwen3-235b-a22b-dapo": _verl("qwen3-235b_megatron_96gb"),
    "verl/qwen3-30b-a3b-dapo": _verl("qwen3moe-30b_megatron_96gb"),
    "verl/qwen3-30b-a3b-gsm8k-lora": _verl("qwen3moe-30b_megatron_lora"),
    "verl/qwen3-8b-gsm8k": _verl("qwen3-8b"),
    "verl/qwen3-vl-235b-a22b-geo3k": _verl("qwen3_vl-235b-megatron"),
    "verl/qwen3-vl-30b-a3b-geo3k": _verl("qwen3_vl-30b-megatron"),
    "verl/qwen3-vl-8b-geo3k": _verl("qwen3_vl-8b-megatron"),
    "verl/seed-oss-36b-gsm8k": _verl("seed_oss_36b"),
}

# Recipes that no script of the sources has; their heads say so.
OWN = {
    "gpus/one-gpu",
    "gpus/two-gpus",
    "verl/llama3.1-8b-gsm8k",
    "verl/mistral-7b-gsm8k",
    "verl/qwen2.5-32b-dapo",
}

# Scripts whose model no family of streamrl/learner/families builds, by its architecture.
NOT_BUILT = {
    "run_glm41v_9b.sh": "Glm4vForConditionalGeneration",
    "run_minicpmo2_6.sh": "MiniCPMO",
}
WITHOUT_RECIPE = {pattern: f"no {name}: {MISSING[name]}" for pattern, name in NOT_BUILT.items()} | {
    "common.sh": "no training",
    "*npu.sh": "no Ascend",
    "run_mistral13b_skyworkrm_hhrlhf.sh": "no task of HH-RLHF",
}


@dataclass(frozen=True)
class Script:
    """One script of a source: its recipes, or why it has none."""

    source: str
    path: str
    recipes: tuple[str, ...]
    reason: str


def scripts(source: str, paths: Iterable[str]) -> Iterator[Script]:
    """What becomes of each script. Raises RuleError for one without a recipe and a reason, or with several of both."""
    for path in sorted(paths):
        recipes = tuple(name for name, origin in ORIGINS.items() if (origin.source, origin.script) == (source, path))
        name = path.rpartition("/")[2]
        reasons = [reason for pattern, reason in WITHOUT_RECIPE.items() if fnmatch.fnmatchcase(name, pattern)]
        if len(reasons) + bool(recipes) != 1:
            raise RuleError(f"{path}: {[*recipes, *reasons]} is its recipe, or why it has none; allowed: one of both")
        yield Script(source, path, recipes, "".join(reasons))
