"""The reference policy of the KL term: kept on the host, in the model only while it scores.

    model: pi    host: pi_ref   ──swapped()──▶   model: pi_ref   host: pi   ──▶   model: pi    host: pi_ref

One parameter changes places at a time, so the device holds one parameter more at most and the host one copy of
this rank's share of the model.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.learner import lora
from streamrl.learner.forward import Wrapped
from streamrl.learner.host_memory import host_copy
from streamrl.learner.huggingface import load_weights
from streamrl.learner.mapping import named_weights
from streamrl.learner.model import policy_of
from streamrl.learner.shape import ModelShape, read_shape
from streamrl.learner.shared_rows import local

log = logging.getLogger(__name__)


class Reference:
    """The weights of the reference policy, this rank's share.

        reference = Reference.of(config, wrapped)  # before the policy's own weights are loaded
        with reference.swapped():
            logprobs = passes.score(micro_batches)

    LoRA without `algo.reference`: the reference is the model without its adapters, and nothing is kept or swapped.
    """

    def __init__(self, wrapped: Sequence[Wrapped], parameters: Iterable[Tensor] = ()) -> None:
        """Hold these parameters of the chunks as they are now; with none, the reference is the model that the
        chunks are without their adapters."""
        self._wrapped = list(wrapped)
        parts = [local(parameter) for parameter in dict.fromkeys(parameters)]
        self._held = [(part, host_copy(part)) for part in parts]

    @classmethod
    def of(cls, config: Config, wrapped: Sequence[Wrapped]) -> Reference | None:
        """The reference of a run, or None where `algo.kl` and `algo.kl_reward` are 0.

        Call it before the weights of the policy are loaded, from wherever: the chunks are left with the weights of
        the reference. Raises ConfigError for a reference of another shape, and what `load_weights` raises.
        """
        if not config.algo.needs_reference:
            return None
        policy_of(wrapped[0]).check_reference(config.algo)
        folder = config.algo.reference
        if folder is None and config.learner.lora.rank:
            log.info("reference policy: the model without its adapters")
            return cls(wrapped)
        key = "model.path" if folder is None else "algo.reference"
        if folder is None:
            folder = config.model.path
        else:
            _refuse_another_shape(config, folder, policy_of(wrapped[0]).shape)
        load_weights([policy_of(chunk) for chunk in wrapped], folder, key)
        named = (pair for chunk in wrapped for pair in named_weights(policy_of(chunk)))
        reference = cls(wrapped, (parameter for name, parameter in named if not lora.is_adapter_parameter(name)))
        log.info("reference policy: %s, %.1f MB of this rank on the host", folder, reference.nbytes / 1e6)
        return reference

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(held.nbytes for _, held in self._held)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The chunks are the reference inside, and afterwards what they were, bit for bit. Collective.

        No optimizer step may happen inside.
        """
        with ExitStack() as stack:
            for chunk in self._wrapped:
                if chunk.use_forward_hook:
                    # A gather of parameters that is still to come would overwrite the reference.
                    chunk.disable_forward_pre_hook()
                    stack.callback(chunk.enable_forward_pre_hook)
            stack.enter_context(lora.disabled([policy_of(chunk) for chunk in self._wrapped]))
            self._exchange()
            stack.callback(self._exchange)
            yield

    @torch.no_grad()
    def _exchange(self) -> None:
        """What is in the model goes to the host, what is on the host into the model."""
        for parameter, held in self._held:
            leaving = host_copy(parameter)
            parameter.copy_(held)
            held.copy_(leaving)


def _refuse_another_shape(config: Config, folder: Path, policy: ModelShape) -> None:
    """The weights of the reference take the places of the policy's."""
    shape = read_shape(folder, "algo.reference", config.model.built_by)
    for field in dataclasses.fields(ModelShape):
        if field.name == "max_length":  # of the longest sequence, not of what is computed
            continue
        theirs, ours = getattr(shape, field.name), getattr(policy, field.name)
        for name, its, own in _differences(field.name, theirs, ours):
            raise ConfigError(
                f"algo.reference: {folder} has {name}={its}, the policy has {name}={own}; "
                "allowed: a model of the policy's shape"
            )


def _differences(name: str, theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, theirs, ours) of what differs, of a mapping key by key, but for its special tokens."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = sorted(key for key in theirs.keys() | ours.keys() if not key.endswith("_token_id"))
        yield from ((key, theirs.get(key), ours.get(key)) for key in keys if theirs.get(key) != ours.get(key))
    elif theirs != ours:
        yield name, theirs, ours
