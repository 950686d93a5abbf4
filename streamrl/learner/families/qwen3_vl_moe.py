"""The family `qwen3_vl_moe`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families.base import Entry
from streamrl.learner.families.qwen3_vl import Qwen3VL
from streamrl.learner.shape import MoeShape

if TYPE_CHECKING:
    from streamrl.learner.mapping import Cut


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL with mixtures of experts, whose weights always sum to 1.

    A folder has each matrix of a layer's experts in one tensor, turned, with the gate in front of the up projection.
    """

    architectures = ("Qwen3VLMoeForConditionalGeneration",)
    experts = True
    head_dim = None
    in_an_expert: ClassVar[Mapping[str, Entry]] = {
        "linear_fc1": ("turned_gate_up", ("mlp.experts.gate_up_proj",)),
        "linear_fc2": ("turned", ("mlp.experts.down_proj",)),
    }

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        return super().read_experts(path, {**config, "norm_topk_prob": True})

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        from streamrl.learner.mapping import Cut

        def turn(_: Any, pieces: Any) -> Any:
            (piece,) = pieces
            return piece.t()

        return {
            "turned_gate_up": Cut(1, turn, lambda _, part: [part.t()], turned=True, blocks=(1, 1)),
            "turned": Cut(0, turn, lambda _, part: [part.t()], turned=True),
        }
