"""A hub on 127.0.0.1 with what its library asks for when it fetches a model: revision, tree, files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.hub.cached import FIRST

# Of names that the hub refuses: status and the header that says why.
REFUSED = {"org/gated": (403, "GatedRepo"), "org/unknown": (404, "RepoNotFound")}


class LocalHub(ThreadingHTTPServer):
    """Serves one model, `org/name`. `silent`: it takes connections and never answers."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.silent = False
        self.fetched: list[str] = []
        self.closing = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve(files: Mapping[str, bytes]) -> Iterator[LocalHub]:
    hub = LocalHub(files)
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        if self.server.silent:
            self.server.closing.wait(60)
            self.close_connection = True
            return
        status, headers, body = self._content(self.path.partition("?")[0].strip("/"), with_body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _content(self, path: str, with_body: bool) -> tuple[int, dict[str, str], bytes]:
        for name, (status, code) in REFUSED.items():
            if name in path:
                return status, {"X-Error-Code": code}, b"{}"
        files = self.server.files
        match path.split("/"):
            case ["api", "models", "org", "name", "revision", "main" | "a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1"]:
                return 200, {}, json.dumps({"id": "org/name", "sha": FIRST, "siblings": []}).encode()
            case ["api", "models", "org", "name", "revision", _]:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            case ["api", "models", "org", "name", "tree", _]:
                tree = [
                    {"type": "file", "path": name, "size": len(files[name]), "oid": _id(files[name])} for name in files
                ]
                return 200, {}, json.dumps(tree).encode()
            case ["org", "name", "resolve", _, *rest] if (name := "/".join(rest)) in files:
                if with_body:
                    self.server.fetched.append(name)
                return 200, {"ETag": f'"{_id(files[name])}"', "X-Repo-Commit": FIRST}, files[name]
        return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"

    def log_message(self, *_: object) -> None:
        """Nothing: it is a test."""


def _id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
