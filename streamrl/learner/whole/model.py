"""A causal language model of transformers' own class, as the learner asks one of Megatron's layers.

    packed row ──▶ transformers' model ──hidden states, or logits──▶ log-probs of the targets

Its weights have their names in a folder, it is whole on every rank, and it is run as it is evaluated: without dropout.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamrl.config import Config
from streamrl.config.algo import AlgoConfig
from streamrl.config.file import ConfigError
from streamrl.device import Device
from streamrl.learner.attention import PackedSegments, describe_row
from streamrl.learner.full_kl import ReferenceStates, full_kl
from streamrl.learner.host_memory import host_copy
from streamrl.learner.logits import logprobs_of_logits
from streamrl.learner.logprobs import Targets, token_logprobs
from streamrl.learner.model import LayerChoice
from streamrl.learner.shape import ModelShape
from streamrl.learner.whole.family import skeleton
from streamrl.learner.whole.segments import register
from streamrl.learner.whole.ways import Way, find_way

log = logging.getLogger(__name__)

INNER = "inner."  # before the names of what transformers' model has


class WholeModel(MegatronModule):
    """What `model.PolicyModel` is to the learner, around a model of transformers.

    `inner` is that model; the names of its parameters are those of a folder behind `inner.`
    """

    overlaps = False  # an expert may have no token, and then no gradient that a bucket could wait for
    vision = None
    model_type = ModelType.encoder_or_decoder  # Megatron's word for what has one stack of layers

    def __init__(self, shape: ModelShape, config: Config, device: Device) -> None:
        dtype = getattr(torch, config.model.dtype)
        super().__init__(_megatron_config(shape, dtype, device))
        self.shape = shape
        self.layers = LayerChoice("local", "transformers' own class")
        self.states: list[ReferenceStates] | None = None
        self.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        with device.torch_device:
            self.inner: Any = skeleton(shape.computes or {}, dtype=dtype)
        _keep_float32(self.inner, dtype)
        _use_all_embeddings(self.inner)
        accepted = inspect.signature(self.inner.forward).parameters
        self._has_positions, self._keeps_some = "position_ids" in accepted, "logits_to_keep" in accepted
        self._reading = register(self.inner)
        self.inner.eval()
        if config.learner.recompute == "full":
            _recompute_layers(self.inner)
        self._entering = Entering()
        self._way = find_way(self.inner, self._of_every_token, self._has_positions)
        self._is_plain = self._has_plain_head(device)
        log.info("%s of transformers on %s: %s rows%s", shape.architecture, device, self._way.name, self._told())

    @property
    def way(self) -> Way:
        """How its rows are made."""
        return self._way

    @property
    def _head(self) -> Any:
        """The output layer; None where the model shows none."""
        return self.inner.get_output_embeddings()

    @property
    def shares_prompts(self) -> bool:
        return self._way.shares_prompts

    @property
    def one_a_row(self) -> bool:
        return self._way.one_a_row

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm behind all layers; None where the model does not show one."""
        children = self.inner.base_model.children()
        norms = [child for child in children if getattr(child, "weight", None) is not None and child.weight.dim() == 1]
        return norms[-1] if norms else None

    def check_reference(self, algo: AlgoConfig) -> None:
        """Refuse a divergence over the whole vocabulary where logits are more than one product. Raises ConfigError."""
        if not self._is_plain and algo.kl > 0 and algo.chosen("kl_estimator").of_vocabulary:
            raise ConfigError(
                f"algo.kl_estimator: {algo.kl_estimator} needs logits that are the output layer's, and "
                f"{self.shape.architecture} makes something else of them; allowed: an estimator by the drawn tokens"
            )

    def set_input_tensor(self, tensors: Any) -> None:
        """Megatron's schedule hands on what an earlier stage gave; there is none."""

    def train(self, mode: bool = True) -> WholeModel:
        """Only says so: `inner` stays as it is evaluated, which is what the servers compute."""
        self.training = mode
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Targets | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Any:
        """As `PolicyModel`: with targets (log-probs [N], entropies [N]), and divergences [N] where they have a
        reference; without, logits [1, T, vocabulary]."""
        if labels is None:
            given = self._given(input_ids, position_ids, None, packed_seq_params)
            return (given @ self._head.weight.t() if self._is_plain else given)[None]
        given = self._given(input_ids, position_ids, labels.positions, packed_seq_params)
        if not self._is_plain:
            return logprobs_of_logits(given, labels, self.shape.vocabulary)
        weight, group, vocabulary = self._head.weight, self.pg_collection.tp, self.shape.vocabulary
        if self.states is not None:
            self.states.append(ReferenceStates(host_copy(given.detach()), weight.detach()))
        measured: tuple[Tensor, ...] = token_logprobs(given, weight, labels, vocabulary, group)
        if labels.reference is not None:
            divergence = full_kl(given, weight, labels.reference, labels, vocabulary=vocabulary, group=group)
            measured = (*measured, divergence)
        return measured

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a checkpoint is told: each tensor once, whole; data-parallel ranks have the same ones."""
        own = self.state_dict(keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {name: own[name] for name in self.names()},
            prefix,
            {},
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group", self.pg_collection.dp_cp),
        )
        return sharded

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what `sharded_state_dict` describes; a tied tensor comes by one of its names."""
        own = self.state_dict(keep_vars=True)
        by_tensor = {id(own[name]): name for name in state_dict if name in own}
        tied = {name: state_dict[by_tensor[id(own[name])]] for name in own if id(own[name]) in by_tensor}
        return super().load_state_dict({**tied, **state_dict}, strict=strict, assign=assign)

    def names(self) -> list[str]:
        """The name of every parameter and buffer that is kept; one name for a tied tensor."""
        first: dict[int, str] = {}
        for name, tensor in self.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), name)
        return list(first.values())

    def _given(self, ids: Tensor, positions: Tensor, places: Tensor | None, row: PackedSegments | None) -> Tensor:
        """What the model makes of the tokens at `places` of a row, [N, any]: logits, or states with a plain head."""
        kept = {"logits_to_keep": places} if places is not None and self._keeps_some else {}
        made = self._raw(ids, positions, row, **kept).squeeze(0)
        return made if places is None or self._keeps_some else made.index_select(0, places)

    def _raw(self, ids: Tensor, positions: Tensor, row: PackedSegments | None, **fields: Any) -> Tensor:
        self._reading.row = row
        if self._has_positions:
            fields["position_ids"] = positions
        logits: Tensor = self.inner(input_ids=ids, **fields).logits
        return logits

    def _of_every_token(self, ids: Tensor, positions: Tensor, row: PackedSegments) -> Tensor:
        return self._given(ids, positions, None, row)

    def _has_plain_head(self, device: Device) -> bool:
        """Whether logits are the product of the last states and the output layer, and nothing else.

        Then the layer gives the states themselves: `logprobs.py` makes the product, a few tokens at a time. Of a model
        that scales or caps what the layer gives, that object is not what comes out.
        """
        if type(self._head) is not nn.Linear or self._head.bias is not None:
            return False
        self._head.forward = self._entering.forward
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device.torch_device)
        with torch.no_grad():
            made = self._raw(ids, ids, describe_row(np.array([[0, 1, 0, 0]]), device.torch_device))
        if made is self._entering.states:
            return True
        del self._head.forward
        return False

    def _told(self) -> str:
        return "" if self._is_plain else ", logits by its own head"


