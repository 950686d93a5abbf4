"""Imports go down only, and the parts that must run without torch do."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path("streamrl")
LAYERS = [
    {"types", "machine", "trainable", "routing", "choices", "config", "device", "lifeline", "last_words"},
    {"progress"},
    {"engine", "stream", "tasks", "algo", "observe"},
    {"publish"},
    {"generate", "replay", "learner", "evaluate"},
    {"places", "preflight"},
    {"testing"},
    {"role_process", "run_folder", "supervisor", "lab"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
LOWEST = {
    "types": 0,
    "machine": 0,
    "device": 0,
    "lifeline": 0,
    "last_words": 0,
    "trainable": 1,
    "routing": 1,
    "choices": 0,
    "config": 1,
}  # order inside the lowest layer
WITHOUT_TORCH = ("types", "trainable", "routing", "choices", "config", "lifeline", "last_words", "progress", "stream")
WITHOUT_TORCH += ("replay", "machine", "tasks", "engine", "generate", "evaluate", "places", "preflight", "run_folder")


def test_every_import_goes_to_a_lower_layer():
    for file in PACKAGE.rglob("*.py"):
        part = _part(file)
        if part not in RANK:  # streamrl/__init__.py
            continue
        for imported in _imports(file):
            allowed = (
                imported == part
                or RANK[imported] < RANK[part]
                or (RANK[part] == 0 and LOWEST[imported] < LOWEST[part])
                or (part == "supervisor" and imported in ("run_folder", "role_process"))
            )
            assert allowed, f"{file} imports streamrl.{imported}"


def test_every_part_of_the_package_has_its_layer():
    parts = {_part(file) for file in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts <= RANK.keys()


def test_the_parts_without_torch_import_without_torch():
    modules = [
        ".".join(file.with_suffix("").parts)
        for file in sorted(PACKAGE.rglob("*.py"))
        if _part(file) in WITHOUT_TORCH and file.name != "launch.py"
    ]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _part(file: Path) -> str:
    """`streamrl/replay/buffer.py` -> `replay`, `streamrl/types.py` -> `types`."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "streamrl" else [f"streamrl.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("streamrl.")}
    return found - {"__version__"}
