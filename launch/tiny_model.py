"""Makes a tiny model with random weights, and its tokenizer, for the tasks copy and successor.

    python -m launch.tiny_model models/tiny [--seed 1] [--symbols 8] [--family qwen2] [--layers 2]

About 75,000 weights in float32 (125,000 with experts), and ten tokens: the letters a to h, "=" and the end. "caf="
is four tokens. So few tokens are what a random policy needs to hit a right answer now and then.
"""

from __future__ import annotations

import argparse
import copy
import json
import string
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

# What models with latent attention and with Mamba-2 layers have, of whichever kind.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
MAMBA: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 32,
}

# The model types of transformers, or names of OF_TYPE, and what each needs in its configuration besides what all have.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,  # SGLang loads no output layer of its own
    },
    "phi3": {
        "original_max_position_embeddings": 1024,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.25 * pair for pair in range(6)],
            "long_factor": [4.0] * 6,
        },
    },
    "nemotron_h": MAMBA,
    "nemotron_3": {
        **MAMBA,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
    },
    "seed_oss": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**LATENT, "q_lora_rank": 32, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    "moonlight": {
        **LATENT,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.446,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
}

# Models that have a name of their own, and transformers' type of them.
OF_TYPE = {"moonlight": "deepseek_v3", "nemotron_3": "nemotron_h"}

# The same of those that the learner trains with model.implementation=transformers alone.
WHOLE: dict[str, dict[str, Any]] = {"olmo2": {}, "granite": {"logits_scaling": 2.0}}

# What transformers 5 drops of the `config.json` of real models, and SGLang asks for, by the architecture.
DROPPED: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "Qwen3NextForCausalLM": {"full_attention_interval": 2},
}

# Models whose layers are one part each: of each second layer what mixes tokens, in turn, and what is behind it. A pair
# counts as one.
MIXERS = ("linear_attention", "full_attention")
HYBRID = {"nemotron_h": "mlp", "nemotron_3": "moe"}

# What transformers 5 calls layers of Nemotron-H, and what SGLang does.
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}

END = "<|endoftext|>"  # the end token of Qwen2's tokenizers

# Standard deviation of the random weights. With the usual 0.02, meant for hidden sizes of thousands, the task copy
# takes up to twice as many steps.
INITIALIZER_RANGE = 0.05

# The turns one after another; "=" asks for the answer, as in the tasks.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def make(folder: Path, seed: int = 1, symbols: int = 8, family: str = "qwen2", layers: int = 2) -> None:
    """Write config, weights (safetensors, float32) and tokenizer to `folder`; the same for the same arguments.

    symbols: how many letters the tokenizer knows, 2..26. family: one of FAMILIES or WHOLE.
    """
    if not 2 <= symbols <= len(string.ascii_lowercase):
        raise ValueError(f"symbols: {symbols} is not allowed; allowed: 2 to {len(string.ascii_lowercase)}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(symbols)
    settings = sizes(tokenizer, layers) | {"tie_word_embeddings": False, "dtype": "float32"}
    if family in HYBRID:
        mixers = [MIXERS[layer % 2] for layer in range(layers)]
        settings |= {"layers_block_type": [part for mixer in mixers for part in (mixer, HYBRID[family])]}
        settings["num_hidden_layers"] *= 2
    config = AutoConfig.for_model(
        OF_TYPE.get(family, family), **copy.deepcopy({**settings, **(FAMILIES | WHOLE)[family]})
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    complete(folder)


def sizes(tokenizer: Qwen2Tokenizer, layers: int) -> dict[str, Any]:
    """What the language models of all families have in their configuration."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": INITIALIZER_RANGE,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def complete(folder: Path) -> None:
    """Put into a folder's config.json what transformers has dropped of it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    dropped = dict(DROPPED.get(config["architectures"][0], {}))
    if kinds := config.get("layers_block_type"):
        dropped |= {"layers_block_type": [KINDS.get(kind, kind) for kind in kinds], "num_hidden_layers": len(kinds)}
        dropped["mamba_n_groups"] = config["n_groups"]
    if dropped:
        path.write_text(json.dumps(config | dropped, indent=2))


def make_tokenizer(symbols: int) -> Qwen2Tokenizer:
    """One token a letter. Other characters have none and are passed over.

    Byte-level BPE without a merge, because transformers reads the tokenizer of any Qwen2 folder as this class; with
    the other families it reads the same tokens.
    """
    vocabulary = {token: place for place, token in enumerate([END, "=", *string.ascii_lowercase[:symbols]])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.tiny_model", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random weights (default %(default)s)")
    parser.add_argument("--symbols", type=int, default=8, help="letters that it knows (default %(default)s)")
    parser.add_argument(
        "--family", choices=FAMILIES | WHOLE, default="qwen2", help="kind of model (default %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=2, help="its layers (default %(default)s)")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.seed, arguments.symbols, arguments.family, arguments.layers)
    print(f"{arguments.folder}: a tiny {arguments.family} with random weights (seed {arguments.seed})")


if __name__ == "__main__":
    main()
