"""What a configuration may say and hardly means: it runs, and a line says what will not come of it.

What cannot run is refused where the keys are (`Section`s of this package); what depends on the model, the data or the
machine is looked at in `preflight/`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from streamrl.choices import Kind, kind_in
from streamrl.config.critic import CriticOptimizer
from streamrl.config.file import fields, value_at
from streamrl.config.in_flight import most_requests
from streamrl.config.replay import AdaptiveConfig
from streamrl.config.speculation import SpeculationConfig
from streamrl.config.tree import Config

# Adam moves a weight by about the learning rate in each update, and the weights of a model are about 0.02.
LARGE_LR = 1e-2

# Heartbeats that one lease should outlast: one is late whenever its worker's event loop is.
LEASE_OF_HEARTBEATS = 3

# Times that the generators must fill all their places for one learner step.
MANY_ROUNDS = 1000

# What tells the policy from a proximal policy by the scores of the step's first weights.
SEVERAL_UPDATES = "learner.passes or learner.mini_batches above 1, or algo.proximal=behaviour"


def _moves_from_old(config: Config) -> bool:
    """Is there an update whose r = pi / pi_old is not 1 for every token?"""
    learner = config.learner
    several = learner.passes * learner.mini_batches > 1
    return several or learner.lora.dropout > 0 or not config.algo.chosen("proximal").scored


def _is_as_served(config: Config) -> bool:
    """Are the learner's log-probs those of its servers, as far as the configuration says?"""
    whole = config.learner.layout.model_ranks == 1
    return config.generate.score == "full_prefill" and config.model.dtype in ("float32", "auto") and whole


def _weighs(config: Config) -> bool:
    """Does the importance weight do anything, where one is chosen?"""
    loss, weight = config.algo.chosen("loss"), config.algo.chosen("weight")
    left_alone = config.algo.chosen("proximal").of_policy and loss.has_ratio and not loss.needs_cap
    return not weight.corrects or not left_alone


# Keys, what they need to have an effect, and whether a configuration has it.
_USED: tuple[tuple[tuple[str, ...], str, Callable[[Config], bool]], ...] = (
    (
        tuple(f"replay.adaptive.{key}" for key in AdaptiveConfig.model_fields if key != "enabled"),
        "replay.adaptive.enabled=true",
        lambda c: c.replay.adaptive.enabled,
    ),
    (
        ("replay.reuse_share", "replay.reuse_min_ess", "replay.reuse_max_age"),
        "replay.reuse above 1",
        lambda c: c.replay.reuse > 1,
    ),
    (("learner.lora.alpha", "learner.lora.dropout"), "learner.lora.rank above 0", lambda c: c.learner.lora.rank > 0),
    (
        ("learner.optimizer.min_lr",),
        "learner.optimizer.decay=linear or cosine",
        lambda c: c.learner.optimizer.decay != "constant",
    ),
    (
        ("learner.optimizer.spike_window",),
        "learner.optimizer.spike_factor",
        lambda c: c.learner.optimizer.spike_factor is not None,
    ),
    (
        ("algo.weight", "algo.weight_options", "algo.weight_cap", "algo.weight_gamma"),
        "algo.loss=clip, or another algo.proximal than behaviour",
        _weighs,
    ),
    (("algo.kl_estimator", "algo.kl_straight_through"), "algo.kl above 0", lambda c: c.algo.kl > 0),
    (("algo.kl_horizon",), "algo.kl_target", lambda c: c.algo.kl_target is not None),
    (("algo.kl_reward_estimator",), "algo.kl_reward above 0", lambda c: c.algo.kl_reward > 0),
    (
        (
            "algo.distillation.revision",
            "algo.distillation.family",
            "algo.distillation.coefficient",
            "algo.distillation.rewards",
        ),
        "algo.distillation.teacher",
        lambda c: c.algo.distils,
    ),
    (
        ("algo.advantage.std", "algo.advantage.baseline", "algo.advantage.eps"),
        "algo.advantage.estimator=group",
        lambda c: not c.algo.advantage.has_critic,
    ),
    (
        ("algo.advantage.std", "algo.advantage.baseline", "algo.advantage.eps"),
        "algo.distillation.rewards=true",
        lambda c: not c.algo.distils or c.algo.distillation.rewards,
    ),
    (("algo.ratio_penalty",), SEVERAL_UPDATES, _moves_from_old),
    (("algo.covariance",), SEVERAL_UPDATES, lambda c: not c.algo.chosen("covariance").of_ratio or _moves_from_old(c)),
    (
        (
            *(f"algo.advantage.{key}" for key in ("gamma", "lam", "whiten")),
            *(f"critic.{key}" for key in ("model", "warmup_steps", "value_clip", "loss_weight")),
            *(f"critic.optimizer.{key}" for key in CriticOptimizer.model_fields),
        ),
        "algo.advantage.estimator=gae",
        lambda c: c.algo.advantage.has_critic,
    ),
    (("run.exit_interval", "run.exit_duration"), "`streamrl train`", lambda c: not c.trains_rows),
    (("task.overlong.penalty",), "task.overlong.buffer above 0", lambda c: c.task.overlong.buffer > 0),
    (
        tuple(f"generate.speculation.{key}" for key in SpeculationConfig.model_fields if key != "algorithm"),
        "generate.speculation.algorithm",
        lambda c: c.generate.speculation.algorithm is not None,
    ),
)


