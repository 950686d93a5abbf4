"""The model of a rank that transformers builds: a policy, or a critic."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.device import Device
from streamrl.learner.shape import ModelShape
from streamrl.learner.whole.model import WholeModel
from streamrl.learner.whole.value import WholeValueModel


def build_whole(shape: ModelShape, config: Config, device: Device, *, values: bool) -> WholeModel:
    """With random weights. Raises ConfigError for what this model cannot give."""
    return (WholeValueModel if values else WholeModel)(shape, config, device)
