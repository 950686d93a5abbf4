"""streamrl: asynchronous off-policy streaming reinforcement learning for language models."""

__version__ = "0.3.0"
