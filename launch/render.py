"""Writes what starts a run on several machines, from its description: scripts and manifests that a person can read.

    python -m launch.render hosts RUN.yaml -o FOLDER          one script, a line to run on each host
    python -m launch.render slurm RUN.yaml -o FOLDER          sbatch scripts
    python -m launch.render kubernetes RUN.yaml [-o FOLDER]   a manifest; without -o on the standard output
    ... --dry-run                                             say what would be started, and write nothing

It starts nothing. FOLDER is one that every node sees: the run's whole configuration is written there, too.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import sys
from collections.abc import Set
from fractions import Fraction
from pathlib import Path
from typing import Any

import jinja2

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.config.shipped import config_path
from streamrl.config.words import as_text
from streamrl.lab.output import output_folder

from .description import NO_WORD, WORDS, Description, Nodes, load
from .placement import place

TEMPLATES = Path(__file__).parent / "templates"

KEYS = "/etc/streamrl/keys"  # where a Secret of keys is mounted

LONGEST_NAME = 40  # of a run on Kubernetes: a host's name has 63 characters, and ends with role and number
LONGEST_JOB = 56  # of a run and a role; the number of a pod, "-0-9999", follows


class Launch:
    """What the templates of one form are rendered from."""

    def __init__(self, form: str, description: Description, config: Config, output: Path) -> None:
        """Raises ConfigError for what does not fit the nodes or the form."""
        if config.reward_model.path is not None:
            raise ConfigError(
                f"reward_model.path: {config.reward_model.path} has no place in these scripts; allowed: null, or one "
                "machine (`streamrl train`), or `streamrl reward-model` started by hand beside them"
            )
        self.form = form
        self.description = description
        self.output = output
        self.placement = place(description, config, pods=form == "kubernetes")
        self.name = _kubernetes_name(config) if form == "kubernetes" else config.run.name
        self.config = self._on_the_nodes(config)
        if form == "kubernetes":
            _check_kubernetes(description)

    def files(self) -> dict[str, str]:
        """Every file by its name."""
        files = {"config.yaml": self._config_text()} if self.form != "kubernetes" else {}
        for name, template, more in self._parts():
            files[name] = self._render(template, more)
        return files

    def summary(self) -> list[str]:
        """What starts on each node, or in the pods of each role; a line each."""
        if self.form == "kubernetes":
            return [f"{job['name']}: {_count(job['pods'], 'pod')} of {_gpus(job['gpus'])}" for job in self._jobs()]
        return [self._on(node) for node in range(self.placement.nodes)]

    def how(self) -> list[str]:
        """The command lines that start it."""
        if self.form == "hosts":
            return [f"on {host}: bash {self.output}/start.sh {n}" for n, host in enumerate(self.description.hosts)]
        if self.form == "kubernetes":
            return [f"kubectl apply -f {self.output}/run.yaml"]
        if self.description.slurm.separate:
            learner = f"job=$(sbatch --parsable {self.output}/learner.sbatch)"
            return [learner, f'sbatch --dependency=after:"$job" {self.output}/generators.sbatch']
        return [f"sbatch {self.output}/run.sbatch"]

    def _parts(self) -> list[tuple[str, str, dict[str, Any]]]:
        """File, template, and what it is rendered with besides the common."""
        description, placement = self.description, self.placement
        if self.form == "hosts":
            if len(description.hosts) != placement.nodes:
                raise ConfigError(
                    f"hosts: {len(description.hosts)} names for {placement.nodes} nodes; allowed: one for "
                    "each node, those of the learner first"
                )
            return [("start.sh", "hosts.sh.j2", {"hosts": description.hosts})]
        if self.form == "kubernetes":
            return [("run.yaml", "kubernetes.yaml.j2", self._kubernetes())]
        learner = {"group": description.learner, "array": False, "nodes": placement.nodes}
        if not description.slurm.separate:
            _check_one_allocation(description)
            return [("run.sbatch", "slurm.sbatch.j2", learner)]
        if description.generators is None:
            raise ConfigError("slurm.separate: the generators have no nodes of their own; allowed: with `generators`")
        generators = {"group": description.generators, "array": True}
        return [
            ("learner.sbatch", "slurm.sbatch.j2", learner | {"nodes": placement.learner_nodes}),
            ("generators.sbatch", "slurm-generators.sbatch.j2", generators),
        ]

    def _render(self, template: str, more: dict[str, Any]) -> str:
        text = _templates().get_template(template).render(**self._common(), **more)
        return re.sub(r"\n{3,}", "\n\n", text.lstrip("\n"))

    def _common(self) -> dict[str, Any]:
        description, placement = self.description, self.placement
        shared = description.generators is None and description.learner.gpus
        return {
            "name": self.name,
            "run": self.config.run_folder,
            "output": self.output,
            "python": "python" if self.form == "kubernetes" else description.python,
            "port": description.port,
            "rendezvous_port": description.rendezvous_port,
            "grace": description.grace,
            "restarts": description.restarts,
            "start_timeout": int(self.config.run.start_timeout),
            "threads": self.config.learner.threads,
            "environment": description.environment,
            "secrets": description.secrets,
            "slurm": description.slurm,
            "kubernetes": description.kubernetes,
            "placement": placement,
            "learner_gpus": ",".join(map(str, range(placement.ranks))) if shared else "",
            "summary": self.summary() if self.form != "kubernetes" else [],
        }

    def _kubernetes(self) -> dict[str, Any]:
        kubernetes = self.description.kubernetes
        labels = {"app.kubernetes.io/name": "streamrl", "app.kubernetes.io/instance": self.name}
        mounts: list[dict[str, Any]] = [
            {"name": "shared", "mountPath": str(kubernetes.mount)},
            {"name": "config", "mountPath": "/etc/streamrl/config.yaml", "subPath": "config.yaml"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ]
        if kubernetes.keys:
            mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
        return {
            "labels": labels,
            "queued_labels": labels | ({"kueue.x-k8s.io/queue-name": kubernetes.queue} if kubernetes.queue else {}),
            "config_text": self._config_text().rstrip("\n"),
            "mounts": mounts,
            "jobs": self._jobs(),
        }

    def _jobs(self) -> list[dict[str, Any]]:
        """The Jobs of a run: name, pods, GPUs of each, command, probe."""
        description, ranks = self.description, self.placement.ranks
        nodes = description.generators or description.learner
        jobs = [
            self._job("replay", 1, 0, "roles.replay()", "replay-0"),
            self._job(
                "learner",
                self.placement.learner_nodes,
                ranks if description.learner.gpus else 0,
                f"roles.torchrun('{self._host('learner')}:{description.rendezvous_port}', restarts)",
                "learner-0",
                asked=_cores_and_memory(description.learner, Fraction(1)),
            ),
        ]
        first, every = 0, sum(pool.workers * pool.server_nodes for pool in self.config.generate.each_pool)
        for pool in self.config.generate.each_pool:
            gpus = pool.gpus if nodes.gpus else 0
            name = _generator_name(self.name, pool.name, {job["name"] for job in jobs})
            index, role = _pod(first, pool.server_nodes)
            command = f"roles.generator({index})"
            share = Fraction(gpus, nodes.gpus) if gpus else min(Fraction(nodes.nodes, every), Fraction(1))
            asked = _cores_and_memory(nodes, share) if description.generators else {}  # the learner's pod has them
            jobs.append(self._job(name, pool.workers * pool.server_nodes, gpus, command, role, asked=asked))
            first += pool.workers
        return jobs

    def _job(self, name: str, pods: int, gpus: int, role: str, probed: str, *, asked: Any = None) -> dict[str, Any]:
        """`asked` for each pod, beside its GPUs and their network cards."""
        kubernetes = self.description.kubernetes
        resources = ({kubernetes.resource: gpus, **kubernetes.rdma} if gpus else {}) | (asked or {})
        command = '{% import "_roles.j2" as roles with context %}exec {{ roles.wrapped(0) }} {{ ' + role + " }}"
        return {
            "name": name,
            "pods": pods,
            "gpus": gpus,
            "resources": resources,
            "security": _security(lock=kubernetes.ipc_lock and gpus > 0),
            "host_network": kubernetes.host_network and gpus > 0,
            "threads": self.config.learner.threads if name == "learner" else 0,
            "command": _templates().from_string(command).render(**self._common()),
            "probe": f"exec python -m streamrl.launch.folder ready {self.config.run_folder} {probed}",
        }

    def _host(self, role: str) -> str:
        """The name by which the pods of a run reach the first one of a role."""
        number = "0-0" if self.description.kubernetes.kind == "jobset" else "0"
        return f"{self.name}-{role}-{number}.{self.name}"

    def _on_the_nodes(self, config: Config) -> Config:
        """The configuration as every node reads it: where the run folder is, and how the replay service is reached."""
        description = self.description
        run = config.run.model_copy(update={"folder": description.folder})
        replay, stream = config.replay, config.stream
        if self.form == "kubernetes" or description.nodes > 1:
            replay = replay.model_copy(update={"address": f"tcp://0.0.0.0:{description.port}"})
        if self.form == "kubernetes":
            if replay.host is not None:
                raise ConfigError(f"replay.host: {replay.host}, and pods have names of their own; allowed: null")
            replay = replay.model_copy(update={"host": self._host("replay")})
            if description.kubernetes.keys:
                stream = stream.model_copy(update={"keys": Path(KEYS)})
        elif self.form == "hosts" and description.nodes > 1 and description.hosts and replay.host is None:
            replay = replay.model_copy(update={"host": description.hosts[0]})
        model = config.model.model_copy(update={"shape": None})  # of plans, and relative to the folder of this command
        changed = config.model_copy(update={"run": run, "model": model, "replay": replay, "stream": stream})
        return config_file.checked(config_file.as_tree(changed))  # a host's name, for one, is checked again

    def _config_text(self) -> str:
        return config_file.as_yaml(config_file.as_tree(self.config))

    def _on(self, node: int) -> str:
        parts = ["replay-0"] if node == 0 else []
        if node < self.placement.learner_nodes:
            ranks = _count(self.placement.ranks, "rank")
            parts.append(f"learner with {ranks}")
        for worker in self.placement.on(node):
            on = f" on GPUs {','.join(map(str, worker.gpus))}" if worker.gpus else ""
            parts.append(f"{worker.name}{on}")
        return ", ".join(parts) or "nothing"


def _pod(first: int, nodes: int) -> tuple[str, str]:
    """The arguments of `roles.generator`, and the role's name, of the pods of a pool, by their number in the Job.

    `first` worker of the pool; `nodes` of one server, each of which is a pod.
    """
    number = "JOB_COMPLETION_INDEX" if nodes == 1 else f"JOB_COMPLETION_INDEX / {nodes}"
    number = f"{first} + {number}" if first else number
    word = f'"$(({number}))"' if first or nodes > 1 else '"$JOB_COMPLETION_INDEX"'
    if nodes == 1:
        return f"'{word}'", f"generator-$(({number}))"
    rank = f"$((JOB_COMPLETION_INDEX % {nodes}))"
    return f"""'{word}', '"{rank}"'""", f"generator-$(({number}))-node-{rank}"


def _cores_and_memory(nodes: Nodes, share: Fraction) -> dict[str, Any]:
    """What a pod asks for that has a share of a node, where the description says what the node has."""
    asked: dict[str, Any] = {}
    if nodes.cpus is not None:
        asked["cpu"] = max(1, int(nodes.cpus * share))
    if nodes.memory is not None:
        mebibytes = int(nodes.memory[:-2]) * (1024 if nodes.memory.endswith("Gi") else 1)
        asked["memory"] = f"{int(mebibytes * share)}Mi"
    return asked


def _security(*, lock: bool) -> dict[str, Any]:
    """The securityContext of a role's container."""
    capabilities = {"capabilities": {"add": ["IPC_LOCK"]}} if lock else {}
    return {"allowPrivilegeEscalation": False, **capabilities}


