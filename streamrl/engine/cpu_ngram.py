"""Stand-ins for what SGLang's drafts by `ngram` need of a GPU, on a machine without one: the same draws, slowly.

SGLang 0.5.23 has kernels for CPUs, in a build that is not published, attention to a tree of drafts with AMX alone, and
on a CPU it keeps what is most probable, whatever the temperature. Here tokens are drawn as on a GPU:

    node ─▶ a coin: the child whose part of [0, 1) it falls into, by the policy's probabilities ─▶ its children, ...
         └▶ none: one of the other tokens, by what is left ─▶ the end

Speed says nothing about a GPU. Drafts of a model have no stand-in.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# SGLang moves what drafts have computed by a kernel, or so.
NATIVE_MOVE = {"SGLANG_NATIVE_MOVE_KV_CACHE": "1"}


def install() -> None:
    """Put them in place in this process, before SGLang's workers are made."""
    from sglang.kernels.ops.speculative import cache_locs, eagle, reconstruct_tree
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import eagle_utils

    os.environ.update(NATIVE_MOVE)
    MHATokenToKVPool._init_kv_copy_and_warmup = _leave_kernel
    allocation.assign_req_to_token_pool_cpu = write_slots
    cache_locs.assign_extend_cache_locs_cpu = read_slots
    eagle.fill_accept_out_cache_loc_cpu = pack_slots
    reconstruct_tree.reconstruct_indices_from_tree_mask = link_tree
    eagle_utils._verify_uses_greedy = _never
    eagle_utils.tree_speculative_sampling_target_only = draw_from_trees
    eagle_utils.top_k_renorm_prob, eagle_utils.top_p_renorm_prob = keep_top_k, keep_top_p
    TorchNativeAttnBackend.forward_extend = _attending_trees(TorchNativeAttnBackend.forward_extend)


def _leave_kernel(pool: Any) -> None:
    pool._kv_copy_config = None


def _never(**kwargs: Any) -> bool:
    return False


