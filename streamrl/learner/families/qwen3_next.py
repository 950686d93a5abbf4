"""The family `qwen3_next`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._delta_nets import IN_A_DELTA_LAYER, IN_PROJ, DeltaNets, delta_of, key_heads
from streamrl.learner.families.base import Entry
from streamrl.learner.shape import ModelShape, MoeShape, need

if TYPE_CHECKING:
    from streamrl.learner.mapping import Cut

_SHARED = "mlp.shared_experts."


class Qwen3Next(DeltaNets):
    """Qwen3-Next: gated delta nets among gated attention, many experts beside a gated shared one."""

    architectures = ("Qwen3NextForCausalLM",)
    experts = True
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **IN_A_DELTA_LAYER,
        IN_PROJ: ("delta_in", ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")),
        f"{_SHARED}gate_weight": ("replicated", ("mlp.shared_expert_gate.weight",)),
        f"{_SHARED}linear_fc1.weight": (
            "gate_and_up",
            ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        ),
        f"{_SHARED}linear_fc2.weight": ("columns", ("mlp.shared_expert.down_proj.weight",)),
    }

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        moe = super().read_experts(path, {"norm_topk_prob": True, **config})
        if moe is None:
            return None
        need(path, config, "shared_expert_intermediate_size")
        return replace(moe, shared_ffn=config["shared_expert_intermediate_size"], shared_gate=True)

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        from streamrl.learner.mapping import by_group

        def gates(shape: ModelShape) -> int:
            """Rows of beta and alpha."""
            return 2 * delta_of(shape).values

        def rest(shape: ModelShape) -> int:
            return delta_of(shape).projected - gates(shape)

        # A folder has the rows of a key head together.
        rows = by_group(lambda shape: (rest(shape),), key_heads, lambda shape: (gates(shape),))
        return {**super().cuts(), "delta_in": rows}
