"""TRL's own `GRPOTrainer._compute_loss` on given log-probs, and streamrl's loss on the same.

The method is called unbound on a stub that holds the settings it reads; its model call is replaced by the
log-probs and entropies under test, so that everything after the forward pass is TRL's code.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.diagnostics import finish
from streamrl.algo.losses import policy_loss
from streamrl.algo.tokens import TokenBatch
from streamrl.config.algo import AlgoConfig

ROWS, COLUMNS, NORM_LENGTH = 6, 9, 12
TRL_LOSS = {"token_mean": ("dapo", "bnpo"), "sequence_mean": ("grpo",), "sequence_sum_norm": ("dr_grpo",)}


DRIFT = (0.2, 0.35, -0.3, 0.0, 0.2, 0.6)  # of whole rows, with which their geometric means take every branch of gspo


def rectangular(spread: float = 0.6, drift: float = 0.0) -> dict[str, Tensor]:
    """[ROWS, COLUMNS] log-probs, entropies and right-padded mask; [ROWS] advantages of both signs."""
    random = torch.Generator().manual_seed(4)
    old = -torch.rand(ROWS, COLUMNS, generator=random, dtype=torch.float64) * 3 - 0.1
    noise, other = (torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64) for _ in range(2))
    lengths = torch.tensor([9, 4, 7, 1, 8, 6])
    return {
        "logprobs": (old + spread * noise + drift * torch.tensor(DRIFT)[:, None]).requires_grad_(),
        "entropy": torch.rand(ROWS, COLUMNS, generator=random, dtype=torch.float64).requires_grad_(),
        "old": old,
        "reference": old + spread * other,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, -0.3, 0.9], dtype=torch.float64),
        "mask": torch.arange(COLUMNS) < lengths[:, None],
    }


def trl_loss(
    data: dict[str, Tensor], loss_type: str, config: AlgoConfig, old: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, dict[str, list[float]]]:
    """TRL's loss and metrics. loss_type: TRL's name of family and aggregation; old: [ROWS, COLUMNS], log pi_old;
    weight: like it, the importance ratio that TRL multiplies with."""
    cispo = config.loss == "cispo"
    stub: Any = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (data["logprobs"], data["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if config.loss == "gspo" else "token",
        beta=config.kl,
        loss_type=loss_type,
        epsilon_low=config.eps_low,
        epsilon_high=1 + config.eps_high if cispo else config.eps_high,  # TRL's cispo takes the edge itself
        args=SimpleNamespace(
            delta=config.dual_clip,
            steps_per_generation=1,
            use_bias_correction_kl=False,
            sapo_temperature_pos=config.sapo_positive,
            sapo_temperature_neg=config.sapo_negative,
        ),
        use_vllm=weight is not None,
        vllm_importance_sampling_correction=weight is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=NORM_LENGTH,
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _entropy_bonus_enabled=config.entropy != 0,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, COLUMNS, dtype=torch.int64),
        "completion_mask": data["mask"].double(),
        "advantages": data["advantages"],
        "old_per_token_logps": old,
        "ref_per_token_logps": data["reference"],
        "num_items_in_batch": data["mask"].sum(),
        "importance_sampling_ratio": weight,
    }
    from trl import GRPOTrainer  # imported here because it takes seconds

    return GRPOTrainer._compute_loss(stub, None, inputs), stub._metrics["train"]


def streamrl_loss(data: dict[str, Tensor], config: AlgoConfig, staleness: int) -> tuple[Tensor, dict[str, float]]:
    """streamrl's loss and metrics on the same tokens."""
    batch = token_batch(data, staleness)
    loss, sums = policy_loss(batch, config, Denominators.of(data["mask"]))
    return loss, finish(sums)


def token_batch(data: dict[str, Tensor], staleness: int) -> TokenBatch:
    """The tokens of `rectangular`, flat."""
    rows = torch.arange(ROWS)[:, None].expand(ROWS, COLUMNS)
    return TokenBatch(
        logprobs=data["logprobs"].flatten(),
        entropy=data["entropy"].flatten(),
        behaviour=data["old"].flatten(),
        advantages=data["advantages"][rows].flatten(),
        mask=data["mask"].flatten(),
        staleness=torch.full((ROWS * COLUMNS,), staleness),
        sample=rows.flatten(),
        samples=ROWS,
        reference=data["reference"].flatten(),
    )
