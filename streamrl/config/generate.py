"""The generator workers, their SGLang servers, and how a token is drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from streamrl.choices import TRAINED_ENGINES
from streamrl.config import speculation
from streamrl.config.section import Section, rule
from streamrl.config.speculation import SpeculationConfig

ServerAddress = Annotated[
    str,
    Field(
        pattern=r"^https?://(\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):"
        r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])/?$",
        description="addresses of the form http://HOST:PORT",
    ),
]


# SGLang's arguments that decide how many ranks a server has and where they are, and what decides it here.
OF_RANKS = {
    "tp_size": "generate.tensor_parallel",
    "tensor_parallel_size": "generate.tensor_parallel",
    "pp_size": "1, and more by generate.tensor_parallel: pipeline stages share their numbers in a weight update",
    "pipeline_parallel_size": "1, and more by generate.tensor_parallel: pipeline stages share their numbers there",
    "nnodes": "generate.server_nodes",
    "node_rank": "generate.server_nodes",
    "dist_init_addr": "generate.server_nodes",
    "base_gpu_id": "CUDA_VISIBLE_DEVICES, of which each server gets its own",
    "gpu_id_step": "1, and CUDA_VISIBLE_DEVICES, of which each server gets its own",
}

# SGLang's arguments that would decide on the format of weights beside `quantization`, or read them in another way.
OF_FORMAT = ("quantization", "json_model_override_args", "load_format", "model_loader_extra_config", "torchao_config")

# SGLang's arguments for the keys that a server asks for: the API's, and that of commands.
KEY_ARGUMENTS = ("api_key", "admin_api_key")

# SGLang's argument for what requests leave out of their sampling: penalties, biases of logits.
UNSEEN_SAMPLING = "preferred_sampling_params"

# Tokens of a kept set at most: SGLang's limit (`sampling_mask_max_tokens`).
LARGEST_TOP_K = 4096

LEAST_TEMPERATURE = 1e-5  # under 1e-6 SGLang draws greedily


class SamplingConfig(Section):
    """How a token is drawn: the learner divides by the same temperature, over the same kept set of tokens."""

    temperature: float = Field(1.0, ge=LEAST_TEMPERATURE, description="softmax temperature")
    max_new_tokens: int = Field(16, ge=1, description="tokens after which an answer is cut")
    top_p: float = Field(
        1.0, gt=0, le=1, description="draw from the most probable tokens that have this probability together; 1: all"
    )
    top_k: int = Field(
        -1, ge=-1, le=LARGEST_TOP_K, description="draw from so many of the most probable tokens, from 2 on; -1: all"
    )
    min_p: float = Field(
        0.0, ge=0, lt=1, description="draw from tokens of at least this share of the largest probability; 0: all"
    )

    @property
    def truncates(self) -> bool:
        """Is a token drawn from a part of the vocabulary? Then the samples carry which."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0

    @rule
    def _draws_from_several(self) -> None:
        if self.top_k in (0, 1):
            raise ValueError(
                f"top_k: {self.top_k} draws nothing that could be trained; allowed: -1, 2 to {LARGEST_TOP_K}"
            )


