"""What Transformer Engine's kernels compute, in torch: the forward passes of its modules, for wiring and numbers.

Each computes what the module's documentation says, not what its kernel does; sequences are `cu_seqlens` long, and under
context parallelism each is cut into 2 x ranks pieces, of which a rank has its own and the mirror image's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_utils
from torch import Tensor


def install(patch: pytest.MonkeyPatch) -> None:
    """Let Transformer Engine's modules and its fused RoPE compute on the CPU."""
    patch.setattr(te.Linear, "forward", _linear)
    patch.setattr(te.LayerNormLinear, "forward", _norm_and_linear)
    patch.setattr(te.RMSNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.eps))
    patch.setattr(te.GroupedLinear, "forward", _grouped)
    patch.setattr(te.DotProductAttention, "forward", _attention)
    patch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", _rope)
    patch.setattr(moe_utils, "te_general_gemm", None)


def _linear(self: te.Linear, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
    """With what crosses tensor-parallel ranks before the layer that cuts its outputs, and behind the other one."""
    if self.parallel_mode == "column" and self.tp_size > 1:
        spread = (
            gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        x = spread(x, group=self.tp_group)
    output = F.linear(x, self.weight, self.bias if self.use_bias else None)
    if self.parallel_mode == "row" and self.tp_size > 1:
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        output = reduce(output, group=self.tp_group)
    return output


def _norm_and_linear(self: te.LayerNormLinear, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
    return _linear(self, F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


def _grouped(self: te.GroupedLinear, x: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Tensor:
    weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(list(m_splits)), weights, strict=True)])


def _rope(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """[t, heads, d] of this rank's slice, turned by the angles of each token's place in its sequence."""
    angles = []
    for length in cu_seqlens.diff().tolist():
        pieces = freqs[:length].chunk(2 * cp_size)
        angles += [pieces[cp_rank], pieces[-1 - cp_rank]] if cp_size > 1 else [freqs[:length]]
    turned = torch.cat(angles)  # [t, 1, 1, d]
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), turned, rotary_interleaved=False).squeeze(1)


def _attention(
    self: te.DotProductAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    qkv_format: str,
    attn_mask_type: str,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    **rest: Any,
) -> Tensor:
    """[t, heads, d] of this rank's slice -> [t, heads * d]: causal in each sequence."""
    assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
    lengths = cu_seqlens_q.diff().tolist()
    assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
    assert max(lengths) == max_seqlen_q == max_seqlen_kv
    group = self.cp_group
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    if ranks > 1:
        # What Transformer Engine asserts of a packed row that is cut.
        assert cu_seqlens_q_padded is not None
        assert cu_seqlens_kv_padded is not None
        assert all(length % (2 * ranks) == 0 for length in lengths)
    assert len(query) == sum(lengths) // ranks
    outputs, start = [], 0
    for length in lengths:
        own = slice(start, start + length // ranks)
        q, k, v = query[own], *(_of_all_ranks(x[own], group, ranks) for x in (key, value))
        places = _places(length, ranks, rank).to(q.device)
        mask = torch.arange(length) <= places[:, None]
        scale = self.flash_attention.softmax_scale
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1).flatten(1))
        start = own.stop
    return torch.cat(outputs)


def _places(length: int, ranks: int, rank: int) -> Tensor:
    """Where in its sequence each token of this rank's part of it is."""
    if ranks == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[-1 - rank]])


def _of_all_ranks(part: Tensor, group: dist.ProcessGroup | None, ranks: int) -> Tensor:
    """A sequence's keys or values, [length, heads, d], in its own order, with gradient."""
    if ranks == 1:
        return part
    gathered = gather_from_sequence_parallel_region(part.contiguous(), group=group)
    order = torch.cat([_places(len(gathered), ranks, rank) for rank in range(ranks)])
    return gathered.index_select(0, torch.argsort(order))
