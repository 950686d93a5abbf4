"""Checkpoints by Megatron's dist_checkpointing: what is in them, which there are, and how one is read.

    RUN/checkpoints/step_20/   checkpoint.json, Megatron's files, huggingface/ where it is exported

A folder named `step_N` is complete. Its weights and optimizer state are cut along the model, not along the
ranks: any layout of ranks reads them; the layout that wrote them goes on bit for bit. Its ledger names the
groups that are in its weights: which data has been trained is what the checkpoint says, not what was delivered.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from streamrl.algo.kl_control import KlControl
from streamrl.config.file import ConfigError
from streamrl.learner import checkpoint_optimizer, checkpoint_shards
from streamrl.learner.checkpoint_files import FileSum, damage
from streamrl.learner.model import PolicyModel
from streamrl.learner.optimizer import PolicyOptimizer
from streamrl.learner.parallel import Ranks
from streamrl.learner.shared_rows import local
from streamrl.types import Ledger, PolicyVersion
from streamrl.whole_files import sync, write_whole

log = logging.getLogger(__name__)

FORMAT = 4
WITHOUT_SUMS = 3  # the format before, without checksums and without the run's id

DESCRIPTION = "checkpoint.json"
_NAME = re.compile(r"step_\d+")
_REPLACED = re.compile(r"\.(step_\d+)\.old")
_LEFT_OVER = re.compile(r"\.step_\d+\.(saving|old)")


class CheckpointMismatchError(ConfigError):
    """A checkpoint is of another model or optimizer; the text names the first difference."""


class CheckpointDamaged(ConfigError):
    """A checkpoint is not what was written; the text says in what."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint folder and what its description says."""

    folder: Path
    version: PolicyVersion
    fixed: dict[str, Any]
    layout: dict[str, Any]
    ledger: Ledger | None  # None where the batches came from a record
    run: str | None = None  # id of the run that wrote it; None from before runs had ids
    files: dict[str, FileSum] = field(default_factory=dict)  # every other file of it; none from before checksums


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint is written from and read into.

    Example of `settings`: {"dtype": "bfloat16", "distributed_optimizer": True, "lora_rank": 0}.
    """

    chunks: Sequence[PolicyModel]  # of this rank, without the data-parallel wrapper
    optimizer: PolicyOptimizer
    ranks: Ranks
    settings: dict[str, Any]  # what a run that resumes must share beside the model's shape
    kl_control: KlControl | None = None
    name: str = ""  # before the keys of the model: "" for the policy, else such as "critic."
    critic: State | None = None

    @property
    def all(self) -> list[State]:
        """This and its critic's."""
        return [self] if self.critic is None else [self, self.critic]

    @property
    def fixed(self) -> dict[str, Any]:
        """What must not change between the run that wrote a checkpoint and the one that reads it."""
        shape = dataclasses.asdict(self.chunks[0].shape)
        del shape["family"]  # a class; what it makes of the model is in the other fields
        if shape["vision"] is not None:
            del shape["vision"]["tensors"]  # of its sizes
        if (computes := shape.pop("computes")) is not None:
            shape |= {f"config.json {key}": value for key, value in computes.items()}
        fixed = {**self.settings, **{f"{self.name}model {name}": value for name, value in shape.items()}}
        fixed |= self.critic.fixed if self.critic is not None else {}
        return dict(msgspec.json.decode(msgspec.json.encode(fixed)))  # as it comes back from the file

    def sharded(self, loading: bool) -> dict[str, Any]:
        """Weights and optimizer state, described shard by shard, on every rank. Collective."""
        metadata = {
            "distrib_optim_sharding_type": checkpoint_optimizer.FORMAT,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        self.optimizer.fill_state()
        weights: dict[str, Any]
        if (shards := self.optimizer.shards) is not None:
            (chunk,) = self.chunks
            named, optimizer = checkpoint_shards.describe(chunk, shards, self.optimizer.megatron, metadata)
            weights = {"model0": named}
        else:
            checkpoint_optimizer.install(self.optimizer.megatron)
            # Megatron numbers the layers of a chunk within the whole model: the chunks' keys do not collide.
            weights = {
                f"model{index}": chunk.sharded_state_dict(prefix=self.name, metadata=metadata)
                for index, chunk in enumerate(self.chunks)
            }
            optimizer = self.optimizer.megatron.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
        for part in _parts(optimizer, self.optimizer):
            part["param_groups"] = [_plain(group) for group in part["param_groups"]]
        critic = {} if self.critic is None else {"critic": self.critic.sharded(loading)}
        return {**weights, "optimizer": optimizer, **critic}

    def restore(self, loaded: dict[str, Any]) -> None:
        """Set weights and optimizer state from what dist_checkpointing loaded for `sharded`."""
        if (shards := self.optimizer.shards) is not None:
            megatron = self.optimizer.megatron
            checkpoint_shards.restore(self.chunks[0], shards, megatron, loaded["model0"], loaded["optimizer"])
        else:
            for index, chunk in enumerate(self.chunks):
                named = loaded[f"model{index}"]
                chunk.load_state_dict({key.removeprefix(self.name): value for key, value in named.items()})
            self.optimizer.megatron.load_state_dict(_with_step(loaded["optimizer"], self.optimizer))
        self.optimizer.own_steps()
        if self.critic is not None:
            self.critic.restore(loaded["critic"])

    def counts(self) -> dict[str, Any]:
        """What every rank has alike: updates, the schedule, the factor of an adaptive weight; the critic's."""
        factor = 1.0 if self.kl_control is None else self.kl_control.factor
        critic = {} if self.critic is None else {"critic": self.critic.counts()}
        return {**self.optimizer.counts(), "kl_factor": factor, **critic}

    def load_counts(self, counts: dict[str, Any]) -> None:
        """Take up what `counts` gave."""
        self.optimizer.load_counts(counts)
        if self.kl_control is not None:
            self.kl_control.factor = counts.get("kl_factor", 1.0)  # absent from before there was one
        if self.critic is not None:
            self.critic.load_counts(counts["critic"])

    def random(self) -> ShardedObject:
        """The random state of every rank."""
        return ShardedObject("random", _random_state(), (self.ranks.world,), (self.ranks.rank,))


def latest(root: Path) -> Checkpoint | None:
    """The checkpoint with the most steps in `root` (RUN/checkpoints); None when there is none."""
    folders = complete(root)
    return read(folders[-1]) if folders else None


class _Description(msgspec.Struct, kw_only=True):
    """What is in `checkpoint.json` beside its format and its own checksum."""

    version: str
    fixed: dict[str, Any]
    layout: dict[str, Any]
    ledger: Ledger | None
    run: str | None = None
    files: dict[str, FileSum] = {}


def describe(**fields: Any) -> bytes:
    """The content of a `checkpoint.json`: the fields of a `Checkpoint` but its folder, and a checksum of them."""
    plain = msgspec.json.decode(msgspec.json.encode({"format": FORMAT, **fields}))
    return msgspec.json.format(msgspec.json.encode({**plain, "checksum": _sum_of(plain)}))


def read(folder: Path) -> Checkpoint:
    """What a complete checkpoint says of itself.

    Raises CheckpointMismatchError for another format, CheckpointDamaged where the description is not whole.
    """
    path = folder / DESCRIPTION
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if fields.get("format") not in (FORMAT, WITHOUT_SUMS):
            raise CheckpointMismatchError(f"{folder} has format {fields.get('format')}, this streamrl reads {FORMAT}")
        if fields.pop("checksum", None) != _sum_of(fields) and fields["format"] == FORMAT:
            raise CheckpointDamaged(f"{path} does not match its checksum")
        found = msgspec.convert(fields, _Description, str_keys=True)
        version = PolicyVersion.parse(found.version)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} is gone") from None
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from None
    if _NAME.fullmatch(folder.name) and version.step != step_of(folder):
        raise CheckpointDamaged(f"{path} is of step {version.step}: the folder has another one's name")
    return Checkpoint(folder, version, found.fixed, found.layout, found.ledger, found.run, found.files)


