"""Facts are read out of scripts: what the shell would run, which key an option is, and the same table each time."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.recipes import __main__ as command
from benchmarks.recipes import table
from benchmarks.recipes.options import flags, overrides, python_defaults, scalar, yaml_defaults
from benchmarks.recipes.rules import RuleError
from benchmarks.recipes.scripts import MEGATRON_LM, VERL, Origin, scripts
from benchmarks.recipes.shell import Script, ShellError, plain, read, written
from benchmarks.recipes.sources import Checkout, Found, recipe_facts

# -- the shell

SHELL = """\
#!/bin/bash
# a comment with "quotes and $(what)
SIZE=${SIZE:-4}  # of a batch
length=$((1024 * (SIZE + 1)))
FILES="['$HOME/a b', 'c']"
if [ "$(basename "$CONFIG")" = "other.yaml" ]; then
  RATE=1
elif [ $SIZE -eq 4 ]; then
  RATE=${RATE:-"2e-6"}
  EXTRAS="--warm \\
    --rate $RATE"
else
  RATE=3
fi
for each in $(env | awk '{print $1}'); do unset "$each"; done
cat > /dev/null << END
LR = 7 if "unclosed
END
LIST=(
    size=$SIZE
    # left=out "here"
    files="$FILES"
)
LIST+=(more=1)
[ -f "none.sh" ] && source none.sh
source $(dirname ${BASH_SOURCE[0]})/common.sh
python3 -m train "${LIST[@]}" --length ${length} $EXTRAS ${SHARED:+--shared} --empty $NONE \\
    --last='x y' "$@" 2>&1 | tee log
"""
COMMON = "SHARED=yes\nRATE=9\n"


def followed(config: str = "") -> Script:
    files = {"sh/common.sh": COMMON}
    return read(SHELL, "sh/run.sh", {"CONFIG": written(config)}, files=files.get)


def words(config: str = "") -> list[str]:
    return [plain(word) for word in followed(config).commands[-1]]


def test_a_command_has_the_words_that_bash_gives_it(tmp_path):
    folder = tmp_path / "sh"
    folder.mkdir()
    (folder / "common.sh").write_text(COMMON)
    (folder / "run.sh").write_text(SHELL.replace('unset "$each"', ":"))
    probe = 'python3() { printf "%s\\0" "$@" >&3; }; tee() { :; }; cd "$0" && source sh/run.sh 3>words'
    bash = ["bash", "--norc", "-c", probe, tmp_path]
    subprocess.run(bash, env={"HOME": "", "PATH": "/usr/bin:/bin"}, check=True, capture_output=True, timeout=30)
    said = (tmp_path / "words").read_text().split("\0")[:-1]
    assert [word for word in words()[1:] if word] == said
    assert said[2:6] == ["size=4", "files=['/a b', 'c']", "more=1", "--length"]


def test_a_value_is_where_it_was_written():
    script = followed()
    places = {plain(word): (word[-1].path, word[-1].line) for word in script.commands[-1] if word}
    assert places["5120"] == ("sh/run.sh", 4)
    assert places["2e-6"] == ("sh/run.sh", 9)
    assert places["size=4"] == ("sh/run.sh", 3)
    assert script.variables["RATE"] == written("9", "sh/common.sh", 2)


def test_another_branch_is_taken_where_its_test_holds():
    assert "--warm" in words()
    assert "--warm" not in words("envs/other.yaml")


def test_names_that_are_fixed_keep_their_value():
    script = read("A=1\nB=$A\n", "run.sh", {"A": written("7")}, fixed=("A",))
    assert script.variables["B"] == written("7")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("A=1\ncase $A in 1) ;; esac\n", "run.sh:2: `case` is not read"),
        ("if true; then A=1\n", "run.sh:1: `fi` is missing"),
        ("source no.sh\n", "run.sh:1: no.sh is sourced and not there"),
        ("A=${B%.*}\n", "run.sh:1: `${B%.*}` is not read"),
        ("A=$((1 ** 2))\n", "run.sh:1: `1 ** 2` is not read"),
        ("[ 1 -lt 2 ] && A=1\n", "run.sh:1: the test `1 -lt 2` is not read"),
    ],
)
def test_what_is_not_read_is_one_line_with_its_place(text, complaint):
    with pytest.raises(ShellError, match=f"^{re.escape(complaint)}$"):
        read(text, "run.sh")


# -- options


def test_options_are_read_in_both_forms_and_the_later_one_wins():
    line = "run +a.b=1e-6 a.c='x' a.b=2 --lr 1 --lr 3e-7 --flag --bound -1 --name=y\n"
    given = read(line, "run.sh").commands[0]
    assert {name: option.value for name, option in overrides(given).items()} == {"a.b": 2, "a.c": "x"}
    assert {name: option.value for name, option in flags(given).items()} == {
        "--lr": 3e-7,
        "--flag": True,
        "--bound": -1,
        "--name": "y",
    }
    assert [scalar(text) for text in ("True", "null", "0.0", "12", "1e-3", "a")] == [True, None, 0.0, 12, 1e-3, "a"]


def test_defaults_are_read_with_their_lines():
    found = yaml_defaults("a:\n  b: 1\n  c: ${a.b}\n  d:\n  - 0.9\n  - 0.95\n", "d.yaml")
    assert {name: (option.value, option.line) for name, option in found.items()} == {
        "a.b": (1, 2),
        "a.d": ([0.9, 0.95], 5),
    }
    python = (
        "group.add_argument('--size', type=int, default=2)\n"
        "group.add_argument('--on', action='store_true')\n"
        "class Config:\n    weight_decay: float = 0.01\n    every: int | None = field(default=None)\n"
    )
    found = python_defaults(python, "p.py")
    assert {name: (option.value, option.line) for name, option in found.items()} == {
        "--size": (2, 1),
        "--on": (False, 2),
        "--weight-decay": (0.01, 4),
        "--every": (None, 5),
    }


# -- sources of our own, in the forms of both

CORE = "def compute_grpo_outcome_advantage(\n    scores,\n    epsilon: float = 1e-6,\n):\n"
DEFAULTS = "data:\n  train_batch_size: 8\nalgorithm:\n  rollout_correction:\n    rollout_is: null\n"
TRAINING = """\
batch=32
ARGS=(data.train_batch_size=$batch actor_rollout_ref.actor.ppo_mini_batch_size=$((batch / 4)))
python3 -m verl.trainer.main_ppo "${ARGS[@]}" \\
    data.train_files="['$HOME/gsm8k/train.parquet', '$HOME/math/train.parquet']" \\
    trainer.total_epochs=2 actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.5 $@
