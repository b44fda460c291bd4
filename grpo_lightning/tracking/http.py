"""Servers that are away: found out in seconds, where MLflow itself would try for minutes."""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

__all__ = ["brief_requests", "reachable"]

# MLflow reads these at each request. What the user has set stays.
_BRIEF = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # default 7, with waits of up to 64 s; the pump has its own back-off
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # seconds, default 120
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # it would print the server's password
}
_lock = threading.Lock()
_inside = 0
_ours: list[str] = []


@contextmanager
def brief_requests() -> Iterator[None]:
    """Let MLflow's requests fail soon and quietly meanwhile. Threads may be inside together."""
    global _inside  # noqa: PLW0603 - environment variables are the process's own, and so is their count
    with _lock:
        _inside += 1
        if _inside == 1:
            _ours[:] = [name for name in _BRIEF if name not in os.environ]
            os.environ.update({name: _BRIEF[name] for name in _ours})
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for name in _ours:
                    os.environ.pop(name, None)


def reachable(uri: str, *, timeout: float = 3.0) -> bool:
    """False when nothing listens at an http(s) URI; other URIs, and those behind a proxy, count as reachable."""
    parts = urlsplit(uri)
    if parts.scheme not in {"http", "https"} or not parts.hostname or _proxied(parts.scheme, parts.hostname):
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout=timeout):
            return True
    except OSError:
        return False


def _proxied(scheme: str, host: str) -> bool:
    return scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
