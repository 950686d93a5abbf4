"""The loss as its equations read, one token at a time in float64: what streamrl.algo is compared with.

Nothing here is shared with the code that it judges, save the batch and the settings. It also counts how many
tokens took each branch, so that a comparison that misses one is seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamrl.algo.tokens import TokenBatch
from streamrl.config.algo import AlgoConfig

EDGES = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
SIDES = ["A>0 below", "A>0 inside", "A>0 above", "A<0 below", "A<0 inside", "A<0 above"]
CAPPED = ("clip",)  # of `proximal: behaviour`: f / q caps the ratio; others bound it themselves
DPPO = ["A>0 masked", "A>0 kept", "A<0 masked", "A<0 kept", "ratio capped"]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token that enters the loss. Only `logprob` and `entropy` carry gradient."""

    logprob: Tensor
    entropy: Tensor | None
    mu: float
    old: float  # log pi_old
    advantage: float
    staleness: int
    sample: int
    reference: float | None
    full_kl: Tensor | None
    teacher: float | None
    outlier: bool
    covariant: bool

    @property
    def pi(self) -> float:
        return self.logprob.item()


def slow_loss(batch: TokenBatch, c: AlgoConfig, tokens: int, samples: int) -> tuple[Tensor, Counter[str]]:
    """The loss, a scalar with gradient, and how many tokens took each branch that `c` has.

    tokens, samples: the counts that the mean is over.
    """
    trained = [t for t in range(len(batch.mask)) if batch.mask[t]]
    lengths = Counter(int(batch.sample[t]) for t in trained)
    measured = [t for t in trained if math.isfinite(batch.behaviour[t])]
    counts: Counter[str] = Counter(dict.fromkeys(branches(c), 0))
    counts["dropped"] = len(trained) - len(measured)
    rows = _tokens(batch, measured, c)
    siblings: dict[int, list[Token]] = {}
    for row in rows:
        siblings.setdefault(row.sample, []).append(row)
    of_sample = {"gspo": _geometric_ratio, "gmpo": lambda of: _clipped_geometric_ratio(of, c)}.get(c.loss)
    sample_ratio = {sample: of_sample(of) for sample, of in siblings.items()} if of_sample else {}
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        if row.teacher is not None and c.distillation.teacher is not None:
            counts["pi above teacher" if row.pi > row.teacher else "pi below teacher"] += 1
        w = _weight(row, siblings[row.sample], c, counts, batch.mean_weight)
        surrogate = _surrogate(row, sample_ratio.get(row.sample), c, counts)
        loss = -w * surrogate + _further(row, c, counts)
        total = total + loss / _divisor(c, tokens, samples, lengths[row.sample])
    return total, counts


def branches(c: AlgoConfig) -> list[str]:
    """The names of the branches that tokens can take under `c`."""
    names = {
        "clip": SIDES,
        "gmpo": SIDES,
        "gspo": SIDES,
        "cispo": ["below", "inside", "above"],
        "sapo": ["A>0 gate", "A<=0 gate"],
        "reinforce": ["A>0", "A<0"],
        "gpg": ["A>0", "A<0"],
        "dro": ["log r below A / tau", "log r above A / tau"],
        "dppo_tv": DPPO,
        "dppo_kl": DPPO,
    }[c.loss]
    if c.dual_clip is not None:
        names = [*names, "dual bound"]
    if c.weight != "none" and not _left_alone(c):
        names = [*names, "capped", "not capped"]
    for rule in rules(c):
        names = [*names, f"{rule} masked", f"{rule} kept"]
    if c.covariance != "none":
        names = [*names, f"{c.covariance} taken", f"{c.covariance} left"]
    if c.discount < 1:
        names = [*names, "fresh", "discounted"]
    if c.ratio_penalty:
        names = [*names, "pi above old", "pi below old"]
    if c.kl:
        names = [*names, "pi above ref", "pi below ref"]
        if c.kl_estimator == "k3_clamped":
            names = [*names, "at the limit"]
    if c.distillation.teacher is not None:
        names = [*names, "pi above teacher", "pi below teacher"]
    return [*names, "dropped"]


def _left_alone(c: AlgoConfig) -> bool:
    """Whether the loss is as published, with no weight."""
    return c.proximal == "behaviour" and c.loss not in (*CAPPED, "reinforce")


def rules(c: AlgoConfig) -> dict[str, tuple[float | None, float | None]]:
    """The masks of `c` in order, with the edges that it gives."""
    given = {c.mask: (c.mask_low, c.mask_high)} | {each.mask: (each.mask_low, each.mask_high) for each in c.more_masks}
    return {name: edges for name, edges in given.items() if name != "none"}