def _check_one_allocation(description: Description) -> None:
    """Its nodes are of one kind, the learner's."""
    learner, generators = description.learner, description.generators or description.learner
    for key in ("gpus", "cpus", "memory", "partition"):
        given, has = getattr(generators, key), getattr(learner, key)
        if given is not None and given != has:
            raise ConfigError(
                f"generators.{key}: {given} differs from learner.{key}={as_text(has)}, and one allocation has nodes of "
                "one kind; allowed: the same, or slurm.separate=true"
            )


def _check_kubernetes(description: Description) -> None:
    mount = description.kubernetes.mount
    if not description.folder.is_relative_to(mount):
        raise ConfigError(f"folder: {description.folder} is not on the claim at {mount}; allowed: a folder in it")
    if description.secrets is not None:
        raise ConfigError(f"secrets: {description.secrets} is a file of nodes; allowed: kubernetes.secret, its name")


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    return environment


def _kubernetes_name(config: Config) -> str:
    name = _plain(config.run.name)
    if len(name) > LONGEST_NAME or not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
        raise ConfigError(
            f"run.name: {config.run.name} makes no name of a host; allowed: up to {LONGEST_NAME} letters, digits and "
            "-._, a letter first"
        )
    return name


def _generator_name(run: str, pool: str, others: Set[str]) -> str:
    """The Job of a pool. Raises ConfigError where its pods have no names as hosts, or one of `others`."""
    name = "generator" + (f"-{_plain(pool)}" if pool else "")
    longest = LONGEST_JOB - len(f"{run}-generator-")
    if len(f"{run}-{name}") > LONGEST_JOB or not re.fullmatch(r"[a-z0-9-]*[a-z0-9]", name) or name in others:
        raise ConfigError(
            f"generate.pools: the name {pool!r} makes no name of a host of its own; allowed: up to {longest} letters, "
            "digits and -._, at the end no sign, and for each pool others than in capitals or signs alone"
        )
    return name


