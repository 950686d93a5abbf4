"""The family `glm4_moe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from streamrl.learner.families._sigmoid_experts import SigmoidExperts
from streamrl.learner.shape import ModelShape


class Glm4Moe(SigmoidExperts):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6. The layer of multi-token prediction is neither trained nor exported."""

    architectures = ("Glm4MoeForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    attention_bias = False
    rotary_part = 0.5

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        shape = super().read(path, config)
        unbuilt = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
        return replace(shape, qk_norm=config.get("use_qk_norm", False), unbuilt_layers=unbuilt)
