"""A tiny Qwen2.5-VL with random weights, its tokenizer and image processor, and images for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

START, END, PAD, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = ["<|im_start|>", "<|im_end|>", START, END, PAD, VIDEO]
HEAD = 32  # width of an attention head: the parts of its rotary embedding for time, height and width are half of it
SIDE = 56  # pixels of an image's side: 4 x 4 patches, which become 2 x 2 tokens

# That of Qwen2.5-VL, without its videos and its default system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path, seed: int = 1) -> None:
    """Write config, weights, tokenizer, chat template and image processor to `folder`."""
    letters = [chr(number) for number in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {token: place for place, token in enumerate(["<|endoftext|>", *letters])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    model = _model(len(tokenizer), ids, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)


PROCESSOR = """{
 "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
 "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
 "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]
}
"""


def _model(tokens: int, ids: dict[str, int], seed: int) -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": tokens,
            "hidden_size": 4 * HEAD,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "out_hidden_size": 4 * HEAD,
            "intermediate_size": 128,
            "num_heads": 4,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids[PAD],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)


def draw(path: Path, seed: int) -> Path:
    """A PNG of coloured squares, another for each seed."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(squares).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(path)
    return path
