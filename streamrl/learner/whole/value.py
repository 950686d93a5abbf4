"""The critic of a model that transformers builds: its layers, and one row of weights in place of its output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.device import Device
from streamrl.learner.attention import PackedSegments
from streamrl.learner.logprobs import Targets
from streamrl.learner.shape import ModelShape
from streamrl.learner.value_model import ValueHead
from streamrl.learner.whole.model import WholeModel


class WholeValueModel(WholeModel):
    """Gives what is still to come behind each target, [N], from the hidden state that predicts it."""

    def __init__(self, shape: ModelShape, config: Config, device: Device) -> None:
        super().__init__(shape, config, device)
        if self._head is None:
            raise ConfigError(
                f"algo.advantage.estimator: gae needs a critic, and {shape.architecture} shows no output layer that "
                "its head could replace; allowed: group"
            )
        self.inner.set_output_embeddings(self._entering)
        self.value_head = ValueHead(shape.hidden, getattr(torch, config.model.dtype)).to(device.torch_device)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Targets | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Any:
        """(values [N], the same without gradient), a pair as that of the policy."""
        assert labels is not None, "a critic values targets alone"
        self._given(input_ids, position_ids, labels.positions, packed_seq_params)
        states = self._entering.states
        assert states is not None, "the output layer was not asked"
        states = states.squeeze(0)
        values = self.value_head(states if self._keeps_some else states.index_select(0, labels.positions))
        return values, values.detach()
