"""The inside of the Python tool: walls off this process, then runs the code that comes on its standard input.

    python -I sandbox.py '{"memory": ..., ...}'   (started by tasks/python_tool.py, with no module of streamrl)

    unshare (network, processes, mounts, IPC) ─▶ a root of its own, read-only ─▶ fork ─▶ limits, nobody's rights ─▶ exec

The code has a loopback that is down as its only network, sees no process but its own, no file but Python's and the
system's libraries, and a small /tmp of its own. When the outer process is killed, the kernel kills everything inside.
Folders that it is given besides (`mounts`) are where they are asked for; with them it has /dev/null and its like.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import signal
import sys
import traceback

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
# from <sched.h> and <sys/mount.h>
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38  # from <linux/prctl.h>

NOBODY = 65534
UNWALLED = 97  # exit code where the walls cannot be put up

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")  # those that shell scripts count on

_libc = ctypes.CDLL(None, use_errno=True)


def wall_off(folder: str, mounts: list[list[str]]) -> None:
    """Leave the network, the other processes and the file system behind. Raises OSError where that is not allowed.

    folder: an empty one, on which the new root is mounted. mounts: folder outside, folder inside, "rw" or "ro".
    """
    user, group = os.getuid(), os.getgid()
    apart = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS
    if user != 0:  # who is not root needs a user namespace, in which it is
        apart |= CLONE_NEWUSER
    _check(_libc.unshare(apart), "unshare")
    if user != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {user} 1")
        _write("/proc/self/gid_map", f"0 {group} 1")
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("none", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")
    for path in sorted({"/usr", "/lib", "/lib64", "/bin", os.path.realpath(sys.base_prefix)}):
        if os.path.isdir(path):
            _bind(path, folder + path)
    os.mkdir(folder + "/tmp")
    os.chmod(folder + "/tmp", 0o777)
    for source, target, access in mounts:
        _bind(source, folder + target, read_only=access != "rw")
    if mounts:
        _bind_devices(folder)
    os.chroot(folder)
    os.chdir("/tmp")


def limit(memory: int, seconds: int, file_size: int, processes: int) -> None:
    """Resource limits of this process and all that it starts. memory, file_size: bytes; seconds: of CPU."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def main() -> None:
    settings = json.loads(sys.argv[1])
    _end_with_parent()
    code = sys.stdin.read()
    if settings["walls"]:
        try:
            wall_off(settings["folder"], settings["mounts"])
        except OSError as error:
            print(f"no walls: {error}", file=sys.stderr)
            os._exit(UNWALLED)
    child = os.fork()  # the first process of the new PID namespace
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _end_with_parent()
    if settings["walls"] and os.getuid() == 0 and not settings["user_namespace"]:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        _end_with_parent()  # forgotten with the change of the user
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limit(settings["memory"], settings["cpu_seconds"], settings["file_size"], settings["processes"])
    os._exit(_run(code))


def _run(code: str) -> int:
    """Run the code as a main module. An exception is shown without the frames of this file."""
    sys.argv = ["tool"]
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # so that its lines are known where it is killed
    status = 0
    try:
        exec(compile(code, "tool", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:  # whatever the code raises is what it has to say
        kind, error, frames = sys.exc_info()
        traceback.print_exception(kind, error, frames.tb_next if frames else None)
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 1
    return status


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _bind(source: str, target: str, *, read_only: bool = True) -> None:
    os.makedirs(target, exist_ok=True)
    _mount(source, target, "", MS_BIND | MS_REC)
    access = MS_RDONLY if read_only else MS_NODEV
    _mount("none", target, "", MS_REMOUNT | MS_BIND | MS_NOSUID | access | _flags(target))


def _bind_devices(folder: str) -> None:
    os.mkdir(folder + "/dev")
    for path in DEVICES:
        _write(folder + path, "")
        _mount(path, folder + path, "", MS_BIND)


def _flags(path: str) -> int:
    """Those of a mount that only its owner may take away, so that they must be said again."""
    return os.statvfs(path).f_flag & (os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME | os.ST_RELATIME)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
