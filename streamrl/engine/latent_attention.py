"""What SGLang 0.5.23 lacks on a CPU machine without AMX for models with latent attention (DeepSeek-V3, Moonlight).

Its attention backend for such machines, `torch_native`, reads the latent cache, and its table of backends does not say
so: they would get heads that are made of it, in a prefill. And its rotary embedding for CPUs asks for a scaling.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from streamrl.engine.model_config import read


def is_latent(model: Path) -> bool:
    """Whether a Hugging Face folder has a model with latent attention."""
    return read(model).get("kv_lora_rank") is not None


def install() -> None:
    """In SGLang's process, before its model is built."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    method = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda attention, batch: method)
    scaled, parameters = factory.get_rope_cpu, inspect.signature(factory.get_rope_cpu)

    def get_rope_cpu(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        if given.get("rope_scaling") is not None:
            return scaled(*args, **kwargs)
        given.pop("device", None)
        return factory.get_rope(**given)

    factory.get_rope_cpu = get_rope_cpu
