"""Whether a teacher's or a critic's folder is whole, and its tokens are the policy's: before any process starts."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.generate.tokenizer import Tokenizer
from streamrl.learner.critic_shape import KEY as CRITIC
from streamrl.learner.critic_shape import critic_shape
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
    _refuse_other_tokens(folder, KEY, tokenizer_of(config.model.path), tokenizer_of(folder, KEY))


def check_critic(config: Config, shape: ModelShape, *, weights: bool = True) -> None:
    """Refuse a critic of a folder of its own that cannot read this policy's tokens, as `check_teacher`."""
    folder = config.critic.model
    if folder is None or critic_shape(config, shape) is None:
        return
    if weights:
        weight_files(folder, CRITIC)
    _refuse_other_tokens(folder, CRITIC, tokenizer_of(config.model.path), tokenizer_of(folder, CRITIC))


def check_teacher_length(config: Config, shape: ModelShape, longest: Longest) -> None:
    """Refuse sequences beyond the positions that the teacher or the critic knows. Raises ConfigError."""
    answer = max(pool.sampling.max_new_tokens for pool in config.generate.each_pool)
    found = (
        ("teacher", KEY, config.algo.distillation.teacher, teacher_shape(config, shape)),
        ("critic", CRITIC, config.critic.model, critic_shape(config, shape)),
    )
    for what, key, folder, other in found:
        if folder is not None and other is not None and longest.tokens + answer > other.max_length:
            raise ConfigError(
                f"{key}: {folder} has {other.max_length} positions, and {longest.whose} has "
                f"{longest.tokens} tokens before an answer of generate.sampling.max_new_tokens={answer}; allowed: a "
                f"{what} with a longer context, or shorter prompts and answers"
            )


def _refuse_other_tokens(folder: Path, key: str, policy: Tokenizer, other: Tokenizer) -> None:
    ids, whose = other.vocabulary, "teacher" if key == KEY else "critic"
    for token, place in sorted(policy.vocabulary.items(), key=lambda each: each[1]):
        if ids.get(token) != place:
            found = "does not have it" if token not in ids else f"has it at {ids[token]}"
            raise ConfigError(
                f"{key}: {folder} has another tokenizer: token {place} of the policy is {token!r}, and the {whose}'s "
                f"{found}; allowed: a model with the policy's tokenizer"
            )
