"""The configuration: one typed tree, where every key has its meaning, unit and default.

YAML gives the tree, `key=value` overrides change it (`replay.max_staleness=0`), and `load` refuses
whatever does not fit with one line. No other file gives a default or reads an environment variable.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from streamrl.config_learner import AlgoConfig, CheckpointConfig, LearnerConfig
from streamrl.config_section import Section


class RunConfig(Section):
    """What a run is called, where it is kept and how long it lasts."""

    name: str = Field("run", pattern=r"^[\w][\w.-]*$", description="name of the run folder")
    folder: Path = Field(Path("runs"), description="folder that holds the run folders")
    seed: int = Field(1, ge=0, description="seed of prompts, initialisation and dropout")
    steps: int = Field(100, ge=1, description="learner steps of the whole run")
    restarts: int = Field(3, ge=0, description="times that the replay service, and the learner, are started again")
    start_timeout: float = Field(300.0, gt=0, description="seconds that a role may take to be ready")
    stop_timeout: float = Field(60.0, gt=0, description="seconds that a role may take to end, then it is killed")
    silence_timeout: float = Field(
        600.0, gt=0, description="seconds without a learner step after which a run has failed"
    )


class ModelConfig(Section):
    """The model that is trained and generates."""

    path: Path = Field(Path("models/tiny"), description="Hugging Face folder (config.json, safetensors, tokenizer)")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the weights in learner and server")
    trust_remote_code: Literal[False] = Field(False, description="code from a model folder is never run")


TaskName = Literal["copy", "successor", "reasoning_gym", "jsonl"]


class TaskShare(Section):
    """One task of a mix, and how much of it."""

    label: str = Field("", pattern=r"^[\w.-]*$", description="name in tickets and metrics; empty: the task's name")
    name: TaskName = Field("copy", description="which task")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task, checked by the task")
    weight: float = Field(1.0, ge=0, description="share of the groups, relative to the others; 0: never asked")

    @property
    def key(self) -> str:
        return self.label or self.name


class OverlongConfig(Section):
    """The soft penalty on answers that come near the cut (DAPO, arXiv:2503.14476)."""

    buffer: int = Field(0, ge=0, description="tokens before sampling.max_new_tokens over which it grows; 0: off")
    penalty: float = Field(1.0, gt=0, description="reward that an answer loses at the cut")


class TaskConfig(Section):
    """What is asked and how it is scored."""

    name: TaskName = Field("copy", description="which task")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task, checked by the task")
    mix: tuple[TaskShare, ...] = Field((), description="several tasks with weights, instead of name and args")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig, description="penalty on answers near the cut")

    @property
    def shares(self) -> tuple[TaskShare, ...]:
        """The tasks of the run; one of them where no mix is given."""
        return self.mix or (TaskShare(name=self.name, args=self.args),)

    @model_validator(mode="after")
    def _mix_is_clear(self) -> TaskConfig:
        keys = [share.key for share in self.mix]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"mix: {key!r} is there twice; allowed: one entry for each label")
        if self.mix and not any(share.weight for share in self.mix):
            raise ValueError("mix: every weight is 0; allowed: at least one above 0")
        return self


class SamplingConfig(Section):
    """How a token is drawn. The learner divides its logits by the same temperature."""

    temperature: float = Field(1.0, gt=0, description="softmax temperature")
    max_new_tokens: int = Field(16, ge=1, description="tokens after which an answer is cut")
    top_p: float = Field(
        1.0, ge=1, le=1, description="truncated sampling changes the behaviour policy's support: refused"
    )
    top_k: int = Field(
        -1, ge=-1, le=-1, description="truncated sampling changes the behaviour policy's support: refused"
    )


class GenerateConfig(Section):
    """The generator workers and their SGLang servers."""

    workers: int = Field(1, ge=1, description="generator workers, one SGLang server each")
    attach: tuple[str, ...] = Field(
        (), description="addresses (http://host:port) of running servers; empty: start own ones"
    )
    group_size: int = Field(8, ge=1, description="G, samples of one prompt")
    groups_in_flight: int = Field(32, ge=1, description="groups that a worker generates at once")
    single_requests: bool = Field(False, description="one request a sample (long answers) instead of one with n = G")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="how tokens are drawn")
    request_timeout: float = Field(600.0, gt=0, description="seconds that one request to a server may take")
    tensor_parallel: int = Field(1, ge=1, description="tensor-parallel size of a server")
    server_args: dict[str, Any] = Field(default_factory=dict, description="further SGLang arguments, passed untouched")
    threads: int = Field(1, ge=1, description="CPU threads of a server (OMP_NUM_THREADS)")
    heartbeat: float = Field(1.0, gt=0, description="seconds between heartbeats of a worker")
    restarts: int = Field(
        3, ge=0, description="times that a worker which had been ready is started again after it died"
    )
    probes: int = Field(3, ge=0, description="held-out prompts answered greedily at the start and at the end")

    @model_validator(mode="after")
    def _runs_no_code_of_a_model_folder(self) -> GenerateConfig:
        if any(name.replace("-", "_") == "trust_remote_code" for name in self.server_args):
            raise ValueError("server_args: trust_remote_code would run code from a model folder; allowed: other names")
        return self


class StreamConfig(Section):
    """The wire between workers, replay service and learner."""

    max_message: int = Field(1 << 28, ge=1 << 12, description="bytes of the largest message that is accepted")
    reply_timeout: float = Field(30.0, gt=0, description="seconds that a reply of the replay service may take")
    curve: Literal["auto", "on", "off"] = Field(
        "auto", description="CURVE authentication and encryption; auto: on unless the address is loopback or ipc"
    )
    keys: Path | None = Field(None, description="folder of the run's CURVE keys; null: RUN/keys")


class FilterConfig(Section):
    """Which groups are dropped and replaced by another prompt's of the same task, before they are trained."""

    signal: bool = Field(False, description="drop groups whose rewards are all equal (std <= 1e-6)")
    placeholders: bool = Field(False, description="drop groups with a failed sample")
    min_pass_rate: float = Field(0.0, ge=0, le=1, description="drop groups below this share of right answers")
    max_pass_rate: float = Field(1.0, ge=0, le=1, description="drop groups above this share of right answers")
    tries: int = Field(4, ge=1, description="prompts for one place; the last one's group is taken as it is")

    @property
    def active(self) -> bool:
        return self.signal or self.placeholders or self.min_pass_rate > 0 or self.max_pass_rate < 1

    @model_validator(mode="after")
    def _keeps_something(self) -> FilterConfig:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate: {self.min_pass_rate:g} is above max_pass_rate={self.max_pass_rate:g}; "
                "allowed: up to max_pass_rate"
            )
        return self


