"""The learner's part of the configuration: algorithm, model layout, adapters, optimizer, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from streamrl.choices import (
    AGGREGATIONS,
    DIVERGENCES,
    FAMILIES,
    LOSSES,
    MASKS,
    PROXIMALS,
    REGULARISERS,
    REWARD_DIVERGENCES,
    WEIGHTS,
)
from streamrl.config.section import Section, rule
from streamrl.config.words import checked


class AdvantageConfig(Section):
    """Group-relative advantages."""

    std: Literal["population", "sample", "none"] = Field(
        "population", description="what the centred reward is divided by"
    )
    baseline: Literal["mean", "leave_one_out"] = Field("mean", description="what is taken from the reward")
    eps: float = Field(1e-4, ge=0, description="added to the standard deviation")

    @property
    def least_samples(self) -> int:
        """Samples of a group that have an advantage besides 0: each of the baselines is made of the group itself."""
        return 2


class MaskRule(Section):
    """One more mask, beside `algo.mask`; each key as its namesake of `algo`."""

    mask: Annotated[str, MASKS] = Field(description="what masks far off-policy tokens, but second_moment")
    mask_options: dict[str, Any] = Field(default_factory=dict, description="options of a mask of your own")
    mask_low: float | None = Field(None, ge=0, description="lower edge of the mask; null: the rule's own default")
    mask_high: float | None = Field(None, gt=0, description="upper edge of the mask; null: the rule's own default")

    def _refused_choices(self) -> Iterator[PydanticCustomError]:
        """None here: `AlgoConfig` asks, because a mask may read other keys of it."""
        return iter(())


class DistillationConfig(Section):
    """On-policy distillation: a frozen teacher scores the tokens that the policy drew."""

    teacher: Path | None = Field(
        None, description="Hugging Face folder of the teacher, or else a name of the hub (`org/name`); null: none"
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a teacher of the hub; null: its main branch"
    )
    family: Annotated[str | None, FAMILIES] = Field(
        None, description="how the teacher is built, as model.family; null: by the architecture in its config.json"
    )
    family_options: dict[str, Any] = Field(default_factory=dict, description="options of a family of your own")
    coefficient: float = Field(1.0, gt=0, description="delta, weight of the reverse KL in the advantage of a token")
    rewards: bool = Field(True, description="the group's advantage counts beside it; false: the teacher alone")


class AlgoConfig(Section):
    """The loss and the importance weights; equations in docs/algorithm.md."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="group-relative advantages")
    distillation: DistillationConfig = Field(
        default_factory=DistillationConfig, description="a teacher's part in the advantages"
    )
    loss: Annotated[str, LOSSES] = Field("clip", description="family of the policy loss")
    loss_options: dict[str, Any] = Field(default_factory=dict, description="options of a family of your own")
    proximal: Annotated[str, PROXIMALS] = Field(
        "behaviour", description="the proximal policy; recompute takes one more forward pass"
    )
    proximal_options: dict[str, Any] = Field(
        default_factory=dict, description="options of a proximal policy of your own"
    )
    eps_low: float = Field(0.2, ge=0, le=1, description="lower clip range")
    eps_high: float = Field(0.28, ge=0, description="upper clip range")
    dual_clip: float | None = Field(None, gt=1, description="c of the dual clip for negative advantages; null: off")
    kl: float = Field(0.0, ge=0, description="beta, weight of the KL divergence to the reference policy")
    kl_estimator: Annotated[str, DIVERGENCES] = Field("k3", description="how a token's KL divergence is estimated")
    kl_estimator_options: dict[str, Any] = Field(
        default_factory=dict, description="options of an estimator of your own"
    )
    kl_straight_through: bool = Field(False, description="the value of kl_estimator with the gradient of k2")
    kl_reward: float = Field(
        0.0, ge=0, description="weight of the KL divergence to the reference policy that is taken off the reward"
    )
    kl_reward_estimator: Annotated[str, REWARD_DIVERGENCES] = Field("k1", description="how that one is estimated")
    kl_reward_estimator_options: dict[str, Any] = Field(
        default_factory=dict, description="options of an estimator of your own"
    )
    reference: Path | None = Field(
        None, description="Hugging Face folder of the reference policy; null: model.path (LoRA: without adapters)"
    )
    entropy: float = Field(0.0, ge=0, description="lambda, weight of the entropy bonus")
    sapo_positive: float = Field(1.0, gt=0, description="temperature of sapo's gate for advantages above 0")
    sapo_negative: float = Field(1.05, gt=0, description="temperature of sapo's gate for the other advantages")
    weight: Annotated[str, WEIGHTS] = Field("token", description="what the truncated importance weight reads")
    weight_options: dict[str, Any] = Field(default_factory=dict, description="options of a weight of your own")
    weight_cap: float = Field(2.0, ge=1, description="C, cap of the importance weight")
    weight_gamma: float = Field(
        1.0, gt=0, le=1, description="gamma, tightens the cap with staleness: 1 + (C - 1) gamma^s"
    )
    weight_normalise: bool = Field(
        False, description="divide the weight by its mean of the step, before masks; needs proximal=recompute"
    )
    mask: Annotated[str, MASKS] = Field(
        "none", description="what masks far off-policy tokens; second_moment needs proximal=recompute"
    )
    mask_options: dict[str, Any] = Field(default_factory=dict, description="options of a mask of your own")
    mask_low: float | None = Field(None, ge=0, description="lower edge of the mask; null: the rule's own default")
    mask_high: float | None = Field(None, gt=0, description="upper edge of the mask; null: the rule's own default")
    more_masks: tuple[MaskRule, ...] = Field(
        (), description="further masks, which all must keep a token: [{mask: token_k2, mask_high: 1}]"
    )
    second_moment: float = Field(0.04, gt=0, description="largest mean of (log rho)^2 that mask=second_moment leaves")
    covariance: Annotated[str, REGULARISERS] = Field(
        "none", description="what is done to the tokens whose log-prob and advantage covary most"
    )
    covariance_options: dict[str, Any] = Field(default_factory=dict, description="options of a regulariser of your own")
    covariance_share: float = Field(2e-4, gt=0, le=1, description="share of the tokens that `covariance` acts on")
    covariance_low: float = Field(1.0, description="clip_cov: lower edge of the covariance it picks from")
    covariance_high: float = Field(5.0, description="clip_cov: upper edge of the covariance it picks from")
    covariance_kl: float = Field(1.0, ge=0, description="kl_cov: weight of the KL penalty on the tokens it picks")
    discount: float = Field(1.0, gt=0, le=1, description="lambda_s, weight factor per step of staleness")
    aggregation: Annotated[str, AGGREGATIONS] = Field("token_mean", description="mean over tokens or samples")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="options of an aggregation of your own"
    )
    norm_length: int | None = Field(None, ge=1, description="tokens by which sequence_sum_norm divides")

    @property
    def distils(self) -> bool:
        """Does a teacher score the tokens?"""
        return self.distillation.teacher is not None

    @property
    def least_samples(self) -> int:
        """Samples of a group that has something to teach: a teacher's word needs no siblings."""
        return 1 if self.distils else self.advantage.least_samples

    @rule
    def _mask_keeps_something(self) -> None:
        own_low, own_high = self.chosen("mask").edges or (None, None)
        low = own_low if self.mask_low is None else self.mask_low
        high = own_high if self.mask_high is None else self.mask_high
        if low is None or high is None or low < high:
            return
        if self.mask_low is None:
            raise ValueError(f"mask_high: {high:g} is not above mask_low={low:g}, the default of mask={self.mask}")
        default = "" if self.mask_high is not None else f", the default of mask={self.mask}"
        raise ValueError(f"mask_low: {low:g} is not below mask_high={high:g}{default}")

    @property
    def needs_reference(self) -> bool:
        """Is a token's log-prob under the reference policy read?"""
        return self.kl > 0 or self.kl_reward > 0

    @property
    def mask_chain(self) -> tuple[AlgoConfig, ...]:
        """The settings of each mask in order: `mask`, then `more_masks`."""
        return self, *(self.model_copy(update={**dict(each), "more_masks": ()}) for each in self.more_masks)

    @rule
    def _more_masks_hold(self) -> None:
        for each in self.mask_chain[1:]:
            declaration = each.chosen("mask")
            try:
                if declaration.whole_step:
                    raise ValueError(f"mask: {each.mask} looks at a whole step; allowed: as algo.mask alone")
                if each.mask_low is not None and "mask_low" not in declaration.uses:
                    raise ValueError(f"mask_low: {each.mask_low:g} does nothing with mask={each.mask}; allowed: null")
                checked(declaration.Options, each.mask_options, "mask_options")
                declaration.check(each)
                each._mask_keeps_something()
            except ValueError as error:
                raise ValueError(f"more_masks: {error}") from error

    @rule
    def _weights_can_be_normalised(self) -> None:
        if not self.weight_normalise:
            return
        if not self.chosen("weight").corrects:
            raise ValueError(f"weight_normalise: true does nothing with weight={self.weight}; allowed: false")
        if not self.chosen("proximal").scored:
            raise ValueError(
                f"weight_normalise: true needs weights that are known before the first update, not those of "
                f"proximal={self.proximal}; allowed: false, or proximal=recompute"
            )

    @rule
    def _straight_through_changes_something(self) -> None:
        if self.kl_straight_through and self.chosen("kl_estimator").follows_k2:
            raise ValueError(
                f"kl_straight_through: true does nothing with kl_estimator={self.kl_estimator}; allowed: false"
            )

    @rule
    def _reference_is_read(self) -> None:
        if self.reference is not None and not self.needs_reference:
            raise ValueError(f"reference: {self.reference} is read only with kl or kl_reward above 0; allowed: null")

    @rule
    def _covariance_leaves_a_range(self) -> None:
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low: {self.covariance_low:g} is not below covariance_high={self.covariance_high:g}"
            )


class OptimizerSettings(Section):
    """Adam of Megatron-Core and its schedule."""

    lr: float = Field(1e-6, gt=0, le=1, description="peak learning rate: how far Adam moves a weight in one update")
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
    passes: int = Field(1, ge=1, description="times that a batch is trained")
    mini_batches: int = Field(1, ge=1, description="updates of one pass; each takes its share of the batch's groups")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in the backward pass: none, attention's, or whole layers'"
    )
    overlap: bool | None = Field(
        None, description="gradients are reduced and parameters gathered during the passes; null: on with CUDA"
    )
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
        False, description="params_norm and grad_zeros: one more pass over parameters and gradients in each step"
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
    timeout: float = Field(600.0, gt=0, description="seconds that writing one checkpoint may take")
