"""The configuration: `Config` is the whole tree, a file beside it each of its parts."""

from streamrl.config.tree import Config, ModelConfig, ObserveConfig, RunConfig

__all__ = ["Config", "ModelConfig", "ObserveConfig", "RunConfig"]
