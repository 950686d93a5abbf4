"""The learner's part of the configuration: model layout, adapters, optimizer, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from streamrl.config.section import Section, rule


class OptimizerSettings(Section):
    """Adam of Megatron-Core and its schedule."""

    lr: float = Field(1e-6, gt=0, le=1, description="peak learning rate: how far Adam moves a weight in one update")
    min_lr: float = Field(0.0, ge=0, description="learning rate that the decay reaches behind the last step")
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
    dither: bool = Field(
        True,
        description="master weights of a bfloat16 model begin anywhere within what rounds to the saved ones, not in "
        "its middle: small steps move the model from the first one on",
    )
    offload: float = Field(
        0.0, ge=0, le=1, description="share of Adam's state that is kept on the host (CUDA and bfloat16 only)"
    )
    spike_factor: float | None = Field(
        None,
        gt=1,
        description="skip an update with a gradient norm above this many times the recent median; null: off",
    )
    spike_window: int = Field(32, ge=4, description="updates that the recent median of the gradient norm is over")

    @rule
    def _decays_downwards(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: {self.min_lr:g} is above lr={self.lr:g}; allowed: up to lr")


class LayoutConfig(Section):
    """How the model is cut over the learner's ranks; what is left of them is data parallel."""

    tensor: int = Field(1, ge=1, description="tensor-parallel size")
    sequence: bool = Field(True, description="sequence parallelism beside tensor parallelism")
    pipeline: int = Field(1, ge=1, description="pipeline stages")
    virtual: int = Field(1, ge=1, description="model chunks of one pipeline stage (interleaved schedule)")
    first_stage: int | None = Field(
        None, ge=1, description="layers of the first pipeline stage, which has the embedding too; null: evenly"
    )
    last_stage: int | None = Field(
        None, ge=1, description="layers of the last pipeline stage, which has the output layer too; null: evenly"
    )
    context: int = Field(1, ge=1, description="context-parallel size: ranks over which the tokens of a row are cut")
    expert: int = Field(1, ge=1, description="expert-parallel size of mixture-of-experts layers")
    expert_tensor: int = Field(1, ge=1, description="tensor-parallel size inside an expert")
    sharding: Literal["optimizer", "full"] = Field(
        "optimizer",
        description="what data-parallel and context ranks share out: the optimizer's state, if learner.optimizer."
        "distributed says so; or parameters and gradients as well (FSDP2, never run on a GPU)",
    )

    @property
    def fully_sharded(self) -> bool:
        """Parameters, gradients and the optimizer's state are shared out."""
        return self.sharding == "full"

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model (expert parallelism cuts across data-parallel ranks)."""
        return self.tensor * self.pipeline * self.context

    @property
    def virtual_stages(self) -> int | None:
        """`virtual` as Megatron takes it: None where a pipeline stage is one chunk."""
        return self.virtual if self.virtual > 1 else None

    @property
    def rows_multiple(self) -> int:
        """The micro batches of a rank are a multiple of it: the interleaved schedule takes them by the stages."""
        return self.pipeline if self.virtual_stages else 1

    @rule
    def _virtual_needs_stages(self) -> None:
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"virtual: {self.virtual} chunks need learner.layout.pipeline above 1; allowed: 1")

    @rule
    def _own_ends_need_stages(self) -> None:
        for name, layers in (("first_stage", self.first_stage), ("last_stage", self.last_stage)):
            if layers is not None and (self.pipeline == 1 or self.virtual > 1):
                raise ValueError(
                    f"{name}: needs learner.layout.pipeline above 1 and virtual 1; allowed: null with "
                    f"pipeline={self.pipeline}, virtual={self.virtual}"
                )


LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]

# The Hugging Face modules of one layer that each target is made of, in Megatron's order.
LORA_PROJECTIONS: dict[LoraTarget, tuple[str, ...]] = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}


class LoraConfig(Section):
    """Low-rank adapters: the base weights stay as they are, only the adapters are trained."""

    rank: int = Field(0, ge=0, description="rank of the adapters; 0: none, the whole model is trained")
    alpha: float = Field(32.0, gt=0, description="an adapter's product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on an adapter's input")
    targets: tuple[LoraTarget, ...] = Field(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), description="layers with an adapter"
    )
    adapter: Path | None = Field(None, description="PEFT folder that the adapters start from; null: fresh ones")
    publish: Literal["merged", "adapter"] = Field(
        "merged", description="what the servers get: whole weights with the adapters merged in, or the adapter alone"
    )

    @property
    def by_adapter(self) -> bool:
        """The servers keep the base weights and get adapters."""
        return self.rank > 0 and self.publish == "adapter"

    @property
    def modules(self) -> tuple[str, ...]:
        """The targets under the names that PEFT and SGLang know: `q_proj`, ..., in order."""
        return tuple(name.rpartition(".")[2] for target in self.targets for name in LORA_PROJECTIONS[target])

    @rule
    def _adapter_is_used(self) -> None:
        if not self.targets and self.rank:
            raise ValueError("targets: none is given for learner.lora.rank above 0; allowed: at least one")
        if self.adapter is not None and self.rank == 0:
            raise ValueError(f"adapter: {self.adapter} needs learner.lora.rank, the rank of that adapter; given: 0")
        if self.adapter is not None and self.publish == "merged":
            raise ValueError(
                f"publish: merged cannot start from an adapter ({self.adapter}): the servers start with model.path "
                "alone; allowed: adapter"
            )


class ProfileConfig(Section):
    """torch's profiler, into RUN/profile."""

    first_step: int | None = Field(
        None, ge=1, description="first learner step, counted as in the metrics, that is recorded; null: none is"
    )
    last_step: int | None = Field(None, ge=1, description="last one; null: the first alone")
    ranks: tuple[int, ...] = Field((0,), description="ranks of the learner that record")

    @property
    def last(self) -> int:
        """The last recorded step; 0 where none is."""
        return self.last_step or self.first_step or 0

    @rule
    def _last_is_not_before_first(self) -> None:
        if self.last_step is not None and self.last_step < (self.first_step or self.last_step + 1):
            first = "null" if self.first_step is None else self.first_step
            raise ValueError(
                f"last_step: {self.last_step} with first_step={first}; allowed: null, or first_step and above"
            )


