"""Makes a tiny vision-language model with random weights, its tokenizer and image processor, for the task shapes.

    python -m launch.tiny_vl_model models/tiny_vl [--seed 1] [--family qwen2_5_vl]

About 200,000 weights in float32. An image of 56 x 56 pixels is four tokens, and an answer one of few letters or digits,
so that a random policy is right now and then.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2Tokenizer

from .tiny_model import END, INITIALIZER_RANGE, sizes

START, STOP, PAD, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

# First letters of colours, digits for counts, and what asks for the answer.
LETTERS = "=rgbycm1234"

# As those of Qwen's models, without roles.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    f"{START}{PAD}{STOP}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)

QWEN3: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
QWEN3_TOWER: dict[str, Any] = {"patch_size": 14, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}

# What each family has in its configuration besides what all have: of the language model, of the vision tower.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (QWEN3, QWEN3_TOWER),
    "qwen3_vl_moe": (
        {**QWEN3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
        QWEN3_TOWER,
    ),
}
PROCESSORS = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
}

# Tensors of all experts of a layer, and where the hidden size is in them, as folders of Qwen3-VL have them.
EXPERTS = {"experts.gate_up_proj": -2, "experts.down_proj": -1}


def make(folder: Path, seed: int = 1, family: str = "qwen2_5_vl", layers: int = 2) -> None:
    """Write config, weights (safetensors, float32), tokenizer and image processor to `folder`.

    family: one of FAMILIES. The same for the same arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    text, vision = FAMILIES[family]
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in {"vision_start": START, "vision_end": STOP, "image": PAD, "video": VIDEO}.items()
    }
    config = AutoConfig.for_model(
        family,
        text_config=sizes(tokenizer, layers) | text,
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "initializer_range": INITIALIZER_RANGE,
            **vision,
        },
        tie_word_embeddings=False,
        dtype="float32",
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    turn_experts(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": PROCESSORS[family],
        "size": {"shortest_edge": 56 * 56, "longest_edge": 448 * 448},
        "patch_size": config.vision_config.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def turned(name: str, tensor: torch.Tensor, hidden: int) -> torch.Tensor:
    """A tensor of all experts as folders of Qwen3-VL have it, [experts, inputs, outputs]; transformers 5 saves neither
    way alone."""
    axis = next((axis for end, axis in EXPERTS.items() if name.endswith(end)), None)
    return tensor if axis is None or tensor.shape[axis] == hidden else tensor.transpose(1, 2).contiguous()


def turn_experts(folder: Path) -> None:
    """Do so with those of a folder, of Qwen3-VL's mixtures alone."""
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] == ["Qwen3VLMoeForConditionalGeneration"]:
        hidden = config["text_config"]["hidden_size"]
        weights = load_file(folder / "model.safetensors")
        changed = {name: turned(name, tensor, hidden) for name, tensor in weights.items()}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def make_tokenizer() -> Qwen2Tokenizer:
    """One token a letter. Other characters have none and are passed over."""
    vocabulary = {token: place for place, token in enumerate([END, *LETTERS])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [START, STOP, PAD, VIDEO]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.tiny_vl_model", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random weights (default %(default)s)")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl", help="kind of model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the language model (default %(default)s)")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.seed, arguments.family, arguments.layers)
    print(f"{arguments.folder}: a tiny {arguments.family} with random weights (seed {arguments.seed})")


if __name__ == "__main__":
    main()
