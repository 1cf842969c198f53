"""A model hub on this machine: serves folders as repositories, as much of them as the hub's client asks for.

Large files (`.safetensors`) are redirected to, as on the real one. Faults are set per file name, and each comes once.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Fault = Literal["unavailable", "cut", "damaged", "held"]

HOLD_S = 60.0
"""No test holds a download for so long."""


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(slots=True)
class Repository:
    folder: Path
    commit: str
    branch: str = "main"
    gated: bool = False
    """Listed for all, but read by holders of the hub's token alone."""
    private: bool = False
    """Not even listed for others."""

    def content(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def listing(self) -> list[dict[str, Any]]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [self._entry(str(path.relative_to(self.folder)), path.read_bytes()) for path in paths]

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
        return entry


@dataclass(slots=True)
class FakeHub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_of_the_test"
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    """By a file's name; the first is the next request's for its content."""
    is_silent: bool = False
    """Every request gets a 503."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests for the content of files, by name; and for everything else together, as `api`."""
    holding: threading.Event = field(default_factory=threading.Event)
    """Set once half of a held file is out."""
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def variables(self, folder: Path, **more: str) -> dict[str, str]:
        """The environment of a process that asks here; its client's own cache is in the folder."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder),
            "HF_HUB_CACHE": str(folder),
            **more,
        }

    def next_fault(self, name: str) -> Fault | None:
        with self.lock:
            self.asked[name] += 1
            left = self.faults.get(name)
            return left.pop(0) if left else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's own name
        pass

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.is_silent:
            self._answer(503)
        elif found := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+)|/(auth-check))?", path):
            self.hub.asked["api"] += 1
            name, what, revision, check = found.groups()
            self._allowed(name, lambda one: self._api(one, name, what or check, revision))
        elif found := re.fullmatch(r"/(.+?)/resolve/[^/]+/(.+)", path):
            name, file = found.groups()
            self._allowed(name, lambda one: self._resolve(one, name, file))
        elif found := re.fullmatch(r"/large/(.+?)/-/(.+)", path):
            self._content(self.hub.repositories[found[1]], found[2])
        else:
            self._answer(404)

    def _allowed(self, name: str, serve: Callable[[Repository], None]) -> None:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._has_token()):
            self._answer(401 if not self._has_token() else 404, {"X-Error-Code": "RepoNotFound"})
        else:
            serve(found)

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _api(self, repository: Repository, name: str, what: str | None, revision: str | None) -> None:
        if revision not in (None, repository.branch, repository.commit):
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif what == "auth-check" and repository.gated and not self._has_token():
            self._answer(403, {"X-Error-Code": "GatedRepo"})
        elif what == "tree":
            self._answer(200, body=json.dumps(repository.listing()).encode())
        else:
            gated = "auto" if repository.gated else False
            about: dict[str, Any] = {
                "id": name,
                "sha": repository.commit,
                "gated": gated,
                "siblings": [],
                "tags": [],
                "downloads": 0,
            }
            self._answer(200, body=json.dumps(about).encode())

    def _resolve(self, repository: Repository, name: str, file: str) -> None:
        if repository.gated and not self._has_token():
            self._answer(401, {"X-Error-Code": "GatedRepo"})
            return
        if not (repository.folder / file).is_file():
            self._answer(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = repository.content(file)
        headers = {"X-Repo-Commit": repository.commit}
        if file.endswith(".safetensors"):
            headers |= {
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                # Another host, so that no token goes there.
                "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/large/{name}/-/{file}",
            }
            self._answer(302, headers)
        else:
            self._content(repository, file, headers)

    def _content(self, repository: Repository, file: str, headers: dict[str, str] | None = None) -> None:
        content = repository.content(file)
        etag = f'"{blob_id(content)}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes", **(headers or {})}
        if self.command == "HEAD":
            self._answer(200, headers, content)
            return
        fault = self.hub.next_fault(file)
        if fault == "unavailable":
            self._answer(503)
            return
        if fault == "damaged":
            content = bytes(len(content))
        start = 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._answer(206 if start else 200, headers, content[start:], fault)

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", fault: Fault | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("cut", "held"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "held":
                self.hub.holding.set()
                self.hub.released.wait(HOLD_S)
            self.close_connection = True
        else:
            self.wfile.write(body)


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """A hub without repositories."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
