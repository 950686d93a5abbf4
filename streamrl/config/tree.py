"""The whole configuration: one typed tree, where every key has its meaning, unit and default.

YAML gives the tree, `key=value` overrides change it (`replay.max_staleness=0`), and `load` refuses
whatever does not fit with one line. No other package gives a default or reads an environment variable.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from streamrl.choices import TRANSPORTS
from streamrl.config import full_sharding, reuse, speculation
from streamrl.config.algo import AlgoConfig
from streamrl.config.critic import CriticConfig, critic_fits
from streamrl.config.evaluate import EvaluateConfig
from streamrl.config.generate import GenerateConfig
from streamrl.config.in_flight import of_lag, without_lag
from streamrl.config.learner import CheckpointConfig, LearnerConfig
from streamrl.config.model import ModelConfig
from streamrl.config.observe import ObserveConfig
from streamrl.config.publish import PublishConfig
from streamrl.config.replay import JournalConfig, ReplayConfig, StreamConfig
from streamrl.config.reward_model import RewardModelConfig
from streamrl.config.run import RunConfig
from streamrl.config.section import Section, rule
from streamrl.config.sft import SftConfig
from streamrl.config.task import TaskConfig


class Config(Section):
    """The whole tree."""

    run: RunConfig = Field(default_factory=RunConfig, description="the run")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    task: TaskConfig = Field(default_factory=TaskConfig, description="the task")
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="the reward model that is served beside"
    )
    generate: GenerateConfig = Field(default_factory=GenerateConfig, description="generators")
    stream: StreamConfig = Field(default_factory=StreamConfig, description="the wire")
    replay: ReplayConfig = Field(default_factory=ReplayConfig, description="the buffer")
    journal: JournalConfig = Field(default_factory=JournalConfig, description="the record of the data")
    algo: AlgoConfig = Field(default_factory=AlgoConfig, description="the loss")
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="the learner")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="the critic")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="checkpoints")
    publish: PublishConfig = Field(default_factory=PublishConfig, description="publishing")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="evaluation")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="observation")
    sft: SftConfig = Field(default_factory=SftConfig, description="supervised fine-tuning")

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def trains_rows(self) -> bool:
        """Is it of `streamrl sft`: rows of a data set instead of answers of generators?"""
        return bool(self.algo.chosen("loss").of_rows)

    @property
    def policy_steps(self) -> int:
        """Learner steps in which the policy is trained: all but those that warm a critic up."""
        held = self.critic.warmup_steps if self.algo.advantage.has_critic else 0
        return max(1, self.run.steps - held)

    @property
    def workers(self) -> int:
        """Generator workers of all pools, numbered from 0 through the pools in their order."""
        return sum(pool.workers for pool in self.generate.each_pool)

    @property
    def progress_timeout(self) -> float:
        """Seconds without a learner step after which a role gives the run up: `run.progress_timeout`, or its default.

        Long enough for a start, for a group that needs all of its time, and for the evaluations between two steps.
        """
        if self.run.progress_timeout is not None:
            return self.run.progress_timeout
        return 2 * (max(self.replay.group_timeout, self.run.start_timeout) + self.evaluate.longest)

    @property
    def request_timeout(self) -> float:
        """Seconds that one request to a server may take: `generate.request_timeout`, or as long as its answer counts.

        The pool's own, as generator workers see it (`of_worker`).
        """
        return self.generate.request_timeout or max(self.replay.group_timeout, self.evaluate.timeout)

    def of_worker(self, index: int) -> Config:
        """The configuration as generator worker `index` sees it: `generate` is its own pool's, for it alone.

        A worker that joins beyond the configured ones belongs to the last pool. Raises ValueError for one without
        an address where its pool attaches to servers.
        """
        pools = self.generate.each_pool
        place = index
        for pool in pools:
            if place < pool.workers or pool is pools[-1]:
                break
            place -= pool.workers
        own_addresses = pool.attach[place * pool.servers : (place + 1) * pool.servers]
        if pool.attach and len(own_addresses) < pool.servers:
            raise ValueError(
                f"generate.attach: {len(pool.attach)} addresses, none for generator {index}; "
                f"allowed: {_addresses(pool)}"
            )
        own = without_lag(self, pool, index).model_copy(update={"workers": 1, "attach": own_addresses})
        return self.model_copy(update={"generate": own})

    @rule
    def _every_worker_has_a_server(self) -> None:
        for pool in self.generate.each_pool:
            addresses = len(pool.attach)
            if addresses and addresses < pool.workers * pool.servers:
                raise ValueError(
                    f"generate.attach: {addresses} addresses for generate.workers={pool.workers}; "
                    f"allowed: {_addresses(pool)}"
                )

    @rule
    def _every_worker_has_a_part_of_the_lag(self) -> None:
        if self.generate.lag is not None and (total := of_lag(self)) < self.workers:
            unit = "request" if self.generate.by_sample else "group"
            raise ValueError(
                f"generate.lag: {self.generate.lag:g} lets {total} {unit}{'s' if total > 1 else ''} be in flight, none "
                f"for some of {self.workers} workers; allowed: a larger lag, or up to {total} workers"
            )

    @rule
    def _shared_devices_are_those_of_own_servers(self) -> None:
        attached = [pool for pool in self.generate.each_pool if pool.attach]
        if self.run.shares_devices and attached:
            raise ValueError(
                f"generate.attach: {attached[0].attach[0]} has devices of its own, and run.placement=shared takes "
                "turns on those of the learner; allowed: [], or run.placement=separate"
            )

    @rule
    def _a_server_over_nodes_is_reached_on_all_of_them(self) -> None:
        nodes = self.generate.most_nodes
        if nodes == 1:
            return
        if self.run.shares_devices:
            raise ValueError(
                f"generate.server_nodes: {nodes} is not possible with run.placement=shared, where a server is on the "
                "learner's own devices; allowed: 1, or run.placement=separate"
            )
        if not self.learner.lora.by_adapter and not self.publish.chosen("transport").over_nodes:
            able = [name for name in TRANSPORTS.names if TRANSPORTS.load(name).over_nodes]
            raise ValueError(
                f"publish.transport: {self.publish.transport} reaches one node of a server, and "
                f"generate.server_nodes={nodes}; allowed: {', '.join(able)}"
            )

    @rule
    def _a_sleeping_server_has_retracted(self) -> None:
        if self.run.shares_devices and self.publish.interruption != "retract":
            raise ValueError(
                f"publish.interruption: {self.publish.interruption} is not possible with run.placement=shared, where "
                "every request gives up its KV cache before the learner's turn; allowed: retract"
            )

    @rule
    def _a_group_teaches_something(self) -> None:
        least = self.algo.least_samples
        if self.generate.group_size < least:
            raise ValueError(
                f"generate.group_size: {self.generate.group_size} has advantage 0 in every group, with "
                f"algo.advantage.baseline={self.algo.advantage.baseline}, and trains nothing; allowed: at least {least}"
            )

    @rule
    def _a_teacher_gets_every_group(self) -> None:
        if self.algo.distils and self.replay.filter.signal:
            raise ValueError(
                "replay.filter.signal: true drops groups with equal rewards, which algo.distillation.teacher trains; "
                "allowed: false"
            )

    @rule
    def _a_critic_fits(self) -> None:
        critic_fits(self)

    @rule
    def _a_lease_outlives_a_heartbeat(self) -> None:
        if self.replay.lease < self.generate.heartbeat:
            raise ValueError(
                f"replay.lease: {self.replay.lease:g} s ends before a worker's next heartbeat extends it, "
                f"generate.heartbeat={self.generate.heartbeat:g} s; allowed: at least {self.generate.heartbeat:g}"
            )

    @rule
    def _a_router_takes_requests_alone(self) -> None:
        routers = [pool.router for pool in self.generate.each_pool if pool.router is not None]
        if routers and self.publish.interruption in ("drain", "abort"):
            raise ValueError(
                f"publish.interruption: {self.publish.interruption} needs to know which server has a request, and "
                f"generate.router={routers[0]} does not tell; allowed: retract, in_place"
            )
        if routers and self.learner.lora.by_adapter:
            raise ValueError(
                f"generate.router: {routers[0]} would choose a server without the adapter of a request; "
                "allowed: null, or learner.lora.publish=merged"
            )

    @rule
    def _quantised_servers_are_corrected(self) -> None:
        """Servers in FP8 draw from another policy than the learner computes: the loss must weigh that."""
        quantization, algo = self.generate.quantization, self.algo
        if quantization is None:
            return
        if self.model.dtype != "bfloat16":
            raise ValueError(
                f"generate.quantization: {quantization} is made of bfloat16 weights, and model.dtype is "
                f"{self.model.dtype}; allowed: null, or model.dtype=bfloat16"
            )
        if self.learner.lora.by_adapter:
            raise ValueError(
                f"generate.quantization: {quantization} is not possible with learner.lora.publish=adapter; allowed: "
                "null, or learner.lora.publish=merged"
            )
        if not (algo.chosen("weight").corrects or algo.chosen("proximal").of_policy):
            raise ValueError(
                f"algo.weight: {algo.weight} leaves the tokens of servers in {quantization} uncorrected, with "
                f"algo.proximal={algo.proximal}; allowed: token, sequence, or algo.proximal=behaviour"
            )

    @rule
    def _servers_take_weights_again(self) -> None:
        """SGLang 0.5.23 quantises to FP8 at the start alone, and then has no loader for the layers; FlashRL's has."""
        for pool in self.generate.each_pool:
            given = pool.sglang_arguments
            loads_again = self.learner.lora.by_adapter or given.get("load_format") == "flash_rl"
            if given.get("quantization") == "fp8" and not loads_again:
                raise ValueError(
                    "generate.server_args: quantization=fp8 is done once, and no new weights could be loaded; allowed: "
                    "generate.quantization=fp8"
                )

    @rule
    def _rows_are_as_served_by_megatrons_layers(self) -> None:
        if self.learner.as_served and self.model.implementation != "megatron":
            raise ValueError(
                "learner.as_served: true with model.implementation=transformers, whose attention has pads; allowed: "
                "false, or model.implementation=megatron"
            )

    @rule
    def _a_prefill_routes_as_the_draw_did(self) -> None:
        if self.learner.router_replay and self.generate.score != "decode":
            raise ValueError(
                f"generate.score: {self.generate.score} may choose other experts than the draw, whose experts "
                "learner.router_replay takes; allowed: decode, or learner.router_replay=false"
            )

    @rule
    def _drafts_go_with_the_rest(self) -> None:
        speculation.check_run(self)

    @rule
    def _a_reward_model_is_there_and_asked(self) -> None:
        asking = [share.name for share in self.task.rewards if share.chosen("name").asks_model]
        if asking and self.reward_model.path is None:
            raise ValueError(
                f"task.rewards: {asking[0]} needs a model; allowed: with reward_model.path, the folder of a sequence "
                "classifier"
            )
        if self.reward_model.path is not None and not asking:
            raise ValueError(
                f"reward_model.path: {self.reward_model.path} would judge nothing; allowed: null, or an entry of "
                "task.rewards that asks it"
            )

    @rule
    def _overlong_fits_the_answer(self) -> None:
        buffer = self.task.overlong.buffer
        longest = min(pool.sampling.max_new_tokens for pool in self.generate.each_pool)
        if buffer > longest:
            raise ValueError(
                f"task.overlong.buffer: {buffer} is above generate.sampling.max_new_tokens={longest}; "
                f"allowed: up to {longest}"
            )

    @rule
    def _groups_can_be_reused(self) -> None:
        reuse.check_run(self)

    @rule
    def _models_can_be_fully_sharded(self) -> None:
        full_sharding.check_run(self)

    @rule
    def _does_not_deadlock(self) -> None:
        needed = self.publish.every * self.replay.groups_per_step
        if self.replay.slots < needed:
            raise ValueError(
                f"publish.every: {self.publish.every} would deadlock: {needed} groups train before a publish, "
                f"but replay.max_staleness={self.replay.max_staleness:g} allows {self.replay.slots}; "
                f"allowed: up to {self.replay.slots // self.replay.groups_per_step}"
            )

    @rule
    def _progress_may_wait_for_a_group(self) -> None:
        needed = self.replay.group_timeout + self.evaluate.longest
        if self.run.progress_timeout is not None and self.run.progress_timeout <= needed:
            evaluated = f" and an evaluation of {self.evaluate.longest:g} s" if self.evaluate.every else ""
            raise ValueError(
                f"run.progress_timeout: {self.run.progress_timeout:g} would end a run that waits for a group within "
                f"replay.group_timeout={self.replay.group_timeout:g}{evaluated}; allowed: above {needed:g}, or null"
            )

    @rule
    def _evaluations_fit_the_run(self) -> None:
        if not self.evaluate.every:
            return
        if self.evaluate.worker >= self.workers:
            raise ValueError(
                f"evaluate.worker: {self.evaluate.worker} is none of the run's {self.workers} generators; "
                f"allowed: 0 to {self.workers - 1}"
            )
        # At the end of a run with one server, the last version may wait for an evaluation, and is then evaluated.
        silence, longest = self.run.silence_timeout, self.evaluate.longest
        if 2 * longest >= silence:
            raise ValueError(
                f"evaluate.timeout: two evaluations of {longest:g} s, scoring included, do not fit in "
                f"run.silence_timeout={silence:g}; allowed: a shorter one, or run.silence_timeout above {2 * longest:g}"
            )

    @rule
    def _servers_that_hang_do_not_end_the_learner(self) -> None:
        # A version waits for attempts that begin before it has waited publish.timeout, and for the end of the last one.
        longest, silence = 2 * self.publish.timeout, self.run.silence_timeout
        if longest >= silence and not self.trains_rows:
            raise ValueError(
                f"publish.timeout: {self.publish.timeout:g} s, for twice of which servers that hang hold training, do "
                f"not fit in run.silence_timeout={silence:g}; allowed: below {silence / 2:g}, or run.silence_timeout "
                f"above {longest:g}"
            )

    @rule
    def _every_mini_batch_has_a_group(self) -> None:
        if self.learner.mini_batches > self.replay.groups_per_step:
            raise ValueError(
                f"learner.mini_batches: {self.learner.mini_batches} cannot share replay.groups_per_step="
                f"{self.replay.groups_per_step} groups; allowed: up to {self.replay.groups_per_step}"
            )

    @rule
    def _a_row_fits_a_micro_batch(self) -> None:
        budget = self.learner.tokens_per_micro_batch
        if self.sft.max_row_tokens is not None and self.sft.max_row_tokens > budget:
            raise ValueError(
                f"sft.max_row_tokens: {self.sft.max_row_tokens} is above learner.tokens_per_micro_batch={budget}; "
                f"allowed: up to {budget}"
            )

    @rule
    def _megatron_can_offload(self) -> None:
        optimizer = self.learner.optimizer
        if optimizer.offload and self.model.dtype != "bfloat16":
            raise ValueError(
                f"learner.optimizer.offload: {optimizer.offload:g} needs model.dtype=bfloat16, not {self.model.dtype}, "
                "whose optimizer Megatron cannot offload; allowed: 0"
            )
        if optimizer.offload and optimizer.distributed is False:
            raise ValueError(
                f"learner.optimizer.offload: {optimizer.offload:g} needs learner.optimizer.distributed=true; allowed: 0"
            )

    @rule
    def _every_task_has_a_place(self) -> None:
        weighted = sum(share.weight > 0 for share in self.task.shares)
        if weighted > self.replay.groups_per_step:
            raise ValueError(
                f"task.mix: {weighted} weighted tasks need one group each, replay.groups_per_step="
                f"{self.replay.groups_per_step}; allowed: up to {self.replay.groups_per_step}"
            )


def _addresses(pool: GenerateConfig) -> str:
    """How many a pool that attaches to servers needs."""
    if pool.servers == 1:
        return f"one for each worker, {pool.workers}"
    return f"generate.servers={pool.servers} for each of generate.workers={pool.workers}"
