"""The learner: Megatron-Core model, packed steps, checkpoints and Hugging Face conversion."""

from streamrl.learner import driverless

driverless.hide()