def write_slots(  # noqa: PLR0917 (SGLang's signature)
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """Into `table` [requests, width], from `starts` to `ends` [B] of each of `requests` [B]: `slots`, one by one."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def read_slots(  # noqa: PLR0917 (SGLang's signature)
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """The other way round, into `slots`."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[taken : taken + end - start] = table[request, start:end].to(slots.dtype)
        taken += end - start


def pack_slots(kept: Tensor, slots: Tensor, packed: Tensor) -> None:
    """Into `packed`: of `slots` those at the places `kept`, one behind the other; -1 is none."""
    places = kept.flatten()
    found = slots[places[places >= 0].long()]
    packed[: found.numel()] = found.to(packed.dtype)


def link_tree(  # noqa: PLR0917 (SGLang's signature)
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch: int,
    size: int,
) -> None:
    """Links of trees of drafts, into four tensors: `mask` [B * size * size] as in `ngram_drafts.without_twins`.

    `positions` [B * size]: of each node in its sequence, which has `lengths` [B] tokens before. `index` [B, size]: the
    number of each node. `next_token` and `next_sibling` [B, size]: a node's first child, and the next child of its
    parent; -1: none.
    """
    import torch

    ancestors = mask.view(batch, size, size).bool().tril(-1)
    positions.view(batch, size).copy_(ancestors.sum(-1) + lengths.view(batch, 1))
    index.copy_(torch.arange(batch * size).view(batch, size))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for tree in range(batch):
        last_child: dict[int, int] = {}
        for node in range(1, size):
            parent = int(ancestors[tree, node].nonzero()[-1])
            if parent in last_child:
                next_sibling[tree, last_child[parent]] = node
            else:
                next_token[tree, parent] = node
            last_child[parent] = node


def draw_from_trees(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    **others: Any,
) -> None:
    """Draw by the policy's `target_probs` [B, size, vocabulary] and keep the drafts that are drawn.

    Into `predicts` [B * size]: what follows the last token and each kept draft, at their places. Into `accept_index`
    [B, depth]: the place of the last token, and of each kept draft. Into `accept_token_num` [B]: how many are kept.
    `candidates` [B, size]: the last token, and drafts. With thresholds of 1, as SGLang's kernel.
    """
    depth = accept_index.shape[1]
    for tree, probabilities in enumerate(target_probs):
        node, kept = 0, 0
        accept_index[tree, 0] = retrive_index[tree, 0]
        left = probabilities[0].clone()
        while kept < depth - 1:
            child, passed = int(retrive_next_token[tree, node]), 0.0
            while child != -1:
                token = int(candidates[tree, child])
                passed += float(probabilities[node, token])
                if probabilities[node, token] > 0 and float(uniform_samples[tree, node]) < passed:
                    break
                left[token] = 0
                child = int(retrive_next_sibling[tree, child])
            if child == -1:
                break
            predicts[retrive_index[tree, node]] = token
            node, kept = child, kept + 1
            accept_index[tree, kept] = retrive_index[tree, node]
            left = probabilities[node].clone()
        sums = left.cumsum(0)
        drawn = int((sums <= uniform_samples_for_final_sampling[tree] * sums[-1]).sum())
        predicts[retrive_index[tree, node]] = min(drawn, int(left.nonzero()[-1]))
        accept_token_num[tree] = kept


def keep_top_k(probabilities: Tensor, k: Tensor) -> Tensor:
    """The `k` [N] most probable of `probabilities` [N, vocabulary], of each row; they add up to 1."""
    ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
    return _kept(ordered * (_ranks(ordered) < k.view(-1, 1)), places)


def keep_top_p(probabilities: Tensor, p: Tensor) -> Tensor:
    """The fewest of the most probable that have `p` [N] together; they add up to 1."""
    ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
    return _kept(ordered * (ordered.cumsum(-1) - ordered < p.view(-1, 1)), places)


def _ranks(ordered: Tensor) -> Tensor:
    import torch

    return torch.arange(ordered.shape[-1]).expand_as(ordered)


def _kept(ordered: Tensor, places: Tensor) -> Tensor:
    import torch

    kept = torch.zeros_like(ordered).scatter(-1, places, ordered)
    return kept / kept.sum(-1, keepdim=True)


def _attending_trees(native: Any) -> Any:
    signature = inspect.signature(native)

    def forward_extend(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        if not asked["forward_batch"].forward_mode.is_target_verify():
            return native(self, *args, **kwargs)
        if asked["save_kv_cache"] and asked["k"] is not None:
            _save(self, asked)
        return _attend_trees(self, asked["q"], asked["layer"], asked["forward_batch"])

    return forward_extend


def _save(backend: Any, asked: Mapping[str, Any]) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    where = KVWriteLoc(asked["forward_batch"].out_cache_loc, backend.swa_out_cache_loc)
    backend.token_to_kv_pool.set_kv_buffer(asked["layer"], where, asked["k"], asked["v"])


def _attend_trees(backend: Any, q: Tensor, layer: Any, batch: Any) -> Tensor:
    """Each draft attends to the sequence before the tree, and to what is above it there."""
    import torch

    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    size = batch.spec_info.draft_token_num
    trees = batch.spec_info.custom_mask[: batch.batch_size * size * size].view(-1, size, size).bool()
    queries = q.view(-1, size, layer.tp_q_head_num, layer.qk_head_dim)
    outputs = q.new_empty(len(queries), size, layer.tp_q_head_num, layer.v_head_dim)
    window = layer.sliding_window_size
    for place, (request, length) in enumerate(
        zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    ):
        slots = backend.req_to_token_pool.req_to_token[request, : length + size]
        seen = torch.cat([torch.ones(size, length, dtype=torch.bool), trees[place]], 1)
        if window is not None and window > -1:
            depth = length + trees[place].sum(-1) - 1
            at = torch.cat([torch.arange(length), depth])
            seen &= at >= depth.view(-1, 1) - window
        outputs[place] = torch.nn.functional.scaled_dot_product_attention(
            queries[place].movedim(0, 1)[None],
            keys[slots].movedim(0, 1)[None].to(q.dtype),
            values[slots].movedim(0, 1)[None].to(q.dtype),
            attn_mask=seen,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )[0].movedim(1, 0)
    return outputs.view(len(q), -1)
