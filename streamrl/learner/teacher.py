"""The teacher of a distillation: a frozen model of its own shape, on the device only while it scores.

    host: weights of this rank ──score()──▶ device: forward passes over the step's rows ──▶ host, the copy is freed

It is cut as the learner's layout cuts the policy, so that a rank holds as small a share of it, and it gives the
log-probs of the same tokens of the same rows, at the temperatures at which they were drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from streamrl.config import Config
from streamrl.config.learner import LoraConfig
from streamrl.learner.forward import Passes, in_dtype
from streamrl.learner.host_memory import host_copy
from streamrl.learner.huggingface import load_weights
from streamrl.learner.model import PolicyModel, build
from streamrl.learner.packing import MicroBatch
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import ModelShape
from streamrl.learner.teacher_shape import KEY, teacher_shape

log = logging.getLogger(__name__)

# What of the learner's section is about training, adapters and the policy's own router.
_OF_THE_POLICY = {
    "lora": LoraConfig(),
    "recompute": "none",
    "router_replay": False,
    "tp_comm_overlap": False,
    "gradient_accumulation_fusion": False,
}


class Teacher:
    """The model chunks of this rank.

    teacher = Teacher.of(config, policy_shape, ranks)
    logprobs = teacher.score(micro_batches)
    """

    def __init__(self, chunks: Sequence[PolicyModel], config: Config, ranks: Ranks) -> None:
        """Freeze these chunks, whose weights are loaded, and leave the device."""
        self._device = ranks.device
        self._passes = Passes([in_dtype(chunk) for chunk in chunks], ranks, config)
        parameters = dict.fromkeys(parameter for chunk in chunks for parameter in chunk.parameters())
        self._held = [(p.requires_grad_(False), host_copy(p.detach()) if p.is_cuda else p.detach()) for p in parameters]
        self._leave()

    @classmethod
    def of(cls, config: Config, policy: ModelShape, ranks: Ranks) -> Teacher | None:
        """The teacher of a run; None without one. Collective.

        policy: shape of the model that is trained. Raises ConfigError for a teacher that cannot score its tokens, and
        what `load_weights` raises.
        """
        shape, folder = teacher_shape(config, policy), config.algo.distillation.teacher
        if shape is None or folder is None:
            return None
        # Its weights come and go as a whole.
        layout = config.learner.layout.model_copy(update={"sharding": "optimizer"})
        learner = config.learner.model_copy(update={**_OF_THE_POLICY, "layout": layout})
        own = config.model_copy(update={"learner": learner})
        chunks = build(shape, own, ranks.device)
        load_weights(chunks, folder, KEY)
        teacher = cls(chunks, own, ranks)
        log.info("teacher: %s, %.1f MB of this rank on the host", folder, teacher.nbytes / 1e6)
        return teacher

    @property
    def model(self) -> PolicyModel:
        """The first chunk of its model."""
        return self._passes.model

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(held.nbytes for _, held in self._held)

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """log pi_T of each micro batch's targets, as `Passes.score` gives the policy's. Collective."""
        # The routes are those of the policy's experts.
        rows = [replace(micro, routed_experts=None) for micro in micro_batches]
        with self._on_device():
            return self._passes.score(rows)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        for parameter, held in self._held:
            parameter.data = held.to(self._device.torch_device, non_blocking=True)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        """Let go of what is on the device; without CUDA that is the one copy that there is, and stays."""
        for parameter, held in self._held:
            parameter.data = held
