"""The configuration: `Config` is the whole tree, a file beside it each of its parts."""

from streamrl.config.model import ModelConfig
from streamrl.config.observe import ObserveConfig
from streamrl.config.run import RunConfig
from streamrl.config.tree import Config

__all__ = ["Config", "ModelConfig", "ObserveConfig", "RunConfig"]
