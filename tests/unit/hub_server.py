"""A small server on loopback that speaks the Hugging Face Hub's HTTP protocol, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LARGE = 10_000  # files of at least this size are kept as on the Hub: by SHA-256


class HubServer:
    """Serves {(kind, repository, commit): folder}. `faults` maps a file name to what goes wrong with it:

    "cut": the connection breaks in the middle, once; "corrupt": one byte is wrong; "gone": status 500.
    `gated` names repositories that ask for a token. `log` holds (method, path, Range header).
    """

    def __init__(self, repositories: dict[tuple[str, str, str], Path]) -> None:
        self.repositories, self.faults, self.gated, self.log = repositories, {}, set(), []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer._answer(self, body=True)

            def do_HEAD(self):
                outer._answer(self, body=False)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    # ---- the protocol -----------------------------------------------------------------------------
    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        self.log.append((request.command, request.path, request.headers.get("Range")))
        path = request.path.split("?")[0]
        tree = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)(?:/.*)?", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not tree and not file:
            return self._error(request, 404, "RepoNotFound", body)
        kind = (
            ("dataset" if tree.group(1) == "datasets" else "model")
            if tree
            else ("dataset" if file.group(1) else "model")
        )
        repository, commit = (tree or file).group(2), (tree or file).group(3)
        if repository not in {name for k, name, _ in self.repositories if k == kind}:
            return self._error(request, 404, "RepoNotFound", body)
        if repository in self.gated and "Authorization" not in request.headers:
            return self._error(request, 403, "GatedRepo", body)
        if (kind, repository, commit) not in self.repositories:
            return self._error(request, 404, "RevisionNotFound", body)
        folder = self.repositories[kind, repository, commit]
        if tree:
            listing = [self._entry(p, folder) for p in sorted(folder.rglob("*")) if p.is_file()]
            return self._send(request, 200, json.dumps(listing).encode(), body, {"Content-Type": "application/json"})
        target = folder / file.group(4)
        if not target.is_file():
            return self._error(request, 404, "EntryNotFound", body)
        self._file(request, target, commit, body)

    @staticmethod
    def _entry(path: Path, folder: Path) -> dict:
        data = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"type": "file", "oid": git, "size": len(data), "path": path.relative_to(folder).as_posix()}
        if len(data) >= LARGE:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def _file(self, request: BaseHTTPRequestHandler, path: Path, commit: str, body: bool) -> None:
        data, entry = path.read_bytes(), self._entry(path, path.parent)
        fault = self.faults.get(path.name)
        if fault == "gone" and body:
            return self._error(request, 500, None, body)
        headers = {"ETag": f'"{entry["oid"]}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(len(data))}
        if fault == "corrupt" and body:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = int(re.match(r"bytes=(\d+)-", request.headers.get("Range") or "bytes=0-").group(1))
        status = 206 if "Range" in request.headers else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if fault == "cut" and body:
            del self.faults[path.name]
            headers["Content-Length"] = str(len(data) - start)
            self._head(request, status, headers)
            request.wfile.write(data[start : start + len(data) // 2])
            request.close_connection = True
            return None
        return self._send(request, status, data[start:], body, headers)

    @staticmethod
    def _head(request: BaseHTTPRequestHandler, status: int, headers: dict) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()

    def _send(self, request: BaseHTTPRequestHandler, status: int, data: bytes, body: bool, headers: dict) -> None:
        self._head(request, status, {"Content-Length": str(len(data)), **headers})
        if body:
            request.wfile.write(data)

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str | None, body: bool) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self._send(request, status, b'{"error": "no"}', body, headers)
