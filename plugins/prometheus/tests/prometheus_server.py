"""A real Prometheus for tests, on a free port of this machine."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)

_CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: grpo
    file_sd_configs: [{{files: ["{targets}/*.json"], refresh_interval: 1s}}]
"""


@dataclass(frozen=True, slots=True)
class Server:
    """Its HTTP API."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        """The `data` of an answer."""
        text = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{text}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def wait_for(self, expr: str, count: int, seconds: float = 30) -> list[dict[str, Any]]:
        """The series of `expr` as soon as there are `count`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = self.query(expr)
            if len(found) == count:
                return found
            time.sleep(0.3)
        raise AssertionError(f"{expr} has {found}, not {count} series")


@contextmanager
def prometheus(folder: Path, targets: Path, rules: Path | None = None) -> Iterator[Server]:
    """Run a Prometheus that scrapes what `targets` names."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(targets=targets, rules=f'"{rules}"' if rules else ""))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://{address}", folder / "log")
        yield Server(f"http://{address}")
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_ready(url: str, log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-2000:])