class GenerateConfig(Section):
    """The generator workers and their SGLang servers."""

    name: str = Field("", pattern=r"^[\w.-]*$", description="of the pool, where there are several")
    engine: Annotated[str, TRAINED_ENGINES] = Field(
        "sglang", description="what generates; others only evaluate and judge (docs/engines.md)"
    )
    engine_options: dict[str, Any] = Field(default_factory=dict, description="options of the engine")
    workers: int = Field(1, ge=1, description="generator workers, each with its own SGLang servers")
    servers: int = Field(1, ge=1, description="SGLang servers of one worker")
    attach: tuple[ServerAddress, ...] = Field(
        (), description="addresses (http://host:port) of running servers; empty: start own ones"
    )
    router: ServerAddress | None = Field(
        None, description="address of an sglang-router in front of `attach`: requests go through it, commands do not"
    )
    group_size: int = Field(8, ge=1, le=65536, description="G, samples of one prompt: at least 2")
    groups_in_flight: int = Field(32, ge=1, description="groups that a worker generates at once")
    least_in_flight: int = Field(
        0,
        ge=0,
        description="groups at once that a full KV cache leaves a worker; 0: groups_in_flight always",
    )
    submission: Literal["group", "sample"] = Field(
        "group",
        description="what a worker's capacity is counted in; sample: requests, so that each answer makes room",
    )
    requests_in_flight: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="requests that a worker runs at once where submission=sample; auto: as the KV cache allows; null: "
        "groups_in_flight x group_size",
    )
    lag: float | None = Field(
        None,
        ge=-1,
        description="Megatron-RL's generation lag L: (L + 1) P groups, or (L + 1) P G requests, at once over all "
        "workers; null: by the keys beside it",
    )
    single_requests: bool = Field(False, description="one request a sample (long answers) instead of one with n = G")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="how tokens are drawn")
    score: Literal["decode", "prefill", "full_prefill"] = Field(
        "decode",
        description="what gives behaviour log-probs: decode, as tokens are drawn; prefill, one of each finished "
        "answer; full_prefill, one without the cached prompt, as learner.as_served computes it",
    )
    stream_every: int = Field(
        256,
        ge=0,
        description="tokens after which a part of an answer is streamed, so that less can be lost; 0: at its end",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        description="seconds that one request to a server may take, then its answers go on by another one; null: "
        "replay.group_timeout, or evaluate.timeout where that is longer",
    )
    tensor_parallel: int = Field(1, ge=1, description="tensor-parallel size of a server")
    server_nodes: int = Field(
        1, ge=1, description="nodes over which one server goes, each with as many of its ranks (docs/launch.md)"
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="of the servers' linear layers: fp8, e4m3 in blocks of 128 x 128, each version again; null: none",
    )
    speculation: SpeculationConfig = Field(
        default_factory=SpeculationConfig, description="tokens that a draft proposes and the policy verifies"
    )
    server_args: dict[str, Any] = Field(default_factory=dict, description="further SGLang arguments, passed untouched")
    threads: int = Field(1, ge=1, description="CPU threads of a server (OMP_NUM_THREADS)")
    heartbeat: float = Field(1.0, gt=0, description="seconds between heartbeats of a worker")
    restarts: int = Field(
        3, ge=0, description="times that a worker, and each of its servers, is started again after it died"
    )
    probes: int = Field(3, ge=0, description="held-out prompts answered greedily at the start and at the end")
    pools: tuple[dict[str, Any], ...] = Field(
        (), description="several pools: each a name and the keys of `generate` in which it differs; empty: one pool"
    )

    @property
    def sglang_arguments(self) -> dict[str, Any]:
        """`server_args` under SGLang's own names; they may be given with hyphens."""
        return {name.replace("-", "_"): value for name, value in self.server_args.items()}

    @property
    def by_sample(self) -> bool:
        """Is a worker's capacity counted in requests, of one sample each?"""
        return self.submission == "sample"

    @property
    def gpus(self) -> int:
        """GPUs of one worker of this pool on each of its nodes, where servers run on GPUs: each rank has its own."""
        return 0 if self.attach else self.servers * self.tensor_parallel // self.server_nodes

    @property
    def each_pool(self) -> tuple[GenerateConfig, ...]:
        """Every pool with its own settings in full; this one alone where no pools are given.

        Raises ValueError for a pool with a key that cannot differ, or a value that does not fit.
        """
        common = self.model_dump(exclude={"pools"})
        return tuple(_pool(common, own) for own in self.pools) or (self,)

    @property
    def most_nodes(self) -> int:
        """Nodes of the server that has the most of them, over all pools."""
        return max(pool.server_nodes for pool in self.each_pool)

    @rule
    def _pools_are_clear(self) -> None:
        names = [pool.name for pool in self.each_pool] if self.pools else []
        for name in names:
            if not name or names.count(name) > 1:
                raise ValueError(f"pools: the name {name!r} is missing or there twice; allowed: a name for each pool")

    @rule
    def _weights_are_those_of_the_run(self) -> None:
        if not TRAINED_ENGINES.is_built_in(self.engine) or not self.chosen("engine").trains:
            able = [name for name in TRAINED_ENGINES.names if TRAINED_ENGINES.load(name).trains]
            raise ValueError(
                f"engine: {self.engine} has weights that no learner publishes to, and tokens of no version: its "
                f"log-probs are those of no behaviour policy of the run; allowed: {', '.join(able)}, and "
                f"evaluate.engine={self.engine}"
            )

    @rule
    def _bounds_are_in_order(self) -> None:
        if self.least_in_flight > self.groups_in_flight:
            raise ValueError(
                f"least_in_flight: {self.least_in_flight} is above groups_in_flight={self.groups_in_flight}; "
                f"allowed: up to {self.groups_in_flight}"
            )

    @rule
    def _capacity_is_counted_in_one_unit(self) -> None:
        if self.requests_in_flight is not None and not self.by_sample:
            raise ValueError(
                f"requests_in_flight: {self.requests_in_flight} counts requests, and submission=group counts groups; "
                "allowed: null, or submission=sample"
            )
        if self.least_in_flight and self.by_sample:
            raise ValueError(
                f"least_in_flight: {self.least_in_flight} counts groups, and submission=sample counts requests; "
                "allowed: 0, and requests_in_flight=auto for what the KV cache allows"
            )

    @rule
    def _the_lag_alone_says_how_many(self) -> None:
        if self.lag is None:
            return
        for key in ("groups_in_flight", "least_in_flight", "requests_in_flight"):
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                raise ValueError(
                    f"{key}: {getattr(self, key)} is not possible beside lag={self.lag:g}, which says how many are in "
                    f"flight; allowed: {'null' if default is None else default}, or lag=null"
                )

    @rule
    def _a_router_has_servers(self) -> None:
        if self.router is not None and not self.attach:
            raise ValueError(
                f"router: {self.router} passes on no command, so the servers behind it must be known; "
                "allowed: generate.attach with their addresses"
            )

    @rule
    def _kept_sets_come_back(self) -> None:
        """Of truncated draws the servers must return the kept sets."""
        if self.sampling.truncates and self.router is not None:
            raise ValueError(
                f"router: {self.router} does not pass on that kept sets are asked for, which generate.sampling.top_p, "
                "top_k and min_p need; allowed: null, or top_p=1, top_k=-1 and min_p=0"
            )
        if self.sampling.min_p and self.sglang_arguments.get("enable_deterministic_inference"):
            raise ValueError(
                f"sampling.min_p: {self.sampling.min_p:g} is nothing that servers with enable_deterministic_inference "
                "draw by; allowed: 0"
            )

    @rule
    def _nothing_else_shapes_a_draw(self) -> None:
        if (given := self.sglang_arguments.get(UNSEEN_SAMPLING)) is not None:
            raise ValueError(
                f"server_args: {UNSEEN_SAMPLING}={given} shapes draws as no learner computes them; allowed: "
                "generate.sampling"
            )

    @rule
    def _a_prefill_has_what_was_drawn_from(self) -> None:
        """A server's prefill has log-probs at temperature 1 over the whole vocabulary."""
        if self.score == "decode":
            return
        sampling = self.sampling
        if sampling.temperature != 1 or sampling.truncates:
            raise ValueError(
                f"score: {self.score} has log-probs at temperature 1 over the whole vocabulary alone, which "
                f"generate.sampling.temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, "
                f"top_k={sampling.top_k} and min_p={sampling.min_p:g} do not draw from; allowed: decode, or 1, 1, -1 "
                "and 0"
            )
        if self.router is not None:
            raise ValueError(
                f"score: {self.score} must go to the server that has drawn, and {self.router} may choose another; "
                "allowed: decode, or generate.router=null"
            )

    @rule
    def _its_ranks_are_counted(self) -> None:
        """What else would decide on ranks and devices: weights go to the ranks of tensor parallelism alone."""
        given = self.sglang_arguments
        for name, instead in OF_RANKS.items():
            if name in given and not (instead.startswith("1") and given[name] == 1):
                raise ValueError(f"server_args: {name}={given[name]} is not allowed; allowed: {instead}")
        if given.get("dp_size", given.get("data_parallel_size", 1)) != 1 and not given.get("enable_dp_attention"):
            raise ValueError(
                "server_args: dp_size is not allowed without enable_dp_attention; allowed: generate.servers for "
                "several servers of one worker"
            )

    @rule
    def _its_nodes_are_alike(self) -> None:
        if self.server_nodes == 1:
            return
        if self.tensor_parallel % self.server_nodes:
            raise ValueError(
                f"server_nodes: {self.server_nodes} cannot share tensor_parallel={self.tensor_parallel} evenly; "
                f"allowed: a divisor of {self.tensor_parallel}"
            )
        for key, value, allowed in (("servers", self.servers, 1), ("attach", list(self.attach), [])):
            if value != allowed:
                raise ValueError(
                    f"{key}: {value} is not possible with server_nodes={self.server_nodes}, where a worker starts the "
                    f"one server of its nodes; allowed: {allowed}"
                )

    @rule
    def _is_quantised_in_one_place(self) -> None:
        """A server that quantises by itself, with SGLang's own arguments, cannot take bfloat16 weights again."""
        if self.quantization is None:
            return
        if self.attach:
            raise ValueError(
                f"quantization: {self.quantization} is given to servers when they are started, and generate.attach has "
                "running ones; allowed: null"
            )
        for name, value in self.sglang_arguments.items():
            if name in OF_FORMAT:
                raise ValueError(
                    f"server_args: {name}={value} is not allowed beside generate.quantization={self.quantization}, "
                    "which decides on it; allowed: other names"
                )

    @rule
    def _its_drafts_change_no_draw(self) -> None:
        speculation.check_pool(self)

    @rule
    def _runs_no_code_of_a_model_folder(self) -> None:
        if "trust_remote_code" in self.sglang_arguments:
            raise ValueError("server_args: trust_remote_code would run code from a model folder; allowed: other names")


