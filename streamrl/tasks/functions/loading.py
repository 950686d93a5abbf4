"""The class of a task of functions, from where the functions are: a file and a name, or pickled by value.

# RUN/inputs/task.py
Task = task_of(__file__, rewards=[("/home/me/rewards.py:exact", 1.0)], tools=["functions.pkl:add"])
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from streamrl.tasks.environment import Environment
from streamrl.tasks.functions.episodes import Episodes
from streamrl.tasks.functions.rewards import RewardFunction
from streamrl.tasks.functions.task import FunctionTask
from streamrl.tasks.functions.tools import tools_of
from streamrl.tasks.named import load_named

PICKLED = ".pkl"


def task_of(
    file: str,
    rewards: Sequence[tuple[str, float]] = (),
    tools: Sequence[str] = (),
    environment: str | None = None,
) -> type[Environment]:
    """The class; `file` is where it is written, beside which pickled functions are.

    Raises ValueError for a function that cannot be one of these, and whatever loading it raises.
    """
    beside = Path(file).parent
    functions = tuple(RewardFunction(load(where, beside), weight) for where, weight in rewards)
    names = [each.name for each in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"reward: {twice} is there twice; allowed: one function of each name")
    made = None if environment is None else load(environment, beside)
    if isinstance(made, type) and issubclass(made, Environment):
        return made
    if not tools and made is None:
        return type("Task", (FunctionTask,), {"rewards": functions})
    loaded = tools_of([load(where, beside) for where in tools])
    kept = {"rewards": functions, "tools": loaded, "environment": None if made is None else staticmethod(made)}
    return type("Task", (Episodes,), kept)


def load(where: str, beside: Path) -> Any:
    """`file.py:NAME`, `package.module:NAME`, or `file.pkl:NAME` in the folder `beside`."""
    path, _, name = where.rpartition(":")
    return _pickled(beside / path)[name] if path.endswith(PICKLED) else load_named(where, "function")


@cache
def _pickled(path: Path) -> dict[str, Any]:
    import cloudpickle

    found: dict[str, Any] = cloudpickle.loads(path.read_bytes())
    return found
