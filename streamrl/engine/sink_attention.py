"""What SGLang 0.5.23 lacks on a CPU machine without AMX for models with attention sinks (gpt-oss).

Its attention backend for such machines, `torch_native`, has no sinks, and SGLang refuses it for them by name. Here a
sink is one more key, whose score is the sink and whose value is zero. Sinks are in float32; SGLang's are in bfloat16,
whatever the model's dtype is. Drafts are refused: what replaces their attention has no sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.engine.model_config import architectures

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = "GptOssForCausalLM"

# `torch_native` looks keys up by places of the whole cache, which are not those of a cache of windows.
ARGUMENTS = ("--disable-hybrid-swa-memory",)

# A backend that SGLang takes for models with sinks; its name is given where it asks for that of torch_native.
ACCEPTED = "intel_amx"


def has_sinks(model: Path) -> bool:
    """Whether a Hugging Face folder has a model with attention sinks."""
    return ARCHITECTURE in architectures(model)


def install() -> None:
    """In SGLang's process, before its arguments are read and its model is built."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.gpt_oss import GptOssAttention

    chosen = model_hook.attention_backends_of

    def attention_backends_of(arguments: Any) -> tuple[str | None, ...]:
        return tuple(ACCEPTED if name == "torch_native" else name for name in chosen(arguments))

    model_hook.attention_backends_of = attention_backends_of
    TorchNativeAttnBackend.forward_extend = _with_sinks(TorchNativeAttnBackend.forward_extend)
    TorchNativeAttnBackend.forward_decode = _with_sinks(TorchNativeAttnBackend.forward_decode)
    TorchNativeAttnBackend._run_sdpa_forward_extend = extend
    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
    GptOssAttention.__init__ = _in_float32(GptOssAttention.__init__)


def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Attention [t, h, v] of the last t tokens of a sequence, query [t, h, d], to key [s, g, d] and value [s, g, v].

    sinks [h]. window: how many tokens before its own a token sees; None: all.
    """
    import torch

    tokens, length = len(query), len(key)
    distance = torch.arange(length - tokens, length)[:, None] - torch.arange(length)
    unseen = (distance < 0) | (distance > (length if window is None else window))
    scores = torch.zeros(tokens, length).masked_fill(unseen, -torch.inf).expand(len(sinks), -1, -1)
    scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, tokens, 1)], -1).to(query.dtype)
    key, value = (torch.nn.functional.pad(each.to(query.dtype), (0, 0, 0, 0, 0, 1)) for each in (key, value))
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=scores[None], scale=scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def extend(  # noqa: PLR0917 (as SGLang calls it)
    self: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    *_: Any,
    scaling: float,
    sliding_window_size: int | None,
    **__: Any,
) -> None:
    """In the place of TorchNativeAttnBackend's: into `output` [t, h, v], for the new tokens of each sequence."""
    ends = extend_seq_lens.cumsum(0).tolist()
    for request, length, count, end in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), ends, strict=True
    ):
        places, own = req_to_token[request, :length], slice(end - count, end)
        seen = k_cache[places], v_cache[places]
        output[own] = attend(query[own], *seen, self.sinks, scale=scaling, window=sliding_window_size)


def decode(  # noqa: PLR0917 (as SGLang calls it)
    self: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *others: Any,
    **named: Any,
) -> None:
    """`extend` for one further token of each sequence."""
    one = seq_lens.new_ones(len(seq_lens))
    extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        seq_lens - one,
        one,
        *others,
        **named,
    )


def _with_sinks(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A backend's method that takes a layer's sinks."""

    def forward(  # noqa: PLR0917
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor,
    ) -> Tensor:
        self.sinks = sinks
        return method(self, q, k, v, layer, forward_batch, save_kv_cache)

    return forward


def _in_float32(initialise: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self.sinks.data = self.sinks.data.float()

    return __init__
