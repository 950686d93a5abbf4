"""Where a recipe says something else than its script, or what no script says: each key once, with the reason."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from streamrl.config import Config
from streamrl.config.file import value_at


class Different(NamedTuple):
    """A key that differs in the recipes of a pattern."""

    key: str
    recipes: str
    reason: str


ASYNCHRONOUS = "asynchronous: a staleness of one step, weighted"
STAGES = "94 layers on 8 stages, one fewer where the embedding or the output layer is, as the script counts"
MEMORY = "memory and speed alone: what fits 80 GiB"

DIFFERENT = (
    Different("algo.weight", "*", ASYNCHRONOUS),
    Different("replay.max_staleness", "megatron_rl/*", ASYNCHRONOUS),
    Different("learner.optimizer.decay", "megatron_rl/*", "its decay is over 48,828,125 samples: 0.6% in 300 steps"),
    Different("generate.sampling.max_new_tokens", "megatron_rl/*", "1,024 tokens less: the room for a prompt"),
    Different("generate.server_args.max_running_requests", "megatron_rl/*", "SGLang runs what its KV cache holds"),
    Different("generate.server_args.context_length", "megatron_rl/nemotron-h-*", "the model's context is shorter"),
    Different("learner.tokens_per_micro_batch", "megatron_rl/nemotron-nano-*", "a row holds the longest sequence"),
    Different("shape.tie_word_embeddings", "megatron_rl/nemotron-3-*", "its script reads it of a checkpoint"),
    Different("learner.recompute", "megatron_rl/qwen3-*", MEMORY),
    Different("learner.lora.targets", "verl/qwen3-30b-a3b-gsm8k-lora", "experts get no adapters"),
)

# Keys that recipes set and their scripts do not determine.
OURS = {
    "algo.proximal": "the code's: one more forward pass before the updates",
    "algo.weight_cap": "no truncation is set where its weight is off",
    "checkpoint.keep": "disk",
    "checkpoint.timeout": "deadlines",
    "evaluate.k": "pass@32 is what Megatron-RL reports",
    "evaluate.prompts": "all of GSM8K's, and as many of MATH's as one server answers",
    "evaluate.samples": "pass@32 is what Megatron-RL reports",
    "evaluate.tasks": "AIME 2024, though the script's own list of files is empty",
    "evaluate.timeout": "deadlines",
    "generate.groups_in_flight": MEMORY,
    "generate.single_requests": "speed: long answers",
    "generate.server_nodes": "machines",
    "generate.workers": "machines",
    "learner.collective_timeout": "deadlines",
    "learner.layout.expert": "the script shards by FSDP",
    "learner.layout.first_stage": STAGES,
    "learner.layout.last_stage": STAGES,
    "learner.layout.tensor": "the script shards by FSDP",
    "learner.lora.alpha": "those of the folder that the script reads",
    "learner.lora.publish": "the adapter alone, or whole weights where it starts from a folder",
    "learner.lora.rank": "those of the folder that the script reads",
    "learner.optimizer.offload": MEMORY,
    "learner.optimizer.distributed": "the script shards by FSDP",
    "learner.ranks": "machines",
    "learner.recompute": MEMORY,
    "learner.router_replay": "mixture of experts: the learner routes as the servers did",
    "learner.tokens_per_micro_batch": MEMORY,
    "model.dtype": "bfloat16 there too",
    "model.path": "the name of the model of the script",
    "model.shape": "for a plan without the model",
    "observe.tensorboard": "logs",
    "publish.mismatch": "logs: how far learner and servers are apart",
    "publish.timeout": "deadlines",
    "replay.group_timeout": "deadlines",
    "replay.max_attempts": "deadlines",
    "replay.max_staleness": ASYNCHRONOUS,
    "run.name": "names",
    "run.silence_timeout": "deadlines",
    "run.start_timeout": "deadlines",
    "run.steps": "300 is what Megatron-RL reports; DAPO's epochs say nothing",
    "run.stop_timeout": "deadlines",
    "task.shares": "where the script leaves its files to the user",
    "stream.max_message": "room for a group of long answers",
}


def is_different(key: str, recipe: str) -> bool:
    """May the recipe say something else than its script about the key?"""
    return any(each.key == key and fnmatchcase(recipe, each.recipes) for each in DIFFERENT)


def value_of(config: Config, key: str) -> Any:
    """What a recipe says about a key of the facts: a key of the configuration, or a view of it that facts have.

    `task.shares` and `evaluate.tasks` are names of tasks, `generate.server_args.NAME` a server's argument and
    `shape.NAME` a figure of the model's own config.json.
    """
    section, _, name = key.rpartition(".")
    if key in ("task.shares", "evaluate.tasks"):
        return [share.name for share in value_at(config, key)]
    if section == "generate.server_args":
        return config.generate.server_args.get(name)
    if section == "shape":
        return json.loads(Path(str(config.model.shape)).read_text()).get(name)
    value = value_at(config, key)
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def said(section: BaseModel, path: str = "") -> set[str]:
    """The keys that a configuration's files say something about, as facts name them."""
    keys = set()
    for name in section.model_fields_set:
        value, key = getattr(section, name), f"{path}{name}"
        if isinstance(value, BaseModel):
            keys |= said(value, f"{key}.")
        elif key == "generate.server_args":
            keys |= {f"{key}.{argument}" for argument in value}
        else:
            keys.add("task.shares" if key in ("task.name", "task.mix") else key)
    return keys