def _plain(name: str) -> str:
    """`Qwen2.5_32B` -> `qwen2-5-32b`."""
    return re.sub(r"[._]", "-", name.lower())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _gpus(number: int) -> str:
    return _count(number, "GPU") if number else "no GPU"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a description that is refused."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.render",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("form", choices=("hosts", "slurm", "kubernetes"))
    parser.add_argument("description", type=config_path, metavar="RUN.yaml")
    parser.add_argument("-o", "--output", type=output_folder, metavar="FOLDER", help="made where it is missing")
    parser.add_argument("--dry-run", action="store_true", help="say what would be started, and write nothing")
    options = parser.parse_args(arguments)
    try:
        return _main(options)
    except ConfigError as error:
        for line in error.lines:
            print(f"render: {line}", file=sys.stderr)
        return 2


def _main(options: argparse.Namespace) -> int:
    to_output = options.output is None and options.form == "kubernetes" and not options.dry_run
    if options.output is None and options.form != "kubernetes" and not options.dry_run:
        raise ConfigError(f"{options.form}: the scripts name the folder that they are in; allowed: with -o FOLDER")
    output = options.output.absolute() if options.output else Path("FOLDER")
    if not re.fullmatch(WORDS, str(output)):
        raise ConfigError(f"-o: {str(output)!r} {NO_WORD}")
    launch = Launch(options.form, *load(options.description), output)
    files = launch.files()
    if to_output:
        print(files["run.yaml"], end="")
        return 0
    if not options.dry_run:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text)
    for number, line in enumerate(launch.summary()):
        print(line if options.form == "kubernetes" else f"node {number}: {line}")
    print(f"{'would write' if options.dry_run else 'wrote'} {', '.join(str(output / name) for name in files)}")
    print("start it with:", *launch.how(), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
