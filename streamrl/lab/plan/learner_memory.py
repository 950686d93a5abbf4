"""Memory of one rank of the learner: what it holds all the time, and the most that a step adds to it.

    weights + gradients + optimizer  +  the largest of  (activations + log-probs + what is gathered for a pass),
    and the same three of a critic                      (one gathered tensor), (a teacher), (a critic's activations)

n: parameters of the rank (its layers, cut over `tensor`, experts over `expert` and `expert_tensor`; the embedding on
the first stage, the output layer on the last one; rows padded as `learner/shape.py` pads them). e: bytes of a weight (2
in bfloat16, 4 in float32). D: ranks with the same parameters (data parallel times context; for experts ranks / (expert
x expert_tensor x pipeline)).

    weights      e n
    gradients    4 n, summed in float32; with LoRA n counts adapters alone, here and below
    optimizer    12 n (bfloat16: float32 copy, two moments) or 8 n (float32); / D with the distributed optimizer
                 (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054)
    full         with `learner.layout.sharding: full` weights 4 n / D, which are the optimizer's float32 copy as well,
                 gradients 4 n / D, optimizer 8 n / D (ZeRO-3); for a pass what follows, of l parameters of the largest
                 layer and r that are in no layer: 2 e r for their weights and gradients, and besides 4 r where they are
                 reduced, or 3 e l + 8 l: a layer, the next one, gradients, and float32 sums of two layers on their way
    offloaded    the share `learner.optimizer.offload` of it; on the host 16 n of the share, with gradients
    log-probs    one chunk of 256 MiB of logits (1 + e/4 of it), 3 e hidden a token, the output layer's gradient: 4
                 bytes a weight, in bfloat16 e more for a product
    reference    e n on the host, with a reference policy and no adapters; 4 n / D with `sharding: full`
    critic       weights, gradients and optimizer of its own n, all of it trained; one row for an output layer
    teacher      e times its own n on the host, and on the device while it scores, with one row in one of its layers and
                 a chunk of its logits

Activations of one token in one layer on a rank of t tensor-parallel ranks, with q and k columns of queries and of keys,
h hidden and f MLP columns, in values of e bytes:

    4 h / t                 inputs of two norms and of two column-parallel layers (not divided without `sequence`)
    (3 q + 3 k) / t         the projection, turned queries and keys, the output of attention
    q / t                   with norms of queries and keys
    4 f / t, or 3 f / t     gate and up, their product, and silu(gate) unless Transformer Engine fuses it

and 4 bytes a head for attention's normaliser unless `recompute` is `selective`. This is the count of Korthikanti et al.
2022 (arXiv:2205.05198, section 4) for layers without dropout, with grouped queries, a gated MLP, and attention that
keeps no scores. A mixture of experts replaces the last line by top_k copies of the rank's own tokens with 2 h and the
MLP of an expert each, spread evenly, and float32 router logits. Latent attention has its vectors before and behind
their norms, and the queries, keys and values of all heads. Delta nets and Mamba-2 have float32 copies besides; a layer
that is one part alone has that part's, and two inputs. With `recompute: full` a layer keeps its input, and one
layer is whole while it is computed again.

A row has `tokens_per_micro_batch` / `context` tokens on a rank. Stage i of p has p - i rows under way (1F1B, Narayanan
et al. 2021, arXiv:2104.04473); with v virtual stages 2 (p - 1 - i) + (v - 1) p + 1 chunks of layers, Megatron-Core's
warm-up. Transformer Engine counts as installed where the learner would use it.

Not counted: CUDA's context, NCCL's buffers, gaps of the allocator; `--headroom` is for them. The distributed optimizer
pads each tensor to a multiple of 64 values, `sharding: full` its rows to a multiple of D. What that gathers is counted
from the order of torch's calls, and was never measured.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from streamrl.config import Config
from streamrl.config.learner import LoraConfig
from streamrl.lab.plan.machines import Machines
from streamrl.lab.plan.parameters import largest_layer, layers_of, of_critic, of_stage, outside_layers
from streamrl.learner.critic_shape import critic_shape
from streamrl.learner.mamba_shape import CHUNK, MambaShape
from streamrl.learner.shape import CHUNK_BYTES, ModelShape
from streamrl.learner.teacher_shape import teacher_shape

# Bytes of one weight.
ITEM = {"float32": 4, "bfloat16": 2}

# Bytes a parameter of the float32 copy of a bf16 weight, of Adam's two moments, of a gradient.
MASTER, MOMENTS, GRADIENT = 4, 8, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of one rank of the learner. `host_...` are in the host's memory."""

    stage: int  # pipeline stage
    parameters: int  # number of them
    trained: int  # those of them that are trained
    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward pass, at the most
    logprobs: int  # logits of a chunk and the output layer's gradient
    gathered: int  # `learner.layout.sharding: full`: whole weights and gradients during a pass
    export: int  # the largest tensor, put together for publishing
    host_optimizer: int  # `learner.optimizer.offload`
    host_reference: int  # `algo.kl`, `algo.kl_reward`
    teacher: int  # `algo.distillation`, on the device while it scores; no activations are kept then
    host_teacher: int  # its weights
    critic: int  # `algo.advantage.estimator: gae`: weights, gradients, optimizer
    critic_activations: int  # kept for its backward pass, when none of the policy's are

    @property
    def held(self) -> int:
        """All the time."""
        return self.weights + self.gradients + self.optimizer + self.critic

    @property
    def peak(self) -> int:
        """At the most, on the device."""
        a_pass = self.activations + self.logprobs + self.gathered
        steps = (a_pass, self.export, self.teacher, self.critic_activations)
        return self.held + max(steps)

    @property
    def host(self) -> int:
        return self.host_optimizer + self.host_reference + self.host_teacher

    def as_json(self) -> dict[str, int]:
        return {**asdict(self), "held": self.held, "peak": self.peak}


