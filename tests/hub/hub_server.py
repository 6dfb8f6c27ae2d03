"""A Hugging Face hub on this machine, as far as its libraries ask: repositories in memory."""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from hub_uploads import Uploads

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".parquet", ".gz", ".safetensors")
RESOLVE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
API = re.compile(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?/?")


@dataclass(kw_only=True)
class Repository:
    """The files of one repository, and what is wrong with it."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    breaks_off: int = 0
    """How many times a connection is closed in the middle of a file of data or weights."""


@dataclass(kw_only=True)
class Hub:
    """What is served, and what was asked for."""

    datasets: dict[str, Repository] = field(default_factory=dict)
    models: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files that were uploaded, by the hash of their content."""
    uploads_break_off: int = 0
    commits_fail: bool = False
    read_only: bool = False

    def repository(self, kind: str, name: str) -> Repository | None:
        return (self.datasets if kind == "datasets" else self.models).get(name)

    def create(self, name: str, *, private: bool) -> None:
        self.models.setdefault(name, Repository(files={}, private=private))


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that nobody else gets; whoever calls it is refused unless `serving` answers."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Server(ThreadingHTTPServer):
    """One that may share its port with the socket that reserves it."""

    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


@contextmanager
def serving(hub: Hub, port: int) -> Iterator[Hub]:
    """Answer on a port of this machine."""
    server = Server(("127.0.0.1", port), type("Bound", (Answers,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Answers(Uploads, BaseHTTPRequestHandler):
    """One connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if self.command == "POST" and self.takes(path):
            return
        if found := RESOLVE.fullmatch(path):
            kind, name, _, file = found.groups()
            self._file(kind or "models", name, file)
        elif found := API.fullmatch(path):
            kind, name, what, _, below = found.groups()
            self._about(kind, name, what, below or "")
        elif path == "/":
            self._send(200, b"")
        else:
            self._refuse(404, "EntryNotFound", "no such page")

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""

    def _about(self, kind: str, name: str, what: str | None, below: str) -> None:
        """The answers of the API: about a repository, about its tree, about some paths."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        repository = self.hub.repository(kind, name)
        if repository is None:
            self._refuse(401 if kind == "models" else 404, "RepoNotFound", "Repository not found")
        elif what in (None, "revision"):
            self._json(self._info(name, repository))
        elif what == "tree":
            self._json(tree(repository.files, f"{below}/" if below else "", whole="recursive=true" in self.path))
        else:
            wanted = _paths(body, self.headers.get("Content-Type") or "")
            self._json([entry(p, repository.files[p]) for p in wanted if p in repository.files])

    def _info(self, name: str, repository: Repository) -> dict[str, Any]:
        return {
            "_id": "0" * 24,
            "id": name,
            "sha": COMMIT,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": path} for path in repository.files],
        }

    def _file(self, kind: str, name: str, path: str) -> None:
        repository = self.hub.repository(kind, name)
        if repository is None:
            self._refuse(401 if kind == "models" else 404, "RepoNotFound", "Repository not found")
        elif repository.gated:
            self._refuse(403, "GatedRepo", f"Access to {name} is restricted; you must be authenticated")
        elif path not in repository.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            cut = self.command == "GET" and repository.breaks_off > 0 and path.endswith(LARGE)
            repository.breaks_off -= cut
            self._content(repository.files[path], half=cut)

    def _content(self, content: bytes, *, half: bool) -> None:
        whole, status, more = content, 200, {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            first, last = int(asked[1]), int(asked[2] or len(whole) - 1)
            if first >= len(whole):
                self._send(416, b"", **{"Content-Range": f"bytes */{len(whole)}"})
                return
            content, status = whole[first : last + 1], 206
            more["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{len(whole)}"
        more |= {"ETag": f'"{oid(whole)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self._send(status, content, half=half, **more)
        self.close_connection |= half

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, why: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": why, "Content-Type": "application/json"}
        self._send(status, json.dumps({"error": why}).encode(), **headers)

    def _send(self, status: int, content: bytes, *, half: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)


def tree(files: dict[str, bytes], inside: str, *, whole: bool) -> list[dict[str, Any]]:
    """What is in a folder, itself or all the way down."""
    found = {}
    for path, content in files.items():
        if path.startswith(inside):
            name, *below = path.removeprefix(inside).split("/")
            folder = {"type": "directory", "path": f"{inside}{name}", "oid": oid(b""), "size": 0}
            found[path if whole else name] = entry(path, content) if whole or not below else folder
    return list(found.values())


def entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": oid(content)}


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _paths(body: bytes, kind: str) -> list[str]:
    """The paths in a question about them, in JSON or as a form."""
    if "json" in kind:
        found: list[str] = json.loads(body)["paths"]
        return found
    from urllib.parse import parse_qs

    return parse_qs(body.decode())["paths"]
