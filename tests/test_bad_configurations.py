"""Over a hundred configurations and command lines that cannot work: one line, exit code 2, nothing started or left.

Each line names the key or flag, the value, and what is allowed. Most run in this process; a sample of them runs as
the command does, in a process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import tiny_model
from streamrl import cli
from streamrl.config import file as config_file
from streamrl.config.replay import JournalConfig
from streamrl.replay.journal import Journal
from tests.operations_table import documented

CONFIG = """
run: {name: bad, folder: runs, steps: 4}
model: {path: model}
"""

# -- configurations: overrides of `train`, and the words that the line must have

KEYS: list[tuple[str, str]] = [
    # unknown, of another type, out of range
    ("bananas=1", "bananas: unknown key (given 1); allowed: run, model"),
    ("replay.max_stalenes=0", "nearest known key: replay.max_staleness"),
    ("learner.lr=1e-3", "nearest known key: learner.optimizer.lr"),
    ("replay=3", "replay: 3 is not allowed; allowed: a mapping"),
    ("run.name.x=3", "run.name.x: run.name is bad and has no keys; allowed: run.name=VALUE"),
    ("run.name=a/b", "run.name: a/b"),
    ("run.name=''", "run.name: ''"),
    ("run.steps=0", "run.steps: 0"),
    ("run.steps=1.5", "run.steps: 1.5"),
    ("run.steps=many", "run.steps: many"),
    ("run.seed=-1", "run.seed: -1"),
    ("run.restarts=-1", "run.restarts: -1"),
    ("run.start_timeout=0", "run.start_timeout: 0"),
    ("run.silence_timeout=.inf", "run.silence_timeout: .inf"),
    ("model.dtype=float16", "one of auto, float32, bfloat16"),
    ("model.trust_remote_code=true", "model.trust_remote_code: true"),
    ("task.name=copyy", "task.name: copyy"),
    ("task.args=3", "task.args: 3"),
    ("task.args.lenght=3", "task.args.lenght: unknown key"),
    ("task.args.held_out=1", "task.args.held_out: 1"),
    ("task.name=nowhere:Task", "task.name: nowhere:Task cannot be loaded"),
    ("task.name=nowhere.py:Task", "nowhere.py:Task cannot be loaded"),
    ("task.mix=[{name: copy, weight: 0}]", "task.mix: every weight of a trained task is 0"),
    ("task.mix=[{name: copy},{name: copy}]", "task.mix: 'copy' is there twice"),
    ("task.file=nowhere.yaml", "task.file: nowhere.yaml cannot be read"),
    ("task.overlong.buffer=99", "task.overlong.buffer: 99 is above generate.sampling.max_new_tokens=16"),
    ("generate.workers=0", "generate.workers: 0"),
    ("generate.servers=0", "generate.servers: 0"),
    ("generate.group_size=0", "generate.group_size: 0"),
    ("generate.group_size=1", "generate.group_size: 1 has advantage 0 in every group"),
    (
        "algo.advantage.estimator=gae replay.filter.signal=true",
        "replay.filter.signal: true drops groups with equal rewards, which algo.advantage.estimator=gae trains",
    ),
    ("critic.optimizer.min_lr=1", "critic.optimizer.min_lr: 1 is above lr=1e-05"),
    ("critic.value_clip=0", "critic.value_clip: 0"),
    ("generate.groups_in_flight=0", "generate.groups_in_flight: 0"),
    ("generate.requests_in_flight=8", "generate.requests_in_flight: 8 counts requests, and submission=group"),
    ("generate.lag=-2", "generate.lag: -2 is not allowed"),
    ("generate.least_in_flight=99", "generate.least_in_flight: 99 is above groups_in_flight=32"),
    ("generate.attach=[foo]", "generate.attach: foo is not allowed"),
    ("generate.attach=[http://a]", "addresses of the form http://HOST:PORT"),
    ("generate.attach=[http://a:65536]", "addresses of the form http://HOST:PORT"),
    ("generate.attach=3", "generate.attach: 3"),
    ("generate={workers: 2, attach: ['http://a:1']}", "generate.attach: 1 addresses for generate.workers=2"),
    ("generate.router=foo", "generate.router: foo"),
    ("generate.router=http://r:1", "generate.router: http://r:1 passes on no command"),
    ("generate.sampling.temperature=0", "generate.sampling.temperature: 0"),
    ("generate.sampling.temperature=1e-7", "generate.sampling.temperature: 1.0e-07"),
    ("generate.sampling.max_new_tokens=0", "generate.sampling.max_new_tokens: 0"),
    ("generate.sampling.top_p=0", "generate.sampling.top_p: 0"),
    ("generate.sampling.top_k=0", "generate.sampling.top_k: 0 draws nothing"),
    ("generate.sampling.top_k=4097", "generate.sampling.top_k: 4097"),
    ("generate.sampling.min_p=1", "generate.sampling.min_p: 1"),
    ("evaluate.top_k=0", "evaluate.top_k: 0 is not allowed"),
    (
        "generate={attach: ['http://a:1'], router: 'http://r:1', sampling: {top_p: 0.9}}",
        "generate.router: http://r:1 does not pass on that kept sets are asked for",
    ),
    (
        "generate={server_args: {enable_deterministic_inference: true}, sampling: {min_p: 0.1}}",
        "generate.sampling.min_p: 0.1 is nothing that servers with enable_deterministic_inference",
    ),
    (
        "generate={server_args: {enable-deterministic-inference: true}, sampling: {min_p: 0.1}}",
        "generate.sampling.min_p: 0.1 is nothing that servers with enable_deterministic_inference",
    ),
    (
        "generate.server_args={preferred-sampling-params: {repetition_penalty: 1.1}}",
        "preferred_sampling_params={'repetition_penalty': 1.1} shapes draws as no learner computes them",
    ),
    ("generate.server_args={trust-remote-code: true}", "trust_remote_code would run code"),
    ("generate.server_args={speculative_algorithm: EAGLE}", "allowed: generate.speculation.algorithm"),
    ("generate.speculation={algorithm: eagle}", "generate.speculation.draft_model: null is no draft for algorithm="),
    (
        "generate={speculation: {algorithm: ngram}, sampling: {top_p: 0.9}}",
        "generate.speculation.algorithm: ngram returns no kept sets",
    ),
    ("generate.heartbeat=0", "generate.heartbeat: 0"),
    ("generate.pools=[{workers: 2}]", "generate.pools: the name '' is missing"),
    ("generate.pools=[{name: a, group_size: 4}]", "generate.pools: 'group_size' cannot differ"),
    ("generate.pools=[{name: a, workers: 0}]", "generate.pools: workers of 'a'"),
    ("stream.max_message=1", "stream.max_message: 1"),
    ("stream.max_message=4096 generate.sampling.max_new_tokens=512", "stream.max_message: a group of 8 answers"),
    ("stream.curve=maybe", "one of auto, on, off"),
    ("replay.address=foo", "replay.address: 'foo' is no address; allowed: tcp://HOST:PORT"),
    ("replay.address=127.0.0.1:0", "replay.address: '127.0.0.1:0' is no address"),
    ("replay.address=tcp://127.0.0.1:99999", "replay.address: 'tcp://127.0.0.1:99999' is no address"),
    ("replay.host=a/b", "replay.host: a/b"),
    ("replay.order=random", "one of fifo, ready, synchronous, windowed, package.module:Class"),
    ("replay={order: windowed, window: 99}", "replay.window: 99 leaves"),
    ("replay.groups_per_step=0", "replay.groups_per_step: 0"),
    ("replay.groups_per_step=1e6", "replay.groups_per_step: 1000000"),
    ("replay.max_staleness=-1", "replay.max_staleness: -1"),
    ("replay.max_staleness=.nan", "replay.max_staleness: .nan"),
    ("replay.lease=0.5", "replay.lease: 0.5 s ends before a worker's next heartbeat"),
    ("replay.max_attempts=0", "replay.max_attempts: 0"),
    ("replay.curriculum=nowhere:Hardest", "replay.curriculum: nowhere:Hardest cannot be loaded"),
    ("replay.curriculum=hardest", "allowed: one of sequential, package.module:Class"),
    ("replay.filter={min_pass_rate: 0.9, max_pass_rate: 0.1}", "replay.filter.min_pass_rate: 0.9 is above"),
    ("replay.adaptive={ess_low: 0.9}", "replay.adaptive.ess_low: 0.9 is not below"),
    ("journal.keep=some", "one of none, resume, all"),
    (
        "algo.loss=ppo",
        "one of cispo, clip, dppo_kl, dppo_tv, dro, gmpo, gpg, gspo, reinforce, sapo, package.module:Class",
    ),
    ("algo.eps_low=1.5", "algo.eps_low: 1.5"),
    ("algo={mask_low: 2, mask_high: 1}", "algo.mask_low: 2 is not below"),
    ("algo.mask=second_moment", "algo.mask: second_moment needs proximal=recompute"),
    ("algo={loss: cispo, dual_clip: 3}", "algo.dual_clip: 3 does nothing with loss=cispo"),
    ("algo.reference=other", "algo.reference: other is read only with kl or kl_reward above 0"),
    ("algo.distillation.coefficient=0", "algo.distillation.coefficient: 0"),
    (
        "algo.distillation={teacher: model, rewards: false} algo.kl_reward=0.1",
        "algo.kl_reward: 0.1 is taken off rewards, which distillation.rewards=false leaves out; allowed: 0, or",
    ),
    (
        "algo.distillation={teacher: model, rewards: false} algo.advantage.estimator=gae",
        "algo.advantage.estimator: gae makes advantages of rewards, which distillation.rewards=false leaves out",
    ),
    (
        "algo.distillation.teacher=model replay.filter.signal=true",
        "replay.filter.signal: true drops groups with equal rewards, which algo.distillation.teacher trains",
    ),
    ("algo.aggregation=sequence_sum_norm", "algo.norm_length: a length in tokens is needed"),
    ("algo.covariance_low=9", "algo.covariance_low: 9 is not below"),
    ("learner.ranks=0", "learner.ranks: 0"),
    ("learner.optimizer.lr=0", "learner.optimizer.lr: 0"),
    ("learner.optimizer.lr=1e9", "learner.optimizer.lr: 1000000000.0"),
    ("learner.optimizer.min_lr=0.5", "learner.optimizer.min_lr: 0.5 is above lr"),
    ("learner.optimizer.offload=0.5", "learner.optimizer.offload: 0.5 needs model.dtype=bfloat16, not float32"),
    (
        "learner.optimizer={offload: 0.5, distributed: false} model.dtype=bfloat16",
        "learner.optimizer.offload: 0.5 needs learner.optimizer.distributed=true; allowed: 0",
    ),
    ("learner.mini_batches=99", "learner.mini_batches: 99 cannot share replay.groups_per_step=8"),
    ("learner.tick=700", "learner.tick: 700 s is as long as the ranks wait"),
    ("learner.lora={rank: 4, targets: []}", "learner.lora.targets: none is given"),
    ("learner.lora.adapter=there", "learner.lora.adapter: there needs learner.lora.rank"),
    ("learner.optimizer.lr=[1,", "learner.optimizer.lr: not YAML"),
    ("learner.layout.virtual=2", "learner.layout.virtual: 2 chunks need learner.layout.pipeline above 1"),
    ("learner.layout.first_stage=1", "learner.layout.first_stage: needs learner.layout.pipeline above 1"),
    ("learner.layout.sharding=parameters", "learner.layout.sharding: parameters"),
    (
        "learner.ranks=2 learner.layout={pipeline: 2, sharding: full}",
        "learner.layout.pipeline: 2 with learner.layout.sharding=full, which would gather",
    ),
    (
        "learner.ranks=2 learner.layout={expert: 2, sharding: full}",
        "learner.layout.expert: 2 with learner.layout.sharding=full, which has experts on every rank; allowed: 1, or",
    ),
    (
        "learner.lora.rank=4 learner.layout.sharding=full",
        "learner.lora.rank: 4 with learner.layout.sharding=full, which trains whole models; allowed: 0, or sharding=",
    ),
    (
        "algo.advantage.estimator=gae learner.layout.sharding=full",
        "algo.advantage.estimator: gae with learner.layout.sharding=full, which shares out the policy alone; allowed:",
    ),
    (
        "learner.optimizer.offload=0.5 model.dtype=bfloat16 learner.layout.sharding=full",
        "learner.optimizer.offload: 0.5 with learner.layout.sharding=full",
    ),
    (
        "learner.optimizer.distributed=false learner.layout.sharding=full",
        "learner.optimizer.distributed: false with learner.layout.sharding=full",
    ),
    ("learner.overlap=true learner.layout.sharding=full", "learner.overlap: true with learner.layout.sharding=full"),
    (
        "model.implementation=transformers learner.layout.sharding=full",
        "model.implementation: transformers with learner.layout.sharding=full, which shards what Megatron-Core builds;",
    ),
    (
        "learner.gradient_accumulation_fusion=true learner.layout.sharding=full",
        "learner.gradient_accumulation_fusion: true with learner.layout.sharding=full",
    ),
    ("checkpoint.keep=0", "checkpoint.keep: 0"),
    ("publish.every=9", "publish.every: 9 would deadlock"),
    ("publish.at_once=2", "publish.at_once: 2 is not possible with transport=broadcast"),
    ("publish.verify_every=1", "publish.verify_every: 1 is not used by transport=broadcast"),
    ("publish.folder=shared", "publish.folder: shared is not used by transport=broadcast"),
    (
        "publish.timeout=300",
        "publish.timeout: 300 s, for twice of which servers that hang hold training, do not fit in "
        "run.silence_timeout=600; allowed: below 300, or run.silence_timeout above 600",
    ),
    ("run.silence_timeout=200", "publish.timeout: 120 s, for twice of which"),
    ("evaluate.every=1 evaluate.worker=3", "evaluate.worker: 3 is none of the run's 1 generators"),
    ("evaluate.every=1 evaluate.timeout=600", "evaluate.timeout: two evaluations of 610 s"),
    ("evaluate.k=[99]", "evaluate.k: 99 needs as many answers"),
    ("observe.prometheus_port=99999", "observe.prometheus_port: 99999"),
    ("observe.wandb=on", "one of off, offline, online"),
    ("replay.max_staleness", "is not an override; allowed: key=value"),
]

MODEL: list[tuple[str, str]] = [
    # what the model, the prompts or this machine do not allow; `plan` says the same
    ("model.path=nowhere", "nowhere is no model; allowed: a Hugging Face folder"),
    ("model.path=foreign", "architecture GPT2LMHeadModel is not supported; allowed: DeepseekV3ForCausalLM"),
    ("model.path=broken", "is not JSON"),
    (
        "model.path=torn",
        "model-00002-of-00002.safetensors is missing, model.safetensors.index.json names it; allowed:",
    ),
    ("model.path=wordless", "wordless: no tokenizer ("),
    ("algo.distillation.teacher=nowhere", "algo.distillation.teacher: nowhere is no model; allowed: a Hugging Face"),
    (
        "algo.distillation.teacher=foreign",
        "architecture GPT2LMHeadModel is not supported; allowed: DeepseekV3ForCausalLM",
    ),
    ("algo.distillation.teacher=torn", "torn/model-00002-of-00002.safetensors is missing, model.safetensors.index"),
    ("algo.distillation.teacher=wordless", "wordless: no tokenizer ("),
    ("learner.ranks=3 learner.layout.tensor=3", "learner.layout.tensor: 3 does not divide 4 attention heads"),
    ("learner.ranks=4 learner.layout.tensor=4", "learner.layout.tensor: 4 does not divide 2 key and value heads"),
    ("learner.ranks=4 learner.layout.pipeline=4", "learner.layout.pipeline: 4 stages of 1 chunks do not share 2"),
    ("learner.ranks=2 learner.layout.expert=2", "learner.layout.expert: 2 ranks cannot share experts"),
    ("learner.ranks=2 learner.layout.tensor=4", "learner.ranks: 2 cannot hold copies of a model cut over 4 ranks"),
    ("generate.tensor_parallel=3", "generate.tensor_parallel: 3 does not divide 4 attention heads"),
    ("learner.tokens_per_micro_batch=4", "learner.tokens_per_micro_batch: 4 cannot hold prompt"),
    ("generate.sampling.max_new_tokens=100000", "generate.sampling.max_new_tokens: 100000 does not fit behind prompt"),
    ("generate.server_args.context_length=4", "generate.sampling.max_new_tokens: 16 leaves no room"),
    ("generate.server_args.context_length=20", "in a context of 20 tokens; allowed: up to"),
    ("generate.server_args.context_length=999999", "is above the model's max_position_embeddings=2048"),
    ("generate.server_args.context_length=wide", "context_length=wide is not allowed"),
    ("generate.server_args.max_total_tokens=20", "a KV cache of max_total_tokens=20; allowed: up to"),
    ("evaluate.every=1 evaluate.max_new_tokens=4000", "evaluate.max_new_tokens: 4000 does not fit behind"),
    ("generate.workers=5000", "generate.workers: 5000 are too many here"),
    ("learner.ranks=100000", "learner.ranks: 100000 are too many here"),
    ("task={name: jsonl, args: {path: empty.jsonl}}", "empty.jsonl' cannot be loaded (it holds no rows)"),
    ("task={name: jsonl, args: {path: broken.jsonl}}", "broken.jsonl:2: not JSON ("),
    ("task={name: jsonl, args: {path: nowhere.jsonl}}", "nowhere.jsonl' cannot be loaded"),
    ("task={name: jsonl, args: {path: sums.jsonl, prompt: question}}", "task.args.prompt: 'question'"),
    ("task={name: jsonl, args: {path: words.jsonl, chat: false}} learner.tokens_per_micro_batch=54", "with 40 tokens"),
    ("task={name: jsonl, args: {path: sums.jsonl, chat: false}}", "the tokenizer makes no token of prompt"),
    ("task={name: tasks.py:Broken}", "cannot be made: RuntimeError: no prompts today"),
    ("task={name: tasks.py:Empty}", "has no prompts: its size is 0; allowed: above 0"),
    ("evaluate={every: 1, tasks: [{name: tasks.py:Empty}]}", "has no prompts: its size is 0; allowed: above 0"),
]

# -- command lines

COMMANDS: list[tuple[str, str]] = [
    ("", "the following arguments are required: COMMAND"),
    ("trian config.yaml", "invalid choice: 'trian'"),
    ("train", "the following arguments are required: config"),
    ("train nowhere.yaml", "nowhere.yaml: No such file or directory; allowed: a YAML file"),
    ("train broken.jsonl", "broken.jsonl:2: not YAML"),
    ("train config.yaml --slowly", "unrecognized arguments: --slowly"),
    ("replay", "a role takes either CONFIG [key=value ...] or --run-folder RUN"),
    ("replay config.yaml generate.group_size=1", "generate.group_size: 1 has advantage 0"),
    ("generator config.yaml --index -1", "-1 is not allowed; allowed: a whole number from 0 on"),
    ("generator config.yaml learner.ranks=3 learner.layout.tensor=3", "does not divide 4 attention heads"),
    ("learner config.yaml model.path=nowhere", "nowhere is no model"),
    ("learner --run-folder nowhere", "nowhere: no run folder (config.yaml is missing)"),
    ("eval", "eval takes either CONFIG"),
    ("eval config.yaml --version 3.0", "--version: names the weights of a run"),
    ("eval config.yaml --output there", "--output: there exists; allowed: a new folder"),
    ("eval config.yaml model.path=nowhere", "nowhere is no model; allowed: a Hugging Face folder"),
    ("eval config.yaml model.path=nowhere --model there", "--model: there is no model; allowed: a Hugging Face folder"),
    ("eval --run-folder run --version 3", "run: no version was kept (publish.keep_every), nor a trained model written"),
    ("audit nowhere", "nowhere: no run folder"),
    ("audit run --tolerance -1", "-1 is not allowed; allowed: a number from 0 on"),
    ("audit lost", "gone is no model; allowed: a Hugging Face folder"),
    ("retrain run", "the following arguments are required: --output"),
    ("retrain run --output new --steps -4", "-4 is not allowed; allowed: a whole number above 0"),
    ("retrain run --output there", "--output: there is not empty; allowed: a new folder"),
    ("retrain run --output sums.jsonl/new", "sums.jsonl cannot be written; allowed: a folder"),
    ("retrain run --output new --set replay.order=ready", "replay.order: ready would change what the recorded data"),
    (
        "retrain run --output new --set learner.ranks=3 learner.layout.tensor=3",
        "learner.layout.tensor: 3 does not divide 4 attention heads",
    ),
    ("journal run --export nowhere/groups.jsonl", "--export: nowhere/groups.jsonl: nowhere is no folder"),
    ("journal run --export groups.csv", "allowed: a file that ends in .jsonl or .parquet"),
    ("journal run --export sums.jsonl", "--export: sums.jsonl exists; allowed: a new file"),
    ("trace run -o nowhere/trace.json", "--output: nowhere/trace.json: nowhere is no folder"),
    ("trace run -o trace.txt", "allowed: a file that ends in .json or .csv"),
    ("trace run", "no event logs in events/; allowed: a run that has begun"),
    ("top run --port 99999", "99999 is not allowed; allowed: 0 (a free port) to 65535"),
    ("top run --every 0", "0 is not allowed; allowed: a number above 0"),
    ("report run run", "report: the same run twice; allowed: each RUN once"),
    ("report run -o nowhere/report.html", "--output: nowhere/report.html: nowhere is no folder"),
    ("simulate", "simulate takes either RUN"),
    ("simulate run --json nowhere/figures.json", "--json: nowhere/figures.json: nowhere is no folder"),
    ("simulate run --vary replay.order", "--vary: 'replay.order' gives no values"),
    ("simulate run run.name=other", "run.name: its effect is not modelled"),
    ("simulate run --steps 0", "0 is not allowed; allowed: a whole number above 0"),
    ("simulate config.yaml --validate --json nowhere/figures.json", "nowhere is no folder"),
    ("simulate config.yaml model.path=nowhere --validate", "model.path: nowhere is no model"),
    ("simulate --fleet nowhere.yaml", "nowhere.yaml"),
    ("tune run", "0 learner steps are too few to calibrate"),
    ("tune run run.name=other", "run.name: its effect is not modelled"),
    ("tune config.yaml --cores 1", "--cores: 1 hold no worker of 1 and 1 learner ranks of 1; allowed: 2 and more"),
    ("tune config.yaml --cores 8 --gpus 8", "--gpus: 8 beside --cores 8; allowed: one of the two"),
    ("tune config.yaml --steps 4", "--steps: 4 are too few to calibrate; allowed: above 4"),
    ("tune config.yaml --within 2", "2 is not allowed; allowed: a number from 0 to 1"),
    ("tune config.yaml --doubling 0", "--doubling: 0 leaves nothing of two ranks"),
    ("tune config.yaml -o tuned.txt", "--output: tuned.txt; allowed: a file that ends in .yaml or .yml"),
    ("tune config.yaml model.path=nowhere", "model.path: nowhere is no model"),
    ("plan config.yaml --json nowhere/plan.json", "--json: nowhere/plan.json: nowhere is no folder"),
    ("plan config.yaml --json there", "--json: there is a folder; allowed: a file"),
    ("plan config.yaml --gpu-memory -1", "--gpu-memory: -1 is not allowed"),
    ("plan config.yaml learner.ranks=3 learner.layout.tensor=3", "does not divide 4 attention heads"),
    ("plan config.yaml learner.tokens_per_micro_batch=4", "cannot hold a prompt (--prompt) with 512 tokens"),
    ("convert model there", "OUT: there is not empty; allowed: a new folder"),
    ("convert model new --tensor 0", "0 is not allowed; allowed: a whole number above 0"),
    ("sweep nowhere.yaml", "nowhere.yaml: No such file or directory; allowed: a sweep file"),
    ("sweep sweep.yaml generate.group_size=1", "point lr_0.1: generate.group_size: 1 has advantage 0"),
    ("sweep sweep.yaml learner.ranks=3 learner.layout.tensor=3", "point lr_0.1: learner.layout.tensor: 3 does not"),
    ("train config.yaml run.folder=sums.jsonl", "run.folder: "),
]

# Where the next override begins: values of several words are in braces, and no key follows a space in them.
_NEXT = re.compile(r" (?=[\w.]+=)")

CASES = [(["train", "config.yaml", *_NEXT.split(overrides)], said) for overrides, said in (*KEYS, *MODEL)]
CASES += [(command.split(), said) for command, said in COMMANDS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "model"
    tiny_model.make(folder, 1)
    return folder


@pytest.fixture(scope="module")
def place(model: Path) -> Iterator[Path]:
    """A folder with a model, a configuration, data, and a run that has recorded nothing."""
    folder = model.parent
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "sweep.yaml").write_text("base: config.yaml\ngrid: {learner.optimizer.lr: [0.1]}\n")
    (folder / "there").mkdir()
    (folder / "there" / "file").touch()
    for name, config in (("foreign", '{"architectures": ["GPT2LMHeadModel"]}'), ("broken", "{")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
    for name, without in (("torn", "model.safetensors"), ("wordless", "tokenizer.json")):
        shutil.copytree(model, folder / name)
        (folder / name / without).unlink()
    shards = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "torn" / "model.safetensors.index.json").write_text(shards)
    (folder / "torn" / "model-00001-of-00002.safetensors").touch()
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n[}')
    rows = [f'{{"prompt": "{number:040d}", "answer": "2"}}' for number in range(50)]
    (folder / "sums.jsonl").write_text("\n".join(rows))
    words = [f'{{"prompt": "{"abcdefgh"[number] * (number + 33)}", "answer": "a"}}' for number in range(8)]
    (folder / "words.jsonl").write_text("\n".join(words))
    (folder / "tasks.py").write_text(TASKS)
    for name, path in (("run", "model"), ("lost", "gone")):
        (folder / name).mkdir()
        keys = [f"model.path={folder / path}", "journal.keep=all", f"run.folder={folder}", f"run.name={name}"]
        config_file.save(config_file.load(None, keys), folder / name / "config.yaml")
        Journal(folder / name / "journal", JournalConfig.model_validate({}), b"").close()
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


TASKS = """
from streamrl.tasks.environment import Environment

