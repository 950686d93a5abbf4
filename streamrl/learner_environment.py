"""Variables of the learner's ranks on GPUs. CUDA and torch read them once: they are set before torch is imported.

    supervisor, `streamrl retrain` ──▶ torchrun ──▶ ranks        `streamrl learner` on a cluster: the rank sets its own

None of this has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.config import Config

# torch's allocator: under its name, and the older one that torch still reads.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Rows differ in length, and leave gaps between blocks of fixed sizes that no longer row fits into.
EXPANDABLE = "expandable_segments:True"

# With one queue, a collective and the products that it overlaps begin in the order in which Megatron gives them.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def learner_environment(config: Config, present: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on GPUs need beside `present`, the environment, which comes first.

    >>> learner_environment(Config(), {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256"})
    {}
    """
    layout = config.learner.layout
    needed = {}
    if not any(name in present for name in ALLOCATOR):
        needed[ALLOCATOR[0]] = EXPANDABLE
    if CONNECTIONS not in present and (layout.tensor > 1 or layout.context > 1):
        needed[CONNECTIONS] = "1"
    return needed