def fullest_rank(config: Config, shape: ModelShape, machines: Machines) -> RankMemory:
    """The rank that needs the most: ranks of one pipeline stage need the same."""
    stages = range(config.learner.layout.pipeline)
    return max((rank_memory(config, shape, machines, stage) for stage in stages), key=lambda rank: rank.peak)


def rank_memory(config: Config, shape: ModelShape, machines: Machines, stage: int) -> RankMemory:
    """A rank of one pipeline stage."""
    learner, layout, item = config.learner, config.learner.layout, ITEM[config.model.dtype]
    counted = of_stage(shape, layout, stage, learner.lora)
    last = stage == layout.pipeline - 1
    frozen = counted.tower if learner.freeze_vision else 0
    trained = counted.adapters if learner.lora.rank else counted.all - frozen
    own = (counted.adapters, 0) if learner.lora.rank else (counted.dense - frozen, counted.expert)
    optimizer, on_host = _optimizer(config, machines, *own)
    critic, of_critic_on_host, critic_activations = _critic(config, shape, machines, stage)
    teacher, teacher_weights = _teacher(config, shape, machines, stage)
    references = config.algo.needs_reference and not (learner.lora.rank and config.algo.reference is None)
    shares, stored = (_copies(config)[0], MASTER) if layout.fully_sharded else (1, item)
    return RankMemory(
        stage=stage,
        parameters=counted.all,
        trained=trained,
        weights=math.ceil(counted.all / shares) * stored,
        gradients=math.ceil(trained / shares) * GRADIENT,
        optimizer=optimizer,
        activations=activations(config, shape, machines, stage),
        logprobs=_logprobs(config, shape) if last else 0,
        gathered=_gathered(config, shape) if layout.fully_sharded else 0,
        export=shape.vocabulary * shape.hidden * item,
        host_optimizer=on_host + of_critic_on_host,
        host_reference=math.ceil((counted.dense + counted.expert) / shares) * stored if references else 0,
        teacher=teacher,
        host_teacher=teacher_weights,
        critic=critic,
        critic_activations=critic_activations,
    )


def _critic(config: Config, shape: ModelShape, machines: Machines, stage: int) -> tuple[int, int, int]:
    """(bytes that it holds, bytes on the host, bytes for its backward pass)."""
    critic = critic_shape(config, shape)
    if critic is None:
        return 0, 0, 0
    item, layout = ITEM[config.model.dtype], config.learner.layout
    counted = of_critic(critic, layout, stage)
    optimizer, on_host = _optimizer(config, machines, counted.dense, counted.expert)
    states = 3 * math.ceil(config.learner.tokens_per_micro_batch / layout.context) * critic.hidden * item
    kept = activations(config, critic, machines, stage) + (states if stage == layout.pipeline - 1 else 0)
    return counted.all * (item + GRADIENT) + optimizer, on_host, kept


