"""The servers of each pool: memory of their GPUs, tokens that their KV cache holds, answers that run at once.

SGLang's `mem_fraction_static` is the share of a GPU for weights and KV cache together. The cache has what weights
leave:

    bytes a token = 2 x layers x max(1, key and value heads / tensor_parallel) x head_dim x bytes of an item

An item has the model's bytes, or one with `kv_cache_dtype: fp8_...`. `max_total_tokens` and `max_running_requests` of
`server_args` limit tokens and answers. The longest sequence is a prompt and `sampling.max_new_tokens`, up to
`context_length`; a worker asks for `groups_in_flight` x `group_size` answers, by sample for `requests_in_flight`.
Served adapters take their places beside the weights.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from streamrl.config import Config
from streamrl.config.generate import GenerateConfig
from streamrl.config.in_flight import most_requests, tickets
from streamrl.engine.block_fp8 import BLOCK
from streamrl.engine.server import CPU_ARGUMENTS, CUDA_ARGUMENTS, adapter_places
from streamrl.lab.plan.learner_memory import ITEM
from streamrl.lab.plan.machines import GIB, Machines
from streamrl.lab.plan.parameters import adapters_of_server_rank, of_server_rank, quantised_of_server_rank
from streamrl.learner.shape import ModelShape
from streamrl.preflight.lengths import context_length

# SGLang's kv_cache_dtype of one byte, or less.
SMALL_CACHE = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The servers of one pool. Bytes are of one GPU (of the host without GPUs), tokens and answers of one server."""

    name: str
    workers: int
    servers: int  # of one worker
    ranks: int  # of one server
    nodes: int  # of one server
    gpus: int  # of one server on each of its nodes; 0 where it runs on cores
    attached: bool  # they run already
    weights: int
    cache: int
    token: int  # bytes of the KV cache that one token takes
    tokens: int  # that the cache holds
    longest: int  # tokens of the longest sequence, prompt included
    at_once: int  # answers of the longest kind that run at once
    asked: int  # answers that its share of what is in flight asks for
    groups: int  # that one worker has in flight for that
    tickets: int  # that one worker holds at the most

    @property
    def all_servers(self) -> int:
        return self.workers * self.servers

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def pools(config: Config, shape: ModelShape, machines: Machines) -> list[Pool]:
    """Every pool. The cache may come out below 0, where the weights do not even fit: `fit.py` refuses that."""
    return [pool_of(config, each, shape, machines) for each in config.generate.each_pool]


def pool_of(config: Config, pool: GenerateConfig, shape: ModelShape, machines: Machines) -> Pool:
    """One pool."""
    arguments = server_args(pool, machines)
    item, tensor = ITEM[config.model.dtype], pool.tensor_parallel
    weights = of_server_rank(shape, tensor) * item
    if pool.quantization is not None:  # a byte each, and a float32 scale a block
        blocks = quantised_of_server_rank(shape, tensor)
        weights -= blocks * (item - 1) - 4 * blocks // BLOCK**2
    if config.learner.lora.by_adapter:  # a place for each version in use, each rank with its part
        places = int(arguments.get("max_loras_per_batch", adapter_places(config)))
        weights += places * adapters_of_server_rank(shape, tensor, config.learner.lora) * item
    small = str(arguments.get("kv_cache_dtype", "auto")) in SMALL_CACHE
    heads = 2 * max(1, shape.groups // tensor) * shape.head_dim
    width = heads if shape.latent is None else shape.latent.rank + shape.latent.turned  # one vector, on every rank
    layers = sum(shape.has_attention(layer) for layer in range(shape.layers))
    token = layers * width * (1 if small else item)
    total = machines.gpu_memory if machines.has_gpus else machines.host_memory / tensor
    cache = int(total * GIB * float(arguments.get("mem_fraction_static", machines.mem_fraction))) - weights
    tokens = max(0, cache) // token
    if arguments.get("max_total_tokens"):
        tokens = min(tokens, int(arguments["max_total_tokens"]))
    longest = longest_sequence(pool, shape, machines)
    most = int(arguments.get("max_running_requests") or tokens)
    at_once, requests = min(most, tokens // longest), most_requests(config, pool)
    if pool.requests_in_flight == "auto":
        requests = max(1, min(requests, at_once * pool.servers))
    return Pool(
        name=pool.name,
        workers=pool.workers,
        servers=pool.servers,
        ranks=tensor,
        nodes=pool.server_nodes,
        gpus=tensor // pool.server_nodes if machines.has_gpus else 0,
        attached=bool(pool.attach),
        weights=weights,
        cache=cache,
        token=token,
        tokens=tokens,
        longest=longest,
        at_once=at_once,
        asked=math.ceil(requests / pool.servers),
        groups=math.ceil(requests / config.generate.group_size),
        tickets=tickets(requests) if pool.by_sample else requests // config.generate.group_size,
    )


def server_args(pool: GenerateConfig, machines: Machines) -> dict[str, Any]:
    """SGLang's arguments of the pool that a plan reads, under Python's names."""
    given = {**pool.speculation.arguments, **pool.sglang_arguments}
    return {**(CUDA_ARGUMENTS if machines.has_gpus else CPU_ARGUMENTS), **given}


def longest_sequence(pool: GenerateConfig, shape: ModelShape, machines: Machines) -> int:
    """Tokens of a prompt as assumed and an answer that is cut, as far as the server takes them."""
    return min(machines.prompt + pool.sampling.max_new_tokens, context_length(pool, shape))