"""
MODEL = """\
PROMPTS=${PROMPTS:-64}
CHKPT_SAVE_INTERVAL=8
MODEL_OPTIONS="\\
  --grpo-prompts-per-step $PROMPTS \\
  --grpo-group-size 16 --global-batch-size 256 --lr-warmup-samples 2560"
"""
README = """\
What it does:
```bash
MODEL_OPTIONS="--grpo-group-size 2"
torchrun train_rl.py --eval-interval 20 --sequence-parallel ${MODEL_OPTIONS}
```
"""
REWARDS = """\
stds = sqrt(
  (x ** 2).sum(axis=-1, keepdims=True)
  / real_counts)
advantages = (rewards - reward_means) / (1e-4 + reward_stds)
"""
SMALL = {
    "verl/trainer/ppo/core_algos.py": CORE,
    "verl/trainer/config/_generated_ppo_trainer.yaml": DEFAULTS,
    "runs/small.sh": TRAINING,
    "runs/odd.sh": TRAINING.replace("$@", "algorithm.adv_estimator=gae"),
    "runs/new.sh": TRAINING.replace("$@", "actor_rollout_ref.actor.shiny=1"),
    "runs/none.sh": "echo nothing\n",
    "runs/model.sh": MODEL,
    "envs.yaml": "- agent_type: DAPOAgent\n  weight: 1.0\n- agent_type: AIMEAgent\n  evaluation_only: true\n",
    "examples/rl/README.md": README,
    "megatron/rl/rl_utils.py": REWARDS,
    "megatron/training/arguments.py": "group.add_argument('--grpo-kl-beta', type=float, default=0.001)\n",
    "megatron/training/config/training_config.py": "",
    "megatron/core/optimizer/optimizer_config.py": "class Config:\n    weight_decay: float = 0.01\n",
    "megatron/core/model_parallel_config.py": "",
}


def small(script: str, source: str = VERL) -> Found:
    return recipe_facts(SMALL.get, Origin(source, f"runs/{script}.sh", "envs.yaml"))


def test_a_script_of_verls_form_becomes_keys():
    found = {fact.key: (fact.value, fact.path, fact.line) for fact in small("small").facts}
    assert found == {
        "algo.advantage.eps": (1e-6, "verl/trainer/ppo/core_algos.py", 3),
        "algo.kl": (0.5, "runs/small.sh", 5),
        "algo.weight": ("none", "verl/trainer/config/_generated_ppo_trainer.yaml", 5),
        "learner.mini_batches": (4, "runs/small.sh", 2),
        "replay.groups_per_step": (32, "runs/small.sh", 1),
        "run.steps": (2 * ((7473 + 7500) // 32), "runs/small.sh", 5),
        "task.shares": (["gsm8k", "math"], "runs/small.sh", 4),
    }


def test_a_script_of_megatrons_form_becomes_keys():
    found = {fact.key: (fact.value, fact.path, fact.line) for fact in small("model", MEGATRON_LM).facts}
    assert found == {
        "algo.advantage.eps": (1e-4, "megatron/rl/rl_utils.py", 4),
        "algo.advantage.std": ("population", "megatron/rl/rl_utils.py", 3),
        "algo.kl": (0.001, "megatron/training/arguments.py", 1),
        "checkpoint.every": (2, "runs/model.sh", 2),
        "evaluate.every": (5, "examples/rl/README.md", 4),
        "evaluate.tasks": (["aime_2024"], "envs.yaml", 3),
        "generate.group_size": (16, "runs/model.sh", 5),
        "learner.layout.sequence": (True, "examples/rl/README.md", 4),
        "learner.mini_batches": (4, "runs/model.sh", 5),
        "learner.optimizer.warmup_steps": (3, "runs/model.sh", 5),
        "learner.optimizer.weight_decay": (0.01, "megatron/core/optimizer/optimizer_config.py", 2),
        "replay.groups_per_step": (64, "runs/model.sh", 1),
        "task.shares": (["dapo_math"], "envs.yaml", 1),
    }


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("odd", "runs/odd.sh:5: algorithm.adv_estimator=gae has no counterpart; allowed: "),
        ("new", "runs/new.sh:5: actor_rollout_ref.actor.shiny has no rule and no reason to have none"),
        ("none", "runs/none.sh: runs verl.trainer.main_ppo 0 times; allowed: once"),
        ("absent", "runs/absent.sh: is not there"),
    ],
)
def test_what_no_rule_knows_is_refused_by_one_line(script, complaint):
    with pytest.raises(RuleError) as refused:
        small(script)
    assert str(refused.value).startswith(complaint)
    assert "\n" not in str(refused.value)


def test_the_table_is_the_same_again_and_gives_back_what_was_read(tmp_path):
    found = {"verl/one": small("small"), "verl/two": small("small"), "megatron_rl/three": small("model", MEGATRON_LM)}
    text = table.facts_text(found)
    again = {name: small("small") for name in ("verl/two", "verl/one")}
    assert table.facts_text({"megatron_rl/three": small("model", MEGATRON_LM)} | again) == text
    (tmp_path / "facts.tsv").write_text(text)
    assert table.read_facts(tmp_path / "facts.tsv") == {
        name: {fact.key: fact for fact in each.facts} for name, each in found.items()
    }


def test_a_script_without_a_recipe_and_a_reason_is_refused():
    with pytest.raises(RuleError, match=r"examples/grpo_trainer/run_new\.sh: \[\] is its recipe"):
        list(scripts(VERL, ["examples/grpo_trainer/run_new.sh"]))


def test_a_checkout_is_read_at_its_commit_with_or_without_a_work_tree(tmp_path):
    def git(*given: str | Path) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *given], check=True, capture_output=True, text=True, timeout=60).stdout

    tree, bare = tmp_path / "tree", tmp_path / "bare"
    git("init", "-q", tree)
    (tree / "runs").mkdir()
    (tree / "runs/a.sh").write_text("A=1\n")
    (tree / "runs/notes.md").write_text("no script\n")
    git("-C", tree, "add", ".")
    git("-C", tree, "commit", "-qm", "one")
    commit = git("-C", tree, "rev-parse", "HEAD").strip()
    (tree / "runs/a.sh").write_text("A=2\n")
    git("clone", "-q", "--bare", tree, bare)
    for folder in (tree, bare):
        checkout = Checkout(folder, commit)
        assert checkout.is_there()
        assert (checkout.under("runs"), checkout.text("runs/../runs/a.sh")) == (["runs/a.sh"], "A=1\n")
        assert checkout.text("runs/none.sh") is None
        assert not Checkout(folder, "0" * 40).is_there()


def test_a_folder_without_the_commit_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert command.main([str(tmp_path), str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
