"""Which tests one process runs, and in which order: what takes longest begins first, so that all end at about one time.

Tests of a unit share what costs a start: an SGLang server, or a process that has loaded Megatron-Core.
"""

from xdist.scheduler import LoadFileScheduling

# Beginnings of paths, with the name of a unit; None: every file is a unit of its own, as are all that are not here.
UNITS = {
    "tests/test_first_hour": None,
    "tests/lab/test_acceptance": None,
    "tests/learner/test_family_layouts": None,
    "tests/learner/test_vision": None,
    "tests/benchmarks": None,
    "tests/test_docs_commands": None,
    "tests/end_to_end/test_run.py": "run",
    "tests/end_to_end/test_trained_model.py": "run",
    "tests/end_to_end": None,
    "tests/launch": None,
    "tests/engine": "server",
    "tests/generate": "server",
    "tests/publish": "server",
    "tests/tasks/test_agent": "server",
    "tests/tasks/test_openai_tools": "server",
    "tests/tasks/test_anthropic": "server",
    "tests/evaluate/test_in_run": "server",
    "tests/learner": "ranks",
    "tests/lab": None,
    "tests/test_own_choices": None,
    "tests/stream/test_door": None,
    "tests/test_supervisor": None,
    "tests/tasks/test_hosted": None,
    "tests/replay": None,
}
PATHS = list(UNITS)


def place_of(nodeid: str) -> int:
    """Of a test among all."""
    return next((place for place, path in enumerate(PATHS) if nodeid.startswith(path)), len(PATHS))


class Units(LoadFileScheduling):
    """pytest-xdist's scheduling by files, of which some are one unit."""

    def _split_scope(self, nodeid: str) -> str:
        place = place_of(nodeid)
        unit = UNITS[PATHS[place]] if place < len(PATHS) else None
        return unit or super()._split_scope(nodeid)