def _teacher(config: Config, shape: ModelShape, machines: Machines, stage: int) -> tuple[int, int]:
    """(bytes that it adds while it scores, bytes of its weights on the host, which without GPUs are the only copy)."""
    teacher = teacher_shape(config, shape)
    if teacher is None:
        return 0, 0
    learner, layout = config.learner, config.learner.layout
    own = learner.model_copy(update={"recompute": "none", "lora": LoraConfig()})
    config = config.model_copy(update={"learner": own})
    weights = of_stage(teacher, layout, stage, own.lora).all * ITEM[config.model.dtype]
    tokens = math.ceil(learner.tokens_per_micro_batch / layout.context)
    layer = max(token_bytes(config, teacher, machines, each) for each in layers_of(teacher, layout, stage))
    logits = _logprobs(config, teacher, backward=False) if stage == layout.pipeline - 1 else 0
    copied = weights if machines.has_gpus else 0
    return copied + tokens * layer + logits, weights


def is_distributed(config: Config, machines: Machines) -> bool:
    """Whether the ranks share the optimizer's state."""
    if config.learner.layout.fully_sharded:
        return True
    given = config.learner.optimizer.distributed
    return machines.has_gpus if given is None else given


def is_fused(config: Config, machines: Machines) -> bool:
    """Whether the layers are Transformer Engine's, taken to be installed, as `learner/model.py` chooses."""
    return machines.has_gpus and config.model.dtype == "bfloat16"


def _optimizer(config: Config, machines: Machines, dense: int, expert: int) -> tuple[int, int]:
    """(bytes on the device, bytes on the host) for so many trained parameters of a rank, of experts and others.

    An offloaded parameter has its gradient on the host as well.
    """
    learner = config.learner
    copies, expert_copies = _copies(config) if is_distributed(config, machines) else (1, 1)
    shard = math.ceil(dense / copies) + math.ceil(expert / expert_copies)
    master = MASTER if config.model.dtype == "bfloat16" and not learner.layout.fully_sharded else 0
    offloaded = learner.optimizer.offload
    kept = int(shard * (master + MOMENTS) * (1.0 - offloaded))
    return kept, int(shard * offloaded * (MASTER + MOMENTS + GRADIENT))


def _copies(config: Config) -> tuple[int, int]:
    """Data-parallel and context ranks that have the same parameters, and those that have the same experts."""
    ranks, layout = config.learner.ranks, config.learner.layout
    return ranks // (layout.tensor * layout.pipeline), ranks // (layout.expert * layout.expert_tensor * layout.pipeline)


def _gathered(config: Config, shape: ModelShape) -> int:
    """What a pass of a fully sharded model has whole at the most, in its backward half."""
    layout, item = config.learner.layout, ITEM[config.model.dtype]
    layer, others = largest_layer(shape, layout), outside_layers(shape, layout)
    in_use = 3 * item * layer + 2 * GRADIENT * layer
    return 2 * item * others + max(GRADIENT * others, in_use)


def activations(config: Config, shape: ModelShape, machines: Machines, stage: int) -> int:
    """Bytes that the forward passes leave for the backward pass on a rank of this stage, at the most.

    A stage has as many micro batches under way as there are stages from it to the last one (1F1B; Narayanan et al.
    2021, arXiv:2104.04473), and more chunks with virtual stages (Megatron-Core's warm-up).
    """
    learner, layout = config.learner, config.learner.layout
    layers = layers_of(shape, layout, stage)
    tokens = math.ceil(learner.tokens_per_micro_batch / layout.context)
    each = [tokens * token_bytes(config, shape, machines, layer) for layer in layers]
    behind = layout.pipeline - 1 - stage
    if layout.virtual > 1:
        chunks = 2 * behind + (layout.virtual - 1) * layout.pipeline + 1
        under_way = sum(each) * chunks // layout.virtual
    else:
        under_way = sum(each) * (behind + 1)
    again = 0
    if learner.recompute == "full":  # the layer that is computed again has all of its own
        whole = config.model_copy(update={"learner": learner.model_copy(update={"recompute": "none"})})
        again = max(tokens * token_bytes(whole, shape, machines, layer) for layer in layers)
    return under_way + again


