"""`streamrl plan CONFIG [key=value ...]`: print what a launch will use; nothing is started."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from streamrl.config import Config, senseless
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.shipped import shipped
from streamrl.config.words import as_text
from streamrl.hub.model import with_local_model, with_local_teacher
from streamrl.hub.repository import label
from streamrl.lab.output import check_file
from streamrl.lab.plan.generators import Pool
from streamrl.lab.plan.machines import GIB, Machines
from streamrl.lab.plan.plan import Plan, make_plan
from streamrl.lab.plan.saves import alike, on_disk, seconds
from streamrl.learner.shape import ModelShape, UnsupportedModelError, read_shape
from streamrl.model_dtype import with_dtype

WIDTH = 120  # columns of the tables

Rows = list[tuple[str, ...]]


def main(
    source: Path,
    overrides: Sequence[str],
    machines: Machines,
    *,
    shape: Path | None = None,
    figures: Path | None = None,
    output: Path | None = None,
) -> int:
    """Plan and print. Returns 0. Raises ConfigError for what cannot run."""
    check_file("--json", output)
    config = with_dtype(config_file.load(source, overrides), fresh=True, gpus=machines.has_gpus)
    config = with_local_teacher(config, "shape")
    plan = make_plan(config, model_shape(config, shape), machines, figures)
    show(plan, config, machines, Console(width=WIDTH))
    senseless.warn(senseless.warnings(config))
    if output is not None:
        output.write_text(json.dumps(plan.as_json(), indent=1) + "\n")
    return 0


def model_shape(config: Config, given: Path | None) -> ModelShape:
    """The shape by `given`, a config.json under any name, else by model.shape or the folder model.path.

    Raises ConfigError.
    """
    if given is None and config.model.shape is None:
        try:
            config = with_local_model(config, "shape")
        except ConfigError as error:
            raise ConfigError(
                f"{error}, and a plan takes its config.json alone, by --shape FILE or model.shape"
            ) from None
    folder = config.model.path
    if given is None and (folder / "config.json").is_file():
        return read_shape(folder, family=config.model.built_by)
    file, key = (given, "--shape") if given is not None else (config.model.shape, "model.shape")
    file = None if file is None else shipped(file)
    if file is None:
        raise ConfigError(
            f"model.path: {folder} has no config.json; a Hugging Face folder is needed, or its config.json alone by "
            "--shape FILE or model.shape"
        )
    if not file.is_file():
        raise ConfigError(f"{key}: {file} is no file; allowed: a model's config.json")
    with tempfile.TemporaryDirectory(prefix="streamrl-shape-") as scratch:
        copy = Path(scratch, "config.json")  # the one name under which the reader looks
        shutil.copyfile(file, copy)
        try:
            return read_shape(copy.parent, key, config.model.built_by)
        except UnsupportedModelError as error:
            raise ConfigError(str(error).replace(str(copy), str(file))) from None


def show(plan: Plan, config: Config, machines: Machines, console: Console) -> None:
    """The plan as tables."""
    layout = config.learner.layout
    copies = config.learner.ranks // layout.model_ranks
    console.print(
        f"{config.run.name}: {label(config.model.path)} in {config.model.dtype}; learner ranks: {config.learner.ranks} "
        f"(tensor {layout.tensor}, pipeline {layout.pipeline}, context {layout.context}, expert {layout.expert}, "
        f"data {copies}), servers: {plan.servers}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if config.learner.megatron:
        fields = ", ".join(f"{name}={as_text(value)}" for name, value in config.learner.megatron.items())
        console.print(f"further fields of Megatron-Core: {fields}", highlight=False, soft_wrap=True)
    hosts: Rows = [(str(number), f"{host.gpus}", host.words) for number, host in enumerate(plan.hosts)]
    console.print(_table("processes", ("host", "GPUs taken", "what runs there"), hosts))
    console.print(
        _table(f"memory of a learner rank (stage {plan.rank.stage}, the fullest)", ("", "bytes"), _rank(plan, machines))
    )
    console.print(_table("one checkpoint", ("hosts", "each writes", "host memory meanwhile"), _saves(plan)))
    console.print(
        f"a checkpoint: {_bytes(sum(each.written for each in plan.saves))}, {seconds(plan.saves, machines):.1f} s at "
        f"the file system's speed; the model at the end: {_bytes(plan.model)}; on disk, with checkpoint.keep="
        f"{config.checkpoint.keep}: up to {_bytes(on_disk(plan.saves, plan.model, config))}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table("generators", ("", *(pool.name or "one pool" for pool in plan.pools)), _pools(plan)))
    console.print(_table("links", ("from", "to", "at most", "expected"), _links(plan)))
    console.print(
        _table(
            "publishing one version",
            ("transport", "learner waits", "server waits", "all have it", ""),
            _publish(plan),
        )
    )
    console.print(
        f"a group on the wire: {plan.group.fixed:,} bytes, and {plan.group.token} for each output token",
        highlight=False,
    )
    bound = "no bound" if plan.bound is None else f"a trained token is at most {plan.bound} learner steps old"
    if config.replay.reuse > 1:
        bound += f", {config.replay.reuse_bound} where its group is trained again"
    console.print(
        f"staleness: {bound}; {plan.slots} slots for {config.replay.groups_per_step} groups a step", highlight=False
    )
    if plan.expected is not None:
        rates = plan.expected.figures
        console.print(
            f"expected: {rates.trained:,.0f} trained tokens/s, {rates.generated:,.0f} generated tokens/s, "
            f"{plan.expected.step_seconds:.1f} s a step",
            highlight=False,
        )
    console.print("what will limit:", highlight=False)
    for line in plan.limits or ["nothing that this plan knows of"]:
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print(_assumed(machines), highlight=False, soft_wrap=True)


def _rank(plan: Plan, machines: Machines) -> Rows:
    rank = plan.rank
    rows = [
        (f"weights ({rank.parameters:,} parameters)", rank.weights),
        (f"gradients ({rank.trained:,} trained)", rank.gradients),
        ("optimizer", rank.optimizer),
        ("activations", rank.activations),
        ("log-probs", rank.logprobs),
        *([("whole during a pass: layers, embedding, gradients", rank.gathered)] if rank.gathered else []),
        *([("the critic: weights, gradients, optimizer", rank.critic)] if rank.critic else []),
        *([("its activations, when none of the policy's are kept", rank.critic_activations)] if rank.critic else []),
        *([("the teacher, while it scores", rank.teacher)] if rank.teacher else []),
        ("at most", rank.peak),
        ("may take", machines.device_bytes),
        ("in the host's memory", rank.host),
        ("first host: staging copies, its ranks, a checkpoint, the buffer", plan.first_host),
    ]
    return [(name, _memory(size)) for name, size in rows]


def _saves(plan: Plan) -> Rows:
    return [
        (f"{first}" if first == last else f"{first}-{last}", _memory(each.written), _memory(each.held))
        for first, last, each in alike(plan.saves)
    ]


def _pools(plan: Plan) -> Rows:
    def row(name: str, values: list[str]) -> tuple[str, ...]:
        return (name, *values)

    return [
        row("servers", [f"{pool.all_servers}{' (attached)' if pool.attached else ''}" for pool in plan.pools]),
        row("GPUs of a server", [_gpus(pool) for pool in plan.pools]),
        row("weights on a GPU", [_memory(pool.weights) for pool in plan.pools]),
        row("KV cache on a GPU", [_memory(pool.tokens * pool.token) for pool in plan.pools]),
        row("KV cache, tokens", [f"{pool.tokens:,}" for pool in plan.pools]),
        row("longest sequence, tokens", [f"{pool.longest:,}" for pool in plan.pools]),
        row("longest answers at once", [f"{pool.at_once:,}" for pool in plan.pools]),
        row("answers asked for at once", [f"{pool.asked:,}" for pool in plan.pools]),
        row("tickets of a worker, most", [f"{pool.tickets:,}" for pool in plan.pools]),
    ]


def _gpus(pool: Pool) -> str:
    return f"{pool.gpus}" if pool.nodes == 1 else f"{pool.gpus} on each of {pool.nodes} hosts"


def _links(plan: Plan) -> Rows:
    rows: Rows = []
    for link in plan.links:
        each = "a publish" if link.target == "servers" else "a step"
        expected = "unknown" if link.rate is None else f"{_bytes(link.rate)}/s"
        rows.append((link.source, link.target, f"{_bytes(link.step)} {each}", expected))
    return rows


def _publish(plan: Plan) -> Rows:
    rows: Rows = []
    for each in plan.publishing:
        seconds = [_seconds(value) for value in (each.copy, each.pause, each.round)]
        rows.append((each.transport, *seconds, each.impossible or ("configured" if each.used else "")))
    return rows


def _assumed(machines: Machines) -> str:
    return (
        f"assumed: prompts of {machines.prompt} tokens, network {machines.network:g} GB/s a host, GPU to "
        f"pinned memory {machines.copy:g} GB/s, to other memory {machines.pageable:g} GB/s, copies in host memory "
        f"{machines.memory:g} GB/s, checksums {machines.hash:g} GB/s, disk {machines.disk:g} GB/s, a delta of "
        f"{machines.changed:.0%} of the weights, SGLang's share of a GPU {machines.mem_fraction:g} unless "
        "server_args say (docs/plan.md)"
    )


def _memory(size: int) -> str:
    """Example: `_memory(61_614_152_704)` is "57.38 GiB"."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def _seconds(seconds: float) -> str:
    """Example: `_seconds(0.0004)` is "0.4 ms"."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def _bytes(size: float) -> str:
    """Example: `_bytes(65_500_000_000)` is "65.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _table(title: str, columns: Sequence[str], rows: Rows) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        number = index and column not in ("what runs there", "to", "")
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
