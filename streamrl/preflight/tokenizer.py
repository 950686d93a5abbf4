"""Whether a tokenizer is that of the model, and can end an answer."""

from __future__ import annotations

from pathlib import Path

from streamrl.config.refused import Refusals
from streamrl.generate.tokenizer import Tokenizer
from streamrl.learner.shape import ModelShape


def check_tokenizer(folder: Path, tokenizer: Tokenizer, shape: ModelShape) -> None:
    """Refuse tokens that the embedding has no row for, and answers that could not end. Raises ConfigError.

    An embedding may have more rows than there are tokens: many are padded. A special token beyond it, such as one of
    images that a model of text has kept, is in no text and is left alone.
    """
    refusals = Refusals()
    largest = tokenizer.largest_id
    if largest >= shape.vocabulary:
        refusals.add(
            f"model.path: {folder}: the tokenizer has a token of id {largest}, and the embedding "
            f"{shape.vocabulary} rows; allowed: the model's own tokenizer"
        )
    if not tokenizer.end_ids:
        refusals.add(
            f"model.path: {folder}: no end token, and every answer would be cut; allowed: eos_token_id in config.json "
            "or generation_config.json, or eos_token in tokenizer_config.json"
        )
    elif min(tokenizer.end_ids) >= shape.vocabulary:
        refusals.add(
            f"model.path: {folder}: the end token {min(tokenizer.end_ids)} is beyond the {shape.vocabulary} rows of "
            "the embedding, and every answer would be cut; allowed: an eos_token_id that the model has"
        )
    refusals.tell()