def _sum_of(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(fields))


def verify(checkpoint: Checkpoint, ranks: Ranks) -> list[str]:
    """Read every file once, each on one of the ranks, and compare it with its checksum. All ranks call.

    Returns a line for each damaged file of an export in a folder of its own, the same on every rank; nothing is loaded
    from those. Raises CheckpointDamaged on every rank for any other file.
    """
    folder, files = checkpoint.folder, checkpoint.files
    by_size = sorted(files, key=lambda name: (-files[name].size, name))
    problems: dict[str, str] = {}
    found = damage(folder, files, by_size[ranks.rank :: ranks.world])
    for part in ranks.gather(found, behind_files=True):
        problems |= part
    lines = {name: f"{folder / name} {text}" for name, text in sorted(problems.items())}
    needed = [line for name, line in lines.items() if Path(name).parent == Path()]
    if needed:
        raise CheckpointDamaged(needed[0] if len(needed) == 1 else f"{needed[0]}, and so with {len(needed) - 1} more")
    return list(lines.values())


def load(checkpoint: Checkpoint, state: State) -> None:
    """Set model, optimizer, schedule and random state from a checkpoint. All ranks call.

    In another layout than the one that wrote it every weight and moment is the same, while the random state
    is that of a fresh start. Raises CheckpointMismatchError when it is of another model or optimizer.
    """
    _refuse_another_model(checkpoint, state)
    same_layout = checkpoint.layout == state.ranks.layout
    wanted = state.sharded(loading=True)
    if same_layout:
        wanted["random"] = state.random()
    else:
        log.info("%s was written in layout %s, it is cut again", checkpoint.folder, checkpoint.layout)
        for each in state.all:
            _clear_pads(each.chunks)
    loaded = dist_checkpointing.load(wanted, str(checkpoint.folder))
    state.restore(loaded)
    state.load_counts(loaded["counts"])
    if same_layout:
        _set_random_state(loaded["random"])


