"""A local HTTP server that fails on purpose, and a real Alertmanager."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

needs_alertmanager = pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None,
    reason="Alertmanager is not installed (apt-get install prometheus-alertmanager)",
)


@dataclass
class Hook:
    """What a server was asked, and what it answers next: ``ok`` once the script is at its end.

    A number is a status; ``drop`` closes the connection, ``hang`` answers nothing, ``drip`` sends a byte of an endless header
    now and then, ``elsewhere`` redirects to another server, ``echo`` answers 400 with the request's path and headers.
    """

    script: list[str] = field(default_factory=list)
    elsewhere: str = ""
    got: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)  # of those answered with 200
    asked: list[tuple[str, str, float]] = field(default_factory=list)  # method, path, when
    done: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def wait_for(self, count: int, seconds: float = 15.0) -> list[Any]:
        """The bodies, once there are `count`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(self.got) < count:
            time.sleep(0.02)
        bodies = [body for _, _, body in self.got]
        assert len(bodies) >= count, f"{len(bodies)} of {count} arrived; asked {self.asked}"
        return bodies


@contextmanager
def serve(*script: str, elsewhere: str = "") -> Iterator[Hook]:
    """Serve on a free port of this machine."""
    hook = Hook(script=list(script), elsewhere=elsewhere)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.asked.append(("POST", self.path, time.monotonic()))
            self.answer(hook.script.pop(0) if hook.script else "ok", body)

        def do_GET(self) -> None:
            hook.asked.append(("GET", self.path, time.monotonic()))
            self.answer("ok", b"{}")

        def answer(self, act: str, body: bytes) -> None:
            if act == "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
            elif act == "hang":
                hook.done.wait(30)
            elif act == "drip":
                self.drip()
            elif act == "elsewhere":
                self.send_response(307)
                self.send_header("Location", hook.elsewhere)
                self.end_headers()
            elif act == "echo":
                self.send_response(400)
                self.end_headers()
                self.wfile.write(f"bad: {self.path} {dict(self.headers)}".encode())
            elif act == "ok":
                hook.got.append((self.path, dict(self.headers), json.loads(body)))
                self.send_response(200)
                self.end_headers()
            else:
                self.send_response(int(act))
                self.send_header("Retry-After", "1")
                self.end_headers()

        def drip(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not hook.done.wait(0.1):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hook.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hook
    finally:
        hook.done.set()
        server.shutdown()
        server.server_close()


@contextmanager
def alertmanager(folder: Path) -> Iterator[str]:
    """The URL of an Alertmanager with an empty store."""
    config = folder / "alertmanager.yml"
    config.write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        "prometheus-alertmanager",
        f"--config.file={config}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--cluster.listen-address=",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: _ready(url), folder / "log")
        yield url
    finally:
        process.terminate()
        process.wait(20)


def known_to(url: str, **query: str) -> list[dict[str, Any]]:
    """The alerts that an Alertmanager holds to be firing."""
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    with urllib.request.urlopen(f"{url}/api/v2/alerts?{asked}", timeout=5) as answer:
        found: list[dict[str, Any]] = json.load(answer)
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return True
    except OSError:
        return False


def wait_until(holds: Any, log: Path | None = None, seconds: float = 30.0) -> Any:
    """What `holds` gives once it is true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := holds():
            return found
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:] if log else "it never came")
