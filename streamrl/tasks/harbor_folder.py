"""A Harbor task's folder, read without a container daemon; and what in it needs one, by its name.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh

An environment is a plain directory where its Dockerfile only copies files: FROM a system image, WORKDIR, COPY, ENV.
What the image itself would bring is what this machine has in /usr.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from streamrl.tasks.arguments import ARGUMENTS

WORKDIR = "/app"  # where the environment is, unless the Dockerfile says otherwise
VERIFIER_TIMEOUT = 600.0  # seconds, the format's own default
MEMORY = 2048  # MiB

# Images whose files are replaced by those of this machine.
SYSTEMS = ("scratch", "debian", "ubuntu", "python")

# Of a Dockerfile: what a directory needs none of.
PASSED_OVER = ("LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER")

# Folders inside that are this machine's, read-only, or the sandbox's own.
TAKEN = ("/", "/usr", "/lib", "/lib64", "/bin", "/tmp", "/dev", "/tests", "/logs", "/proc")

# Programs that fetch something: there is no network.
_FETCHES = re.compile(r"(?<![\w./-])(curl|wget|apt|apt-get|apk|pip3?|uvx?|npm|npx|git\s+clone)(?![\w./-])")

_SECRET = re.compile(r"\$\{?\w")


class NeedsDocker(ValueError):
    """What of a task needs more than a directory; one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborFolder:
    """One task. Example: `read_folder(Path("tasks/hello"))`."""

    name: str
    instruction: str
    folder: Path
    workdir: str  # absolute, inside the sandbox
    copies: tuple[tuple[Path, str], ...]  # file or folder outside, place below `workdir`
    environment: dict[str, str]  # variables of commands and tests
    verifier_environment: dict[str, str]  # further ones of the tests
    verifier_timeout: float  # seconds
    memory: int  # MiB


def read_folders(path: Path) -> list[HarborFolder]:
    """The task at `path`, or all tasks in it, by their names. Raises ValueError, with one line."""
    if not path.is_dir():
        raise ValueError(f"{ARGUMENTS}.path: {path} is no folder; allowed: a Harbor task, or a folder of them")
    folders = [path] if (path / "task.toml").exists() else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise ValueError(f"{ARGUMENTS}.path: {path} has no task.toml; allowed: a Harbor task, or a folder of them")
    return [read_folder(folder) for folder in folders]


def read_folder(folder: Path) -> HarborFolder:
    """One task. Raises ValueError, with one line, for what is missing, and for what needs a container."""
    try:
        return _read(folder)
    except (NeedsDocker, tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{ARGUMENTS}.path: {folder.name}: {reason}; allowed: tasks whose environment is a plain directory and "
            "whose tests/test.sh needs no network"
        ) from None


def _read(folder: Path) -> HarborFolder:
    settings = tomllib.loads((folder / "task.toml").read_text())
    _check_settings(settings)
    instruction = (folder / "instruction.md").read_text().strip()
    _check_tests(folder / "tests" / "test.sh")
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    workdir, copies, variables = _read_dockerfile(folder / "environment")
    return HarborFolder(
        name=folder.name,
        instruction=instruction,
        folder=folder.resolve(),
        workdir=workdir,
        copies=copies,
        environment={**variables, **_plain(environment.get("env", {}), "environment.env")},
        verifier_environment=_plain(verifier.get("env", {}), "verifier.env"),
        verifier_timeout=float(verifier.get("timeout_sec", VERIFIER_TIMEOUT)),
        memory=int(environment.get("memory_mb", MEMORY)),
    )


def _check_settings(settings: dict[str, Any]) -> None:
    """Raises NeedsDocker."""
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    if image := environment.get("docker_image"):
        raise NeedsDocker(f"environment.docker_image = {image!r} needs docker")
    if environment.get("os", "linux") != "linux":
        raise NeedsDocker(f"environment.os = {environment['os']!r} needs a machine of that kind")
    for key in ("gpus", "tpus", "tpu"):
        if environment.get(key):
            raise NeedsDocker(f"environment.{key} = {environment[key]!r} needs docker with devices")
    for key in ("mcp_servers", "healthcheck"):
        if environment.get(key):
            raise NeedsDocker(f"environment.{key} needs docker, for servers beside the task")
    if verifier.get("environment") or verifier.get("environment_mode", "shared") != "shared":
        raise NeedsDocker("verifier.environment_mode = 'separate' needs docker")
    if settings.get("steps"):
        raise NeedsDocker("steps: a task of several steps is not played")


