"""How a wrong configuration is told: where it is, all of it at once, and what another trainer's name means here."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl import cli
from streamrl.config import file as config_file
from streamrl.config.complaints import nearest_key
from streamrl.config.file import ConfigError
from streamrl.config.other_names import OTHER_NAMES
from tests.operations_table import documented

KEYS = {path for path, _ in config_file.fields()}

MEANT = {
    "learning_rate": "learner.optimizer.lr",
    "lr": "learner.optimizer.lr",
    "batch_size": "replay.groups_per_step",
    "num_generations": "generate.group_size",
    "max_completion_length": "generate.sampling.max_new_tokens",
    "beta": "algo.kl",
    "algo.kl_coef": "algo.kl",
    "temperature": "generate.sampling.temperature",
    "evaluate.sampling.temperature": "evaluate.temperature",
    "per_device_train_batch_size": "learner.tokens_per_micro_batch",
    "rollout.n": "generate.group_size",
    "actor_rollout_ref.actor.optim.lr": "learner.optimizer.lr",
    "learner.optimizer.learning-rate": "learner.optimizer.lr",
    "clip_ratio_high": "algo.eps_high",
    "max_steps": "run.steps",
    "trainer.total_epochs": "run.epochs",
    "tensor_model_parallel_size": "learner.layout.tensor",
    "rollout.tensor_model_parallel_size": "generate.tensor_parallel",
    "model_name_or_path": "model.path",
    "importance_sampling_level": "algo.loss",  # of the loss's own ratio, as GSPO has it
    "vllm_importance_sampling_mode": "algo.weight",
    "trainer.v1.sampler.max_off_policy_threshold": "replay.max_staleness",
    "async_training.trigger_parameter_sync_step": "publish.every",
    "weight_sync_steps": "publish.every",
    "replay.max_stalenes": "replay.max_staleness",  # spelling
    "learner.lr": "learner.optimizer.lr",  # the section
}


@pytest.mark.parametrize(("name", "key"), MEANT.items())
def test_a_key_is_found_by_its_meaning_its_section_or_its_spelling(name: str, key: str) -> None:
    assert nearest_key(name) == key


def test_every_name_of_another_trainer_means_a_key_of_ours_and_is_none_itself() -> None:
    assert {name: key for name, key in OTHER_NAMES.items() if key not in KEYS} == {}
    leaves = {key.rpartition(".")[2] for key in KEYS}
    assert sorted(leaves & OTHER_NAMES.keys()) == []
    assert all(name == name.lower().replace("-", "_") for name in OTHER_NAMES)


def refused(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        config_file.load(path, overrides)
    return list(refusal.value.lines)


def test_a_key_of_a_file_is_told_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# a comment\nrun:\n  sed: 1\nlearner:\n  optimizer: {lr: fast,\n    beta1: 2}\n")
    seed, lr, beta = refused(file)
    assert seed.startswith(f"{file}:3: run.sed: unknown key (given 1); allowed: name, folder")
    assert lr.startswith(f"{file}:5: learner.optimizer.lr: fast is not allowed")
    assert beta.startswith(f"{file}:6: learner.optimizer.beta1: 2 is not allowed")


def test_a_key_of_a_base_has_the_line_of_the_base_and_one_behind_the_command_has_none(tmp_path: Path) -> None:
    base, file = tmp_path / "base.yaml", tmp_path / "config.yaml"
    base.write_text("run:\n  steps: 0\n  seed: -1\n")
    file.write_text("base: base.yaml\nrun: {steps: 3}\n")
    (line,) = refused(file)
    assert line.startswith(f"{base}:3: run.seed: -1 is not allowed")
    seed, steps, task = refused(file, "run.steps=0", "task={args: {a: 1}, nme: copy}")
    assert seed.startswith(f"{base}:3: run.seed: -1 is not allowed")
    assert steps.startswith("override run.steps: 0 is not allowed")
    assert task.startswith("override task.nme: unknown key (given copy)")


def test_a_rule_between_keys_is_told_where_its_key_is(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("replay:\n  lease: 0.5\npublish:\n  every: 9\n")
    lease, every = refused(file)
    assert lease.startswith(f"{file}:2: replay.lease: 0.5 s ends before")
    assert every.startswith(f"{file}:4: publish.every: 9 would deadlock")


def test_all_mistakes_of_a_stage_are_told_in_the_order_of_the_tree(tmp_path: Path, capsys) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("observe: {wandb: on}\nrun: {steps: 0}\nbananas: 1\n")
    overrides = ["learner.lr=1e-3", "algo={mask_low: 2, mask_high: 1, reference: x}", "publish.every=9"]
    assert cli.main(["train", str(file), *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].split(" is ")[0].split(": unknown")[0] for line in lines] == [
        f"{file}:2: run.steps: 0",
        "override algo.mask_low: 2",
        "override algo.reference: x",
        "override learner.lr",
        f"{file}:1: observe.wandb: on",
        f"{file}:3: bananas",
    ]
    assert all(line.startswith("streamrl: ") for line in lines)
    documented("...:...: ...: unknown key ...; allowed: ...", lines[-1], 2)
    documented("override ...: unknown key ...; allowed: ...", lines[3], 2)
    assert cli.main(["train", str(file), *overrides]) == 2
    assert capsys.readouterr().err.splitlines() == lines


def test_what_is_no_override_is_told_with_the_others() -> None:
    assert len(refused(None, "replay", "run.name=a", "run.name.x=3", "run.steps=[1,", "run.name.y.z=1")) == 4


def test_a_file_that_is_no_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("run:\n  seed: 1\n  seed: 2\n")
    assert refused(file) == [f"{file}:3: not YAML: key 'seed' occurs twice; allowed: YAML"]
    file.write_text("run: {name: x\nmodel: 3")
    assert refused(file)[0].startswith(f"{file}:2: not YAML: ")
    file.write_text("a: &a [*a]\n")
    assert refused(file)[0].startswith(f"{file}:1: ")


def test_mistakes_of_model_and_task_are_told_together_with_their_lines(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("model: {path: nowhere}\ntask:\n  name: jsonl\n  args:\n    pat: a\n    form: odd\n")
    assert cli.main(["train", "config.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("streamrl: config.yaml:1: model.path: ")
    assert sorted(line.split(": ")[2] for line in lines[1:]) == ["task.args.form", "task.args.pat", "task.args.path"]
    assert all(f"config.yaml:{number}: " in "\n".join(lines) for number in (4, 5, 6))
