"""What `learner.layout.sharding: full` (torch's FSDP2) does not go with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from streamrl.config.words import as_text

if TYPE_CHECKING:
    from streamrl.config.tree import Config

# A key that it does not go with, its value in a configuration, why not, and what is allowed.
_REFUSED: tuple[tuple[str, Callable[[Config], object], str, object], ...] = (
    ("model.implementation", lambda c: c.model.implementation, "shards what Megatron-Core builds", "megatron"),
    ("learner.layout.pipeline", lambda c: c.learner.layout.pipeline, "would gather a stage for each micro batch", 1),
    ("learner.layout.expert", lambda c: c.learner.layout.expert, "has experts on every rank", 1),
    ("learner.layout.expert_tensor", lambda c: c.learner.layout.expert_tensor, "has experts on every rank", 1),
    ("learner.lora.rank", lambda c: c.learner.lora.rank, "trains whole models", 0),
    ("algo.advantage.estimator", lambda c: c.algo.advantage.estimator, "shares out the policy alone", "group"),
    ("learner.optimizer.offload", lambda c: c.learner.optimizer.offload, "updates its shards on the device", 0),
    (
        "learner.gradient_accumulation_fusion",
        lambda c: c.learner.gradient_accumulation_fusion,
        "has no buffers of whole gradients",
        False,
    ),
    ("learner.overlap", lambda c: c.learner.overlap, "overlaps by itself where there are GPUs", None),
)


def check_run(config: Config) -> None:
    """Raise ValueError, with a line for each key, where what else is configured does not go with it."""
    if not config.learner.layout.fully_sharded:
        return
    lines = [
        f"{key}: {as_text(given(config))} with learner.layout.sharding=full, which {reason}; "
        f"allowed: {as_text(allowed)}, or sharding=optimizer"
        for key, given, reason, allowed in _REFUSED
        if given(config) != allowed
    ]
    if config.learner.optimizer.distributed is False:
        lines.append(
            "learner.optimizer.distributed: false with learner.layout.sharding=full, which shares out the optimizer's "
            "state, too; allowed: null, true, or sharding=optimizer"
        )
    if lines:
        raise ValueError("\n".join(lines))