def token_bytes(config: Config, shape: ModelShape, machines: Machines, layer: int) -> int:
    """Bytes that one token of a row leaves on one rank in one layer.

    After Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for this architecture: no dropout, grouped queries,
    attention that keeps no scores, a gated MLP.
    """
    layout, item = config.learner.layout, ITEM[config.model.dtype]
    # Gate and up, their product, and without fusion silu(gate); without a gate max(up, 0) and its square.
    mlp = (3 if is_fused(config, machines) and shape.family.engine else 4) if shape.gated else 2
    spread = layout.tensor if layout.sequence else 1  # what tensor parallelism leaves whole
    if config.learner.recompute == "full":
        return shape.hidden * item // spread
    # Inputs of all norms and of the column-parallel layers that a layer's parts begin with.
    parts = 1 if shape.mamba is not None else 2
    residual = (parts + shape.family.norms_in_a_layer) * shape.hidden // spread
    mixer = _of_mixer(shape, layer, layout.tensor, spread, item)
    norms = 4 * shape.heads // layout.tensor  # float32 log-sum-exps
    if config.learner.recompute == "selective" or not shape.has_attention(layer):
        norms = 0
    if not shape.has_mlp(layer):
        return (residual + mixer) * item + norms
    if not shape.has_experts(layer):
        return (residual + mixer + mlp * shape.ffn // layout.tensor) * item + norms
    assert shape.moe is not None
    own = 1 if layout.tensor == 1 or not layout.sequence else 1 / layout.tensor  # of a row's tokens, on this rank
    routed = own * shape.moe.top_k * layout.expert_tensor  # copies of tokens that meet its experts, spread evenly
    experts = routed * (2 * shape.hidden + mlp * shape.moe.ffn / layout.expert_tensor)
    experts += mlp * shape.moe.shared_ffn / layout.tensor
    router = 2 * 4 * shape.moe.experts * own  # float32 logits and probabilities
    return int((residual + mixer + experts) * item + router) + norms


def _of_mixer(shape: ModelShape, layer: int, tensor: int, spread: int, item: int) -> int:
    """Values of `item` bytes that a token leaves in what mixes tokens in a layer, but for its input.

    tensor: ranks over which heads are cut; spread: those that share what is not.
    """
    if (delta := shape.delta) is not None and shape.is_delta(layer):
        # The projection, the convolution and what it makes, float32 copies for the rule, what tokens write, outputs.
        copies = 4 * delta.values * (3 * delta.key + 4 * delta.value) // item
        return (delta.projected + 2 * delta.channels + 2 * delta.values * delta.value + copies) // tensor
    if shape.mamba is not None and shape.is_mamba(layer):
        return _of_scan(shape.mamba, item) // tensor
    if not shape.has_attention(layer):
        return 0
    if (latent := shape.latent) is not None:  # vectors before and behind their norms; keys are put together, too
        vectors = 2 * (latent.rank + (latent.query_rank or 0)) + latent.turned
        heads = 2 * shape.head_dim + shape.head_dim + latent.plain + 2 * latent.value
        return vectors // spread + shape.heads // tensor * heads
    queries, keys = (heads * shape.head_dim // tensor for heads in (shape.heads, shape.groups))
    # The projection (its values are seen there), turned queries and keys, the output.
    return 3 * queries + 3 * keys + (queries if shape.qk_norm else 0)


def _of_scan(mamba: MambaShape, item: int) -> int:
    """Values of `item` bytes that a token leaves in a Mamba-2 layer (`learner/mamba.py`, `learner/mamba_scan.py`).

    The projection, the convolution and what it makes, the output; in float32: what it makes once more, values before
    and behind the scan, its gate and its norm (8 times their width), decays of a chunk's pairs, those that are seen and
    their scores, and each chunk's states twice.
    """
    pairs, states = 3 * CHUNK * mamba.heads, 2 * mamba.inner * mamba.state // CHUNK
    float32 = 8 * mamba.inner + mamba.channels + 2 * mamba.groups * mamba.state + pairs + states
    return mamba.projected + 2 * mamba.channels + mamba.inner + 4 * float32 // item


def _logprobs(config: Config, shape: ModelShape, *, backward: bool = True) -> int:
    """What the log-probs of a micro batch take at the most: in their backward pass (`learner/logprobs.py`), if any."""
    learner, layout, item = config.learner, config.learner.layout, ITEM[config.model.dtype]
    rows = shape.padded_vocabulary(layout.tensor) // layout.tensor
    tokens = math.ceil(learner.tokens_per_micro_batch / layout.context)
    logits = min(CHUNK_BYTES, 4 * rows * tokens)
    copies = 1 + item / 4 + (2 if config.algo.entropy else 0)
    states = 3 * tokens * shape.hidden * item  # gathered, chosen, and their gradient
    weight_gradient = 0
    if backward and not learner.lora.rank:
        weight_gradient = rows * shape.hidden * (4 if item == 4 else 4 + item)
    whole = 0
    if backward and config.algo.kl > 0 and config.algo.chosen("kl_estimator").of_vocabulary:
        # The reference's output layer and its states of a micro batch; the policy's gradient comes a second time.
        whole = (rows + tokens) * shape.hidden * item + weight_gradient
    return int(logits * copies) + states + weight_gradient + whole