class Broken(Environment):
    def __init__(self, arguments, seed, split):
        pass

    def prompt(self, index):
        raise RuntimeError("no prompts today")

    async def score(self, prompt, completion):
        raise NotImplementedError

class Empty(Broken):
    size = 0
"""


def test_there_are_more_than_a_hundred_of_them_and_no_two_are_the_same():
    lines = {" ".join(arguments) for arguments, _ in CASES}
    assert len(lines) == len(CASES) >= 100


@pytest.mark.parametrize(("arguments", "said"), CASES, ids=[" ".join(arguments) or "none" for arguments, _ in CASES])
def test_one_line_exit_code_2_nothing_started_nothing_left(
    arguments: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    started: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    before, children = _files(place), _children()
    try:
        code = cli.main(arguments)
    except SystemExit as wrong_usage:
        code = wrong_usage.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("streamrl")
    assert err.count("\n") == 1
    assert said in err
    assert _files(place) == before
    assert _children() <= children
    assert started == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "config.yaml", "replay.address=foo"],
        ["train", "config.yaml", "learner.ranks=3", "learner.layout.tensor=3"],
        ["train", "config.yaml", "task={name: jsonl, args: {path: empty.jsonl}}"],
        ["top", "run", "--port", "99999"],
        ["journal", "run", "--export", "nowhere/groups.jsonl"],
    ],
)
def test_the_command_itself_says_it_in_one_line(arguments: list[str], place: Path):
    before = _files(place)
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", *arguments],
        capture_output=True, text=True, check=False, timeout=120, cwd=place, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert _files(place) == before


def test_what_cannot_run_is_refused_as_the_page_of_operations_says(place: Path, capsys: pytest.CaptureFixture[str]):
    def told(*overrides: str) -> tuple[str, int]:
        code = cli.main(["train", "config.yaml", *overrides])
        return capsys.readouterr().err, code

    documented(
        "learner.layout.tensor: ... does not divide ... attention heads; allowed: ...",
        *told("learner.ranks=3", "learner.layout.tensor=3"),
    )
    documented(
        "learner.tokens_per_micro_batch: ... cannot hold prompt ... of ... with ... tokens and an answer of "
        "generate.sampling.max_new_tokens=...; allowed: at least ...",
        *told("learner.tokens_per_micro_batch=4"),
    )
    documented(
        "generate.sampling.max_new_tokens: ... does not fit behind prompt ...",
        *told("generate.sampling.max_new_tokens=100000", "learner.tokens_per_micro_batch=200000"),
    )
    documented(
        "task.args.path: ... cannot be loaded (it holds no rows)...",
        *told("task={name: jsonl, args: {path: empty.jsonl}}"),
    )
    documented("replay.address: ... is no address; allowed: ...", *told("replay.address=foo"))


def _files(folder: Path) -> set[tuple[str, int]]:
    """Everything in the folder with its time of change, but for what Python keeps for itself."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {(str(path), 0 if path.is_dir() else path.stat().st_mtime_ns) for path in paths}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
