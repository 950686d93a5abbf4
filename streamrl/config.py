"""The configuration: one typed tree, where every key has its meaning, unit and default.

YAML gives the tree, `key=value` overrides change it (`replay.max_staleness=0`), and `load` refuses
whatever does not fit with one line. No other file gives a default or reads an environment variable.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A frozen part of the tree that knows its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class RunConfig(Section):
    """What a run is called, where it is kept and how long it lasts."""

    name: str = Field("run", pattern=r"^[\w][\w.-]*$", description="name of the run folder")
    folder: Path = Field(Path("runs"), description="folder that holds the run folders")
    seed: int = Field(1, ge=0, description="seed of prompts, initialisation and dropout")
    steps: int = Field(100, ge=1, description="learner steps of the whole run")
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


class TaskConfig(Section):
    """What is asked and how it is scored."""

    name: Literal["copy", "successor", "reasoning_gym", "jsonl"] = Field("copy", description="which task")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the task, checked by the task")


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


class StreamConfig(Section):
    """The wire between workers, replay service and learner."""

    max_message: int = Field(1 << 28, ge=1 << 12, description="bytes of the largest message that is accepted")
    reply_timeout: float = Field(30.0, gt=0, description="seconds that a reply of the replay service may take")


class ReplayConfig(Section):
    """The buffer between generation and training."""

    address: str = Field("tcp://127.0.0.1:0", description="where the replay service listens; port 0 takes a free one")
    order: Literal["fifo"] = Field("fifo", description="in which order groups are consumed")
    groups_per_step: int = Field(8, ge=1, description="P, groups of one learner step")
    max_staleness: float = Field(
        2.0, ge=0, description="S, learner steps that a trained token may be old; 0 is synchronous"
    )
    group_timeout: float = Field(900.0, gt=0, description="seconds after which a ticket is issued again")
    max_attempts: int = Field(3, ge=1, description="times that one ticket is issued before the run fails")

    @property
    def slots(self) -> int:
        """N = floor((S + 1) P): groups that may be issued and not yet be part of acknowledged weights."""
        return math.floor((self.max_staleness + 1) * self.groups_per_step)


class AdvantageConfig(Section):
    """Group-relative advantages."""

    std: Literal["population", "sample", "none"] = Field(
        "population", description="what the centred reward is divided by"
    )
    baseline: Literal["mean", "leave_one_out"] = Field("mean", description="what is taken from the reward")
    eps: float = Field(1e-4, ge=0, description="added to the standard deviation")


class AlgoConfig(Section):
    """The loss and the importance weights; equations in docs/algorithm.md."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="group-relative advantages")
    proximal: Literal["behaviour", "interpolate"] = Field("behaviour", description="the proximal policy")
    eps_low: float = Field(0.2, ge=0, le=1, description="lower clip range")
    eps_high: float = Field(0.28, ge=0, description="upper clip range")
    dual_clip: float | None = Field(None, gt=1, description="c of the dual clip for negative advantages; null: off")
    entropy: float = Field(0.0, ge=0, description="lambda, weight of the entropy bonus")
    weight: Literal["none", "token", "sequence"] = Field(
        "token", description="what the truncated importance weight reads"
    )
    weight_cap: float = Field(2.0, ge=1, description="C, cap of the importance weight")
    weight_gamma: float = Field(
        1.0, gt=0, le=1, description="gamma, tightens the cap with staleness: 1 + (C - 1) gamma^s"
    )
    mask: Literal["none", "token", "sequence", "geometric"] = Field(
        "none", description="what masks far off-policy tokens"
    )
    mask_low: float | None = Field(None, ge=0, description="lower edge of the mask; null: the rule's own default")
    mask_high: float | None = Field(None, gt=0, description="upper edge of the mask; null: the rule's own default")
    discount: float = Field(1.0, gt=0, le=1, description="lambda_s, weight factor per step of staleness")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_norm"] = Field(
        "token_mean", description="mean over tokens or samples"
    )
    norm_length: int | None = Field(None, ge=1, description="tokens by which sequence_sum_norm divides")

    @model_validator(mode="after")
    def _mask_keeps_something(self) -> AlgoConfig:
        if self.mask_low is not None and self.mask_high is not None and self.mask_low >= self.mask_high:
            raise ValueError(f"mask_low: {self.mask_low:g} is not below mask_high={self.mask_high:g}")
        return self

    @model_validator(mode="after")
    def _norm_length_given(self) -> AlgoConfig:
        if self.aggregation == "sequence_sum_norm" and self.norm_length is None:
            raise ValueError("norm_length: a length in tokens is needed by aggregation=sequence_sum_norm")
        return self


