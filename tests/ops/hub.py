"""A model hub on this machine: as much of its protocol as a download needs, over the real client library.

`HF_ENDPOINT` points a `concordia pull` process here. Faults are had by asking: a connection that ends in the middle of a file, a
gated repository, one that isn't there.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """Serves one repository from a directory. `cuts`: bytes of a file after which the connection ends, once."""

    def __init__(self, repo: str, directory: Path) -> None:
        self.repo, self.directory = repo, directory
        self.cuts: dict[str, int] = {}
        self.gated = False
        self.ranges: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = to.path.partition("?")[0]
        if path.startswith(f"/api/models/{self.repo}/"):
            self._describe(to, path)
        elif path.startswith(f"/{self.repo}/resolve/"):
            self._file(to, path.split("/", 5)[5], body)
        else:
            _send(to, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, to: BaseHTTPRequestHandler, path: str) -> None:
        files = sorted(file.name for file in self.directory.iterdir())
        if "/tree/" in path:
            entries = [{"type": "file", "path": name, "size": self._size(name), "oid": _oid(name)} for name in files]
            _send(to, 200, json.dumps(entries).encode(), {})
            return
        siblings = [{"rfilename": name} for name in files]
        described = {"id": self.repo, "modelId": self.repo, "sha": COMMIT, "siblings": siblings}
        _send(to, 200, json.dumps(described).encode(), {})

    def _file(self, to: BaseHTTPRequestHandler, name: str, body: bool) -> None:
        if self.gated:
            _send(to, 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."})
            return
        content = (self.directory / name).read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(name)}"', "Accept-Ranges": "bytes"}
        wanted = to.headers.get("Range", "")
        if body and wanted:
            self.ranges.append(f"{name} {wanted}")
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            _send(to, 206, content[start:], headers)
        elif body and name in self.cuts:
            _send(to, 200, content, headers, stop_at=self.cuts.pop(name))
        else:
            _send(to, 200, content, headers, body=body)

    def _size(self, name: str) -> int:
        return (self.directory / name).stat().st_size


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def _send(
    to: BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str],
    *,
    body: bool = True,
    stop_at: int | None = None,
) -> None:
    to.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content)), "Content-Type": "application/json"}.items():
        to.send_header(name, value)
    to.end_headers()
    if body and to.command != "HEAD":
        to.wfile.write(content[:stop_at])
    if stop_at is not None:
        to.wfile.flush()
        to.close_connection = True
        to.connection.shutdown(2)
