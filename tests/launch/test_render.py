"""Scripts for hosts and for Slurm: whole, readable by bash, and right about who is told what."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch import render
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from tests.operations_table import documented

# Fakes replace srun, squeue, scontrol and the roles: the scripts are what is tested.
FAKE = """#!/usr/bin/env bash
# Replaces the interpreter: it writes down its arguments, and ends as the test says.
echo "$*" >> "{folder}/calls"
lives() {{
  trap 'echo told >> "{folder}/calls"; exit 75' TERM
  echo "$$" > "{folder}/$1"
  for _ in {{1..300}}; do sleep 0.1; done
  exit 9
}}
case "$*" in
*launch.folder*) for ((n = 0; n < {prepares}; n++)); do sleep 0.1; done ;;
*"cli replay"*)
  (({replay})) || lives replay
  until [[ -s "{folder}/learner" ]]; do sleep 0.05; done
  exit {replay}
  ;;
*"cli learner"*)
  (({learner} >= 0)) || lives learner
  (({replay})) || until [[ -s "{folder}/replay" ]]; do sleep 0.05; done
  echo "$$" > "{folder}/learner"
  exit {learner}
  ;;
*"--index 1"*) lives generator ;;
*"cli generator"*) exit {generator} ;;
esac
"""

# The script's own, before it starts its second role: told to end.
MKDIR = """#!/usr/bin/env bash
echo >> "{folder}/mkdirs"
(($(wc -l < "{folder}/mkdirs") != 2)) || kill -TERM "$PPID"
exec /bin/mkdir "$@"
"""

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""

SQUEUE = """#!/usr/bin/env bash
case "$*" in
*--steps*) echo "7.1 learner" ;;
*) echo RUNNING ;;
esac
"""

SCANCEL = """#!/usr/bin/env bash
kill -TERM "$(< "{folder}/learner")"
"""

SCONTROL = """#!/usr/bin/env bash
case $1 in
show) echo first; echo second ;;
*) echo "scontrol $*" >> "{folder}/calls" ;;
esac
"""


@pytest.mark.parametrize("nodes", [1, 2, 8])
@pytest.mark.parametrize("form", ["hosts", "slurm"])
def test_every_script_is_read_by_bash_and_starts_every_role_once(launch, form, nodes):
    made = launch(form, nodes)
    for name, text in made.files().items():
        if name == "config.yaml":
            continue
        assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=10).returncode == 0
        assert text.startswith("#!/usr/bin/env bash\n")
        assert len(re.findall(r"cli replay ", text)) == 1
        learners = made.placement.learner_nodes if form == "hosts" else 1  # srun starts it on all of its nodes
        assert len(re.findall(r"cli learner ", text)) == learners
        assert [int(index) for index in re.findall(r"--index (\d+)", text)] == list(range(len(made.placement.workers)))


def test_the_nodes_read_one_configuration_with_the_shared_folder_and_an_address_for_others(launch, tmp_path):
    for nodes, address, host in ((1, "tcp://127.0.0.1:0", None), (2, "tcp://0.0.0.0:7100", "gpu-0")):
        path = tmp_path / "rendered.yaml"
        path.write_text(launch("hosts", nodes).files()["config.yaml"])
        config = config_file.load(path)
        assert config.run_folder == Path("/shared/runs/trial")
        assert (config.replay.address, config.replay.host) == (address, host)


def test_torchrun_meets_on_the_first_node_of_several_and_on_loopback_of_one(launch):
    assert "--rdzv-endpoint=127.0.0.1:0 --local-addr" in launch("hosts", 2).files()["start.sh"]
    text = launch("hosts", 8).files()["start.sh"]
    assert text.count("--nnodes=4 --nproc-per-node=4") == text.count("--rdzv-endpoint=gpu-0:29400") == 4
    assert '--rdzv-endpoint="${nodes[0]}:29400"' in launch("slurm", 8).files()["run.sbatch"]


def test_on_a_shared_node_learner_and_workers_see_gpus_of_their_own(launch):
    text = launch("hosts", 1).files()["start.sh"]
    assert "--gpus 0,1,2,3 -- python -m torch" in text
    assert re.findall(r"--gpus (\S+) -- python -m streamrl.cli generator", text) == ["4,5", "6,7"]


@pytest.mark.parametrize("form", ["hosts", "slurm"])
def test_each_node_of_a_server_has_a_role_with_its_number_and_a_log_of_its_own(launch, form):
    generate = {"workers": 2, "server_nodes": 2, "tensor_parallel": 4}
    config = {"model": {"path": "/m"}, "generate": generate}
    roles = {"learner": {"nodes": 1, "gpus": 8}, "generators": {"nodes": 2, "gpus": 4}, "hosts": ["a", "b", "c"]}
    separate = {"slurm": {"separate": True}} if form == "slurm" else {}
    files = launch(form, 3, config=config, **roles, **separate).files()
    text = files["start.sh" if form == "hosts" else "generators.sbatch"]
    started = re.findall(r"start (generator\S+) .*--gpus (\S+) -- .* --index (\d)(?: --node (\d))?\n", text)
    assert started == [
        ("generator-0", "0,1", "0", ""),
        ("generator-1", "2,3", "1", ""),
        ("generator-0-node-1", "0,1", "0", "1"),
        ("generator-1-node-1", "2,3", "1", "1"),
    ]


def _headers(text: str) -> dict[str, str | None]:
    """The options of sbatch, which must come before the first command."""
    head, _, body = text.partition("\nset -euo pipefail\n")
    assert "#SBATCH" not in body
    words = [line.removeprefix("#SBATCH ") for line in head.splitlines() if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", word) for word in words)
    return {word.partition("=")[0]: word.partition("=")[2] or None for word in words}


def test_one_allocation_says_what_it_needs_and_comes_back(launch):
    slurm = {"partition": "gpu", "account": "lab", "time": "12:00:00", "options": ["--exclusive"]}
    learner = {"nodes": 4, "gpus": 8, "cpus": 32, "memory": "500Gi"}
    text = launch("slurm", 8, slurm=slurm, learner=learner, grace=300).files()["run.sbatch"]
    headers = _headers(text)
    expected = {
        "--nodes": "8",
        "--ntasks-per-node": "1",
        "--gpus-per-node": "8",
        "--cpus-per-task": "32",
        "--mem": "500G",
        "--partition": "gpu",
        "--account": "lab",
        "--time": "12:00:00",
        "--signal": "B:TERM@300",
        "--exclusive": None,
    }
    assert expected.items() <= headers.items()
    assert {"--requeue", "--job-name", "--output", "--open-mode"} <= headers.keys()
    assert "job=$SLURM_JOB_ID\n" in text


def test_separate_jobs_let_each_generator_node_come_and_go_alone(launch):
    slurm = {"separate": True, "partition": "gpu"}
    generators = {"nodes": 4, "gpus": 4, "partition": "preemptible"}
    files = launch("slurm", 8, slurm=slurm, generators=generators).files()
    learner, pool = files["learner.sbatch"], files["generators.sbatch"]
    assert "cli generator" not in learner
    assert "cli replay" not in pool
    assert "cli learner" not in pool
    assert (_headers(learner)["--nodes"], _headers(learner)["--partition"]) == ("4", "gpu")
    headers = _headers(pool)
    assert (headers["--array"], headers["--nodes"], headers["--partition"]) == ("0-3", "1", "preemptible")
    assert "job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}\n" in pool
    assert [int(index) for index in re.findall(r"--index (\d+)", pool)] == list(range(8))


@pytest.mark.parametrize(
    ("generators", "line"),
    [
        ({"gpus": 4}, "generators.gpus: 4 differs from learner.gpus=8, and one allocation has nodes of one kind"),
        ({"cpus": 32}, "generators.cpus: 32 differs from learner.cpus=64"),
        ({"memory": "900Gi"}, "generators.memory: 900Gi differs from learner.memory=null"),
        ({"partition": "big"}, "generators.partition: big differs from learner.partition=null"),
    ],
)
def test_what_one_allocation_cannot_give_its_generators_is_refused(launch, generators, line):
    nodes = {"learner": {"nodes": 1, "gpus": 8, "cpus": 64}, "generators": {"nodes": 1, "gpus": 8} | generators}
    with pytest.raises(ConfigError, match=re.escape(line)):
        launch("slurm", 2, **nodes).files()
    assert launch("slurm", 2, **nodes, slurm={"separate": True}).files()


def test_separate_jobs_need_nodes_of_their_own(launch):
    with pytest.raises(ConfigError, match=r"slurm\.separate: the generators have no nodes"):
        launch("slurm", 1, slurm={"separate": True}).files()


def _start(folder: Path, text: str, arguments: list[str], **ends: int) -> subprocess.Popen[str]:
    """A script, with fakes for all that it starts; `ends`: exit codes, and tenths of seconds that it prepares.

    A learner of -1 and a replay service of 0 live until they are told to end. Each of the two waits for the other
    before it ends by itself.
    """
    ends = {"learner": 0, "replay": 0, "generator": 0, "prepares": 0} | ends
    fakes = {"python": FAKE, "srun": SRUN, "squeue": SQUEUE, "scancel": SCANCEL, "scontrol": SCONTROL}
    for name, script in fakes.items():
        path = folder / name
        path.write_text(script.format(folder=folder, **ends) if "{" in script else script)
        path.chmod(0o755)
    for role in ("replay", "learner"):
        (folder / role).unlink(missing_ok=True)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **slurm}
    return subprocess.Popen(
        ["bash", "-c", text, "script", *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )


def _play(folder: Path, text: str, arguments: list[str], **ends: int) -> tuple[int, list[str], str]:
    """Run such a script. Its exit code, what was started, and what it said on stderr."""
    process = _start(folder, text, arguments, **ends)
    _, said = process.communicate(timeout=60)
    return process.returncode, (folder / "calls").read_text().splitlines(), said


def _local(launch, tmp_path, form, *, workers=1, **others):
    """With the run folder in `tmp_path`."""
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "runs/trial/logs").mkdir(parents=True, exist_ok=True)
    cpu = {"learner": {"nodes": 1, "gpus": 0}, "generators": {"nodes": 1, "gpus": 0}, "folder": str(tmp_path / "runs")}
    config = {"model": {"path": "/m"}, "run": {"name": "trial"}, "generate": {"workers": workers}}
    return launch(form, 2, config=config, **cpu, **others)


def test_a_learner_that_fails_on_a_host_ends_the_replay_service(launch, tmp_path):
    text = _local(launch, tmp_path, "hosts").files()["start.sh"]
    code, calls, _ = _play(tmp_path, text, ["0"], learner=3)
    assert code == 3
    assert "told" in calls
    assert calls[0] == f"-m streamrl.launch.folder prepare {tmp_path}/out/config.yaml"


def test_a_job_that_was_told_to_end_is_queued_again(launch, tmp_path):
    text = _local(launch, tmp_path, "slurm").files()["run.sbatch"]
    code, calls, _ = _play(tmp_path, text, [], learner=75)
    assert code == 0
    assert calls[-1] == "scontrol requeue 7"
    assert any("cli generator" in call for call in calls)


def test_a_job_that_fails_is_queued_again_as_often_as_allowed_however_often_it_was_told_to_end(launch, tmp_path):
    text = _local(launch, tmp_path, "slurm", restarts=1).files()["run.sbatch"]
    codes = [_play(tmp_path, text, [], learner=code)[0] for code in (75, 3, 3)]
    assert codes == [0, 0, 3]


@pytest.mark.parametrize("failure", [1, 2])
def test_a_replay_service_that_fails_gives_its_exit_code_to_the_job_and_the_learner_that_was_told_of_it_does_not(
    launch, tmp_path, failure
):
    text = _local(launch, tmp_path, "slurm", restarts=0).files()["run.sbatch"]
    code, calls, said = _play(tmp_path, text, [], learner=-1, replay=failure)
    assert (code, calls.count("told"), "scontrol requeue 7" in calls) == (failure, 1, False)
    assert f"replay-0 ended with exit code {failure}; see" in said


@pytest.mark.parametrize("failure", [1, 2])
def test_a_replay_service_that_fails_gives_its_exit_code_to_its_host(launch, tmp_path, failure):
    text = _local(launch, tmp_path, "hosts").files()["start.sh"]
    assert _play(tmp_path, text, ["0"], learner=-1, replay=failure)[0] == failure
    assert _play(tmp_path, text, ["0"], learner=3, replay=failure)[0] == 3


def test_a_generator_node_that_was_told_to_end_comes_back_by_itself(launch, tmp_path):
    text = _local(launch, tmp_path, "slurm", slurm={"separate": True}).files()["generators.sbatch"]
    code, calls, _ = _play(tmp_path, text, [], generator=75)
    assert code == 0
    assert calls[0] == f"-m streamrl.launch.folder wait {tmp_path}/out/config.yaml"
    assert calls[-1] == "scontrol requeue 9_0"


@pytest.mark.parametrize(
    ("script", "code", "last"),
    [
        ("start.sh 0", 75, "folder prepare"),
        ("start.sh 1", 75, "folder wait"),
        ("run.sbatch", 0, "scontrol requeue 7"),
        ("generators.sbatch", 0, "scontrol requeue 9_0"),
    ],
)
def test_a_script_that_is_told_to_end_while_it_prepares_starts_no_role(launch, tmp_path, script, code, last):
    script, *host = script.split()
    separate = {"slurm": {"separate": True}} if script == "generators.sbatch" else {}
    made = _local(launch, tmp_path, "hosts" if host else "slurm", **separate)
    process = _start(tmp_path, made.files()[script], host, prepares=50)
    calls = tmp_path / "calls"
    while not (calls.exists() and calls.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert last in calls.read_text().splitlines()[-1]
    assert "streamrl.cli" not in calls.read_text()


def test_a_host_that_is_told_to_end_between_two_starts_tells_both_roles(launch, tmp_path):
    text = _local(launch, tmp_path, "hosts", workers=2).files()["start.sh"]
    (tmp_path / "mkdir").write_text(MKDIR.format(folder=tmp_path))
    (tmp_path / "mkdir").chmod(0o755)
    code, _, said = _play(tmp_path, text, ["1"])
    assert (code, said) == (75, "")


@pytest.mark.parametrize("failure", [1, 2])
def test_a_host_of_generators_alone_ends_with_the_first_that_fails(launch, tmp_path, failure):
    text = _local(launch, tmp_path, "hosts", workers=2).files()["start.sh"]
    code, _, said = _play(tmp_path, text, ["1"], generator=failure)
    assert code == failure  # and not 75, with which the other one ends
    assert said == f"generator-0 ended with exit code {failure}; see {tmp_path}/runs/trial/logs/generator-0.log\n"


def test_a_job_of_generators_of_which_one_fails_counts_it(launch, tmp_path):
    made = _local(launch, tmp_path, "slurm", workers=2, slurm={"separate": True}, restarts=1)
    text = made.files()["generators.sbatch"]
    played = [_play(tmp_path, text, [], generator=1) for _ in range(2)]
    assert [code for code, _, _ in played] == [0, 1]
    assert played[0][1][-1] == "scontrol requeue 9_0"


def test_a_generator_that_fails_beside_a_learner_is_a_line_of_the_job_and_not_its_end(launch, tmp_path):
    text = _local(launch, tmp_path, "slurm").files()["run.sbatch"]
    code, calls, said = _play(tmp_path, text, [], learner=75, generator=1)
    assert (code, calls[-1]) == (0, "scontrol requeue 7")
    documented("generator-... ended with exit code ...; see ...", said, None)


def test_a_host_beyond_the_last_one_is_refused(launch, tmp_path):
    text = _local(launch, tmp_path, "hosts").files()["start.sh"]
    done = subprocess.run(["bash", "-c", text, "start.sh", "2"], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr) == (2, "start.sh: 2 hosts, 0 to 1; given 2\n")


def test_secrets_are_read_from_a_file_and_are_in_no_script(launch, tmp_path):
    secrets = tmp_path / "secrets"
    secrets.write_text("WANDB_API_KEY=hidden\n")
    secrets.chmod(0o644)
    text = _local(launch, tmp_path, "hosts", secrets=str(secrets)).files()["start.sh"]
    assert "hidden" not in text
    assert subprocess.run(["bash", "-c", text, "start.sh", "1"], capture_output=True, timeout=10).returncode == 2


def test_a_run_of_epochs_is_rendered_with_its_epochs(describe, launch, tmp_path):
    epochs = {"override": ["run.epochs=2"], "learner": {"gpus": 0}, "hosts": ["gpu-0"]}
    assert render.main(["hosts", str(describe(**epochs)), "--dry-run"]) == 0
    (tmp_path / "rendered.yaml").write_text(launch("hosts", 1, override=["run.epochs=2"]).files()["config.yaml"])
    assert config_file.load(tmp_path / "rendered.yaml").run.epochs == 2


def test_a_dry_run_says_what_would_start_and_writes_nothing(describe, tmp_path, capsys):
    path = describe(learner={"nodes": 1, "gpus": 0}, generators={"nodes": 1, "gpus": 0}, hosts=["a", "b"])
    assert render.main(["hosts", str(path), "-o", str(tmp_path / "out"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "node 0: replay-0, learner with 1 rank\nnode 1: generator-0\n" in told
    assert f"on b: bash {tmp_path}/out/start.sh 1" in told
    assert not (tmp_path / "out").exists()


RECIPES = sorted(path for part in ("megatron_rl", "verl") for path in Path("configs/recipes", part).glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_dry_run_of_every_recipe_in_every_form(recipe, tmp_path, capsys):
    config = config_file.load(recipe)
    gpus = sum(pool.workers * pool.servers * pool.tensor_parallel for pool in config.generate.each_pool)
    nodes = -(-config.learner.ranks // 8), -(-gpus // 8)
    description = tmp_path / "run.yaml"
    hosts = [f"gpu-{node}" for node in range(sum(nodes))]
    description.write_text(
        f"config: {recipe.resolve()}\nfolder: /shared/runs\nhosts: {hosts}\nkubernetes: {{image: 'streamrl:gpu'}}\n"
        f"learner: {{nodes: {nodes[0]}, gpus: 8}}\ngenerators: {{nodes: {nodes[1]}, gpus: 8}}\n"
        f"grace: {config.run.stop_timeout:g}\noverride: [model.path=/shared/{config.model.path}]\n"
    )
    last = f"generator-{config.workers - 1} on GPUs"
    pods = config.workers * config.generate.server_nodes
    for form, workers in (("hosts", last), ("slurm", last), ("kubernetes", f"generator: {pods} pod")):
        assert render.main([form, str(description), "-o", str(tmp_path / "out"), "--dry-run"]) == 0
        assert workers in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("name", ["quickstart", "qwen2.5-32b-dapo"])
@pytest.mark.parametrize("form", ["hosts", "slurm", "kubernetes"])
def test_the_descriptions_that_come_along_are_rendered_in_every_form(tmp_path, form, name):
    assert render.main([form, f"launch/runs/{name}.yaml", "-o", str(tmp_path / "out")]) == 0
    assert list((tmp_path / "out").iterdir())


def test_a_wrong_description_is_one_line_and_exit_code_2(describe, capsys):
    assert render.main(["hosts", str(describe()), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("render: hosts: 0 names for 1 nodes; allowed:")
    assert render.main(["slurm", str(describe())]) == 2
    assert "allowed: with -o FOLDER" in capsys.readouterr().err


def test_a_folder_of_scripts_that_a_shell_would_split_is_refused(describe, capsys, tmp_path):
    path = describe(learner={"gpus": 0}, hosts=["a"])
    assert render.main(["hosts", str(path), "-o", str(tmp_path / "my scripts")]) == 2
    assert "my scripts' would need quotes in a script; allowed: " in capsys.readouterr().err
    assert not (tmp_path / "my scripts").exists()


def test_a_shape_for_plans_is_not_told_to_the_nodes_which_may_start_in_other_folders(launch):
    config = {"model": {"path": "/shared/models/tiny", "shape": "configs/recipes/shapes/qwen2.5-3b.json"}}
    made = launch("hosts", 1, config=config, learner={"nodes": 1, "gpus": 8})
    assert "shape: null" in made.files()["config.yaml"]


@pytest.mark.parametrize("odd", ["no name", "fd00::1", "a\nrm", ""])
def test_a_host_that_is_no_name_is_refused_in_one_line(describe, capsys, odd):
    nodes = {"learner": {"nodes": 1, "gpus": 0}, "generators": {"nodes": 1, "gpus": 0}}
    assert render.main(["hosts", str(describe(**nodes, hosts=["a", odd])), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "hosts.1: string should match pattern '^[\\w.-]+$'" in line


def test_a_name_of_the_first_host_that_is_given_stays(launch):
    made = launch("hosts", 2, override=["replay.host=ib-first"], hosts=["a", "b"])
    assert made.config.replay.host == "ib-first"
    with pytest.raises(ConfigError, match=r"^replay.host: ib-first, and pods have names of their own; allowed: null"):
        launch("kubernetes", 2, override=["replay.host=ib-first"])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"override": ["replay.address=tcp://10.1.2.3:7555"]}, "override: replay.address is said by `port` of the"),
        ({"override": ["run.folder=/elsewhere"]}, "override: run.folder is said by `folder` of the description"),
        ({"secrets": "mine.env"}, "secrets: mine.env is another file on each node; allowed: an absolute path"),
        ({"learner": {"memory": "500G"}}, "learner.memory: string should match pattern '^\\d+(Mi|Gi)$' (given '500G')"),
        ({"override": "a=b"}, "override: input should be a valid tuple (given 'a=b')"),
    ],
)
def test_what_a_description_may_not_say_is_told_in_one_line(describe, capsys, given, line):
    assert render.main(["hosts", str(describe(**given)), "--dry-run"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told


def test_values_of_secrets_are_taken_as_they_are(launch, tmp_path):
    secrets = tmp_path / "secrets"
    text = _local(launch, tmp_path, "hosts", secrets=str(secrets)).files()["start.sh"]
    (part,) = re.findall(r"^while IFS= .*?^done < \S+$", text, re.MULTILINE | re.DOTALL)

    def read(content: str) -> subprocess.CompletedProcess[str]:
        secrets.write_text(content)
        command = ["bash", "-euo", "pipefail", "-c", part + '\nprintf "%s|" "$A" "$B_2"']
        return subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=tmp_path)

    done = read('# mine\n\nA=x y $1 `touch f`;touch f\nB_2="q"')
    assert done.stdout == 'x y $1 `touch f`;touch f|"q"|'
    assert not (tmp_path / "f").exists()
    refused = read("A=1\nexport B=2\n")
    assert refused.returncode == 2
    assert refused.stderr == f"{secrets}: a line that is no NAME=VALUE; allowed: those, empty ones, and comments (#)\n"


@pytest.mark.parametrize("first", ["localhost", "127.0.0.1"])
def test_a_first_host_that_the_others_do_not_reach_is_refused_in_one_line(describe, capsys, first):
    nodes = {"learner": {"nodes": 1, "gpus": 0}, "generators": {"nodes": 1, "gpus": 0}}
    assert render.main(["hosts", str(describe(**nodes, hosts=[first, "b"])), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("render: replay.host: ")
    assert first in line
