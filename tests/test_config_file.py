"""Bad input is refused with exit code 2 and one line: which key, what was given, what is allowed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from streamrl import cli, run_folder
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.yaml_text import Writer
from tests.operations_table import documented

# (override, what the line must say)
BAD = [
    (
        "replay.max_stalenes=0",
        ["replay.max_stalenes: unknown key (given 0)", "nearest known key: replay.max_staleness"],
    ),
    ("learner.lr=1e-3", ["learner.lr: unknown key", "nearest known key: learner.optimizer.lr"]),
    (
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        [
            "actor_rollout_ref.actor.ppo_mini_batch_size: unknown key (given 4)",
            "nearest known key: learner.mini_batches (updates of one pass",
        ],
    ),
    (
        "generate.server_arg={dtype: bfloat16}",
        ["generate.server_arg: unknown key", "nearest known key: generate.server_args"],
    ),
    ("bananas={colour: yellow}", ["bananas: unknown key (given {colour: yellow})"]),
    ("data={train_files: a}", ["data.train_files: unknown key (given a)", "nearest known key: task.args"]),
    ("bananas=1", ["bananas: unknown key (given 1)", "allowed: run, model, task"]),
    ("learner.ranks=0", ["learner.ranks: 0", "whole number >= 1"]),
    ("learner.ranks=1.5", ["learner.ranks: 1.5", "whole number >= 1"]),
    ("learner.ranks=two", ["learner.ranks: two", "whole number >= 1"]),
    ("run.seed=4294967296", ["run.seed: 4294967296", "whole number >= 0 and <= 2147483647"]),
    ("generate.group_size=1000000000", ["generate.group_size: 1000000000", "whole number >= 1 and <= 65536"]),
    ("replay.max_staleness=-1", ["replay.max_staleness: -1", "number >= 0"]),
    ("replay.max_staleness=.nan", ["replay.max_staleness: .nan", "number >= 0"]),
    ("replay.order=random", ["replay.order: random", "one of fifo, ready, synchronous, windowed"]),
    ("observe.wandb=on", ["observe.wandb: on", "one of off, offline, online"]),
    ("observe.console=perhaps", ["observe.console: perhaps", "true or false"]),
    ("generate.attach=[http://a:1]", ["generate.attach: 1 addresses for generate.workers=2", "one for each worker"]),
    ("publish.every=9", ["publish.every: 9 would deadlock", "allowed: up to 3"]),
    ("algo.aggregation=sequence_sum_norm", ["algo.norm_length", "is needed by aggregation=sequence_sum_norm"]),
    ("learner.optimizer.min_lr=1", ["learner.optimizer.min_lr: 1 is above lr", "allowed: up to lr"]),
    ("algo={mask_low: 2, mask_high: 1}", ["algo.mask_low: 2 is not below mask_high=1"]),
    ("algo={mask: token, mask_low: 6}", ["algo.mask_low: 6 is not below mask_high=5, the default of mask=token"]),
    ("algo={mask: geometric, mask_high: 0.9}", ["algo.mask_high: 0.9 is not above mask_low=0.99, the default"]),
    ("algo.eps_low=1.5", ["algo.eps_low: 1.5", "number >= 0 and <= 1"]),
    ("generate.sampling.top_k=1", ["generate.sampling.top_k: 1 draws nothing", "allowed: -1, 2 to 4096"]),
    ("generate.attach=3", ["generate.attach: 3", "a list of addresses of the form http://HOST:PORT"]),
    ("model.dtype=float16", ["model.dtype: float16", "one of auto, float32, bfloat16"]),
    ("model.trust_remote_code=true", ["model.trust_remote_code: true", "allowed: false"]),
    (
        "algo.reference=/models/base",
        ["algo.reference: /models/base is read only with kl or kl_reward above 0", "allowed: null"],
    ),
    ("generate.server_args={trust-remote-code: true}", ["generate.server_args: trust_remote_code", "model folder"]),
    ("run.name=a/b", ["run.name: a/b", "matching"]),
    ('run.name="a\\n"', ["run.name: 'a\\n' is not allowed", "matching"]),
    ('learner.ranks="two\\u2028"', ["learner.ranks: 'two\\u2028' is not allowed", "whole number >= 1"]),
    ("run.name.x=3", ["run.name.x: run.name is bad and has no keys", "allowed: run.name=VALUE"]),
    (
        "replay={address: 'tcp://0.0.0.0:7100', host: 127.0.0.1}",
        ["replay.host: 127.0.0.1 is this machine alone", "nobody could connect", "address=tcp://127.0.0.1:0"],
    ),
    ("replay=3", ["replay: 3", "a mapping of address, "]),
    ("learner.optimizer.lr=[1,", ["learner.optimizer.lr: not YAML"]),
    ("replay.max_staleness", ["is not an override; allowed: key=value"]),
]


@pytest.mark.parametrize(("override", "said"), BAD)
def test_a_bad_configuration_ends_with_exit_code_2_and_one_line(override, said, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("run:\n  name: bad\ngenerate:\n  workers: 2\n")
    assert cli.main(["train", str(file), override]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("streamrl: ")
    for words in said:
        assert words in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "allowed: a mapping of run, model"),
        ("run: {name: x\n", "not YAML"),
        ("run:\n  seed: 1\n  seed: 2\n", "key 'seed' occurs twice"),
        ("run:\n  sed: 1\n", "nearest known key: run.seed"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(text, said, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        config_file.load(file)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_and_a_missing_model_are_told_by_the_command_itself(tmp_path):
    missing = _command("train", str(tmp_path / "none.yaml"))
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    documented("...: No such file or directory", missing.stderr, missing.returncode)
    file = tmp_path / "config.yaml"
    file.write_text(f"run: {{folder: {tmp_path}/runs}}\nmodel: {{path: {tmp_path}/model}}\n")
    no_model = _command("train", str(file))
    assert (no_model.returncode, no_model.stderr.count("\n")) == (2, 1)
    documented("model.path: ... is no model; allowed: a Hugging Face folder ...", no_model.stderr, no_model.returncode)
    assert not (tmp_path / "runs" / "run").exists()


def test_bad_task_arguments_and_a_folder_in_use_are_told_before_anything_starts(tmp_path, model_folders):
    model = model_folders[0]
    file = tmp_path / "config.yaml"
    file.write_text(f"run: {{folder: {tmp_path}/runs}}\nmodel: {{path: {model}}}\n")
    bad = _command("train", str(file), "task.args.lenght=3")
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1), bad.stderr
    documented("task.args.lenght...", bad.stderr, bad.returncode)
    absent = _command("train", str(file), "replay.curriculum=nowhere:Hardest")
    assert absent.returncode == 2
    assert "replay.curriculum: nowhere:Hardest cannot be loaded" in absent.stderr
    assert len(absent.stderr.strip().splitlines()) == 1
    claim = run_folder.lock(config_file.load(file))
    in_use = _command("train", str(file))
    os.close(claim)
    assert (in_use.returncode, in_use.stderr.count("\n")) == (2, 1), in_use.stderr
    documented("run.name: ... is in use by another ...; allowed: another run.name", in_use.stderr, in_use.returncode)
    assert "is in use by another `streamrl train`" in in_use.stderr


def test_a_resume_with_a_key_that_changes_what_the_data_means_is_refused(tmp_path, model_folders):
    model = model_folders[0]
    file = tmp_path / "config.yaml"
    file.write_text(f"run: {{folder: {tmp_path}/runs}}\nmodel: {{path: {model}}}\n")
    (tmp_path / "runs" / "run").mkdir(parents=True)
    config_file.save(config_file.load(file), tmp_path / "runs" / "run" / "config.yaml")
    told = _command("train", str(file), "generate.sampling.temperature=0.5")
    documented(
        "...: ... differs from ... of the run in ...; allowed: the same value, --fresh, or another run.name",
        told.stderr,
        told.returncode,
    )
    assert told.stderr.count("\n") == 1
    several = _command("train", str(file), "algo.eps_low=0.1", "generate.sampling.temperature=0.5", "run.steps=7")
    assert [line.split(": ")[1] for line in several.stderr.splitlines()] == [
        "override generate.sampling.temperature",
        "override algo.eps_low",
    ]


def test_a_progress_timeout_within_the_time_of_a_group_is_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"run: {{folder: {tmp_path}/runs}}\n")
    told = _command("train", str(file), "run.progress_timeout=900", "replay.group_timeout=900")
    documented(
        "run.progress_timeout: ... would end a run that waits for a group within replay.group_timeout=...; "
        "allowed: above ..., or null",
        told.stderr,
        told.returncode,
    )
    assert told.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="and an evaluation of "):
        config_file.load(file, ["run.progress_timeout=1000", "evaluate.every=5", "evaluate.timeout=120"])


def test_wrong_usage_is_one_line_and_exit_code_2():
    for arguments in (["train"], ["trian"], ["audit", "/nowhere"], ["generator"], ["retrain", "/nowhere"]):
        told = _command(*arguments)
        assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr


def test_the_help_of_train_lists_every_key_once():
    text = _command("train", "configs/quickstart.yaml", "--help").stdout
    for path, field in config_file.fields():
        assert text.count(f"\n  {path}=") == 1
        assert field.description in text


def test_every_key_has_a_description_and_what_is_saved_is_what_is_loaded(tmp_path):
    assert all(field.description for _, field in config_file.fields())
    config = config_file.load(None, ["learner.optimizer.lr=1e-6", "observe.wandb=off", "algo.dual_clip=3"])
    assert config.learner.optimizer.lr == 1e-6
    config_file.save(config, tmp_path / "config.yaml")
    assert config_file.load(tmp_path / "config.yaml") == config


def test_later_overrides_win_and_reach_into_task_arguments():
    config = config_file.load(None, ["task.args.symbols=3", "task.args.symbols=4", "run.seed=7"])
    assert config.task.args == {"symbols": 4}
    assert config_file.changed(Config(), config) == ["run.seed", "task.args"]


def test_the_shipped_configurations_are_valid():
    others = ("experiments", "parts")  # sweeps, whose points are checked in tests/lab, and parts of recipes
    for file in (file for file in Path("configs").rglob("*.yaml") if file.parent.name not in others):
        assert isinstance(config_file.load(file), Config)


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streamrl.cli", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ["0-0", "1-2", "1e5", "7", "truer", "false", "3.x", "yes"])
def test_a_run_name_survives_the_file_whatever_it_looks_like(name, tmp_path):
    config = config_file.load(None, [f'run.name="{name}"'])
    config_file.save(config, tmp_path / "config.yaml")
    assert config_file.load(tmp_path / "config.yaml") == config
    assert config.run.name == name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2026-01-31", "2026-01-31"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("off", "off"),
        ("=", "="),
        ("010", 10),
        ("-7", -7),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e-6", 1e-6),
        ("1e5", 1e5),
    ],
)
def test_a_scalar_is_what_yaml_1_2_says_and_a_text_like_it_stays_a_text(text, value):
    assert config_file.parse_yaml(text, where="text") == value
    assert type(config_file.parse_yaml(text, where="text")) is type(value)
    written = yaml.dump(text, Dumper=Writer)
    assert config_file.parse_yaml(written, where="text") == text


def test_a_date_is_a_name_of_a_run():
    assert config_file.load(None, ["run.name=2026-01-31"]).run.name == "2026-01-31"


def test_each_worker_sees_the_settings_of_its_own_pool():
    hot = {"name": "hot", "workers": 2, "sampling": {"temperature": 1.2}}
    cold = {"name": "cold", "attach": ["http://[::1]:30000"]}
    config = Config.model_validate({"generate": {"sampling": {"max_new_tokens": 8}, "pools": [hot, cold]}})
    assert config.workers == 3
    first, last = config.of_worker(1).generate, config.of_worker(2).generate
    assert (first.name, first.sampling.temperature, first.sampling.max_new_tokens) == ("hot", 1.2, 8)
    assert (last.name, last.sampling.temperature, last.attach) == ("cold", 1.0, ("http://[::1]:30000",))
    with pytest.raises(ValueError, match="1 addresses, none for generator 3"):
        config.of_worker(3)


def test_what_is_shared_has_every_key_but_those_of_servers():
    pools = [{"name": "a", "server_args": {"api_key": "hidden", "mem_fraction_static": 0.5}}, {"name": "b"}]
    config = config_file.load(None, ["generate.server_args={api-key: hidden}", f"generate.pools={pools}"])
    shared = config_file.shareable(config)
    assert "hidden" not in str(shared)
    assert shared["generate"]["pools"] == [{"name": "a", "server_args": {"mem_fraction_static": 0.5}}, {"name": "b"}]
    assert shared["generate"].pop("server_args") == {}
    assert shared["run"] == config.model_dump(mode="json")["run"]


@pytest.mark.parametrize(
    ("pool", "text"),
    [
        ({"workers": 2}, "the name '' is missing"),
        ({"name": "a", "group_size": 4}, "'group_size' cannot differ between pools"),
        ({"name": "a", "sampling": {"temperature": 0}}, "sampling.temperature of 'a'"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_by_name(pool, text):
    with pytest.raises(ValueError, match=text):
        Config.model_validate({"generate": {"pools": [pool]}})


def test_a_file_builds_on_its_bases_and_wins_over_them(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/small.yaml").write_text("generate: {group_size: 4, sampling: {max_new_tokens: 5}}\n")
    (tmp_path / "shared/slow.yaml").write_text("base: small.yaml\ngenerate: {sampling: {temperature: 0.5}}\n")
    (tmp_path / "other.yaml").write_text("generate: {group_size: 6}\nrun: {steps: 3}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: [shared/slow.yaml, other.yaml]\nrun: {steps: 9}\n")
    config = config_file.load(top)
    assert (config.generate.group_size, config.run.steps) == (6, 9)
    assert (config.generate.sampling.max_new_tokens, config.generate.sampling.temperature) == (5, 0.5)


def test_a_list_of_a_base_is_replaced_and_not_lengthened(tmp_path):
    (tmp_path / "below.yaml").write_text("generate: {attach: ['http://a:1', 'http://b:2']}\n")
    (tmp_path / "top.yaml").write_text("base: below.yaml\ngenerate: {attach: ['http://c:3']}\n")
    assert config_file.load(tmp_path / "top.yaml").generate.attach == ("http://c:3",)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"top.yaml": "base: top.yaml\n"}, "builds on itself"),
        ({"top.yaml": "base: a.yaml\n", "a.yaml": "base: top.yaml\n"}, "builds on itself"),
        ({"top.yaml": "base: gone.yaml\n"}, "gone.yaml: No such file"),
        ({"top.yaml": "base: 3\n"}, "allowed: a file, or a list of files"),
        ({"top.yaml": "base: a.yaml\n", "a.yaml": "run: {stepz: 3}\n"}, "run.stepz: unknown key"),
    ],
)
def test_a_base_that_cannot_be_is_refused_by_name(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        config_file.load(tmp_path / "top.yaml")
