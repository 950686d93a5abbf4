"""Whether the longest prompt and an answer that is cut have room: in a row of the learner and at a server.

What has none would be a placeholder, and the long answers among them first: the learner would only see short ones.
"""

from __future__ import annotations

from typing import Any

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import GenerateConfig
from streamrl.learner.shape import ModelShape
from streamrl.preflight.prompts import Longest

# Tokens of its context that SGLang leaves free: an answer that would need them is cut before its max_new_tokens.
KEPT_FREE = 2


def check_lengths(config: Config, shape: ModelShape, longest: Longest) -> None:
    """Refuse answers that a server or a micro batch has no room for beside the longest prompt. Raises ConfigError."""
    budget = config.learner.tokens_per_micro_batch
    for pool in config.generate.each_pool:
        answer = pool.sampling.max_new_tokens
        _check_context(pool, shape, longest, answer, "generate.sampling.max_new_tokens")
        needed = longest.tokens + answer - 1  # nothing is predicted from the last token
        if needed > budget:
            fewer = f", or task.max_prompt_tokens={budget - answer + 1}" if budget >= answer else ""
            raise ConfigError(
                f"learner.tokens_per_micro_batch: {budget} cannot hold {longest.whose} with {longest.tokens} tokens "
                f"and an answer of generate.sampling.max_new_tokens={answer}; allowed: at least {needed}{fewer}"
            )


def check_evaluated(config: Config, shape: ModelShape, longest: Longest) -> None:
    """Refuse answers of evaluations that a server has no room for. Raises ConfigError."""
    pool = config.of_worker(config.evaluate.worker).generate
    key = "evaluate" if config.evaluate.max_new_tokens is not None else "generate.sampling"
    answer = config.evaluate.sampling(pool.sampling).max_new_tokens
    _check_context(pool, shape, longest, answer, f"{key}.max_new_tokens")


def prompt_limit(config: Config, shape: ModelShape) -> int:
    """Tokens that a prompt of the run may have: `task.max_prompt_tokens`, or what an answer leaves of the context.

    Raises ConfigError.
    """
    if config.task.max_prompt_tokens is not None:
        return config.task.max_prompt_tokens
    return min(_room(pool, shape)[0] - pool.sampling.max_new_tokens for pool in config.generate.each_pool)


def evaluated_limit(config: Config, shape: ModelShape) -> int:
    """Tokens that a prompt of an evaluation may have. Raises ConfigError."""
    if config.task.max_prompt_tokens is not None:
        return config.task.max_prompt_tokens
    pool = config.of_worker(config.evaluate.worker).generate
    return _room(pool, shape)[0] - config.evaluate.sampling(pool.sampling).max_new_tokens


def context_length(pool: GenerateConfig, shape: ModelShape) -> int:
    """Tokens that a sequence may have at most at a server. Raises ConfigError."""
    return _number(pool.sglang_arguments, "context_length") or shape.max_length


def _check_context(pool: GenerateConfig, shape: ModelShape, longest: Longest, answer: int, key: str) -> None:
    held, what = _room(pool, shape)
    room = held - longest.tokens
    if room < 1:
        raise ConfigError(
            f"{key}: {answer} leaves no room: {longest.whose} has {longest.tokens} tokens, in {what}; allowed: a "
            "longer context, or shorter prompts"
        )
    if answer > room:
        raise ConfigError(
            f"{key}: {answer} does not fit behind {longest.whose} with {longest.tokens} tokens in {what}; "
            f"allowed: up to {room}"
        )


def _room(pool: GenerateConfig, shape: ModelShape) -> tuple[int, str]:
    """Tokens that a prompt and its answer may have at a server, and what says so. Raises ConfigError."""
    context, arguments = context_length(pool, shape), pool.sglang_arguments
    if context > shape.max_length:
        raise ConfigError(
            f"generate.server_args: context_length={context} is above the model's max_position_embeddings="
            f"{shape.max_length}; allowed: up to {shape.max_length}"
        )
    what = f"a context of {context} tokens"
    cache = _number(arguments, "max_total_tokens")
    if cache and cache < context:
        context, what = cache, f"a KV cache of max_total_tokens={cache}"
    return context - KEPT_FREE, what


def _number(arguments: dict[str, Any], key: str) -> int | None:
    given = arguments.get(key)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ConfigError(f"generate.server_args: {key}={given} is not allowed; allowed: a whole number above 0")
    return given
