"""Imports go down only, and the parts that must run without torch do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path("streamrl")
LAYERS = [
    {
        "types",
        "images",
        "machine",
        "mamba_steps",
        "trainable",
        "moe_routing",
        "sampling_columns",
        "choices",
        "config",
        "device",
        "device_copy",
        "device_map",
        "learner_environment",
        "lifeline",
        "last_words",
        "loading",
        "locks",
        "torchrun",
        "whole_files",
    },
    {"progress", "hub"},
    {"engine", "stream", "tasks", "algo", "observe"},
    {"publish", "reward_model"},
    {"generate", "replay", "learner", "evaluate"},
    {"places", "preflight"},
    {"testing", "recorded", "next_commands", "model_dtype"},
    {"role_process", "run_folder", "supervisor", "lab"},
    {"dry_run", "api", "starter", "sft"},
    {"commands"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
LOWEST = {
    "types": 0,
    "images": 1,
    "machine": 0,
    "mamba_steps": 0,
    "device": 0,
    "lifeline": 0,
    "last_words": 0,
    "loading": 0,
    "locks": 2,
    "torchrun": 0,
    "whole_files": 0,
    "trainable": 2,
    "moe_routing": 1,
    "sampling_columns": 1,
    "choices": 0,
    "config": 1,
    "device_copy": 1,
    "device_map": 2,
    "learner_environment": 2,
}  # order inside the lowest layer
WITHOUT_TORCH = (
    "types",
    "images",
    "whole_files",
    "trainable",
    "moe_routing",
    "sampling_columns",
    "choices",
    "config",
    "device_map",
    "learner_environment",
    "lifeline",
    "last_words",
    "loading",
    "locks",
    "progress",
    "hub",
    "stream",
)
WITHOUT_TORCH += ("replay", "machine", "tasks", "engine", "generate", "evaluate", "places", "preflight", "recorded")
WITHOUT_TORCH += ("model_dtype", "run_folder", "next_commands", "supervisor", "api", "sft")

# What a command of the workbench imports beside configuration, types and records: nothing of a role, or one module.
RECORDS = {"choices", "config", "device", "hub", "torchrun", "types", "places", "observe", "recorded", "lab"}
RECORDS |= {"images", "mamba_steps", "sampling_columns", "whole_files"}
BESIDE_RECORDS = {
    "acceptance": {
        "device_map",
        "engine.hardware",
        "engine.stand_ins",
        "learner.te",
        "lifeline",
        "stream.contiguous",
        "stream.identity",
        "stream.messages",
        "stream.peer",
        "stream.sockets",
    },
    "audit": {"preflight.model", "replay.history", "replay.orders", "replay.records"},
    "convert": {"learner.layout_fit", "learner.shape", "learner.torch_format", "lifeline"},
    "group": {"replay.history", "replay.life", "replay.records"},
    "journal": set(),
    "journal_export": set(),
    "plan": {
        "engine.block_fp8",
        "engine.server",
        "learner.critic_shape",
        "learner.layout_fit",
        "learner.mamba_shape",
        "learner.shape",
        "learner.teacher_shape",
        "model_dtype",
        "preflight",
        "publish.transports",
        "replay.orders",
    },
    "report": {"algo.advantages"},
    "retrain": {"engine.hardware", "learner.role", "learner_environment", "preflight"},
    "simulate": {
        "engine.server",
        "generate.request_placement",
        "lifeline",
        "model_dtype",
        "preflight",
        "replay.core",
        "replay.release_gate",
        "stream.messages",
    },
    "tune": {"engine.hardware", "model_dtype", "preflight", "trainable"},
    "top": set(),
    "top_endpoint": set(),
    "trace": set(),
}


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


def test_modules_of_launch_import_one_another_by_relative_names():
    # Where streamrl is installed they are streamrl.launch, and there is no package `launch`.
    absolute = [
        f"{file}: {name}"
        for file in sorted(Path("launch").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module])
        if name.partition(".")[0] == "launch"
    ]
    assert absolute == []


def test_the_parts_without_torch_import_without_torch():
    modules = [
        ".".join(file.with_suffix("").parts)
        for file in sorted(PACKAGE.rglob("*.py"))
        if _part(file) in WITHOUT_TORCH and file.name != "launch.py"
    ]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", BESIDE_RECORDS)
def test_a_command_of_the_workbench_reads_records_and_imports_no_more_than_it_says(command):
    lab = PACKAGE / "lab"
    files = [lab / f"{command}.py"] if (lab / f"{command}.py").exists() else sorted((lab / command).rglob("*.py"))
    modules = {module for file in files for module in _modules(file)}
    beside = {module for module in modules if module.partition(".")[0] not in RECORDS}
    allowed = BESIDE_RECORDS[command]
    unused = {name for name in allowed if not any(_is_within(module, name) for module in beside)}
    assert files
    assert not unused
    assert {module for module in beside if not any(_is_within(module, name) for name in allowed)} == set()


def _is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _part(file: Path) -> str:
    """`streamrl/replay/buffer.py` -> `replay`, `streamrl/types.py` -> `types`."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(file: Path) -> set[str]:
    """Parts of the package: `replay`."""
    return {module.partition(".")[0] for module in _modules(file)}


def _modules(file: Path) -> set[str]:
    """Modules of the package, without its name: `replay.buffer`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    within = {name.removeprefix("streamrl.") for name in found if name.startswith("streamrl.")} - {"__version__"}
    return {name if _is_module(name) else name.rpartition(".")[0] for name in within}


def _is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()
