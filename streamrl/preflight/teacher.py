"""Whether a teacher's folder is whole, and its tokens are the policy's: before any process starts."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.generate.tokenizer import Tokenizer
from streamrl.learner.shape import ModelShape, weight_files
from streamrl.learner.teacher_shape import KEY, teacher_shape
from streamrl.preflight.prompts import Longest, tokenizer_of


def check_teacher(config: Config, shape: ModelShape, *, weights: bool = True) -> None:
    """Refuse a teacher that cannot score this policy's tokens; `weights`: are they there? Raises ConfigError.

    Its shape is looked at with the layout (`check_model`). Each token of the policy's tokenizer must be the same
    token of the teacher's, which may have more of them.
    """
    folder = config.algo.distillation.teacher
    if folder is None or teacher_shape(config, shape) is None:
        return
    if weights:
        weight_files(folder, KEY)
    _refuse_other_tokens(config, tokenizer_of(config.model.path), tokenizer_of(folder, KEY))


def check_teacher_length(config: Config, shape: ModelShape, longest: Longest) -> None:
    """Refuse sequences beyond the positions that the teacher knows. Raises ConfigError."""
    teacher = teacher_shape(config, shape)
    if teacher is None:
        return
    answer = max(pool.sampling.max_new_tokens for pool in config.generate.each_pool)
    if longest.tokens + answer > teacher.max_length:
        raise ConfigError(
            f"{KEY}: {config.algo.distillation.teacher} has {teacher.max_length} positions, and {longest.whose} has "
            f"{longest.tokens} tokens before an answer of generate.sampling.max_new_tokens={answer}; allowed: a "
            "teacher with a longer context, or shorter prompts and answers"
        )


def _refuse_other_tokens(config: Config, policy: Tokenizer, teacher: Tokenizer) -> None:
    ids = teacher.vocabulary
    for token, place in sorted(policy.vocabulary.items(), key=lambda each: each[1]):
        if ids.get(token) != place:
            other = "does not have it" if token not in ids else f"has it at {ids[token]}"
            raise ConfigError(
                f"{KEY}: {config.algo.distillation.teacher} has another tokenizer: token {place} of the policy is "
                f"{token!r}, and the teacher's {other}; allowed: a model with the policy's tokenizer"
            )