class AdaptiveConfig(Section):
    """The controller that lowers the admitted staleness where the data becomes too far off-policy."""

    enabled: bool = Field(False, description="adapt the admitted staleness within [0, replay.max_staleness]")
    ess_low: float = Field(0.5, gt=0, lt=1, description="off-policy effective sample size under which it is lowered")
    ess_high: float = Field(0.8, gt=0, le=1, description="effective sample size above which it is raised")
    change: float = Field(0.25, gt=0, description="learner steps of staleness by which it is changed at once")
    patience: int = Field(4, ge=1, description="learner steps between two changes")

    @model_validator(mode="after")
    def _has_a_dead_band(self) -> AdaptiveConfig:
        if self.ess_low >= self.ess_high:
            raise ValueError(f"ess_low: {self.ess_low:g} is not below ess_high={self.ess_high:g}")
        return self


class ReplayConfig(Section):
    """The buffer between generation and training."""

    address: str = Field("tcp://127.0.0.1:0", description="where the replay service listens; port 0 takes a free one")
    order: Literal["fifo", "windowed", "ready", "synchronous"] = Field(
        "fifo", description="in which order groups are consumed; synchronous is fifo with the bound 0"
    )
    window: int = Field(1, ge=1, description="W, ids from the oldest unconsumed group on that `windowed` may consume")
    over_age: Literal["drop", "pass"] = Field(
        "drop", description="what `ready` does with a group older than the bound: generate it again, or train it"
    )
    groups_per_step: int = Field(8, ge=1, description="P, groups of one learner step")
    max_staleness: float = Field(
        2.0, ge=0, description="S, learner steps that a trained token may be old; 0 is synchronous"
    )
    lease: float = Field(30.0, gt=0, description="seconds without a heartbeat after which a ticket is issued again")
    group_timeout: float = Field(
        900.0, gt=0, description="seconds after which a group ends with placeholders for its missing samples"
    )
    max_attempts: int = Field(3, ge=1, description="times that one ticket is issued before its group is a placeholder")
    curriculum: str = Field(
        "sequential", description="which prompt is asked next: sequential, or package.module:Class of your own"
    )
    filter: FilterConfig = Field(default_factory=FilterConfig, description="groups that are dropped and replaced")
    adaptive: AdaptiveConfig = Field(default_factory=AdaptiveConfig, description="the adaptive bound")

    @property
    def bound(self) -> float:
        """S of the order: 0 for `synchronous`."""
        return 0.0 if self.order == "synchronous" else self.max_staleness

    @property
    def slots(self) -> int:
        """N = floor((S + 1) P) - (W - 1): groups that may be issued and not yet be part of acknowledged weights."""
        window = self.window if self.order == "windowed" else 1
        return math.floor((self.bound + 1) * self.groups_per_step) - (window - 1)


