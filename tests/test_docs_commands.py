"""Every command of the documents is run here, is run by another test, or is in a block that says what it needs.

The slow tests do what a reader does: in a folder like a fresh clone, `make demo` first, then one command after another.
Runs and sweeps are cut short by further `key=value` words; models and data of the reader's own are small ones.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from launch.screenshot import installed
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.sweep.servers import SharedServers
from streamrl.observe.metrics import read_metrics
from tests.documented_commands import PAGES, ROOT, Command, blocks, commands, hidden, typed

DEADLINE = 500.0  # seconds of one command; a start of SGLang on two busy cores may take a hundred
LINKED = ("Makefile", "pyproject.toml", "requirements", "streamrl", "launch", "benchmarks", "docs", "tests")
PORT = "9464"  # of the documents; a free one takes its place
STEPS = 50  # of the run that most commands look at: the documents name its version 50.0
LAST = "step_150"  # of the documents, of the whole run
SMALL = "--fresh run.steps=3"
SMALL_RUN = "generate.group_size=4"
SMALL_GROUPS = "generate.group_size=2 generate.groups_in_flight=4 replay.groups_per_step=2"
# What is put behind the first pattern that a command begins with.
MORE = (
    (r"make demo-pretrained", f"run.steps=1 {SMALL_GROUPS}"),
    (r"make demo ARGS=", f"run.steps=3 {SMALL_RUN}"),
    (r"make demo", f"run.steps={STEPS} {SMALL_RUN}"),
    (r"streamrl train .*--help", ""),
    (r"streamrl train configs/quickstart.yaml$", f"run.steps={STEPS + 2} {SMALL_RUN}"),  # `make demo` goes on
    (r"streamrl train .*evaluate", f"{SMALL} evaluate.every=2 evaluate.prompts=4"),
    (r"streamrl train .*prometheus", f"{SMALL} run.name=watched"),
    (r"streamrl train .*model.path", SMALL),
    (r"streamrl train configs/pretrained", f"{SMALL} model.path=models/tiny"),
    (r"streamrl train", SMALL),
    (r"streamrl retrain", "--steps 3"),
    (r"streamrl tune", "--points 8"),
    (r"streamrl eval", "evaluate.prompts=4 evaluate.samples=4"),
    (r"streamrl sweep .*(run.steps|--results|--print-jobs)", "run.steps=3"),
    (r"streamrl sweep", "run.steps=2"),
)  # fmt: skip

# Commands that another test runs. A benchmark's full form is long: `make bench` runs the short one of each.
ELSEWHERE = (
    (r"make test(-all)?", "tests/test_docs_commands.py"),
    (r"make check", ".ci/run"),
    (r"(UV=1 )?/path/to/streamrl/requirements/install\.sh.*", "tests/test_install.py"),
    (r"make test-gpu-set", "tests/gpu_set/test_installed.py"),  # in an environment of its own
    (r"python3\.11 -m venv envs/\w+ && .*", "tests/foreign_environments.py"),
    (r"streamrl train .* task\.name=(verifiers|gymnasium) .*", "tests/end_to_end/test_foreign_environments.py"),
    (r"python3 streamrl/tasks/foreign/adapter\.py .*", "tests/tasks/test_adapter.py"),
    (r"streamrl train .*vowels\.py:.*|python -m streamrl\.tasks\.megatron_rl\.environment_server .*",
     "tests/end_to_end/test_megatron_run.py"),
    (r"streamrl train .*backwards\.py:.*", "tests/end_to_end/test_own_task_run.py::test_the_task_of_the_page_trains"),
    (r"streamrl train .*summed_up\.py:.*",
     "tests/end_to_end/test_branching_run.py::test_the_task_of_the_page_trains_both_branches_of_a_rollout"),
    (r"streamrl train .*tools\.py:.*", "tests/end_to_end/test_own_task_run.py::test_the_tool_of_the_page_trains"),
    (r"streamrl .*\.py:[A-Z].*|streamrl audit runs/own",
     "tests/end_to_end/test_own_choices_run.py::test_the_commands_of_the_pages_run_with_what_the_pages_show"),
    (r"python -m pytest test_\w+.py",
     "tests/test_own_choices.py::test_what_a_page_shows_passes_the_tests_that_it_shows"),
    (r"make docs", "tests/test_docs_site.py::test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere"),
    (r"python -m benchmarks\.stored_sweeps .*",
     "tests/benchmarks/test_stored_sweeps.py::test_the_command_stores_writes_the_pages_and_checks_them"),
    (r"python -m benchmarks\.stored_figures.*",
     "tests/benchmarks/test_stored_figures.py::test_the_command_writes_the_page_and_checks_it"),
    (r"make bench|python -m benchmarks\.(?!suite).*",
     "tests/benchmarks/test_suite.py::test_a_benchmark_runs_in_its_quick_form"),
    (r"python -m benchmarks.suite .*",
     "tests/benchmarks/test_suite.py::test_a_benchmark_runs_through_the_suite_and_its_figures_are_in_one_file"),
    (r"python -m pytest tests/launch/test_four_hosts.py", "tests/launch/test_four_hosts.py"),
    (r"streamrl train .* --dry-run .*", "tests/test_dry_run.py"),
    (r"streamrl train configs/images.yaml",
     "tests/end_to_end/test_images_run.py::test_a_run_on_images_learns_is_audited_and_retrains_bit_for_bit"),
    (r"streamrl sft .*|streamrl train .* model\.path=runs/warm/model",
     "tests/end_to_end/test_sft_run.py::test_reinforcement_learning_goes_on_from_its_model_far_above_a_random_one"),
    (r"streamrl train RUN/config.yaml",
     "tests/test_places.py::test_the_printed_command_resumes_the_run_from_another_folder_also_after_fresh"),
    (r"streamrl eval --run-folder runs/quickstart",
     "tests/evaluate/test_eval_command.py::"
     "test_the_pass_rates_of_a_kept_version_are_those_of_its_exact_distribution"),
    (r"streamrl simulate .*--validate.*",
     "tests/lab/test_simulate_validation.py::"
     "test_settings_are_run_for_real_and_compared_with_what_was_predicted"),
    (r"streamrl tune configs/quickstart.yaml -o .*|streamrl train tuned.yaml",
     "tests/lab/test_tune.py::test_a_configuration_is_calibrated_by_real_runs_tuned_and_trained"),
    (r"streamrl generator --run-folder .* --node 1",
     "tests/generate/test_node.py::test_it_joins_its_server_and_ends_it_and_itself_as_its_worker_has"),
    (r"streamrl generator --run-folder .*",
     "tests/end_to_end/test_pools.py::test_a_worker_joins_a_run_and_leaves_it_and_neither_costs_a_group"),
    (r"python -m streamrl.engine.launch .*|source .venv/bin/activate|streamrl train first/config.yaml.*",
     "tests/test_first_hour.py"),
    (r"python -m streamrl.tasks.serve .*", "tests/tasks/test_remote.py"),
    (r"python -m sglang.launch_server \.\.\. .*", "tests/end_to_end/test_pools.py"),
)  # fmt: skip

# A file that is there afterwards, or words of the output.
LEAVES = (
    (r"streamrl init first", "first/data.jsonl"),
    (r"streamrl schema -o", "configs/config.schema.json"),
    (r"streamrl report runs/quickstart$", "runs/quickstart/report.html"),
    (r"streamrl report .*-o compare.html", "compare.html"),
    (r"streamrl trace runs/quickstart$", "runs/quickstart/trace.json"),
    (r"streamrl trace .*-o run.csv", "run.csv"),
    (r"streamrl retrain .*--output runs/other", "runs/other/metrics.jsonl"),
    (r"streamrl retrain .*--output runs/cispo", "runs/cispo/metrics.jsonl"),
    (r"streamrl eval .*--version 50.0", "runs/quickstart/evaluations/50.0/index.html"),
    (r"streamrl sweep .*--print-jobs", "streamrl train"),
    (r"streamrl sweep configs/experiments/(\w+)\.yaml", r"sweeps/\1/results.md"),
    (r"streamrl journal .*--verify", "every record and every frame matches its checksum"),
    (r"streamrl audit", "tokens audited"),
    (r"streamrl convert .* models/tiny-megatron ", "models/tiny-megatron/latest_checkpointed_iteration.txt"),
    (r"streamrl convert .* models/quickstart", "models/quickstart/model.safetensors"),
    (r"python -m launch.render hosts .*-o", "shared/launch/NAME/start.sh"),
    (r"python -m launch.render slurm .*-o", "shared/launch/NAME/run.sbatch"),
    (r"python -m launch.screenshot", "report.png"),
    (r"python -m launch.pictures", "pictures/console.png"),
    (r"python -m launch.tiny_model", "models/tiny/config.json"),
)  # fmt: skip

COMMANDS = [command for page in PAGES for command in commands(page)]


def elsewhere(command: Command) -> str | None:
    return next((test for pattern, test in ELSEWHERE if re.fullmatch(pattern, command.text)), None)


def run_here() -> list[Command]:
    """Each one once: first those that train, by their models, so that they share a server; then those that look."""
    distinct: dict[object, Command] = {}
    for command in COMMANDS:
        if not command.needs and not elsewhere(command):
            config = trained(longer(command.words), ROOT)
            distinct.setdefault(command.words if config is None else config.model_dump_json(), command)
    return sorted(distinct.values(), key=place)


def place(command: Command) -> tuple[bool, bool, bool]:
    """models/tiny is made again, with experts, when nothing needs the former one any more."""
    return "tiny_model" in command.text, command.words[1] != "train", "pretrained" in command.text


def longer(words: Sequence[str]) -> list[str]:
    """With what MORE says; that of `make` goes into its ARGS."""
    more = next((more for pattern, more in MORE if re.match(pattern, " ".join(words))), "")
    if words[0] != "make" or not more:
        return [*words, *more.split()]
    given = [word for word in words if word.startswith("ARGS=")]
    return [*(word for word in words if word not in given), f"{' '.join(given) or 'ARGS='} {more}"]


def trained(words: Sequence[str], folder: Path) -> Config | None:
    """The configuration of the run that `words` train; None where they train none."""
    if list(words[:2]) != ["streamrl", "train"] or "--help" in words:
        return None
    return config_file.load(folder / words[2], [word for word in words[3:] if not word.startswith("--")])


def test_every_block_with_commands_says_that_it_is_for_a_shell():
    assert not [f"{page.name}: {line}" for page in PAGES for line in hidden(page)]


def test_every_command_is_run_by_a_test_or_says_what_it_needs():
    unknown = [command for command in run_here() if command.words[0] not in ("streamrl", "python", "make")]
    assert not [str(command) for command in unknown], "no test runs it: mark it, as in `# needs GPUs`"
    assert len(run_here()) > 50


def test_every_test_that_runs_a_command_of_the_documents_is_there():
    for pattern, name in ELSEWHERE:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text() if function else (ROOT / file).exists(), name
        assert any(re.fullmatch(pattern, command.text) for command in COMMANDS), f"{pattern}: no document has it"


def test_a_mark_is_about_its_line_or_about_all_lines_below_it():
    block = "one  # needs GPUs\nKEY=1 two a \\\n    b   # quickly\n# needs a cluster\nthree\n"
    found = [(command.text, command.needs) for command in typed(ROOT / "page.md", block, "")]
    assert found == [("one", "GPUs"), ("KEY=1 two a b", ""), ("three", "a cluster")]
    two = Command("page.md", "KEY=1 two a b")
    assert (two.words, two.environment) == (("two", "a", "b"), {"KEY": "1"})


def test_the_last_checkpoint_of_the_documents_is_that_of_the_quickstart():
    steps = config_file.load(ROOT / "configs/quickstart.yaml").run.steps
    assert f"step_{steps}" == LAST
    assert any(LAST in command.text for command in COMMANDS)


def test_make_demo_hands_its_arguments_to_the_run():
    for command in COMMANDS:
        if command.text.startswith("make demo ARGS="):
            told = subprocess.run(
                ["make", "-n", "-o", "venv", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
            )
            given = command.words[2].removeprefix("ARGS=")
            assert f"streamrl train configs/quickstart.yaml {given} --fresh" in told.stdout


class Clone:
    """A folder with what a clone of the repository has, in which commands are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers = SharedServers(folder / "servers")
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        shutil.copytree(ROOT / "configs", folder / "configs")
        self._write_what_a_reader_has()

    def _write_what_a_reader_has(self) -> None:
        """Sweeps of one run; the files that the pages show; questions."""
        for file in (self.folder / "configs" / "experiments").glob("*.yaml"):
            sweep = yaml.safe_load(file.read_text())
            first = {key: sweep[key][:1] for key in ("points", "seeds") if key in sweep}
            grid = {"grid": {key: values[:1] for key, values in sweep["grid"].items()}} if "grid" in sweep else {}
            file.write_text(yaml.safe_dump(sweep | first | grid))
        for page, language, name in (
            ("howto-reward.md", "python", "rewards.py"),
            ("howto-order.md", "python", "curricula.py"),
            ("simulate.md", "yaml", "fleet.yaml"),
        ):
            *_, text = (text for kind, text in blocks(ROOT / "docs" / page) if kind == language)
            (self.folder / name).write_text(text)
        (self.folder / "data").mkdir()
        rows = [f'{{"prompt": "{text}=", "question": "{text}=", "answer": "{text}"}}\n' for text in ("ab", "ca", "fe")]
        (self.folder / "data" / "sums.jsonl").write_text("".join(rows * 100))

    def stop(self) -> None:
        self._servers.stop()

    def attached(self, words: Sequence[str]) -> list[str]:
        """Overrides with which a short training run uses servers that are there, as the runs of a sweep do."""
        config = trained(words, self.folder)
        if config is None or "--fresh" not in words:
            return []
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            addresses = self._servers.addresses(config)
        return [f"generate.attach=[{','.join(addresses)}]", f"stream.keys={self.folder}/servers/keys"] * bool(addresses)

    def words(self, command: Command) -> list[str]:
        """What is run for `command`."""
        words = [word.replace(PORT, str(free_port())).replace(LAST, f"step_{STEPS}") for word in longer(command.words)]
        if words[0] == "make":
            return ["make", "-o", "venv", "VENV=.venv", *words[1:]]
        if "--output" in words:
            shutil.rmtree(self.folder / words[words.index("--output") + 1], ignore_errors=True)
        return [*words, *self.attached(words)]

    def run(self, command: Command) -> str:
        """Its output. Fails where it does not end with 0 in time."""
        words = self.words(command)
        found = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        environment = os.environ | found | command.environment
        process = subprocess.Popen(
            words, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the roles end by themselves when their supervisor is gone
                process.wait()
        assert process.returncode == 0, f"{' '.join(words)}\n{output[-6000:]}"
        if (config := trained(words, self.folder)) is not None:
            *_, last = read_metrics(self.folder / config.run_folder)
            assert last["step"] == config.run.steps
        return output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """After `make demo`: with models/tiny, and runs/quickstart for all commands that look at it."""
    made = Clone(tmp_path_factory.mktemp("clone"))
    runs = made.folder / "runs"
    try:
        made.run(Command("start.md", "make demo"))
        shutil.copytree(runs / "quickstart", runs / "few-in-flight")
        yield made
    finally:
        made.stop()


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("command", run_here(), ids=str)
def test_a_command_does_what_its_page_says(clone: Clone, command: Command):
    if re.match(r"python -m launch\.(screenshot|pictures)", command.text) and installed() is None:
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    if command.text == "make demo":  # the fixture has run it
        assert len(list(read_metrics(clone.folder / "runs" / "quickstart"))) >= STEPS
        return
    output = clone.run(command)
    for pattern, name in LEAVES:
        if found := re.match(pattern, " ".join(command.words)):
            left = found.expand(name)
            assert left in output or (clone.folder / left).exists(), f"{left} is not there\n{output[-3000:]}"
            return
    assert output.strip() or command.words[0] == "python"
