"""What the model chunks of one rank take of a packed row: padded, and cut as the layout cuts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from streamrl.config import Config
from streamrl.learner import router_replay
from streamrl.learner.attention import PackedRow, Slice, describe_row, describe_row_for_engine, is_varlen
from streamrl.learner.logprobs import Targets
from streamrl.learner.model import PolicyModel, row_multiple
from streamrl.learner.packing import MicroBatch
from streamrl.learner.shape import ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One micro batch as this rank's chunks take it; T is the length of the padded row."""

    ids: Tensor  # int64 [1, T / context], the tokens of this rank's slice
    positions: Tensor  # int64 [1, T], of the whole row: Megatron takes the slice of the RoPE angles itself
    packed: PackedRow
    targets: Targets


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Pads rows to what the layout divides, and cuts them.

    Example: with tensor 2 (sequence parallel) and context 2 a row of 13 tokens is padded to 16, and each
    context-parallel rank gets 8 of them.
    """

    shape: ModelShape
    part: Slice  # this rank's, of every row
    multiple: int  # of tokens in a padded row
    one_length: bool  # all rows of a pass are padded to the longest
    fixed: int  # tokens to which every row is padded; 0: to its own length
    engine: bool  # Transformer Engine's layers
    varlen: bool  # the local layers' attention is torch's varlen kernel
    entropy_gradient: bool
    device: torch.device

    @classmethod
    def of_model(cls, model: PolicyModel, config: Config, device: torch.device) -> RowMaker:
        """For the layout that the model is built in."""
        layout = model.config
        ranks = layout.context_parallel_size
        return cls(
            shape=model.shape,
            part=Slice(ranks, parallel_state.get_context_parallel_rank()),
            multiple=row_multiple(layout),
            # The stages of a pipeline would have to tell each other the length of every row.
            one_length=layout.pipeline_model_parallel_size > 1,
            fixed=config.learner.tokens_per_micro_batch if layout.tp_comm_overlap else 0,
            engine=model.layers.kind == "transformer_engine",
            varlen=is_varlen(device, getattr(torch, config.model.dtype)),
            entropy_gradient=config.algo.entropy > 0,
            device=device,
        )

    def length(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Tokens of the longest of these rows after padding."""
        return self._padded(max(len(micro.ids) for micro in micro_batches))

    def make(self, micro: MicroBatch, longest: int) -> Row:
        """The row of a micro batch; `longest`: `length` of the pass that it is part of."""
        row = longest if self.one_length else self._padded(len(micro.ids))
        pads = row - len(micro.ids)
        # Pads are a sequence of their own that nobody sees.
        segments = np.concatenate([micro.segments, [[len(micro.ids), pads, 0, 0]]]) if pads else micro.segments
        tokens = self.part.tokens(row)
        packed = (
            describe_row_for_engine(segments, self.device, self.part)
            if self.engine
            else describe_row(segments, self.device, self.part, varlen=self.varlen)
        )
        if micro.routed_experts is not None:
            routed = router_replay.row_experts(micro.routed_experts, self.shape, row, self.device)
            packed.routed_experts = routed[self._moved(tokens)]
        return Row(
            ids=self._moved(np.pad(micro.ids, (0, pads))[tokens])[None],
            positions=self._moved(np.concatenate([micro.positions, np.arange(pads)]))[None],
            packed=packed,
            targets=self._targets(micro, tokens),
        )

    def _padded(self, length: int) -> int:
        return math.ceil(max(length, self.fixed) / self.multiple) * self.multiple

    def _targets(self, micro: MicroBatch, tokens: np.ndarray) -> Targets:
        if self.part.ranks == 1:
            positions, chosen, drawn, places = micro.targets, micro.tokens, micro.temperature, None
        else:
            place_of = np.full(self.part.ranks * len(tokens), -1)  # in the slice, by the place in the row
            place_of[tokens] = np.arange(len(tokens))
            positions = place_of[micro.targets]
            mine = positions >= 0
            positions, chosen, drawn = positions[mine], micro.tokens[mine], micro.temperature[mine]
            places = self._moved(np.flatnonzero(mine))
        return Targets(
            positions=self._moved(positions),
            tokens=self._moved(chosen),
            temperature=float(drawn[0]) if _is_one(drawn) else self._moved(drawn),
            entropy_gradient=self.entropy_gradient,
            places=places,
            total=len(micro.targets),
        )

    def _moved(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _is_one(temperatures: np.ndarray) -> bool:
    """All tokens were drawn at the same temperature: no tensor of them is needed."""
    return len(temperatures) > 0 and bool((temperatures == temperatures[0]).all())