class JournalConfig(Section):
    """The record of every group and batch, from which a run is recovered and trained again."""

    keep: Literal["none", "resume", "all"] = Field(
        "resume", description="segments: none written; those behind the oldest checkpoint deleted; all, for `retrain`"
    )
    commit_groups: int = Field(64, ge=1, description="groups after which a commit is made (one fsync for all)")
    commit_seconds: float = Field(0.02, ge=0, description="seconds that an accepted group waits for its commit at most")
    segment: int = Field(256 << 20, ge=1 << 12, description="bytes after which a new segment is begun")


class PublishConfig(Section):
    """How new weights reach the servers."""

    transport: Literal["broadcast"] = Field("broadcast", description="gloo or NCCL broadcast of flattened buckets")
    every: int = Field(1, ge=1, description="k, learner steps between two published versions")
    interruption: Literal["retract", "in_place"] = Field(
        "retract", description="what happens to requests in flight (not with adapters)"
    )
    bucket: int = Field(256 << 20, ge=1 << 10, description="bytes of one flattened bucket (not with adapters)")
    timeout: float = Field(120.0, gt=0, description="seconds that one server may take to receive a version")
    keep_every: int = Field(0, ge=0, description="versions kept in RUN/weights for the audit: every Nth; 0: none")


class ObserveConfig(Section):
    """Where metrics go besides RUN/metrics.jsonl."""

    console: bool = Field(True, description="live table in the terminal")
    wandb: Literal["off", "offline", "online"] = Field("off", description="Weights & Biases")
    wandb_project: str = Field("streamrl", description="project at Weights & Biases")
    tensorboard: bool = Field(False, description="event files in RUN/tensorboard")


class Config(Section):
    """The whole tree."""

    run: RunConfig = Field(default_factory=RunConfig, description="the run")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    task: TaskConfig = Field(default_factory=TaskConfig, description="the task")
    generate: GenerateConfig = Field(default_factory=GenerateConfig, description="generators")
    stream: StreamConfig = Field(default_factory=StreamConfig, description="the wire")
    replay: ReplayConfig = Field(default_factory=ReplayConfig, description="the buffer")
    journal: JournalConfig = Field(default_factory=JournalConfig, description="the record of the data")
    algo: AlgoConfig = Field(default_factory=AlgoConfig, description="the loss")
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="the learner")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="checkpoints")
    publish: PublishConfig = Field(default_factory=PublishConfig, description="publishing")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="observation")

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @model_validator(mode="after")
    def _every_worker_has_a_server(self) -> Config:
        addresses = len(self.generate.attach)
        if addresses and addresses < self.generate.workers:
            raise ValueError(
                f"generate.attach: {addresses} addresses for generate.workers={self.generate.workers}; "
                "allowed: one for each worker"
            )
        return self

    @model_validator(mode="after")
    def _overlong_fits_the_answer(self) -> Config:
        buffer, longest = self.task.overlong.buffer, self.generate.sampling.max_new_tokens
        if buffer > longest:
            raise ValueError(
                f"task.overlong.buffer: {buffer} is above generate.sampling.max_new_tokens={longest}; "
                f"allowed: up to {longest}"
            )
        return self

    @model_validator(mode="after")
    def _does_not_deadlock(self) -> Config:
        needed = self.publish.every * self.replay.groups_per_step
        if self.replay.order == "windowed" and self.replay.slots < self.replay.groups_per_step:
            widest = math.floor(self.replay.bound * self.replay.groups_per_step) + 1
            raise ValueError(
                f"replay.window: {self.replay.window} leaves {self.replay.slots} slots, fewer than one step needs; "
                f"allowed: up to {widest} with replay.max_staleness={self.replay.bound:g}"
            )
        if self.replay.slots < needed:
            raise ValueError(
                f"publish.every: {self.publish.every} would deadlock: {needed} groups train before a publish, "
                f"but replay.max_staleness={self.replay.max_staleness:g} allows {self.replay.slots}; "
                f"allowed: up to {self.replay.slots // self.replay.groups_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _every_mini_batch_has_a_group(self) -> Config:
        if self.learner.mini_batches > self.replay.groups_per_step:
            raise ValueError(
                f"learner.mini_batches: {self.learner.mini_batches} cannot share replay.groups_per_step="
                f"{self.replay.groups_per_step} groups; allowed: up to {self.replay.groups_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _every_task_has_a_place(self) -> Config:
        weighted = sum(share.weight > 0 for share in self.task.shares)
        if weighted > self.replay.groups_per_step:
            raise ValueError(
                f"task.mix: {weighted} weighted tasks need one group each, replay.groups_per_step="
                f"{self.replay.groups_per_step}; allowed: up to {self.replay.groups_per_step}"
            )
        return self
