"""`model.path` as a folder: a local one as it is, a name of the hub by its snapshot, which is fetched where it lacks.

    a folder ──────────────────────────────────────────────────────▶ that folder
    org/name ─▶ the hub can be asked ─▶ what the cache lacks is fetched ─▶ CACHE/models--org--name/snapshots/COMMIT
             └▶ it cannot ─▶ the revision's snapshot in the cache is whole ─▶ the same
                          └▶ it is not ─▶ one line: what lacks, where, and the command that fetches it

It is done once, before anything starts: every process and the run's record see the snapshot's folder, whose path says
model and commit. Code and pickles are never fetched.
"""

from __future__ import annotations

import sys
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


def with_local_model(config: Config, part: Part = "whole") -> Config:
    """The same configuration with a folder as `model.path`, where that is a name of the hub.

    A folder wins over a name. A snapshot that a record names and this machine lacks is fetched again, the same commit.
    Raises ConfigError with one line for what cannot be had.
    """
    repository = _asked_for(config)
    if repository is None:
        return config
    folder = _snapshot(repository, part, config.model.hub_timeout)
    _asked[folder] = repository.at
    at = {"path": folder, "revision": folder.name}  # a branch moves, and the record is of this commit
    return config.model_copy(update={"model": config.model.model_copy(update=at)})


def recorded_model(config: Config) -> dict[str, str] | None:
    """Name, revision and commit of a model of the hub, for the record of a run; None for a folder of another kind."""
    model = model_of(config.model.path)
    if model is None:
        return None
    return {"name": model.name, "revision": _asked.get(config.model.path, model.at), "commit": model.at}


def _asked_for(config: Config) -> Repository | None:
    """What of the hub `model.path` names; None for a folder, and for a path that is neither."""
    path, revision, cache = config.model.path, config.model.revision, config.model.cache
    snapshot = model_of(path)
    if path.exists():
        if revision is None or (snapshot and snapshot.revision == revision):
            return None
        if snapshot is None:
            raise ConfigError(
                f"model.revision: {revision} is of a model of the hub, and model.path={path} is a folder here; "
                "allowed: null, or a name of the hub that is no folder"
            )
    if snapshot is not None:  # as a record has it: another revision is wanted, or its cache is not here
        return Repository(name=snapshot.name, revision=revision or snapshot.revision, cache=cache)
    return Repository(name=str(path), revision=revision, cache=cache) if is_name(str(path)) else None


@lru_cache  # so that one process sees one commit, however often it asks
def _snapshot(repository: Repository, part: Part, timeout: float) -> Path:
    cached = repository.snapshot()
    is_whole = cached is not None and not lacking(cached, part)
    if cached is not None and is_whole and (repository.is_pinned or is_offline()):
        return cached
    if is_offline():
        raise ConfigError(_not_here(repository, cached, part, "HF_HUB_OFFLINE is set"))
    try:
        return fetch(repository, part, timeout)
    except HubError as error:
        if error.kind in ("unreachable", "stalled") and cached is not None and is_whole:
            print(f"streamrl: warning: {_at_cached(repository, cached, error)}", file=sys.stderr)
            return cached
        raise ConfigError(_refusal(repository, cached, part, error)) from None


def _at_cached(repository: Repository, cached: Path, error: HubError) -> str:
    return (
        f"model.path: the hub cannot be reached ({error}): {repository.name} at {repository.at} is commit "
        f"{cached.name}, as it was fetched last"
    )


def _refusal(repository: Repository, cached: Path | None, part: Part, error: HubError) -> str:
    """The line for a model that the hub did not give."""
    name = repository.name
    match error.kind:
        case "unknown":
            return (
                f"model.path: {name} is no model; allowed: {FOLDER}, or a name of the hub, which knows none of this "
                "name, or hides it: `hf auth login`"
            )
        case "gated":
            return (
                f"model.path: {name} is gated: the hub gives it to accounts that accepted its terms; allowed: another "
                "model, or this one after that and `hf auth login`"
            )
        case "revision":
            return (
                f"model.revision: {repository.at} is no branch, tag or commit of {name}; allowed: one of the hub's, or "
                "null for its main branch"
            )
        case "other":
            return f"model.path: {name} cannot be fetched to {repository.root} ({error}); allowed: {FOLDER}"
        case _:
            return _not_here(repository, cached, part, f"the hub cannot be reached: {error}")


def _not_here(repository: Repository, cached: Path | None, part: Part, why: str) -> str:
    """The line for a model that the cache lacks while the hub cannot be asked."""
    name, command = repository.name, repository.command()
    if cached is None:
        return (
            f"model.path: {name} is no model; allowed: {FOLDER}, or a name of the hub: revision {repository.at} is not "
            f"in {repository.root}, and {why}; `{command}` fetches it, `python -m launch.tiny_model {name}` makes a "
            "tiny one"
        )
    return (
        f"model.path: {name} at {repository.at} lacks {named(lacking(cached, part))} in {cached}, and {why}; "
        f"allowed: after `{command}`"
    )
