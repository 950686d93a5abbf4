"""The reference policy of the KL term: kept on the host, in the model only while it scores.

    model: pi    host: pi_ref   ──swapped()──▶   model: pi_ref   host: pi   ──▶   model: pi    host: pi_ref

One parameter changes places at a time, so the device holds one parameter more at most and the host one copy of
this rank's share of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from streamrl.config import Config
from streamrl.learner import lora
from streamrl.learner.huggingface import load_weights
from streamrl.learner.model import PolicyModel

log = logging.getLogger(__name__)


class Reference:
    """The weights of the reference policy, this rank's share.

        reference = Reference.of(config, wrapped)  # before the policy's own weights are loaded
        with reference.swapped():
            logprobs = passes.score(micro_batches)

    LoRA without `algo.reference`: the reference is the model without its adapters, and nothing is kept or swapped.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel]) -> None:
        """Hold the weights that the chunks have now as the reference; adapters of LoRA are no part of it."""
        parameters = dict.fromkeys(
            parameter
            for chunk in wrapped
            for name, parameter in chunk.named_parameters()
            if name.rpartition(".")[2] not in lora.PARAMETERS
        )
        self._wrapped = list(wrapped)
        self._held = [(parameter, _host_copy(parameter.detach())) for parameter in parameters]

    @classmethod
    def of(cls, config: Config, wrapped: Sequence[DistributedDataParallel]) -> Reference | None:
        """The reference of a run, or None where `algo.kl` is 0.

        Call it before the weights of the policy are loaded, from wherever: the chunks are left with the weights of
        the reference. Raises what `load_weights` raises.
        """
        if config.algo.kl == 0:
            return None
        folder = config.algo.reference
        if folder is None and config.learner.lora.rank:
            log.info("reference policy: the model without its adapters")
            return cls.without_adapters(wrapped)
        folder = folder or config.model.path
        load_weights([_policy(chunk) for chunk in wrapped], folder)
        reference = cls(wrapped)
        log.info("reference policy: %s, %.1f MB of this rank on the host", folder, reference.nbytes / 1e6)
        return reference

    @classmethod
    def without_adapters(cls, wrapped: Sequence[DistributedDataParallel]) -> Reference:
        """The model itself with its LoRA adapters off."""
        reference = cls(())
        reference._wrapped = list(wrapped)
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
            stack.enter_context(lora.disabled([_policy(chunk) for chunk in self._wrapped]))
            self._exchange()
            stack.callback(self._exchange)
            yield

    @torch.no_grad()
    def _exchange(self) -> None:
        """What is in the model goes to the host, what is on the host into the model."""
        for parameter, held in self._held:
            leaving = _host_copy(parameter)
            parameter.copy_(held)
            held.copy_(leaving)


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


def _policy(chunk: torch.nn.Module) -> PolicyModel:
    """The model inside its wrappers."""
    return next(module for module in chunk.modules() if isinstance(module, PolicyModel))
