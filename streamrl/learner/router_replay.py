"""Router replay: the experts that the generator took for a token are those that the learner takes.

The generator's routing travels with the description of the packed row, which Megatron hands to every layer in
every pass, whichever micro batch it is of and also when a layer is computed again for its gradient:

    MicroBatch.routed_experts ──row_experts──▶ packed_seq_params.routed_experts ──▶ each layer's router

The weights of the experts are still those of the learner's own router, with their gradient. Without replay a
token whose router logits are close to a tie may take other experts here than there, and its log-prob jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from streamrl.config.file import ConfigError
from streamrl.learner.attention import PackedRow
from streamrl.learner.shape import ModelShape
from streamrl.moe_routing import UNKNOWN


def row_experts(routed: np.ndarray, shape: ModelShape, tokens: int, device: torch.device) -> Tensor:
    """What a row's description carries: int16 [tokens, layers, top_k], UNKNOWN behind the row's own tokens.

    routed: int16 [T, layers, top_k] of the whole model, dense layers too (they are not read); tokens: length of
    the row with padding, at least T. Raises ValueError when that is not this model's routing.
    """
    assert shape.moe is not None
    expected = (shape.layers, shape.moe.top_k)
    if routed.shape[1:] != expected:
        raise ValueError(f"routed experts of {routed.shape[1:]} layers and choices, the model has {expected}")
    if routed.size and routed.max() >= shape.moe.experts:
        raise ValueError(f"routed expert {routed.max()}, the model has {shape.moe.experts}")
    row = torch.full((tokens, *expected), UNKNOWN, dtype=torch.int16)
    row[: len(routed)] = torch.from_numpy(routed)
    return row.to(device)


def attach(model: GPTModel, shape: ModelShape) -> None:
    """Let every router of this model chunk read its row's `routed_experts`. Once, when it is built.

    Raises ConfigError for a model without experts.
    """
    if shape.moe is None:
        raise ConfigError(f"learner.router_replay: true needs a mixture of experts, not {shape.architecture}")
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            replay = LayerReplay(layer.layer_number - 1, model.pg_collection.tp)
            router.router_replay = replay
            layer.register_forward_pre_hook(replay.record, with_kwargs=True)


class LayerReplay:
    """The routing of one layer, in the place of Megatron's `RouterReplay`, which knows one micro batch at a time."""

    def __init__(self, layer: int, tensor_parallel: torch.distributed.ProcessGroup) -> None:
        """`layer`: counted from 0 over the whole model."""
        self._layer = layer
        self._tensor_parallel = tensor_parallel
        self._experts: Tensor | None = None  # [t, top_k] of the row that the layer is computing

    def record(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the layer runs: whose row is it?"""
        row = kwargs.get("packed_seq_params")
        experts = row.routed_experts if isinstance(row, PackedRow) else None
        self._experts = None if experts is None else experts[:, self._layer]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """(scores, numbers) of each token's experts, [t, top_k] both; called by Megatron's router.

        scores: [t, experts], logits or probabilities, with gradient.
        """
        own, numbers = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._experts is None:
            return own, numbers
        replayed = self._slice(len(scores))
        known = (replayed >= 0).all(1, keepdim=True)
        numbers = torch.where(known, replayed.long(), numbers)
        return scores.gather(1, numbers), numbers

    def _slice(self, tokens: int) -> Tensor:
        """The part of the row that this rank's router sees: with sequence parallelism one of equal parts."""
        assert self._experts is not None
        if len(self._experts) == tokens:
            return self._experts
        ranks, rank = self._tensor_parallel.size(), self._tensor_parallel.rank()
        if len(self._experts) != ranks * tokens:
            raise ValueError(f"routed experts of {len(self._experts)} tokens for a router of {ranks} x {tokens}")
        return self._experts[rank * tokens : (rank + 1) * tokens]