class LearnerConfig(Section):
    """The torchrun ranks of the learner."""

    ranks: int = Field(1, ge=1, description="processes of the learner")
    layout: LayoutConfig = Field(default_factory=LayoutConfig, description="how the model is cut over the ranks")
    tokens_per_micro_batch: int = Field(4096, ge=1, description="token budget of one packed micro batch")
    share_prompts: bool = Field(True, description="pack the prompt of a group once, not once a sample (local layers)")
    as_served: bool = Field(
        False,
        description="each answer is computed whole behind a prompt of its own, in attention calls without pads, as a "
        "server's full_prefill does (generate.score): on CPUs in float32 their log-probs are equal to the bit",
    )
    passes: int = Field(1, ge=1, description="times that a batch is trained")
    mini_batches: int = Field(1, ge=1, description="updates of one pass; each takes its share of the batch's groups")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in the backward pass: none, attention's, or whole layers'"
    )
    overlap: bool | None = Field(None, description="gradients are reduced during the backward pass; null: on with CUDA")
    gradient_accumulation_fusion: bool = Field(
        False, description="the product that gives a weight's gradient adds it up as well (CUDA and Apex; never run)"
    )
    moe_permute_fusion: bool = Field(
        False, description="tokens go to their experts and back by fused kernels (Transformer Engine; never run)"
    )
    tp_comm_overlap: bool = Field(
        False,
        description="tensor-parallel collectives overlap the products beside them; every row is padded to "
        "tokens_per_micro_batch (Transformer Engine; never run)",
    )
    router_replay: bool = Field(
        False, description="mixture of experts: the learner routes tokens to the experts that the generator took"
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="further fields of Megatron-Core's TransformerConfig, OptimizerConfig and "
        "DistributedDataParallelConfig, by their names; fp8 is never run",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="low-rank adapters")
    freeze_vision: bool = Field(
        False, description="the vision tower of a vision-language model is not trained; with adapters it never is"
    )
    bad_steps: int = Field(
        8, ge=0, description="steps in a row without an update after which the run stops, its batch saved; 0: never"
    )
    bad_groups: int = Field(
        8, ge=0, description="groups in a row that cannot be trained, after which the run stops; 0: never"
    )
    empty_steps: int = Field(
        8, ge=0, description="steps in a row without a trained token after which the run stops; 0: never"
    )
    threads: int = Field(1, ge=1, description="CPU threads of a rank")
    params_metrics: bool = Field(
        False,
        description="params_norm, grad_zeros, gradient/signal and /noise: one more pass over parameters and gradients "
        "in each step",
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="peak TFLOP/s of a rank's device, dense, for learner/mfu; null: the GPU's data sheet's, on a CPU "
        "measured at the start",
    )
    tick: float = Field(1.0, gt=0, description="seconds between the ranks' looks at the stop signal while they wait")
    collective_timeout: float = Field(600.0, gt=0, description="seconds that one collective may take")
    profile: ProfileConfig = Field(default_factory=ProfileConfig, description="torch's profiler")
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings, description="Adam and its schedule")

    @property
    def keeps_vision(self) -> bool:
        """The weights of a vision tower never change."""
        return self.freeze_vision or self.lora.rank > 0

    @property
    def shares_prompts(self) -> bool:
        """The answers of a group may follow one copy of their prompt."""
        return self.share_prompts and not self.as_served

    @rule
    def _layout_fits_the_ranks(self) -> None:
        if self.ranks % self.layout.model_ranks:
            raise ValueError(
                f"ranks: {self.ranks} cannot hold copies of a model cut over {self.layout.model_ranks} ranks "
                "(learner.layout: tensor x pipeline x context); allowed: a multiple of it"
            )
        if self.tp_comm_overlap and not (self.layout.tensor > 1 and self.layout.sequence):
            raise ValueError(
                f"tp_comm_overlap: true with learner.layout.tensor={self.layout.tensor}, "
                f"sequence={str(self.layout.sequence).lower()}; allowed: false, or tensor above 1 with sequence=true"
            )
        if self.tick >= self.collective_timeout:
            raise ValueError(
                f"tick: {self.tick:g} s is as long as the ranks wait for it, learner.collective_timeout="
                f"{self.collective_timeout:g} s; allowed: below {self.collective_timeout:g}"
            )
        if strangers := [rank for rank in self.profile.ranks if not 0 <= rank < self.ranks]:
            raise ValueError(
                f"profile.ranks: {strangers[0]} is none of learner.ranks={self.ranks}; allowed: 0 to {self.ranks - 1}"
            )
        expert_ranks = self.layout.expert * self.layout.expert_tensor * self.layout.pipeline
        if self.ranks % expert_ranks:
            raise ValueError(
                f"ranks: {self.ranks} cannot hold experts cut over {expert_ranks} ranks "
                "(learner.layout: expert x expert_tensor x pipeline); allowed: a multiple of it"
            )


class CheckpointConfig(Section):
    """Megatron dist_checkpointing in RUN/checkpoints."""

    every: int = Field(50, ge=0, description="learner steps between checkpoints; 0: only at the end of a run")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_every: int = Field(0, ge=0, description="checkpoints kept besides: those of every Nth step; 0: none")
    background: bool = Field(True, description="write while training goes on; false: wait for every write")
    export: bool = Field(
        True,
        description="at the end of a run write the model as a Hugging Face folder, RUN/model; adapters: RUN/adapter",
    )
    export_each: bool = Field(False, description="write that inside each checkpoint, too: huggingface/, adapter/")
    timeout: float = Field(
        600.0,
        gt=0,
        description="seconds that writing one checkpoint may take, and that ranks wait for one that reads its files at "
        "a resume or writes the model",
    )
