"""A Slurm of virtual nodes on this machine: munged, slurmctld and a slurmd a node, from the packages of Debian.

Everything is in one temporary folder, also the key of munge and its socket, and nothing of it is a service of the
machine. All nodes are this machine under other names, so that a job sees several nodes, and one file system.
`apt-get install --no-install-recommends slurmctld slurmd slurm-client munge` brings what is needed; slurmd has to be
compiled for several of its kind on a machine, as Debian's is.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")

SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))  # daemons are not in everyone's path

PATIENCE = 60.0  # seconds for a daemon to come or to go

REQUEUED_AFTER = 20  # seconds; Slurm starts a job again when the credentials of its former start are no longer good

# No cgroups, no accounting; a node may say that it has more cores than the machine (`config_overrides`); a job that has
# ended is remembered (`MinJobAge`). A job in `urgent` takes the nodes of those in `all`, which have a minute to leave.
CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={expire}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
MinJobAge=86400
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""


@dataclass
class Cluster:
    """A Slurm that runs between `start` and `stop`."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a command find this Slurm, and no other."""
        return {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a command says, which must succeed."""
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol` knows of a job (`12`, or `12_0` of an array): JobState, NodeList and more."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, number: str) -> tuple[str, int]:
        """A job's state, and how often it was queued again: `("RUNNING", 1)`."""
        job = self.job(number)
        return job["JobState"], int(job["Restarts"])

    def start(self, nodes: dict[str, int]) -> None:
        """`nodes`: cores by name."""
        self._configure(nodes)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed", "socket": "socket"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._start("munged", "--foreground", "--force", *options)  # the temporary folder is everyone's
        self._wait((self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for node in nodes:
            self._start("slurmd", "-D", "-N", node)
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        self._wait(lambda: set(self._ask(*idle).split()) == set(nodes))

    def stop(self) -> None:
        """End every job, then the daemons, then what is left of the jobs."""
        self._ask("scancel", f"--user={getpass.getuser()}")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._ask("squeue", "--noheader"):
            time.sleep(0.1)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(PATIENCE)
        left = self._processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=PATIENCE)

    def _configure(self, nodes: dict[str, int]) -> None:
        first, *ports = free_ports(1 + len(nodes))
        text = CONFIGURATION.format(folder=self.folder, user=getpass.getuser(), port=first, expire=REQUEUED_AFTER)
        for (node, cores), port in zip(nodes.items(), ports, strict=True):
            (self.folder / node).mkdir()
            text += f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cores}\n"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{len(self.daemons)}-{command[0]}.log").open("wb") as log:
            daemon = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.daemons.append(daemon)

    def _wait(self, condition: Callable[[], bool]) -> None:
        """For something that takes every daemon."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))
            assert all(daemon.poll() is None for daemon in self.daemons), logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.1)

    def _ask(self, *command: str) -> str:
        """What a command says of a cluster that may not be there, or not any more; nothing then."""
        try:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return ""
        return done.stdout

    def _processes(self) -> list[psutil.Process]:
        """Whatever was started with this cluster's configuration, and still runs."""
        mine = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        return [process for process in psutil.process_iter() if mine in _environment(process.pid).split(b"\0")]


@contextmanager
def cluster(nodes: dict[str, int]) -> Iterator[Cluster]:
    """A cluster of `nodes`, cores by name; skips the test where the programs are not installed."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=SEARCH) is None]
    if missing:
        pytest.skip(
            f"no {', '.join(missing)}: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
        )
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short: the name of a socket has 107 characters
        made = Cluster(Path(folder))
        try:
            made.start(nodes)
            yield made
        finally:
            made.stop()


def _environment(pid: int) -> bytes:
    """That of a process at its start; empty for one that is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody listens at."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