def warnings(config: Config) -> list[str]:
    """One line for each thing that is configured and will hardly be meant: key, value, what comes of it."""
    return [*_unused(config), *_out_of_proportion(config)]


def warn(lines: Iterable[str]) -> None:
    """Print them for the user who starts something."""
    for line in lines:
        print(f"streamrl: warning: {line}", file=sys.stderr)


def _unused(config: Config) -> Iterator[str]:
    defaults = {path: field.get_default(call_default_factory=True, validated_data={}) for path, field in fields()}
    kinds = {path: kind_in(field.metadata) for path, field in fields()}
    without_effect = [(key, needed) for keys, needed, is_used in _USED if not is_used(config) for key in keys]
    for key, needed in [*without_effect, *_unused_by_choices(config)]:
        if not _is_same(value := value_at(config, key), defaults[key], kinds[key]):
            yield f"{key}: {value} has no effect without {needed}"


def _is_same(value: Any, default: Any, kind: Kind | None) -> bool:
    """Is it the default, where it is a built-in choice by its name or by its path?"""
    return value == default or (kind is not None and kind.load(value) is kind.load(default))


def _unused_by_choices(config: Config) -> Iterator[tuple[str, str]]:
    """Keys that some choice has a use for, and the chosen one has not; and what would have."""
    for path, field in fields():
        kind, section = kind_in(field.metadata), path.rpartition(".")[0]
        if kind is None or kind.hosted or value_at(config, path) is None:
            continue
        used = kind.load(value_at(config, path)).uses
        for key in sorted({key for name in kind.names for key in kind.load(name).uses} - used):
            yield f"{section}.{key}", f"{path}={' or '.join(kind.users_of(key))}"


def _out_of_proportion(config: Config) -> Iterator[str]:
    optimizer, replay, learner = config.learner.optimizer, config.replay, config.learner
    if optimizer.lr > LARGE_LR:
        yield (
            f"learner.optimizer.lr: each update moves every weight by about {optimizer.lr:g}, and a model's weights "
            f"are about 0.02; usual: 1e-6, and 1e-3 for a tiny model"
        )
    if optimizer.warmup_steps >= config.run.steps:
        yield (
            f"learner.optimizer.warmup_steps: {optimizer.warmup_steps} is not over when the run is, "
            f"run.steps={config.run.steps}: the learning rate never reaches {optimizer.lr:g}"
        )
    if config.algo.advantage.has_critic and config.critic.warmup_steps >= config.run.steps:
        yield (
            f"critic.warmup_steps: {config.critic.warmup_steps} is not over when the run is, run.steps="
            f"{config.run.steps}: the policy is never trained"
        )
    if learner.as_served and not _is_as_served(config):
        yield (
            "learner.as_served: log-probs are the servers' to the bit with generate.score=full_prefill, "
            "model.dtype=float32 and ranks that have the whole model; otherwise it only costs shared prompts"
        )
    if config.generate.score == "full_prefill" and not learner.as_served:
        yield (
            "generate.score: full_prefill computes each prompt once more, for a learner with learner.as_served=true; "
            "usual: prefill"
        )
    if replay.lease < LEASE_OF_HEARTBEATS * config.generate.heartbeat:
        yield (
            f"replay.lease: {replay.lease:g} s outlasts fewer than {LEASE_OF_HEARTBEATS} heartbeats "
            f"(generate.heartbeat={config.generate.heartbeat:g} s): one that is late costs its worker's tickets"
        )
    yield from _late_answers(config)
    places = sum(pool.workers * most_requests(config, pool) for pool in config.generate.each_pool)
    places = math.ceil(places / config.generate.group_size)
    if replay.groups_per_step > MANY_ROUNDS * places:
        yield (
            f"replay.groups_per_step: {replay.groups_per_step} groups are {replay.groups_per_step // places} rounds of "
            f"the {places} that all generators have in flight, and one step must come within run.silence_timeout="
            f"{config.run.silence_timeout:g} s"
        )
    copies = learner.ranks // learner.layout.model_ranks
    samples = replay.groups_per_step // learner.mini_batches * config.generate.group_size
    if copies > samples:
        yield (
            f"learner.ranks: {learner.ranks} hold {copies} copies of the model, and an update has {samples} samples: "
            f"{copies - samples} copies never have one"
        )


def _late_answers(config: Config) -> Iterator[str]:
    """Requests that are late before their answers are."""
    longest, evaluate = config.replay.group_timeout, config.evaluate
    for pool in config.generate.each_pool:
        tokens = pool.sampling.max_new_tokens
        streams = 0 < pool.stream_every < tokens
        if pool.request_timeout is not None and pool.request_timeout < longest and not streams:
            yield (
                f"generate.request_timeout: {pool.request_timeout:g} s, and with generate.stream_every="
                f"{pool.stream_every} an answer of up to {tokens} tokens that takes longer is drawn again from its "
                f"beginning, until replay.group_timeout={longest:g}: long answers are lost; usual: null, or "
                "stream_every above 0 and below max_new_tokens"
            )
    limit = config.of_worker(evaluate.worker).generate.request_timeout if evaluate.every else None
    if limit is not None and limit < evaluate.timeout:
        yield (
            f"generate.request_timeout: {limit:g} s, and an answer of an evaluation that takes longer is lost, before "
            f"evaluate.timeout={evaluate.timeout:g}; usual: null"
        )
