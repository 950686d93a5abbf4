"""The learner: Megatron-Core model, packed steps, checkpoints and Hugging Face conversion."""

import warnings

from streamrl.learner import driverless, megatron_imports

driverless.hide()
megatron_imports.lighten()

# At its import Megatron-Core says that torch does what Apex would. Nothing here asks for Apex but by a key of its own.
warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed", module=r"megatron\.core\.")
