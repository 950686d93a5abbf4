"""Megatron-RL's options: which key of streamrl's configuration each one is."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.recipes.rules import UNSAID, Constant, Language, Rule, same

SAVE_INTERVAL = "CHKPT_SAVE_INTERVAL"  # a variable of the model's file, for whatever launches it
AGENTS = {"DAPOAgent": "dapo_math", "AIMEAgent": "aime_2024", "OpenMathInstructAgent": "openmath"}
TRAINED, EVALUATED = "agent_type", "agent_type evaluation_only"  # of the environments' file
BATCH = ("--global-batch-size", "--grpo-prompts-per-step", "--grpo-group-size")


def updates(batch: int, prompts: int, group: int) -> int:
    """Updates of one step: its samples are cut into global batches."""
    return prompts * group // batch


def steps(iterations: int, batch: int, prompts: int, group: int) -> int:
    """An interval there counts updates, here learner steps."""
    return iterations // updates(batch, prompts, group)


def warmup(samples: int, prompts: int, group: int) -> int:
    """Learner steps of a warm-up that is given in samples, rounded up."""
    return math.ceil(samples / (prompts * group))


def tasks(agents: list[str]) -> Any:
    """The tasks of the environments' file."""
    return [AGENTS[agent] for agent in agents] or UNSAID


def if_experts(size: int | None, tensor: int, experts: int | None) -> Any:
    """The tensor-parallel size inside an expert: that of the model unless it is given."""
    return (size or tensor) if experts else UNSAID


RULES = (
    Rule("model.dtype", ("--bf16",), lambda on: "bfloat16" if on else UNSAID),
    Rule("task.shares", (TRAINED,), tasks),
    Rule("evaluate.tasks", (EVALUATED,), tasks),
    Rule("generate.group_size", ("--grpo-group-size",)),
    Rule("generate.sampling.max_new_tokens", ("--inference-max-seq-length",)),
    Rule("generate.sampling.temperature", ("--rl-default-temperature",), float),
    Rule("generate.sampling.temperature", ("--model-temperature",), float),  # a script's, which no parser reads
    Rule("generate.sampling.top_p", ("--rl-default-top-p",), lambda share: float(share) or 1.0),  # 0: off
    Rule("generate.sampling.top_k", ("--rl-default-top-k",)),
    Rule("generate.server_args.context_length", ("--inference-max-seq-length",)),
    Rule("generate.server_args.max_running_requests", ("--inference-max-requests",)),
    Rule(
        "generate.tensor_parallel",
        ("--tensor-model-parallel-size", "--rl-inference-tensor-model-parallel-size"),
        lambda tensor, own: own or tensor,
    ),
    Rule("replay.groups_per_step", ("--grpo-prompts-per-step",)),
    Rule("replay.max_staleness", ("--rl-partial-rollouts",), lambda on: UNSAID if on else 0),
    Rule("replay.filter.signal", ("--grpo-filter-groups-with-same-reward",)),
    Rule("algo.eps_low", ("--grpo-clamp-eps-lower",)),
    Rule("algo.eps_high", ("--grpo-clamp-eps-upper",)),
    Rule("algo.kl", ("--grpo-kl-beta",), float),
    Rule("algo.entropy", ("--grpo-entropy-term-weight",), float),
    Rule("algo.aggregation", ("--calculate-per-token-loss",), lambda on: "token_mean" if on else UNSAID),
    Rule("algo.weight", ("--rl-inference-logprobs-is-correction",), lambda on: "token" if on else "none"),
    Rule("algo.weight_cap", ("--rl-importance-sampling-truncation-coef",)),
    Rule("learner.passes", ("--grpo-iterations",)),
    Rule("learner.mini_batches", BATCH, updates),
    Rule("learner.tokens_per_micro_batch", ("--seq-length",)),
    Rule("learner.layout.tensor", ("--tensor-model-parallel-size",)),
    Rule("learner.layout.sequence", ("--sequence-parallel",)),
    Rule("learner.layout.pipeline", ("--pipeline-model-parallel-size",)),
    Rule("learner.layout.expert", ("--expert-model-parallel-size",)),
    Rule(
        "learner.layout.expert_tensor",
        ("--expert-tensor-parallel-size", "--tensor-model-parallel-size", "--num-experts"),
        if_experts,
    ),
    Rule("learner.recompute", ("--recompute-granularity",)),
    Rule("learner.optimizer.lr", ("--lr",)),
    Rule("learner.optimizer.decay", ("--lr-decay-style",)),
    Rule(
        "learner.optimizer.warmup_steps",
        ("--lr-warmup-samples", "--grpo-prompts-per-step", "--grpo-group-size"),
        warmup,
    ),
    Rule("learner.optimizer.beta1", ("--adam-beta1",)),
    Rule("learner.optimizer.beta2", ("--adam-beta2",)),
    Rule("learner.optimizer.eps", ("--adam-eps",)),
    Rule("learner.optimizer.weight_decay", ("--weight-decay",)),
    Rule("learner.optimizer.clip_grad", ("--clip-grad",)),
    Rule("learner.optimizer.distributed", ("--use-distributed-optimizer",)),
    Rule("evaluate.every", ("--eval-interval", *BATCH), steps),
    Rule("evaluate.prompts", ("--rl-prompts-per-eval",)),
    Rule("checkpoint.every", ("--save-interval", *BATCH), steps),
    Rule("checkpoint.every", (SAVE_INTERVAL, *BATCH), steps),
    Rule("shape.num_hidden_layers", ("--num-layers",)),
    Rule("shape.hybrid_override_pattern", ("--hybrid-layer-pattern",)),
    Rule("shape.ssm_state_size", ("--mamba-state-dim",)),
    Rule("shape.mamba_head_dim", ("--mamba-head-dim",)),
    Rule("shape.hidden_size", ("--hidden-size",)),
    Rule("shape.num_attention_heads", ("--num-attention-heads",)),
    Rule("shape.num_key_value_heads", ("--num-query-groups", "--group-query-attention"), lambda heads, _: heads),
    Rule("shape.intermediate_size", ("--ffn-hidden-size",)),
    Rule("shape.rope_theta", ("--rotary-base",), float),
    Rule("shape.rms_norm_eps", ("--norm-epsilon",)),
    Rule("shape.tie_word_embeddings", ("--untie-embeddings-and-output-weights",), lambda untied: not untied),
    Rule("shape.num_experts", ("--num-experts",), same),
    Rule("shape.num_experts_per_tok", ("--moe-router-topk", "--num-experts"), lambda k, count: k if count else UNSAID),
    Rule("shape.moe_intermediate_size", ("--moe-ffn-hidden-size",)),
    Rule("shape.routed_scaling_factor", ("--moe-router-topk-scaling-factor",)),
)

