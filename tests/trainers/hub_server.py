"""A Hugging Face hub on this machine; it serves a folder as a dataset, over a part of the API."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Handler(BaseHTTPRequestHandler):
    """Answers requests for a dataset's list of files, and for its files or ranges of them."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        if self.server.breaks and self.server.breaks in self.path:
            if self.server.status:
                return self._send(self.server.status, b"", {"X-Request-Id": "Root=1-abc"})
            self.close_connection = True
            return None
        path = unquote(urlsplit(self.path).path).removeprefix(f"/datasets/{self.server.dataset}")
        if match := re.fullmatch(r"/resolve/[^/]+/(.+)", path):
            return self._file(self.server.folder / match[1])
        path = path.removeprefix(f"/api/datasets/{self.server.dataset}")
        if match := re.fullmatch(r"/tree/[^/]+(/.*)?", path):
            return self._json(self._below((match[1] or "").strip("/")))
        if path == "" or path.startswith("/revision/"):
            names = [entry["path"] for entry in self._below("") if entry["type"] == "file"]
            return self._json(
                {
                    "id": self.server.dataset, "sha": self.server.revision, "private": False,
                    "siblings": [{"rfilename": name} for name in names],
                }
            )  # fmt: skip
        return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        known = {entry["path"]: entry for entry in self._below("")}
        self._json([known[path] for path in asked.get("paths", ()) if path in known])

    def _below(self, folder: str) -> list[dict[str, Any]]:
        root = self.server.folder
        return [
            {
                "type": "directory" if path.is_dir() else "file",
                "path": path.relative_to(root).as_posix(), "oid": etag(path),
                "size": path.stat().st_size if path.is_file() else 0,
            }
            for path in sorted((root / folder).rglob("*"))
        ]  # fmt: skip

    def _file(self, path: Path) -> None:
        if not path.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data, headers = path.read_bytes(), {"ETag": f'"{etag(path)}"'}
        headers["X-Repo-Commit"] = self.server.revision
        self.server.served.append((path.name, self.command, self.headers.get("Range", "")))
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return self._send(206, data[first : last + 1], headers)
        return self._send(200, data, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing; `Hub.served` lists the requests of files."""


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes() if path.is_file() else b"").hexdigest()


class Hub(ThreadingHTTPServer):
    """One dataset at a revision; `served` lists the requests of files as (file, method, range).

    If the path of a GET or HEAD request contains `breaks`, the answer is the error `status`; if
    `status` is 0, there is no answer, and the connection ends. An empty `breaks` has no effect.
    """

    daemon_threads = True

    def __init__(self, folder: Path, dataset: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.dataset = folder, dataset
        self.revision, self.breaks, self.status = "0123456789" * 4, "", 0
        self.served: list[tuple[str, str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve(folder: Path, dataset: str) -> Iterator[Hub]:
    """Runs a hub during the `with` block."""
    hub = Hub(folder, dataset)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