def complete(root: Path) -> list[Path]:
    """The complete checkpoints of `root`, oldest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def step_of(folder: Path) -> int:
    """The learner step in a checkpoint's name."""
    return int(folder.name.removeprefix("step_"))


def clean(root: Path) -> None:
    """Remove what a learner that was killed left half written, and put back what it was about to replace."""
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (root / replaced[1]).exists() and (path / DESCRIPTION).exists():
            path.rename(root / replaced[1])
        elif _LEFT_OVER.fullmatch(path.name):
            remove(path)


def remove(folder: Path) -> None:
    """Remove a folder that is out of the way. Its description goes first: what is half removed never comes back.

    What cannot be removed, as a file that somebody reads on NFS, costs no checkpoint: the next learner tries again.
    """
    try:
        (folder / DESCRIPTION).unlink(missing_ok=True)
        sync(folder)
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("%s is not removed: %s", folder, error)


def next_incarnation(root: Path, ranks: Ranks) -> int:
    """Count a start of the learner: 0 at the first, one more at each later one. All ranks call.

    The count is on disk before any step of the incarnation, so that two starts from one checkpoint differ too.
    Raises ConfigError for a file that is no count.
    """
    incarnation = 0
    if ranks.rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        path = root / "incarnation"
        content = path.read_bytes().strip() if path.exists() else b"-1"
        if not content.removeprefix(b"-").isdigit():
            raise ConfigError(
                f"{path}: {content[:40]!r} is no number; allowed: one above those behind the dot of every `version` in "
                "metrics.jsonl"
            )
        incarnation = int(content) + 1
        write_whole(path, str(incarnation), durable=True)
    return int(ranks.broadcast(incarnation))


def _refuse_another_model(checkpoint: Checkpoint, state: State) -> None:
    ours = state.fixed
    for key in sorted(ours.keys() | checkpoint.fixed.keys()):
        theirs = checkpoint.fixed.get(key)
        if theirs != ours.get(key):
            raise CheckpointMismatchError(
                f"{checkpoint.folder} was written with {key}={theirs}, this run has {key}={ours.get(key)}: "
                "resume with what wrote it, or start a new run from an exported model"
            )


@torch.no_grad()
def _clear_pads(chunks: Sequence[PolicyModel]) -> None:
    """Another tensor-parallel size pads the vocabulary to another size: the rows that no file has become 0."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                local(parameter).zero_()


def _with_step(state: Any, optimizer: PolicyOptimizer) -> Any:
    """Megatron saves no `step` of 0, and torch's Adam does not load without one."""
    for part in _parts(state, optimizer):
        if optimizer.torch_adams() and "state" in part:
            part["state"].setdefault("common_step", torch.zeros(()))
    return state


def _parts(state: Any, optimizer: PolicyOptimizer) -> Iterator[dict[str, Any]]:
    """What Megatron's state has of each optimizer of a chain: `param_groups`, and without a distributed one `state`."""
    for part in [state] if len(optimizer.megatron.chained_optimizers) == 1 else state.values():
        yield part.get("optimizer", part)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without the classes that an offloading optimizer has in it: torch reads no class from a file,
    and the optimizer that reads it has its own."""
    return {key: value for key, value in group.items() if not isinstance(value, type)}


def _random_state() -> dict[str, Any]:
    """The generators of this rank: host, device, and those of Megatron's parallel regions."""
    state = {"host": torch.get_rng_state(), "regions": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["host"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["regions"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"])
