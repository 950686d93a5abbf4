"""The gated delta rule (arXiv 2412.06464): a state of keys and values that forgets, and corrects what a key recalls.

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q / sqrt(width of a key)

By chunks: within one, what each token writes is the solution of a triangular system (WY form, section 3.2 there); from
one to the next the state alone is carried.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # tokens


def delta_rule(  # noqa: PLR0917 (as in the formula)
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """query, key [n, t, h, k], value [n, t, h, v], decay (g, at most 0) and beta [n, t, h], state [n, h, k, v] (None:
    zeros), float32 -> outputs [n, t, h, v], the state behind the last token.

    A token of decay 0 and beta 0 leaves the state as it is: such are pads.
    """
    tokens = query.size(1)
    chunk = min(CHUNK, tokens)
    query = query * query.size(-1) ** -0.5
    query, key, value = (_chunks(x, chunk) for x in (query, key, value))  # [n, h, c, chunk, width]
    decay, beta = (_chunks(x.unsqueeze(-1), chunk) for x in (decay, beta))  # [n, h, c, chunk, 1]
    total = decay.cumsum(3)  # from the beginning of a chunk
    # [.., q, k]: what decays between a token and a later one, summed for each pair by itself: a difference of two sums
    # from the beginning loses what is small beside them, in the gradient of the decay above all.
    between = decay.expand(*decay.shape[:-1], chunk).tril(-1).cumsum(-2)
    kept = between.exp().tril()  # of what a token wrote, at another
    recalled = (beta * (key @ key.transpose(3, 4)) * kept).tril(-1)
    system = recalled + torch.eye(chunk, dtype=key.dtype, device=key.device)
    right = beta * torch.cat([value, total.exp() * key], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, of_state = solved.split([value.size(-1), key.size(-1)], -1)
    scores = (query @ key.transpose(3, 4)) * kept
    query = query * total.exp()
    last = total[:, :, :, -1:]
    key = key * between[:, :, :, -1].exp().unsqueeze(-1)
    if state is None:
        state = key.new_zeros(*key.shape[:2], key.size(-1), value.size(-1))
    outputs = []
    for place in range(query.size(2)):
        written = own[:, :, place] - of_state[:, :, place] @ state
        outputs.append(query[:, :, place] @ state + scores[:, :, place] @ written)
        state = last[:, :, place].exp() * state + key[:, :, place].transpose(2, 3) @ written
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2), state


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[n, t, h, d] -> [n, h, chunks, chunk, d], zeros behind the last token."""
    x = pad(x, (0, 0, 0, 0, 0, -x.size(1) % chunk))
    return x.transpose(1, 2).unflatten(2, (-1, chunk))
