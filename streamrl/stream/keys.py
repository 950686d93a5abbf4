"""The secrets of a run, one file each in `RUN/keys`: who may talk to the replay service and to SGLang's servers.

    service.key  service.pub    CURVE pair of the replay service      made when the service first listens
    client.key   client.pub     CURVE pair that all of its peers use
    api.key      admin.key      bearer tokens of SGLang's servers     made when the first server starts

The folder has mode 0700, a secret 0600 (one of root's at most 0640). A host that runs only workers needs client.key,
service.pub and the two tokens; the service's host alone needs service.key. A file that is there is used as it is.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from streamrl.config import Config
from streamrl.config.replay import StreamConfig

# Addresses that only this user's processes reach: a socket file has mode 0600, a port of loopback is everybody's.
_OWN = ("ipc://", "inproc://")

# But for Linux's abstract names: no file, so no mode.
_ABSTRACT = "ipc://@"


class KeysUnusable(RuntimeError):
    """A key that is missing, cannot be read, is no key, or can be read by others; the text says how to mend it."""


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """What the replay service needs; Z85 text, 40 bytes each."""

    secret: bytes
    client_public: bytes  # the only key that is let in


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a peer of the replay service needs; Z85 text, 40 bytes each."""

    secret: bytes
    public: bytes
    service_public: bytes  # a peer that answers without the secret half of it is not the service


def key_folder(config: Config, run_folder: Path) -> Path:
    """Where the keys of a run are: `stream.keys`, or RUN/keys."""
    return config.stream.keys or run_folder / "keys"


def needs_curve(stream: StreamConfig, address: str) -> bool:
    """Whether a socket at `address` authenticates and encrypts: `stream.curve`; `auto`: unless the file system does the
    former.

    >>> needs_curve(StreamConfig(), "tcp://127.0.0.1:7000"), needs_curve(StreamConfig(), "ipc:///run/user/1000/replay")
    (True, False)
    """
    is_own = address.startswith(_OWN) and not address.startswith(_ABSTRACT)
    return stream.curve == "on" or (stream.curve == "auto" and not is_own)


def service_keys(folder: Path | None) -> ServiceKeys:
    """The service's keys, made where they are missing. Raises KeysUnusable."""
    folder = _given(folder)
    service = _secret(folder / "service.key", _curve_secret)
    client = _secret(folder / "client.key", _curve_secret)
    for name, secret in (("service.pub", service), ("client.pub", client)):
        _make(folder / name, _public(secret, folder / name), 0o644)
    return ServiceKeys(service, _read(folder / "client.pub"))


def client_keys(folder: Path | None) -> ClientKeys:
    """A peer's keys. Raises KeysUnusable where the service has not made them, or they were not copied here."""
    folder = _given(folder)
    secret = _read_secret(folder / "client.key")
    return ClientKeys(secret, _public(secret, folder / "client.key"), _read(folder / "service.pub"))


def bearer_token(folder: Path, name: str) -> str:
    """The token `api` or `admin` of the run's SGLang servers, made where it is missing. Raises KeysUnusable."""
    return _secret(folder / f"{name}.key", lambda: secrets.token_hex(32).encode()).decode()


def _given(folder: Path | None) -> Path:
    if folder is None:
        raise KeysUnusable("CURVE needs the folder of the run's keys; stream.curve=off goes without")
    return folder


def _curve_secret() -> bytes:
    return zmq.curve_keypair()[1]


def _public(secret: bytes, path: Path) -> bytes:
    try:
        return zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError) as error:
        raise KeysUnusable(f"{path.with_suffix('.key')} holds no CURVE key: {error}") from error


def _secret(path: Path, make: Callable[[], bytes]) -> bytes:
    """The secret in `path`; a new one where there is none. Several processes at once agree on one of them."""
    _make(path, make(), 0o600)
    return _read_secret(path)


def _make(path: Path, content: bytes, mode: int) -> None:
    """Write a key, and its folder, unless it is there. Raises KeysUnusable."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_once(path, content, mode)
    except OSError as error:
        raise _unreachable(path, error) from error


def write_once(path: Path, content: bytes, mode: int) -> bool:
    """Write a file whole, unless it is there: what another process wrote stays, also in a folder that is read-only.

    Returns whether it was written. Raises OSError.
    """
    if path.exists():
        return False
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + b"\n")
            os.fchmod(file.fileno(), mode)
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(partial)
    return True


def _read_secret(path: Path) -> bytes:
    content = _read(path)
    status = path.stat()
    # Of root's files the group may read, as libpq allows it: the kubelet mounts a Secret so for the user of a pod.
    if status.st_mode & (0o037 if status.st_uid == 0 else 0o077):
        mode = stat.S_IMODE(status.st_mode)
        raise KeysUnusable(f"{path} can be read by others (mode {mode:04o}): chmod 600 {path}, or make new keys")
    return content


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes().strip()
    except FileNotFoundError as error:
        raise KeysUnusable(
            f"{path} is missing: the replay service makes it; without a shared file system copy the folder here"
        ) from error
    except OSError as error:
        raise _unreachable(path, error) from error
    if not content:
        raise KeysUnusable(f"{path} is empty")
    return content


def _unreachable(path: Path, error: OSError) -> KeysUnusable:
    if isinstance(error, PermissionError):
        return KeysUnusable(
            f"{path} is closed to user {os.geteuid()}: it or its folder belongs to another one; "
            "allowed: a copy of this user's"
        )
    return KeysUnusable(f"{path}: {error.strerror}; allowed: a folder that holds the run's keys, or can")
