"""How well the learner uses its devices: model FLOPs of a step by its time, and by what the devices could do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from streamrl.config import Config
from streamrl.learner.flops import training_flops, work_of
from streamrl.learner.parallel import Ranks
from streamrl.learner.peak import Peak, peak_of
from streamrl.learner.shape import ModelShape
from streamrl.learner.shares import Share

log = logging.getLogger(__name__)


class Utilisation:
    """How well all ranks use their devices; on rank 0, which has the shares of all."""

    def __init__(self, shape: ModelShape, config: Config, ranks: Ranks) -> None:
        """Find the peak of a rank; on a CPU that takes 0.1 to 0.5 s, and every start measures again: its machine may be
        another."""
        self._shape = shape
        self._learner = config.learner
        self.peak: Peak | None = peak_of(config, ranks.device)
        if self.peak is None:
            log.warning(
                "learner.peak_tflops: no peak of %s in %s is known, so that there is no learner/mfu; allowed: TFLOP/s",
                ranks.device,
                config.model.dtype,
            )

    def metrics(self, shares: Sequence[Share], step: Mapping[str, float]) -> dict[str, float]:
        """The `learner/` metrics of a step; `step`: its times."""
        rows = (micro for share in shares for micro in share.micro_batches)
        vision = self._shape.vision
        work = work_of(rows, None if vision is None else vision.image)
        each = training_flops(self._shape, self._learner.lora, work, freeze_vision=self._learner.freeze_vision)
        flops = self._learner.passes * each
        seconds = max(step["time/forward_backward"] + step["time/optimizer"], 1e-9)
        tflops = flops / seconds / self._learner.ranks / 1e12
        return {"learner/tflops": tflops} | ({"learner/mfu": tflops / self.peak.tflops} if self.peak else {})
