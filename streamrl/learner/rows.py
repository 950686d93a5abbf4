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
from streamrl.learner.kept import Kept
from streamrl.learner.logprobs import Targets
from streamrl.learner.model import LayerChoice, PolicyModel, row_multiple
from streamrl.learner.packing import MicroBatch
from streamrl.learner.shape import ModelShape
from streamrl.learner.vision.pixels import ImageReader, image_reader
from streamrl.learner.vision.positions import place_images
from streamrl.learner.vision.tower import RowImages
from streamrl.moe_routing import UNKNOWN


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One micro batch as this rank's chunks take it; T is the length of the padded row."""

    ids: Tensor  # int64 [1, T / context], the tokens of this rank's slice
    # int64 [1, T], [3, T] with images: of the whole row, Megatron takes the slice of the RoPE angles itself
    positions: Tensor
    packed: PackedRow
    targets: Targets


def sequence_multiple(context: int, layers: LayerChoice) -> int:
    """What a sequence's tokens are a multiple of: Transformer Engine cuts each over the context-parallel ranks."""
    return 2 * context if context > 1 and layers.kind == "transformer_engine" else 1


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Pads rows to what the layout divides, and cuts them.

    Example: with tensor 2 (sequence parallel) and context 2 a row of 13 tokens is padded to 16, and each
    context-parallel rank gets 8 of them; Transformer Engine's rows have each of their sequences padded as well,
    here to a multiple of 4.
    """

    shape: ModelShape
    part: Slice  # this rank's, of every row
    multiple: int  # of tokens in a padded row
    sequence_multiple: int  # of tokens in each of its sequences
    one_length: bool  # all rows of a pass are padded to the longest
    fixed: int  # tokens to which every row is padded; 0: to its own length
    engine: bool  # Transformer Engine's layers
    varlen: bool  # the local layers' attention is torch's varlen kernel
    padded: bool  # else it has no pads
    entropy_gradient: bool
    device: torch.device
    images: ImageReader | None = None  # of a model that reads images
    tower: bool = False  # this rank has it

    @classmethod
    def of_model(cls, model: PolicyModel, config: Config, device: torch.device) -> RowMaker:
        """For the layout that the model is built in."""
        layout = model.config
        ranks = layout.context_parallel_size
        return cls(
            shape=model.shape,
            part=Slice(ranks, parallel_state.get_context_parallel_rank()),
            multiple=row_multiple(layout),
            sequence_multiple=sequence_multiple(ranks, model.layers),
            # The stages of a pipeline would have to tell each other the length of every row.
            one_length=layout.pipeline_model_parallel_size > 1,
            fixed=config.learner.tokens_per_micro_batch if layout.tp_comm_overlap else 0,
            engine=model.layers.kind == "transformer_engine",
            varlen=model.shape.attention.is_plain and is_varlen(device, getattr(torch, config.model.dtype)),
            padded=not config.learner.as_served,
            entropy_gradient=config.algo.entropy > 0,
            device=device,
            images=None if model.shape.vision is None else image_reader(config.model.path),
            tower=model.vision is not None,
        )

    def length(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Tokens of the longest of these rows after padding."""
        return max(self._padded(int(self._lengths(micro).sum())) for micro in micro_batches)

    def make(self, micro: MicroBatch, longest: int) -> Row:
        """The row of a micro batch; `longest`: `length` of the pass that it is part of."""
        lengths = self._lengths(micro)
        filled = int(lengths.sum())
        row = longest if self.one_length else self._padded(filled)
        starts = np.cumsum(lengths) - lengths
        # Where in the row the micro batch's tokens are: sequences stay together, pads are behind each of them.
        places = np.arange(len(micro.ids)) + np.repeat(starts - micro.segments[:, 0], micro.segments[:, 1])
        segments = np.concatenate([np.stack([starts, lengths], 1), micro.segments[:, 2:]], 1)
        if row > filled:  # pads are a sequence of their own that nobody sees
            segments = np.concatenate([segments, [[filled, row - filled, 0, 0]]])
        tokens = self.part.tokens_of(segments[:, 1]) if self.engine else self.part.tokens(row)
        packed = (
            describe_row_for_engine(segments, self.device, self.part)
            if self.engine
            else describe_row(segments, self.device, self.part, varlen=self.varlen, padded=self.padded)
        )
        if micro.routed_experts is not None:
            routed = np.full((row, *micro.routed_experts.shape[1:]), UNKNOWN, micro.routed_experts.dtype)
            routed[places] = micro.routed_experts
            whole = router_replay.row_experts(routed, self.shape, row, self.device)
            packed.routed_experts = whole[self._moved(tokens)]
        ids, positions = np.zeros(row, micro.ids.dtype), np.zeros(row, micro.positions.dtype)
        ids[places], positions[places] = micro.ids, micro.positions
        positions[filled:] = np.arange(row - filled)
        rotary = positions[None]
        if micro.images:
            rotary = self._with_images(micro, places, rotary, tokens, packed)
        return Row(
            ids=self._moved(ids[tokens])[None],
            positions=self._moved(rotary),
            packed=packed,
            targets=self._targets(micro, places[micro.targets], tokens),
        )

    def _with_images(
        self, micro: MicroBatch, places: np.ndarray, positions: np.ndarray, tokens: np.ndarray, packed: PackedRow
    ) -> np.ndarray:
        """Positions int64 [3, T] of the row with images, which `packed` then has for the tower.

        places: int64, of the micro batch's tokens in the row; positions: int64 [1, T], of text alone; tokens: places in
        the row of this rank's tokens. Raises ValueError for images that do not fit their prompt.
        """
        vision = self.shape.vision
        assert vision is not None
        assert self.images is not None
        positions = np.repeat(positions, 3, 0)
        pixels, found = [], []
        for segment, files in micro.images:
            start, length, *_ = micro.segments[segment]
            given = self.images.read_all(files)
            grids = np.stack([each.grid for each in given])
            own = places[start : start + length]
            positions[:, own], image_tokens = place_images(micro.ids[start : start + length], grids, vision)
            behind = micro.segments[(micro.segments[:, 2] == start) & (micro.segments[:, 3] > 0)]
            for answer, count, *_ in behind:
                positions[:, places[answer : answer + count]] += positions[:, own].max() + 1 - length
            pixels += given
            found.append(own[image_tokens])
        if self.tower:
            where = _where_in(tokens, np.concatenate(found), len(positions[0]))
            mine = np.flatnonzero(where >= 0)
            packed.images = RowImages(
                pixels=self._moved(np.concatenate([each.values for each in pixels])),
                grids=self._moved(np.stack([each.grid for each in pixels])),
                places=self._moved(where[mine]),
                features=self._moved(mine),
            )
        return positions

    def _lengths(self, micro: MicroBatch) -> np.ndarray:
        """Tokens of each sequence with its pads, int64 [B]."""
        return -(-micro.segments[:, 1] // self.sequence_multiple) * self.sequence_multiple

    def _padded(self, length: int) -> int:
        return math.ceil(max(length, self.fixed) / self.multiple) * self.multiple

    def _targets(self, micro: MicroBatch, targets: np.ndarray, tokens: np.ndarray) -> Targets:
        """targets: int64 [N], places in the row; tokens: places in the row of this rank's tokens."""
        if self.part.ranks == 1:
            positions, chosen, drawn, places = targets, micro.tokens, micro.temperature, None
            kept = micro.kept
        else:
            positions = _where_in(tokens, targets, self.part.ranks * len(tokens))
            mine = positions >= 0
            positions, chosen, drawn = positions[mine], micro.tokens[mine], micro.temperature[mine]
            places = self._moved(np.flatnonzero(mine))
            kept = None if micro.kept is None else micro.kept.where(mine)
        return Targets(
            positions=self._moved(positions),
            tokens=self._moved(chosen),
            temperature=float(drawn[0]) if _is_one(drawn) else self._moved(drawn),
            entropy_gradient=self.entropy_gradient,
            places=places,
            total=len(micro.targets),
            kept=None if kept is None else Kept.of(kept, self.device),
        )

    def _moved(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _where_in(tokens: np.ndarray, places: np.ndarray, row: int) -> np.ndarray:
    """Where tokens at `places` of a row of so many are in a slice with `tokens`; -1: in another one."""
    found = np.full(row, -1)
    found[tokens] = np.arange(len(tokens))
    return found[places]


def _is_one(temperatures: np.ndarray) -> bool:
    """All tokens were drawn at the same temperature: no tensor of them is needed."""
    return len(temperatures) > 0 and bool((temperatures == temperatures[0]).all())