# Keys in which pools may differ. The others belong to the run: a group has as many samples wherever it is made.
OF_A_POOL = (
    "name", "workers", "servers", "attach", "router", "groups_in_flight", "least_in_flight", "requests_in_flight",
    "single_requests", "sampling", "stream_every", "request_timeout", "tensor_parallel", "server_nodes", "server_args",
    "threads",
)  # fmt: skip


def _pool(common: dict[str, Any], own: dict[str, Any]) -> GenerateConfig:
    if other := sorted(own.keys() - set(OF_A_POOL)):
        raise ValueError(f"pools: {other[0]!r} cannot differ between pools; allowed: {', '.join(OF_A_POOL)}")
    try:
        return GenerateConfig.model_validate(_merged(common, own))
    except ValidationError as error:
        raise ValueError("\n".join(_of_pool(own, each) for each in error.errors())) from None


def _of_pool(own: dict[str, Any], error: ErrorDetails) -> str:
    key = ".".join(str(part) for part in error["loc"])
    what = f"{key} of {own.get('name', '')!r}" if key else repr(own.get("name", ""))
    return f"pools: {what}: {error['msg']}" + (f" (given {error['input']!r})" if key else "")


def _merged(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `common`, section by section."""
    merged = common | own
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(common.get(key), dict) and key != "server_args":
            merged[key] = common[key] | value
    return merged
