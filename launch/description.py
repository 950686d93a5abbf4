"""The description of a launch: a YAML file that says on which nodes the roles of a run start, and how.

config: ../../configs/recipes/megatron_rl/qwen2.5-32b-dapo.yaml
override: [model.path=/shared/models/Qwen2.5-32B]
folder: /shared/runs
learner: {nodes: 4, gpus: 8}
generators: {nodes: 4, gpus: 8}
slurm: {partition: gpu, time: "24:00:00"}
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from streamrl.choices import TRANSPORTS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError, parse_yaml
from streamrl.config.generate import KEY_ARGUMENTS
from streamrl.config.section import Section
from streamrl.config.words import as_text
from streamrl.places import absolute, chosen
from streamrl.preflight.machine import check_served

# Keys whose path may be relative: the description has the first, and nodes do not read the second.
NOT_OF_A_NODE = ("run.folder", "model.shape")

# Keys of the configuration that the description says.
OWN = {"run.folder": "folder", "replay.address": "port"}

RESOURCE = r"[a-z0-9.-]+/[A-Za-z0-9._-]+"  # a resource that a device plugin gives out

WORDS = r"^[\w@%+=:,./-]+$"  # what needs no quotes in a shell

NO_WORD = "would need quotes in a script; allowed: a path of letters, digits and @%+=:,./-_"


class Nodes(Section):
    """Nodes of one kind."""

    nodes: int = Field(1, ge=1, description="how many")
    gpus: int = Field(8, ge=0, description="GPUs of one of them; 0: none")
    cpus: int | None = Field(None, ge=1, description="CPU cores of one of them; null: not said")
    memory: str | None = Field(None, pattern=r"^\d+(Mi|Gi)$", description="memory of one, as in 500Gi; null: not said")
    partition: str | None = Field(None, pattern=WORDS, description="Slurm partition; null: that of `slurm`")


class SlurmConfig(Section):
    """What sbatch needs to know."""

    separate: bool = Field(False, description="a job for the learner and one a generator node, instead of one for all")
    partition: str | None = Field(None, pattern=WORDS, description="null: the cluster's own default")
    account: str | None = Field(None, pattern=WORDS, description="null: the user's own")
    time: str | None = Field(None, pattern=r"^[\d:-]+$", description="time limit of a job; null: the partition's")
    options: tuple[str, ...] = Field((), description="further options, such as --exclusive")

    @model_validator(mode="after")
    def _options_are_options(self) -> SlurmConfig:
        for option in self.options:
            if not option.startswith("--") or "\n" in option:
                raise ValueError(f"options: {option!r} is no option of sbatch; allowed: words such as --exclusive")
        return self


class KubernetesConfig(Section):
    """What the cluster needs to know."""

    kind: Literal["jobset", "jobs"] = Field("jobset", description="one JobSet, or a Job a role: a pool then can grow")
    image: str = Field("streamrl:gpu", pattern=WORDS, description="container image (launch/Dockerfile.gpu)")
    namespace: str = Field("default", pattern=r"^[a-z0-9-]+$", description="namespace")
    claim: str = Field("streamrl", pattern=r"^[a-z0-9.-]+$", description="PersistentVolumeClaim, ReadWriteMany")
    mount: Path = Field(Path("/shared"), description="where the claim is mounted; `folder` and models are in it")
    queue: str | None = Field(None, pattern=r"^[a-z0-9.-]+$", description="Kueue's local queue; null: none")
    keys: str | None = Field(
        None, pattern=r"^[a-z0-9.-]+$", description="Secret of the run's keys; null: RUN/keys, which the service makes"
    )
    secret: str | None = Field(None, pattern=r"^[a-z0-9.-]+$", description="Secret of further environment; null: none")
    resource: str = Field("nvidia.com/gpu", pattern=WORDS, description="what the cluster calls a GPU")
    rdma: dict[str, int] = Field(
        default_factory=dict, description="what the cluster calls a network card, and how many a pod with GPUs gets"
    )
    ipc_lock: bool = Field(
        False, description="pods with GPUs have the capability IPC_LOCK, by which root locks memory, as RDMA does"
    )
    host_network: bool = Field(False, description="pods with GPUs are in their node's network, and have its cards")
    shared_memory: str = Field("16Gi", pattern=r"^\d+(Mi|Gi)$", description="limit of /dev/shm in each pod")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels of the nodes that may run it")

    @model_validator(mode="after")
    def _cards_are_counted(self) -> KubernetesConfig:
        for name, count in self.rdma.items():
            if not re.fullmatch(RESOURCE, name) or count < 1:
                raise ValueError(
                    f"rdma: {name}: {count} is no count of a resource; allowed: such as rdma/hca_shared_devices: 1"
                )
        return self


class Description(Section):
    """The whole description."""

    config: Path = Field(description="the run's configuration, relative to this file")
    override: tuple[str, ...] = Field((), description="keys that differ from it")
    folder: Path = Field(description="run.folder: absolute, on a file system that all nodes share")
    learner: Nodes = Field(default_factory=Nodes, description="nodes of the learner, the replay service on the first")
    generators: Nodes | None = Field(None, description="nodes of the generators; null: those of the learner")
    hosts: tuple[Annotated[str, Field(pattern=r"^[\w.-]+$")], ...] = Field(
        (), description="names of the nodes in that order, where no scheduler knows them"
    )
    python: str = Field("python", pattern=WORDS, description="the interpreter that has streamrl, on every node")
    port: int = Field(7100, ge=1, le=65535, description="of the replay service on its node")
    rendezvous_port: int = Field(29400, ge=1, le=65535, description="of torchrun on the learner's first node")
    grace: int = Field(120, ge=1, description="seconds between SIGTERM and the end by force")
    restarts: int = Field(3, ge=0, description="times that a role, and a whole job, is started again after a failure")
    environment: dict[str, str] = Field(
        default_factory=dict, description="variables of every process, such as NCCL_SOCKET_IFNAME; no secrets"
    )
    secrets: Path | None = Field(
        None, description="file of NAME=VALUE lines, mode 600, on every node; Kubernetes: kubernetes.secret instead"
    )
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="Slurm")
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig, description="Kubernetes")

    @property
    def nodes(self) -> int:
        return self.learner.nodes + (self.generators.nodes if self.generators else 0)

    @model_validator(mode="after")
    def _folder_is_shared(self) -> Description:
        if not self.folder.is_absolute():
            raise ValueError(f"folder: {self.folder} is another one on each node; allowed: an absolute path")
        return self

    @model_validator(mode="after")
    def _folder_needs_no_quotes(self) -> Description:
        if not re.fullmatch(WORDS, str(self.folder)):
            raise ValueError(f"folder: {str(self.folder)!r} {NO_WORD}")
        return self

    @model_validator(mode="after")
    def _secrets_are_one_file(self) -> Description:
        if self.secrets is not None and not self.secrets.is_absolute():
            raise ValueError(f"secrets: {self.secrets} is another file on each node; allowed: an absolute path")
        return self

    @model_validator(mode="after")
    def _own_keys_are_not_overridden(self) -> Description:
        for word in self.override:
            if (key := word.partition("=")[0].strip()) in OWN:
                raise ValueError(f"override: {key} is said by `{OWN[key]}` of the description; allowed: {OWN[key]}")
        return self

    @model_validator(mode="after")
    def _environment_is_words(self) -> Description:
        for name, value in self.environment.items():
            if not name.isidentifier() or "\n" in value:
                raise ValueError(f"environment: {name!r} is no variable; allowed: a word and a value of one line")
            if name.upper().endswith(("KEY", "TOKEN", "SECRET", "PASSWORD")):
                raise ValueError(f"environment: {name} would be written into a script; allowed: in `secrets`")
        return self


def load(path: Path) -> tuple[Description, Config]:
    """The description and the configuration that it names, with its overrides. Raises ConfigError with one line."""
    try:
        tree = parse_yaml(path.read_text(), where=path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: {reason}; allowed: a YAML file, such as launch/runs/quickstart.yaml") from None
    try:
        description = Description.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    config = config_file.load(path.parent / description.config, description.override)
    _check(description, config)
    return description, config


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return ".".join(filter(None, [key, str(first["ctx"]["error"])]))
    unknown = first["type"] in ("missing", "extra_forbidden") and len(first["loc"]) == 1
    allowed = f"; allowed: {', '.join(Description.model_fields)}" if unknown or not key else ""
    said = first["msg"][:1].lower() + first["msg"][1:]
    return f"{key or 'it'}: {said} (given {first['input']!r:.80}){allowed}"


def _check(description: Description, config: Config) -> None:
    """Refuse what would fail only on the nodes."""
    if config.model.dtype == "auto":
        raise ConfigError(
            "model.dtype: auto is of the machine that makes the run folder, which may be another one than those that "
            "train; allowed: float32, bfloat16"
        )
    if config.run.stop_timeout > description.grace:
        raise ConfigError(
            f"grace: {description.grace} s are fewer than run.stop_timeout={config.run.stop_timeout:g} of the run; "
            f"allowed: from {config.run.stop_timeout:g} on"
        )
    if not config.model.path.is_absolute():
        raise ConfigError(
            f"model.path: {config.model.path} is another one on each node; allowed: an absolute path (override: "
            "[model.path=/shared/models/NAME])"
        )
    for path in chosen(config):
        file = path.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_absolute():
            raise ConfigError(f"{path} is another file on each node; allowed: an absolute path, which all of them see")
    for key in config_file.changed(config, absolute(config)):
        if key not in NOT_OF_A_NODE:
            value = as_text(config_file.value_at(config, key))
            raise ConfigError(f"{key}: {value} has a path that is another one on each node; allowed: absolute paths")
    if config.publish.chosen("transport").one_host and description.nodes > 1:
        others = [name for name in TRANSPORTS.names if not TRANSPORTS.load(name).one_host]
        raise ConfigError(
            f"publish.transport: {config.publish.transport} reaches the servers of the learner's node alone, there are "
            f"{description.nodes} nodes; allowed: {', '.join(others)}"
        )
    for pool in config.generate.each_pool:
        for name in pool.server_args:
            if name.replace("-", "_") in KEY_ARGUMENTS:  # others may read what is rendered
                raise ConfigError(
                    f"generate.server_args: {name} would be written into what is rendered; allowed: the key in its "
                    "file, see docs/security.md"
                )
    if (description.generators or description.learner).gpus:
        check_served(config)
