"""verl's options: which key of streamrl's configuration each one is."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.recipes.rules import UNSAID, Constant, Language, Rule

DATA, ACTOR, ROLLOUT = "data", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, ALGORITHM, TRAINER = "actor_rollout_ref.model", "algorithm", "trainer"
OPTIMIZER, LAYOUT = f"{ACTOR}.optim", f"{ACTOR}.megatron"
CORRECTION = f"{ALGORITHM}.rollout_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

# Its data files, our tasks, and the prompts that each has to train.
TASKS = {
    "gsm8k": ("gsm8k", 7473),
    "math": ("math", 7500),
    "geo3k": ("geo3k", 2101),
    "dapo-math-17k": ("dapo_math", None),
}
HELD_OUT = {"aime-2024": "aime_2024"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "sequence_sum_norm",
}
ALL_LINEAR = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def _files(value: Any) -> list[str]:
    """The names of data files: `.../gsm8k/train.parquet` is gsm8k, `.../aime-2024.parquet` aime-2024."""
    found = re.findall(r"([\w-]*)/([\w-]+)\.parquet", value)
    return [folder if name in ("train", "test") else name for folder, name in found]


def tasks(train_files: str) -> Any:
    """The tasks that are trained; a script that leaves its files to the user says nothing."""
    return [TASKS[name][0] for name in _files(train_files)] or UNSAID


def evaluated(val_files: str) -> Any:
    """Tasks that are evaluated and not trained; without such, those that are trained."""
    return [HELD_OUT[name] for name in _files(val_files) if name in HELD_OUT] or UNSAID


def steps(epochs: int, batch: int, train_files: str) -> Any:
    """Whole batches of all epochs. DAPO's file has each prompt many times, so that its epochs say nothing."""
    sizes = [TASKS[name][1] for name in _files(train_files)]
    return UNSAID if None in sizes or not sizes else epochs * (sum(size for size in sizes if size) // batch)


def model(path: str) -> Any:
    """The model's own name, in our folder of models; `<...>` is for the user to fill in."""
    return UNSAID if path.startswith("<") else f"models/{path.rsplit('/', 1)[-1]}"


def one_unless_given(size: int | None) -> int:
    """A parallel size; null is 1."""
    return size or 1


def lora(key: str) -> tuple[Rule, Rule]:
    """The rank, of whichever trainer; 0 is for no adapters."""
    return Rule(key, (f"{MODEL}.lora_rank",), lambda rank: rank or UNSAID), Rule(
        key, (f"{MODEL}.lora.rank",), lambda rank: rank or UNSAID
    )


RULES = (
    Rule("model.path", (f"{MODEL}.path",), model),
    Rule("task.shares", (f"{DATA}.train_files",), tasks),
    Rule("task.max_prompt_tokens", (f"{DATA}.max_prompt_length",)),
    Rule(
        "task.chat_template_kwargs",
        (f"{DATA}.apply_chat_template_kwargs.reasoning_effort",),
        lambda effort: {"reasoning_effort": effort},
    ),
    Rule("task.overlong.buffer", (f"{OVERLONG}.len", f"{OVERLONG}.enable"), lambda size, on: size if on else UNSAID),
    Rule("task.overlong.penalty", (f"{OVERLONG}.penalty_factor",), float),
    Rule("run.steps", (f"{TRAINER}.total_epochs", f"{DATA}.train_batch_size", f"{DATA}.train_files"), steps),
    Rule("replay.groups_per_step", (f"{DATA}.train_batch_size",)),
    Rule("generate.group_size", (f"{ROLLOUT}.n",)),
    Rule("generate.sampling.max_new_tokens", (f"{DATA}.max_response_length",)),
    Rule("generate.sampling.temperature", (f"{ROLLOUT}.temperature",), float),
    Rule("generate.sampling.top_p", (f"{ROLLOUT}.top_p",), float),
    Rule("generate.sampling.top_k", (f"{ROLLOUT}.top_k",)),
    Rule("generate.tensor_parallel", (f"{ROLLOUT}.tensor_model_parallel_size",)),
    Rule("algo.loss", (f"{ACTOR}.policy_loss.loss_mode",), {"vanilla": "clip"}.__getitem__),
    Rule("algo.eps_low", (f"{ACTOR}.clip_ratio_low",)),
    Rule("algo.eps_high", (f"{ACTOR}.clip_ratio_high",)),
    Rule("algo.dual_clip", (f"{ACTOR}.clip_ratio_c",), float),
    Rule("algo.kl", (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss"), lambda beta, on: float(beta) if on else 0.0),
    Rule("algo.entropy", (f"{ACTOR}.entropy_coeff",), float),
    Rule("algo.aggregation", (f"{ACTOR}.loss_agg_mode",), AGGREGATIONS.__getitem__),
    Rule("algo.advantage.std", (f"{ALGORITHM}.norm_adv_by_std_in_grpo",), lambda on: "sample" if on else "none"),
    Rule("algo.weight", (f"{CORRECTION}.rollout_is",), lambda level: level or "none"),
    Rule("algo.weight_cap", (f"{CORRECTION}.rollout_is_threshold",), float),
    Rule("learner.passes", (f"{ACTOR}.ppo_epochs",)),
    Rule(
        "learner.mini_batches",
        (f"{ACTOR}.ppo_mini_batch_size", f"{DATA}.train_batch_size"),
        lambda prompts, batch: batch // prompts,
    ),
    Rule(
        "learner.tokens_per_micro_batch",
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz", f"{LAYOUT}.context_parallel_size"),
        lambda tokens, packed, context: tokens * context if packed else UNSAID,
    ),
    Rule(
        "learner.tokens_per_micro_batch",
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.fsdp_config.strategy"),
        lambda tokens, packed, _: tokens if packed else UNSAID,
    ),
    Rule("learner.freeze_vision", (f"{ACTOR}.freeze_vision_tower",), lambda frozen: frozen or UNSAID),
    Rule("learner.layout.tensor", (f"{LAYOUT}.tensor_model_parallel_size",)),
    Rule("learner.layout.sequence", (f"{LAYOUT}.sequence_parallel",)),
    Rule("learner.layout.pipeline", (f"{LAYOUT}.pipeline_model_parallel_size",)),
    Rule("learner.layout.virtual", (f"{LAYOUT}.virtual_pipeline_model_parallel_size",), one_unless_given),
    Rule("learner.layout.first_stage", (f"{LAYOUT}.override_transformer_config.num_layers_in_first_pipeline_stage",)),
    Rule("learner.layout.last_stage", (f"{LAYOUT}.override_transformer_config.num_layers_in_last_pipeline_stage",)),
    Rule("learner.layout.context", (f"{LAYOUT}.context_parallel_size",)),
    Rule("learner.layout.expert", (f"{LAYOUT}.expert_model_parallel_size",)),
    Rule("learner.layout.expert_tensor", (f"{LAYOUT}.expert_tensor_parallel_size",)),
    Rule("learner.recompute", (f"{LAYOUT}.override_transformer_config.recompute_granularity",)),
    *lora("learner.lora.rank"),
    Rule(
        "learner.lora.alpha",
        (f"{MODEL}.lora_alpha", f"{MODEL}.lora_rank"),
        lambda alpha, rank: float(alpha) if rank else UNSAID,
    ),
    Rule(
        "learner.lora.alpha",
        (f"{MODEL}.lora.alpha", f"{MODEL}.lora.rank"),
        lambda alpha, rank: float(alpha) if rank else UNSAID,
    ),
    Rule(
        "learner.lora.targets",
        (f"{MODEL}.target_modules", f"{MODEL}.lora_rank"),
        lambda names, rank: {"all-linear": ALL_LINEAR}[names] if rank else UNSAID,
    ),
    Rule(
        "learner.lora.targets",
        (f"{MODEL}.lora.target_modules", f"{MODEL}.lora.rank"),
        lambda names, rank: names if rank else UNSAID,
    ),
    Rule("learner.optimizer.lr", (f"{OPTIMIZER}.lr",)),
    Rule("learner.optimizer.beta1", (f"{OPTIMIZER}.betas",), lambda betas: betas[0]),
    Rule("learner.optimizer.beta2", (f"{OPTIMIZER}.betas",), lambda betas: betas[1]),
    Rule("learner.optimizer.weight_decay", (f"{OPTIMIZER}.weight_decay",)),
    Rule("learner.optimizer.clip_grad", (f"{OPTIMIZER}.clip_grad",)),
    Rule("learner.optimizer.warmup_steps", (f"{OPTIMIZER}.lr_warmup_steps",), lambda count: max(count, 0)),
    Rule("learner.optimizer.decay", (f"{OPTIMIZER}.lr_scheduler_type",)),
    Rule("learner.optimizer.decay", (f"{OPTIMIZER}.lr_decay_style",)),
    Rule("learner.optimizer.distributed", (f"{LAYOUT}.use_distributed_optimizer",)),
    Rule("checkpoint.every", (f"{TRAINER}.save_freq",), lambda steps: max(steps, 0)),  # -1: never
    Rule("evaluate.every", (f"{TRAINER}.test_freq",), lambda steps: max(steps, 0)),
    Rule("evaluate.samples", (f"{ROLLOUT}.val_kwargs.n",)),
    Rule(
        "evaluate.top_p",
        (f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.do_sample"),
        lambda share, drawn: float(share) if drawn else UNSAID,
    ),
    Rule("evaluate.tasks", (f"{DATA}.val_files",), evaluated),
)

CONSTANTS = (
    Constant(
        "algo.advantage.eps",
        "verl/trainer/ppo/core_algos.py",
        r"def compute_grpo_outcome_advantage\([^)]*?epsilon: float = (\S+),",
    ),
)

REQUIRED: dict[str, tuple[Any, ...]] = {
    f"{ALGORITHM}.adv_estimator": ("grpo",),
    f"{ALGORITHM}.use_kl_in_reward": (False,),
    f"{ACTOR}.kl_loss_type": ("low_var_kl", "k3"),
    f"{ACTOR}.policy_loss.loss_mode": ("vanilla",),
    f"{CORRECTION}.rollout_rs": (None,),
    f"{OPTIMIZER}.lr_warmup_steps_ratio": (0.0,),
}

MEMORY = "memory and speed alone"
ENGINE = "of the engine that generates there"
PLACES = "names, logs and machines"
WITHOUT_KEY = {
    r"data\.(prompt_key|image_key|return_raw_chat|shuffle|trust_remote_code)": "how their loader reads a file",
    r"data\.(filter_overlong_prompts|truncation)": "longer prompts are left out",
    r"algorithm\.kl_ctrl\..*": "of a KL in the reward",
    r"reward_model\..*": "who adds the penalty for length",
    r"actor_rollout_ref\.hybrid_engine": ENGINE,
    r"actor_rollout_ref\.model\.(use_remove_padding|use_fused_kernels|enable_gradient_checkpointing|use_shm)": MEMORY,
    r"actor_rollout_ref\.model\.override_config\..*": "room for the longest sequence",
    r"actor_rollout_ref\.model\.lora\.lora_A_init_method": "A is drawn as PEFT draws it, which is Kaiming's",
    r"actor_rollout_ref\.model\.exclude_modules": "adapters are of the language model alone",
    r"actor_rollout_ref\.model\.lora_adapter_path": "given on the command line: learner.lora.adapter",
    r"actor_rollout_ref\.model\.trust_remote_code": "a family of our own builds it",
    r"actor_rollout_ref\.actor\.(ppo_micro_batch_size_per_gpu|use_torch_compile|strategy|fsdp_config\..*)": MEMORY,
    r"actor_rollout_ref\.actor\.optim\.override_optimizer_config\..*": MEMORY,
    r"actor_rollout_ref\.actor\.megatron\.(\w+_offload|use_mbridge|vanilla_mbridge)": MEMORY,
    r"actor_rollout_ref\.actor\.megatron\.(use_dist_checkpointing|dist_checkpointing_path)": MEMORY,
    r"actor_rollout_ref\.actor\.megatron\.override_transformer_config\..*": MEMORY,
    r"actor_rollout_ref\.ref\..*": "how the reference policy is laid out",
    r"actor_rollout_ref\.rollout\.log_prob_.*": MEMORY,
    r"actor_rollout_ref\.rollout\.val_kwargs\.(temperature|top_k)": "evaluated at temperature 1 and 0",
    r"actor_rollout_ref\.rollout\.(name|mode|gpu_memory_utilization|max_num_\w+|engine_kwargs\..*)": ENGINE,
    r"actor_rollout_ref\.rollout\.(enable_chunked_prefill|enforce_eager|free_cache_engine|load_format)": ENGINE,
    r"actor_rollout_ref\.rollout\.(layered_summon|multi_turn\..*|checkpoint_engine\..*|calculate_log_probs)": ENGINE,
    r"actor_rollout_ref\.rollout\.multi_stage_wake_up": ENGINE,
    r"global_profiler\..*": PLACES,
    r"actor_rollout_ref\.nccl_timeout": PLACES,
    r"trainer\.(logger|project_name|experiment_name|default_local_dir|n_gpus_per_node|nnodes)": PLACES,
    r"trainer\.(critic_warmup|val_before_train|resume_mode|log_val_generations)": PLACES,
}

LANGUAGE = Language(RULES, CONSTANTS, REQUIRED, WITHOUT_KEY)
