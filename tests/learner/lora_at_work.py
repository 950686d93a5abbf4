"""What ranks do for the tests of LoRA: `lora_at_work.py CASES.json OUT`, one case after another in the same processes.

A case is a configuration, a run folder and a port. Of each: the adapters that the run starts from or resumes with,
their gradient on one batch, both as PEFT has them, and the merged weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from learner_parts import make_batch
from megatron.core import parallel_state
from torch import Tensor

from streamrl.config import Config
from streamrl.learner import lora
from streamrl.learner.forward import Passes
from streamrl.learner.huggingface import export_weights
from streamrl.learner.lora_folder import export_adapters
from streamrl.learner.packing import plan_batch
from streamrl.learner.trainer import Trainer

ADVANTAGES = [0.5 - index % 3 for index in range(12)]  # of make_batch()'s samples
ENTROPY = 0.1  # weight of the entropies


def loss_of(logprobs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    """A loss whose slow form fits on a line."""
    return -(advantages * logprobs).sum() - ENTROPY * entropy.sum()


def adapter_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradient of `loss_of` on `make_batch()`, of every adapter, under PEFT's names. Spoils the adapters."""
    plan = plan_batch(make_batch(), ADVANTAGES, trainer._packing)
    micro_batches = plan[parallel_state.get_data_parallel_rank()]

    def loss(logprobs: Tensor, entropy: Tensor, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_of(logprobs, entropy, torch.from_numpy(micro_batches[index].advantages)), {}

    Passes(trainer._wrapped, trainer._ranks, trainer._config).forward_backward(micro_batches, loss)
    for _, module in lora.adapters(trainer._chunks):
        for name in lora.PARAMETERS:
            parameter: Any = getattr(module, name)
            parameter.data.copy_(parameter.main_grad)
    return {name: tensor.clone() for name, tensor in export_adapters(trainer._chunks)}


def frozen_with_gradient(trainer: Trainer) -> list[str]:
    """Parameters outside the adapters that could get a gradient: none, it is hoped."""
    named = [pair for chunk in trainer._chunks for pair in chunk.named_parameters()]
    outside = [(name, parameter) for name, parameter in named if not lora.is_adapter_parameter(name)]
    return [name for name, parameter in outside if parameter.requires_grad or hasattr(parameter, "main_grad")]


def work(config: Config, run_folder: Path) -> dict[str, Any]:
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    result = {
        "adapters": {name: tensor.clone() for name, tensor in export_adapters(trainer._chunks)},
        "merged": {name: tensor.clone() for name, tensor in export_weights(trainer._chunks)},
        "frozen": frozen_with_gradient(trainer),
        "gradients": adapter_gradients(trainer),
    }
    trainer.close()
    return result


def main() -> None:
    cases, out = sys.argv[1:]
    results = {}
    for name, (config, run_folder, port) in json.loads(Path(cases).read_text()).items():
        os.environ["MASTER_PORT"] = str(port)  # each case has a store of its own
        results[name] = work(Config.model_validate(config), Path(run_folder))
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main()
