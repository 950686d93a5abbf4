"""Layers in the place of attention that carry a state from token to token, over packed rows: what all kinds of them do.

    hidden ──in──▶ projected ── of each sequence: causal convolution, recurrence ──▶ mixed ──out──▶ hidden

An answer begins with the state, and the inputs of the convolution, that its prompt ends with. Rows of weights are cut
over tensor-parallel ranks by groups of heads, and all that is of one group is together: a rank's part is a slice of the
whole. A state is not handed over context-parallel ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from streamrl.learner.attention import PackedSegments
from streamrl.learner.sequences import sequences_of

# (inputs of the convolution before the next token [n, kernel - 1, channels], state [n, heads, ...])
Before = tuple[Tensor, Tensor]


class RecurrentMixer(MegatronModule, ABC):
    """In the place of Megatron's self-attention. Its own parameters are cut by rows.

    projected: outputs of the first projection over all ranks; width: inputs of the last one; kernel: tokens that the
    convolution sees.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection | None,
        *,
        projected: int,
        width: int,
        kernel: int,
    ) -> None:
        super().__init__(config)
        self.groups = groups or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.ranks = self.groups.tp.size()
        self._width, self._kernel = width // self.ranks, kernel
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            projected,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.groups.tp,
        )
        self.out_proj = RowParallelLinear(
            width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.groups.tp,
        )

    def own(self, rows: int, *sizes: int) -> nn.Parameter:
        """A parameter [rows, *sizes] over all ranks, for an attribute: this rank's part."""
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = nn.Parameter(torch.empty(rows // self.ranks, *sizes, dtype=self.config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, hidden] of this rank's tokens -> the same, and no bias. A packed row has b = 1."""
        projected, _bias = self.in_proj(hidden_states)
        if packed_seq_params is None:
            output = self.mix(projected.transpose(0, 1), None, None)[0].transpose(0, 1)
        else:
            assert isinstance(packed_seq_params, PackedSegments), "the local layers' description of a row"
            output = self._by_blocks(projected.squeeze(1), packed_seq_params).unsqueeze(1)
        mixed: tuple[Tensor, Tensor | None] = self.out_proj(output)
        return mixed

    @abstractmethod
    def mix(self, projected: Tensor, real: Tensor | None, before: Before | None) -> tuple[Tensor, Before]:
        """projected [n, t, of in_proj], real bool [n, t] (None: all) -> outputs [n, t, of out_proj], what follows."""

    def convolve(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        real: Tensor | None,
        before: Before | None,
    ) -> tuple[Tensor, Tensor]:
        """silu of the causal convolution of inputs [n, t, c], and the inputs that the next token sees besides."""
        tail = inputs.new_zeros(len(inputs), self._kernel - 1, inputs.size(-1)) if before is None else before[0]
        whole = torch.cat([tail, inputs], 1)
        turned = silu(conv1d(whole.transpose(1, 2), weight, bias, groups=len(weight))).transpose(1, 2)
        return turned, self._tail(whole, real)

    def _by_blocks(self, projected: Tensor, packed: PackedSegments) -> Tensor:
        """[T, of in_proj] -> [T, of out_proj]."""
        output = projected.new_zeros(len(projected), self._width)
        ends: list[Before] = []
        before_all: Before | None = None
        for block in sequences_of(packed, projected.device):
            before = None
            if block.parents is not None:
                before_all = before_all or (torch.cat([tail for tail, _ in ends]), torch.cat([s for _, s in ends]))
                before = before_all[0][block.parents], before_all[1][block.parents]
            mixed, end = self.mix(projected[block.tokens], block.real, before)
            ends.append(end)
            output = output.index_copy(0, block.tokens[block.real], mixed[block.real])
        return output

    def _tail(self, whole: Tensor, real: Tensor | None) -> Tensor:
        """Inputs of the convolution that the token behind each sequence's last sees; whole [n, kernel - 1 + t, c]."""
        if real is None:
            return whole[:, whole.size(1) - self._kernel + 1 :]
        places = real.sum(1, keepdim=True) + torch.arange(self._kernel - 1, device=whole.device)
        return whole.gather(1, places.unsqueeze(-1).expand(-1, -1, whole.size(-1)))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a checkpoint is told: a rank has its heads'."""
        sharded: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = dict(self.named_parameters(recurse=False))
        sharded |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded
