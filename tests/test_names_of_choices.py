"""Nobody compares the name of a choice: what depends on it, its declaration says (`streamrl/choices.py`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.choices import FAMILIES, KINDS
from tests.documented_commands import ROOT

NAMES = {name for kind in KINDS for name in kind.names}
# Words that are spelled like a choice and are none.
OTHER_MEANINGS = {
    "launch/folder.py": {"ready"},  # an event
    "launch/render.py": {"python", "memory"},  # a program; of a node
    # transformers' own names
    "launch/tiny_model.py": set(FAMILIES.names) - {"qwen3_next", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"},
    "launch/tiny_vl_model.py": {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"},
    "streamrl/algo/advantages.py": {"none"},  # algo.advantage.std
    "streamrl/algo/tokens.py": {"behaviour"},  # a field
    "streamrl/api/inputs.py": {"tools"},  # an argument
    "streamrl/config/algo.py": {"none"},  # algo.advantage.std
    "streamrl/config/learner.py": {"none", "full"},  # learner.recompute
    "streamrl/config/megatron_rl.py": {"agent"},  # an argument
    "streamrl/config/replay.py": {"none"},  # journal.keep
    "streamrl/config/reuse.py": {"none"},  # journal.keep
    "streamrl/config/model.py": {"transformers"},  # model.implementation
    "streamrl/engine/client.py": {"shapes"},  # an argument of SGLang's
    "streamrl/generate/tokenizer.py": {"tools"},  # a variable of chat templates
    "streamrl/lab/group.py": {"ready"},  # an event
    "streamrl/lab/sweep/results.py": {"mean"},  # over seeds
    "streamrl/lab/plan/learner_memory.py": {"recompute", "full"},  # learner.recompute
    "streamrl/lab/plan/machines.py": {"copy", "memory", "disk"},  # speeds of a machine
    "streamrl/lab/plan/traffic.py": {"none"},  # journal.keep
    "streamrl/learner/lora.py": {"full"},  # Megatron's recomputation
    "streamrl/learner/model.py": {"full"},  # learner.recompute
    "streamrl/learner/megatron_imports.py": {"wandb"},  # a package
    "streamrl/learner/packing.py": {"behaviour"},  # a field
    "streamrl/learner/selection.py": {"behaviour"},  # a field
    "streamrl/learner/teacher.py": {"recompute"},  # learner.recompute
    "streamrl/learner/whole/model.py": {"full"},  # learner.recompute
    "streamrl/observe/timeline.py": {"ready"},  # an event
    "streamrl/replay/durable.py": {"none"},  # journal.keep
    "streamrl/run_folder.py": {"python"},  # a version
    "streamrl/tasks/anthropic_protocol.py": {"delta"},  # a key of Anthropic's protocol
    "streamrl/tasks/conversation.py": {"tools"},  # an argument of `Inference`
    "streamrl/tasks/host_handle.py": {"tools"},  # the same
    "streamrl/tasks/openai_protocol.py": {"token"},  # a key of OpenAI's protocol
    "streamrl/tasks/python_tool.py": {"memory"},  # a limit of the sandbox
    "streamrl/tasks/questions.py": {"memory", "math", "countdown"},  # a limit of the sandbox; judges
    "streamrl/tasks/sandbox.py": {"memory"},  # a limit of the sandbox
    "streamrl/tasks/functions/loading.py": {"tools"},  # a member of a class
    "streamrl/testing/tools.py": {"tools"},  # an argument of the task
}


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every string that something is compared with, looked up by or limited to."""
    for node in ast.walk(tree):
        places: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            places = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            places = [node.value]
        elif isinstance(node, ast.Dict):
            places = [key for key in node.keys if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.Subscript):  # Literal["a", "b"], table["a"]
            places = [node.slice]
        for place in places:
            if isinstance(place, ast.Constant | ast.Tuple | ast.List | ast.Set):
                for found in ast.walk(place):
                    if isinstance(found, ast.Constant) and isinstance(found.value, str):
                        yield found.lineno, found.value


@pytest.mark.parametrize(
    "code",
    ['a == "fifo"', 'a in ("fifo", b)', 'match a:\n case "fifo": pass', '{"fifo": 1}', 'a: Literal["x", "fifo"]'],
)
def test_each_way_of_comparing_is_seen(code):
    assert "fifo" in [text for _, text in compared(ast.parse(code))]


def test_no_name_of_a_choice_is_compared_outside_of_its_own_file():
    found = []
    for file in sorted([*ROOT.glob("streamrl/**/*.py"), *ROOT.glob("launch/**/*.py")]):
        where = file.relative_to(ROOT)
        package = ".".join(where.parent.parts)
        for line, text in compared(ast.parse(file.read_text())):
            own = any(package == kind.package and text == where.stem for kind in KINDS)
            if text in NAMES and not own and text not in OTHER_MEANINGS.get(str(where), set()):
                found.append(f"{where}:{line}: {text}")
    assert not found


def test_every_exception_is_needed():
    for where, words in OTHER_MEANINGS.items():
        assert words <= {text for _, text in compared(ast.parse(Path(ROOT / where).read_text()))}, where
