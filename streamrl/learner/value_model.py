"""The critic's model: the policy's layers, and one row of weights in place of its output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streamrl.learner.logprobs import Targets, over_context
from streamrl.learner.model import PolicyModel

HEAD = "value_head.weight"  # its name among a chunk's parameters; no Hugging Face folder has it


class ValueHead(nn.Module):
    """`states weight^T` in float32, [n] of [n, hidden]; the same on every tensor-parallel rank."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        """Zeros: before the first update every value is 0, in every layout."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype))

    def forward(self, states: Tensor) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        return (states.to(wide) @ self.weight.to(wide).t()).squeeze(1)


class ValueModel(PolicyModel):
    """Gives what is still to come behind each target, [N], from the hidden state that predicts it."""

    post_process: bool  # Megatron's word for having the end of the model
    values = True

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **{**fields, "share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = None
            self.value_head = ValueHead(self.config.hidden_size, self.config.params_dtype)

    def sharded_state_dict(self, *args: Any, **fields: Any) -> Any:
        """Megatron's, which would look for an output layer here."""
        ends, self.post_process = self.post_process, False
        try:
            return super().sharded_state_dict(*args, **fields)
        finally:
            self.post_process = ends

    def _postprocess(self, hidden_states: Tensor, *, labels: Targets | None = None, **rest: Any) -> Any:
        """(values [N], the same without gradient), a pair as that of the policy; hidden states on other stages."""
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=None, **rest)
        values = self.value_head(self._states_of(hidden_states, labels))
        if labels.places is not None:
            values = over_context(values, labels.places, labels.total, self.pg_collection.cp)
        return values, values.detach()