class OptimizerSettings(Section):
    """Adam of Megatron-Core and its schedule."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    warmup_steps: int = Field(0, ge=0, description="learner steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="shape of the decay over run.steps")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam beta1")
    beta2: float = Field(0.95, ge=0, lt=1, description="Adam beta2")
    eps: float = Field(1e-8, gt=0, description="Adam epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0: no clipping")
    distributed: bool | None = Field(
        None, description="Megatron's distributed optimizer; null: on with CUDA, off without"
    )

    @model_validator(mode="after")
    def _decays_downwards(self) -> OptimizerSettings:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: {self.min_lr:g} is above lr={self.lr:g}; allowed: up to lr")
        return self


class LearnerConfig(Section):
    """The torchrun ranks of the learner."""

    ranks: int = Field(1, ge=1, description="processes on this machine")
    tokens_per_micro_batch: int = Field(4096, ge=1, description="token budget of one packed micro batch")
    share_prompts: bool = Field(True, description="pack the prompt of a group once, not once a sample (local layers)")
    threads: int = Field(1, ge=1, description="CPU threads of a rank")
    tick: float = Field(1.0, gt=0, description="seconds between the ranks' looks at the stop signal while they wait")
    collective_timeout: float = Field(600.0, gt=0, description="seconds that one collective may take")
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings, description="Adam and its schedule")


class CheckpointConfig(Section):
    """Megatron dist_checkpointing in RUN/checkpoints."""

    every: int = Field(50, ge=0, description="learner steps between checkpoints; 0: only at the end of a run")
    keep: int = Field(2, ge=1, description="checkpoints that are kept")


class PublishConfig(Section):
    """How new weights reach the servers."""

    transport: Literal["broadcast"] = Field("broadcast", description="gloo or NCCL broadcast of flattened buckets")
    every: int = Field(1, ge=1, description="k, learner steps between two published versions")
    interruption: Literal["retract", "in_place"] = Field("retract", description="what happens to requests in flight")
    bucket: int = Field(256 << 20, ge=1 << 10, description="bytes of one flattened bucket")
    timeout: float = Field(120.0, gt=0, description="seconds that one server may take to receive a version")
    keep_every: int = Field(0, ge=0, description="versions kept in RUN/weights for the audit: every Nth; 0: none")


class ObserveConfig(Section):
    """Where metrics go besides RUN/metrics.jsonl."""

    console: bool = Field(True, description="live table in the terminal")
    wandb: Literal["off", "offline", "online"] = Field("off", description="Weights & Biases")
    wandb_project: str = Field("streamrl", description="project at Weights & Biases")
    tensorboard: bool = Field(False, description="event files in RUN/tensorboard")
    journal: bool = Field(True, description="keep every accepted group, and what each step consumed, in RUN/journal")


class Config(Section):
    """The whole tree."""

    run: RunConfig = Field(default_factory=RunConfig, description="the run")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    task: TaskConfig = Field(default_factory=TaskConfig, description="the task")
    generate: GenerateConfig = Field(default_factory=GenerateConfig, description="generators")
    stream: StreamConfig = Field(default_factory=StreamConfig, description="the wire")
    replay: ReplayConfig = Field(default_factory=ReplayConfig, description="the buffer")
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
    def _does_not_deadlock(self) -> Config:
        needed = self.publish.every * self.replay.groups_per_step
        if self.replay.slots < needed:
            raise ValueError(
                f"publish.every: {self.publish.every} would deadlock: {needed} groups train before a publish, "
                f"but replay.max_staleness={self.replay.max_staleness:g} allows {self.replay.slots}; "
                f"allowed: up to {self.replay.slots // self.replay.groups_per_step}"
            )
        return self
