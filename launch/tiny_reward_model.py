"""Makes a tiny sequence classifier with random weights, and its tokenizer: a reward model for tests on the task copy.

    python -m launch.tiny_reward_model models/tiny-reward [--seed 1] [--labels 1]

Its tokens are those of `launch.tiny_model`; its scores say nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from .tiny_model import CHAT_TEMPLATE, END, make_tokenizer


def make(folder: Path, seed: int = 1, labels: int = 1) -> None:
    """Write config, weights (safetensors, float32) and tokenizer to `folder`; the same for the same arguments."""
    tokenizer = make_tokenizer(8)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.get_vocab()[END],
        initializer_range=0.2,
    )
    config.num_labels = labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.tiny_reward_model", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument("--seed", type=int, default=1, help="of the weights")
    parser.add_argument("--labels", type=int, default=1, help="outputs of the classifier")
    options = parser.parse_args(arguments)
    make(options.folder, options.seed, options.labels)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