ADVANTAGE = "megatron/rl/rl_utils.py"
CONSTANTS = (
    Constant("algo.advantage.eps", ADVANTAGE, r"\(rewards - reward_means\) / \((\S+) \+ reward_stds\)"),
    Constant(
        "algo.advantage.std",
        ADVANTAGE,
        r"\*\* 2\)\.sum\(axis=-1, keepdims=True\)\s*/ (real_counts)",
        lambda _: "population",
    ),
)

FLAGS_FILES = (
    "megatron/training/arguments.py",
    "megatron/training/config/training_config.py",
    "megatron/core/optimizer/optimizer_config.py",
    "megatron/core/model_parallel_config.py",
)

ARCHITECTURE = "of the model's architecture, which its config.json has"
WITHOUT_KEY = {
    r"--(micro-batch-size|recompute-(activations|modules))": "memory and speed alone",
    r"--(no-)?rl-(use-)?sequence-packing\S*": "memory and speed alone",
    r"--(overlap-\S+|ddp-num-buckets|manual-gc|cross-entropy-\S+|no-gradient-accumulation-fusion)": "speed alone",
    r"--fp8-\S+|--(first-last-layers|num-layers-at-(start|end)-in)-bf16": "the layers of these models have no FP8 here",
    r"--(seq-length|max-position-embeddings)": ARCHITECTURE,
    r"--(kv-channels|swiglu|normalization|qk-layernorm|add-qkv-bias|disable-bias-linear)": ARCHITECTURE,
    r"--(position-embedding-type|rotary-percent|use-rotary-position-embeddings)": ARCHITECTURE,
    r"--(vocab-size|make-vocab-size-divisible-by|\w+-dropout)": ARCHITECTURE,
    r"--(squared-relu|init-method-std|use-checkpoint-args)": ARCHITECTURE,
    r"--moe-router-(score-function|enable-expert-bias)": ARCHITECTURE,
    r"--(no-masked-softmax-fusion|attention-softmax-in-fp32|attention-backend|transformer-impl)": "kernels",
    r"--(moe-layer-freq|moe-token-dispatcher-type|use-mcore-models|te-rng-tracker|spec)": "kernels",
    r"--(moe-router-dtype|enable-experimental|disable-gloo-process-groups)": "kernels",
    r"--moe-(aux-loss-coeff|router-load-balancing-type)": "no auxiliary loss beside the policy's",
    r"--tokenizer-\S+|--no-use-tokenizer-\S+|--tiktoken-pattern|--rl-skip-bos-token": "the tokenizer is in the folder",
    r"--(pretrained-checkpoint|ckpt-format|dist-ckpt-strictness|load|save|finetune|no-load-optim)": "folders",
    r"--ckpt-(assume-constant-structure|fully-parallel-\w+)|--(async-save|no-load-rng|no-mmap-bin-files)": "folders",
    r"--(per-split-data-args-path|num-workers|check-weight-hash-\S+|rerun-mode)": "folders",
    r"--(data-parallel-random-init|mock-data|data-cache-path|no-create-attention-mask-in-dataloader|seed)": "folders",
    r"--min-lr": "of the decay, which ends long after these runs",
    r"--lr-warmup-init": "of the warm-up, of one step",
    r"--train-samples": "how long: run.steps",
    r"--accumulate-allreduce-grads-in-fp32": "always",
    r"--(inference-dynamic-batching-\S+|rl-persist-cuda-graphs|cuda-graph-impl)": "of the engine",
    r"--(empty-unused-memory-level|decode-only-cuda-graphs|moe-pad-experts-for-cuda-graph-inference)": "of the engine",
    r"--(langrl-env-config|env-config|perform-rl-step|initialize-socket-comms)": "the environments' file",
    r"--(log|timing|tensorboard|wandb)-\S+|--(disable-)?straggler-\S+|--save-retain-interval": "logs",
    r"--(distributed-timeout-minutes|nproc-per-node|nnodes|exit-duration-in-mins)": "machines",
}

REQUIRED = {"--optimizer": ("adam",)}

LANGUAGE = Language(RULES, CONSTANTS, REQUIRED, WITHOUT_KEY)