def slow_mean_weight(batch: TokenBatch, c: AlgoConfig) -> float:
    """`weight_normalise`: the mean of the truncated weights of a step, of tokens or of samples."""
    measured = [t for t in range(len(batch.mask)) if batch.mask[t] and math.isfinite(batch.behaviour[t])]
    rows = _tokens(batch, measured, c)
    if c.weight == "token":
        weights = [_truncated(_exp(row.old - row.mu), row.staleness, c) for row in rows]
    else:
        weights = []
        for sample in sorted({row.sample for row in rows}):
            siblings = [row for row in rows if row.sample == sample]
            product = _exp(sum(row.old - row.mu for row in siblings))
            weights.append(_truncated(product, max(row.staleness for row in siblings), c))
    return sum(weights) / len(weights)


def slow_outliers(log_rho: Sequence[float], limit: float) -> list[bool]:
    """`mask: second_moment`: while the mean square of what is left is too large, the largest goes."""
    left = sorted((value**2 for value in log_rho), reverse=True)
    while left and sum(left) / len(left) > limit:
        largest = left[0]
        left = [square for square in left if square < largest]
    return [value**2 not in left for value in log_rho]


def slow_covariant(scores: Tensor, batch: TokenBatch, place: Tensor, step: int, c: AlgoConfig) -> list[bool]:
    """`covariance`: which of all N tokens of a step `c` acts on. scores, place: [N]; every token is trained."""
    measured = [t for t in range(len(scores)) if math.isfinite(batch.behaviour[t])]
    advantages = {t: _advantage(batch, t, scores[t].item(), c) for t in measured}
    mean_a = sum(advantages.values()) / len(measured)
    mean_l = sum(scores[t].item() for t in measured) / len(measured)
    covariance = {t: (advantages[t] - mean_a) * (scores[t].item() - mean_l) for t in measured}
    count = max(int(c.covariance_share * len(measured)), 1)
    if c.covariance == "kl_cov":
        chosen = sorted(measured, key=lambda t: -covariance[t])[:count]
    else:
        lot = torch.randperm(int(place.max()) + 1, generator=torch.Generator().manual_seed(step)).tolist()
        inside = [t for t in measured if c.covariance_low < covariance[t] < c.covariance_high]
        inside = [t for t in inside if not _stopped(scores[t].item(), batch, t, c)]
        chosen = sorted(inside, key=lambda t: lot[int(place[t])])[:count]
    return [t in chosen for t in range(len(scores))]


def _stopped(score: float, batch: TokenBatch, t: int, c: AlgoConfig) -> bool:
    """Whether the clip has taken the token's gradient already at the start of the step."""
    mu, a = batch.behaviour[t].item(), _advantage(batch, t, score, c)
    r = _exp(score - _old(mu, score, score, int(batch.staleness[t]), c))
    high = c.dual_clip is not None and a < 0 and r > c.dual_clip
    if c.loss == "gmpo":
        return (a > 0 and math.log(r) > c.eps_high) or (a < 0 and math.log(r) < -c.eps_low)
    return c.loss == "clip" and ((a > 0 and r > 1 + c.eps_high) or (a < 0 and r < 1 - c.eps_low) or high)


def _advantage(batch: TokenBatch, t: int, pi: float, c: AlgoConfig) -> float:
    """A of one token: of its group, of the teacher, or of both."""
    of_group = batch.advantages[t].item()
    if c.distillation.teacher is None:
        return of_group
    assert batch.teacher is not None
    divergence = min(max(pi - batch.teacher[t].item(), -20.0), 20.0)
    return (of_group if c.distillation.rewards else 0.0) - c.distillation.coefficient * divergence


