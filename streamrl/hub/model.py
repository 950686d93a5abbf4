"""A model as a folder: a local one as it is, a name of the hub by its snapshot, which is fetched where it lacks.

    a folder ──────────────────────────────────────────────────────▶ that folder
    org/name ─▶ the hub can be asked ─▶ what the cache lacks is fetched ─▶ CACHE/models--org--name/snapshots/COMMIT
             └▶ it cannot ─▶ the revision's snapshot in the cache is whole ─▶ the same
                          └▶ it is not ─▶ one line: what lacks, where, and the command that fetches it

It is done once, before anything starts, with `model.path` and a teacher: every process and the run's record see the
snapshot's folder, whose path says model and commit. Code and pickles are never fetched.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.hub.download import HubError, fetch
from streamrl.hub.files import Part, lacking, named
from streamrl.hub.repository import Repository, is_name, is_offline, model_of

FOLDER = "a Hugging Face folder (config.json, safetensors, tokenizer)"

# The revision that each snapshot was asked for by, in this process: its folder says the commit alone.
_asked: dict[Path, str] = {}


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where the configuration names a model: for messages."""

    path: str
    revision: str


_POLICY = _Keys("model.path", "model.revision")
_TEACHER = _Keys("algo.distillation.teacher", "algo.distillation.revision")


def with_local_model(config: Config, part: Part = "whole") -> Config:
    """The same configuration with a folder as `model.path`, where that is a name of the hub.

    A folder wins over a name. A snapshot that a record names and this machine lacks is fetched again, the same commit.
    Raises ConfigError with one line for what cannot be had.
    """
    model = config.model
    folder = _local(_POLICY, model.path, model.revision, config, part)
    if folder is None:
        return config
    at = {"path": folder, "revision": folder.name}  # a branch moves, and the record is of this commit
    return config.model_copy(update={"model": model.model_copy(update=at)})


def with_local_models(config: Config, part: Part = "whole") -> Config:
    """`with_local_model` and `with_local_teacher`: for what trains, or checks what will be trained."""
    return with_local_teacher(with_local_model(config, part), part)


def with_local_teacher(config: Config, part: Part = "whole") -> Config:
    """The same configuration with a folder as `algo.distillation.teacher`, where that is a name of the hub."""
    given = config.algo.distillation
    if given.teacher is None:
        return config
    folder = _local(_TEACHER, given.teacher, given.revision, config, part)
    if folder is None:
        return config
    found = given.model_copy(update={"teacher": folder, "revision": folder.name})
    return config.model_copy(update={"algo": config.algo.model_copy(update={"distillation": found})})


def recorded_model(config: Config) -> dict[str, str] | None:
    """Name, revision and commit of a model of the hub, for the record of a run; None for a folder of another kind."""
    model = model_of(config.model.path)
    if model is None:
        return None
    return {"name": model.name, "revision": _asked.get(config.model.path, model.at), "commit": model.at}


def _local(keys: _Keys, path: Path, revision: str | None, config: Config, part: Part) -> Path | None:
    """The folder of a snapshot; None where `path` names nothing of the hub. Raises ConfigError."""
    repository = _asked_for(keys, path, revision, config.model.cache)
    if repository is None:
        return None
    folder = _snapshot(keys, repository, part, config.model.hub_timeout)
    _asked[folder] = repository.at
    return folder


def _asked_for(keys: _Keys, path: Path, revision: str | None, cache: Path | None) -> Repository | None:
    """What of the hub a path names; None for a folder, and for a path that is neither."""
    snapshot = model_of(path)
    if path.exists():
        if revision is None or (snapshot and snapshot.revision == revision):
            return None
        if snapshot is None:
            raise ConfigError(
                f"{keys.revision}: {revision} is of a model of the hub, and {keys.path}={path} is a folder here; "
                "allowed: null, or a name of the hub that is no folder"
            )
    if snapshot is not None:  # as a record has it: another revision is wanted, or its cache is not here
        return Repository(name=snapshot.name, revision=revision or snapshot.revision, cache=cache)
    return Repository(name=str(path), revision=revision, cache=cache) if is_name(str(path)) else None


@lru_cache  # so that one process sees one commit, however often it asks
def _snapshot(keys: _Keys, repository: Repository, part: Part, timeout: float) -> Path:
    cached = repository.snapshot()
    is_whole = cached is not None and not lacking(cached, part)
    if cached is not None and is_whole and (repository.is_pinned or is_offline()):
        return cached
    if is_offline():
        raise ConfigError(_not_here(keys, repository, cached, part, "HF_HUB_OFFLINE is set"))
    try:
        return fetch(repository, part, timeout)
    except HubError as error:
        if error.kind in ("unreachable", "stalled") and cached is not None and is_whole:
            print(f"streamrl: warning: {_at_cached(keys, repository, cached, error)}", file=sys.stderr)
            return cached
        raise ConfigError(_refusal(keys, repository, cached, part, error)) from None


def _at_cached(keys: _Keys, repository: Repository, cached: Path, error: HubError) -> str:
    return (
        f"{keys.path}: the hub cannot be reached ({error}): {repository.name} at {repository.at} is commit "
        f"{cached.name}, as it was fetched last"
    )


def _refusal(keys: _Keys, repository: Repository, cached: Path | None, part: Part, error: HubError) -> str:
    """The line for a model that the hub did not give."""
    name = repository.name
    match error.kind:
        case "unknown":
            return (
                f"{keys.path}: {name} is no model; allowed: {FOLDER}, or a name of the hub, which knows none of this "
                "name, or hides it: `hf auth login`"
            )
        case "gated":
            return (
                f"{keys.path}: {name} is gated: the hub gives it to accounts that accepted its terms; allowed: another "
                "model, or this one after that and `hf auth login`"
            )
        case "revision":
            return (
                f"{keys.revision}: {repository.at} is no branch, tag or commit of {name}; allowed: one of the hub's, "
                "or null for its main branch"
            )
        case "other":
            return f"{keys.path}: {name} cannot be fetched to {repository.root} ({error}); allowed: {FOLDER}"
        case _:
            return _not_here(keys, repository, cached, part, f"the hub cannot be reached: {error}")


def _not_here(keys: _Keys, repository: Repository, cached: Path | None, part: Part, why: str) -> str:
    """The line for a model that the cache lacks while the hub cannot be asked."""
    name, command = repository.name, repository.command()
    if cached is None:
        return (
            f"{keys.path}: {name} is no model; allowed: {FOLDER}, or a name of the hub: revision {repository.at} is "
            f"not in {repository.root}, and {why}; `{command}` fetches it, `python -m launch.tiny_model {name}` makes "
            "a tiny one"
        )
    return (
        f"{keys.path}: {name} at {repository.at} lacks {named(lacking(cached, part))} in {cached}, and {why}; "
        f"allowed: after `{command}`"
    )