class Entering(nn.Module):
    """Gives what would enter the output layer, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Tensor | None = None

    def forward(self, states: Tensor) -> Tensor:
        self.states = states
        return states


def _megatron_config(shape: ModelShape, dtype: torch.dtype, device: Device) -> TransformerConfig:
    """What Megatron's schedule and data parallelism read; the layers do not."""
    return TransformerConfig(
        num_layers=max(1, shape.layers),
        hidden_size=shape.hidden,
        num_attention_heads=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=device.kind == "cpu",
        batch_p2p_sync=False,
    )


def _keep_float32(inner: Any, dtype: torch.dtype) -> None:
    """What transformers has in float32 when it loads a model of this dtype."""
    for pattern, kept in inner._get_dtype_plan(dtype).items():
        wanted = re.compile(pattern.replace("*", ".*"))
        for name, tensor in itertools.chain(inner.named_parameters(), inner.named_buffers()):
            if wanted.search(name):
                tensor.data = tensor.data.to(kept)


def _use_all_embeddings(inner: nn.Module) -> None:
    """A pad is a token like others here: torch would give its embedding no gradient."""
    for module in inner.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def _recompute_layers(inner: nn.Module) -> None:
    """Have the backward pass compute each layer again. Raises ConfigError for a model that shows none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if not layers:
        raise ConfigError(
            f"learner.recompute: full is not possible with {type(inner).__name__}, whose layers transformers does not "
            "compute again; allowed: none"
        )