def _exp(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def _old(mu: float, pi: float, score: float | None, staleness: int, c: AlgoConfig) -> float:
    if c.proximal == "behaviour":
        return mu
    if c.proximal == "recompute":
        assert score is not None
        return score
    # Versions on a line from the token's own, 0: pi_old is the step's first one, or the one before, and pi one later.
    old = staleness if c.proximal == "interpolate" else max(staleness - 1, 0)
    return mu + old / (old + 1) * (pi - mu)


def _tokens(batch: TokenBatch, measured: list[int], c: AlgoConfig) -> list[Token]:
    logprobs = batch.logprobs.unbind()
    entropies = [None] * len(logprobs) if batch.entropy is None else batch.entropy.unbind()

    def at(tensor: Tensor | None, t: int, absent: Any) -> Any:
        return absent if tensor is None else tensor[t].item()

    return [
        Token(
            logprob=logprobs[t],
            entropy=entropies[t],
            mu=batch.behaviour[t].item(),
            old=_old(
                batch.behaviour[t].item(),
                batch.logprobs[t].item(),
                at(batch.proximal, t, None),
                int(batch.staleness[t]),
                c,
            ),
            advantage=_advantage(batch, t, batch.logprobs[t].item(), c),
            staleness=int(batch.staleness[t]),
            sample=int(batch.sample[t]),
            reference=at(batch.reference, t, None),
            full_kl=None if batch.full_kl is None else batch.full_kl[t],
            teacher=at(batch.teacher, t, None),
            outlier=at(batch.outliers, t, False),
            covariant=at(batch.covariant, t, False),
        )
        for t in measured
    ]


def _geometric_ratio(siblings: list[Token]) -> Tensor:
    mean = sum((row.logprob - row.old for row in siblings), torch.zeros((), dtype=torch.float64)) / len(siblings)
    return torch.exp(torch.clamp(mean, -20, 20))


def _clipped_geometric_ratio(siblings: list[Token], c: AlgoConfig) -> Tensor:
    """GMPO's: each log-ratio is clipped on the side that its advantage pushes it to, before the mean."""
    total = torch.zeros((), dtype=torch.float64)
    for row in siblings:
        log_r = torch.clamp(row.logprob - row.old, -20, 20)
        if row.advantage > 0:
            log_r = torch.clamp(log_r, max=c.eps_high)
        elif row.advantage < 0:
            log_r = torch.clamp(log_r, min=-c.eps_low)
        total = total + log_r
    return torch.exp(torch.clamp(total / len(siblings), -20, 20))


def _truncated(q: float, staleness: int, c: AlgoConfig) -> float:
    return min(q, 1 + (c.weight_cap - 1) * c.weight_gamma**staleness)


def _weight(row: Token, siblings: list[Token], c: AlgoConfig, counts: Counter[str], mean_weight: float | None) -> float:
    """w of one token."""
    behaviour = c.proximal == "behaviour"

    def correction(token: Token) -> float:
        return token.pi - token.mu if behaviour else token.old - token.mu

    product = sum(correction(token) for token in siblings)
    q = {
        "token": _exp(correction(row)),
        "sequence": _exp(product),
        "geometric": _exp(product / len(siblings)),
    }
    if _left_alone(c):
        w = 1.0
    elif c.weight == "none":
        f = q["token"] if behaviour else 1.0
        w = f / q["token"] if behaviour and c.loss != "reinforce" else f
    else:
        s = row.staleness if c.weight == "token" else max(token.staleness for token in siblings)
        f = _truncated(q[c.weight], s, c)
        counts["capped" if f < q[c.weight] else "not capped"] += 1
        w = f / q[c.weight] if behaviour and c.loss != "reinforce" else f
    if c.weight_normalise:
        assert mean_weight is not None
        w /= mean_weight
    masked = False
    for rule, (low, high) in rules(c).items():
        if rule == "second_moment":
            taken = row.outlier
        elif rule in EDGES:
            own_low, own_high = EDGES[rule]
            taken = not (own_low if low is None else low) <= q[rule] <= (own_high if high is None else high)
        else:
            assert high is not None
            taken = _distance(rule, correction(row), [correction(token) for token in siblings]) > high
        counts[f"{rule} {'masked' if taken else 'kept'}"] += 1
        masked = masked or taken
    if c.covariance != "none":
        counts[f"{c.covariance} {'taken' if row.covariant else 'left'}"] += 1
    if c.discount < 1:
        counts["discounted" if row.staleness else "fresh"] += 1
    if masked or (c.covariance == "clip_cov" and row.covariant):
        return 0.0
    return w * c.discount**row.staleness


def _distance(rule: str, own: float, of_sample: list[float]) -> float:
    """Of a mask by a divergence, `token_k2`, `sequence_max_k3`, ..."""
    over, k = rule.rsplit("_", 1)

    def each(d: float) -> float:
        d = min(max(d, -20.0), 20.0)
        return d * d / 2 if k == "k2" else math.exp(d) - 1 - d

    values = [each(d) for d in of_sample]
    return {
        "token": each(own),
        "sequence_sum": sum(values),
        "sequence_mean": sum(values) / len(values),
        "sequence_max": max(values),
    }[over]


def _surrogate(  # noqa: PLR0911
    row: Token, sample_ratio: Tensor | None, c: AlgoConfig, counts: Counter[str]
) -> Tensor:
    """S of one token."""
    a, low, high = row.advantage, 1 - c.eps_low, 1 + c.eps_high
    r = torch.exp(torch.clamp(row.logprob - row.old, -20, 20)) if sample_ratio is None else sample_ratio
    where = "below" if r < low else "above" if r > high else "inside"
    if c.loss in ("reinforce", "gpg"):
        counts["A>0" if a > 0 else "A<0"] += 1
        return a * row.logprob
    if c.loss == "dro":
        return _dro(row, c, counts)
    if c.loss in ("dppo_tv", "dppo_kl"):
        return _dppo(row, c, counts)
    if c.loss == "sapo":
        counts["A>0 gate" if a > 0 else "A<=0 gate"] += 1
        tau = c.sapo_positive if a > 0 else c.sapo_negative
        return 4 / tau / (1 + torch.exp(-tau * (r - 1))) * a
    if c.loss == "cispo":
        counts[where] += 1
        return min(max(r.item(), low), high) * a * row.logprob
    if c.loss == "gmpo":
        own = row.pi - row.old
        where = "below" if own < -c.eps_low else "above" if own > c.eps_high else "inside"
        counts[f"A{'>' if a > 0 else '<'}0 {where}"] += 1
        return r * a
    counts[f"A{'>' if a > 0 else '<'}0 {where}"] += 1
    unclipped, clipped = r * a, torch.clamp(r, low, high) * a
    surrogate = unclipped if unclipped < clipped else clipped
    if c.dual_clip is not None and a < 0 and surrogate < c.dual_clip * a:
        counts["dual bound"] += 1
        return torch.tensor(c.dual_clip * a, dtype=torch.float64)
    return surrogate


def _dro(row: Token, c: AlgoConfig, counts: Counter[str]) -> Tensor:
    """The regression of one token's log-ratio."""
    off = row.advantage - c.dro_temperature * torch.clamp(row.logprob - row.old, -20, 20)
    counts["log r below A / tau" if off > 0 else "log r above A / tau"] += 1
    return -off * off / (2 * c.dro_temperature)


def _dppo(row: Token, c: AlgoConfig, counts: Counter[str]) -> Tensor:
    """The masked surrogate of one token, by the two probabilities of "it" and "not it"."""
    a, r = row.advantage, _exp(row.pi - row.old)
    log_pi, log_old = min(row.pi, 0.0), min(row.old, 0.0)
    pi, old = math.exp(log_pi), math.exp(log_old)
    if c.loss == "dppo_tv":
        distance = abs(pi - old)
    else:
        distance = old * (log_old - log_pi) + (1 - old) * math.log((1 - old + 1e-8) / (1 - pi + 1e-8))
    side = "A>0" if a > 0 else "A<0"
    away = row.pi > row.old if a > 0 else row.pi < row.old
    if away and distance > (c.eps_high if a > 0 else c.eps_low):
        counts[f"{side} masked"] += 1
        return 0 * row.logprob
    counts[f"{side} kept"] += 1
    counts["ratio capped"] += r > c.ratio_cap
    return min(r, c.ratio_cap) * a * row.logprob


def estimate(d: Tensor, estimator: str) -> Tensor:
    """The divergence of one token, d = log pi_ref - log pi."""
    d = torch.clamp(d, -20, 20)
    k3 = torch.exp(d) - 1 - d
    return {"k1": -d, "abs": torch.abs(d), "k2": d * d / 2, "k3": k3, "k3_clamped": torch.clamp(k3, max=10)}[estimator]


def _further(row: Token, c: AlgoConfig, counts: Counter[str]) -> Tensor:
    """Penalties and bonus of one token."""
    terms = torch.zeros((), dtype=torch.float64)
    if c.covariance == "kl_cov" and row.covariant:
        terms = terms + c.covariance_kl * torch.abs(torch.clamp(row.logprob - row.old, -20, 20))
    if c.ratio_penalty:
        counts["pi above old" if row.pi > row.old else "pi below old"] += 1
        terms = terms + c.ratio_penalty * torch.clamp(row.logprob - row.old, -20, 20) ** 2
    if c.kl:
        assert row.reference is not None
        counts["pi above ref" if row.pi > row.reference else "pi below ref"] += 1
        d = row.reference - row.logprob
        divergence = row.full_kl if c.kl_estimator == "full" else estimate(d, c.kl_estimator)
        assert divergence is not None
        if c.kl_estimator == "k3_clamped":
            counts["at the limit"] += divergence.item() == 10
        if c.kl_straight_through:
            squares = estimate(d, "k2")
            divergence = divergence.detach() + squares - squares.detach()
        terms = terms + c.kl * divergence
    if c.entropy:
        assert row.entropy is not None
        terms = terms - c.entropy * row.entropy
    return terms


def _divisor(c: AlgoConfig, tokens: int, samples: int, length: int) -> int:
    if c.aggregation == "token_sum":
        return 1
    if c.aggregation == "token_mean":
        return tokens
    if c.aggregation == "sequence_sum":
        return samples
    if c.aggregation == "sequence_mean":
        return samples * length
    assert c.norm_length is not None
    return samples * c.norm_length