def _check_tests(script: Path) -> None:
    """Raises NeedsDocker for a script that fetches something, OSError where there is none."""
    for number, line in enumerate(script.read_text().splitlines(), 1):
        if found := _FETCHES.search(line.partition("#")[0]):
            raise NeedsDocker(f"tests/test.sh:{number}: {found[0]!r} needs docker, with a network")


def _read_dockerfile(folder: Path) -> tuple[str, tuple[tuple[Path, str], ...], dict[str, str]]:
    """The working directory, what is copied into it, and variables. Raises NeedsDocker."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            raise NeedsDocker(f"environment/{name} needs docker")
    file = folder / "Dockerfile"
    workdir, copies, variables = WORKDIR, list[tuple[Path, str]](), dict[str, str]()
    for word, rest in _instructions(file.read_text()) if file.exists() else ():
        match word:
            case "FROM":
                _check_image(rest)
            case "WORKDIR":
                workdir = _workdir(workdir, rest, bool(copies))
            case "COPY":
                copies += _copied(folder, rest, workdir)
            case "ENV":
                variables |= _variables(rest)
            case _ if word not in PASSED_OVER:
                raise NeedsDocker(f"environment/Dockerfile: {word} {rest[:60]} needs docker")
    return workdir, tuple(copies), variables


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _check_image(rest: str) -> None:
    """Raises NeedsDocker for an image that has more than a system."""
    image = rest.split(maxsplit=1)[0] if rest else ""
    if image.partition(":")[0] not in SYSTEMS:
        raise NeedsDocker(f"environment/Dockerfile: FROM {image} needs docker (not so: {', '.join(SYSTEMS)})")


def _workdir(before: str, rest: str, copied: bool) -> str:
    path = str(PurePosixPath(before) / rest)
    if path in TAKEN or any(path.startswith(f"{taken}/") for taken in TAKEN[1:]) or ".." in path or copied:
        raise NeedsDocker(f"environment/Dockerfile: WORKDIR {rest} needs docker")
    return path


def _copied(folder: Path, rest: str, workdir: str) -> list[tuple[Path, str]]:
    """Sources of a COPY and their places below the working directory. Raises NeedsDocker."""
    try:
        *sources, target = shlex.split(rest)
        below = (PurePosixPath(workdir) / target).relative_to(workdir)
    except ValueError:
        raise NeedsDocker(f"environment/Dockerfile: COPY {rest} needs docker (not so: into {workdir})") from None
    found = []
    for source in sources:
        path = (folder / source.lstrip("/")).resolve()
        if source.startswith("-") or ".." in below.parts or not path.is_relative_to(folder.resolve()):
            raise NeedsDocker(f"environment/Dockerfile: COPY {rest} needs docker")
        if not path.exists():
            raise NeedsDocker(f"environment/Dockerfile: COPY {rest}: no {source} in environment/")
        into = target.endswith("/") or target == "." or len(sources) > 1 or str(below) == "."
        found.append((path, str(below / path.name) if into and path.is_file() else str(below)))
    return found


def _variables(rest: str) -> dict[str, str]:
    """The variables of an ENV, in either form: `A=1 B=2`, or `A 1`. Raises NeedsDocker."""
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return _plain({words[0]: " ".join(words[1:])}, "ENV")
    return _plain(dict(word.split("=", 1) for word in words if "=" in word), "ENV")


def _plain(variables: dict[str, Any], where: str) -> dict[str, str]:
    """Raises NeedsDocker for values that come from elsewhere."""
    for name, value in variables.items():
        if _SECRET.search(str(value)):
            raise NeedsDocker(f"{where}: {name} = {value!r} is filled in by Harbor")
    return {str(name): str(value) for name, value in variables.items()}
