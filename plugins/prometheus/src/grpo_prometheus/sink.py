"""The sink: one HTTP endpoint a run, and the file by which Prometheus finds it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from threading import Thread
from typing import Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks import EventRow, StepRow
from grpo_prometheus.collector import RunCollector

__all__ = ["PrometheusSink"]

_HIGHEST_PORT = 65535


class PrometheusSink:
    """Serve a run's newest step on ``http://host:port/metrics``, every sample with ``run_id`` and ``run_name``.

    Args:
        port: 0 is off; ``auto`` takes a free one, which `targets_dir` tells Prometheus.
        host: the address that it listens on; only this machine reaches the default.
        targets_dir: a folder for ``<run_id>.json``, a target file for Prometheus's file-based service discovery; written
            at the start, removed at the end.
        linger: at the end of a run that an alert pauses, the most seconds to wait for a scrape that sees the alert.
        run_id: the run's id.
        run_name: the run's name; its id when not given.
        description: what the run is for; a label of ``grpo_run_info``.
    """

    def __init__(
        self,
        *,
        port: int | Literal["auto"] = 0,
        host: str = "127.0.0.1",
        targets_dir: str | Path | None = None,
        linger: float = 8.0,
        run_id: str = "",
        run_name: str = "",
        description: str = "",
    ) -> None:
        self._collector = RunCollector(run_id=run_id, run_name=run_name, description=description)
        self._linger = linger
        self._served: tuple[WSGIServer, Thread] | None = None
        self._target: Path | None = None
        if port == 0:
            return
        self._served = _serve(self._collector, _checked(port), host)
        if targets_dir is not None:
            self._announce(Path(targets_dir), run_id or str(os.getpid()))

    @property
    def address(self) -> str:
        """``host:port`` of the endpoint, empty when it is off."""
        if self._served is None:
            return ""
        host, port = self._served[0].server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def write_step(self, row: StepRow) -> None:
        """Show this step from now on."""
        self._collector.step(row)

    def write_event(self, row: EventRow) -> None:
        """Count an alert or a recovery, or show an evaluation."""
        self._collector.event(row)

    def close(self) -> None:
        """Stop serving and take the target file away."""
        if self._served is not None:
            self._collector.wait_until_shown(self._linger)
        if self._target is not None:
            self._target.unlink(missing_ok=True)
        if self._served is not None:
            server, thread = self._served
            server.shutdown()
            server.server_close()
            thread.join(timeout=5)
            self._served = None

    def _announce(self, folder: Path, name: str) -> None:
        try:
            self._target = _write_target(folder, name, self.address)
        except ConfigError:
            self.close()
            raise


def _checked(port: int | str) -> int:
    """The port to bind; 0 lets the system choose."""
    if port == "auto":
        return 0
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= _HIGHEST_PORT:
        raise ConfigError(f"The Prometheus port is {port!r}: give 1 to {_HIGHEST_PORT}, 'auto', or 0 for none.")
    return port


def _serve(collector: RunCollector, port: int, host: str) -> tuple[WSGIServer, Thread]:
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        return start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"The Prometheus port {port} on {host} is in use: give this run another port, or 'auto'."
            ) from error
        reason = error.strerror or str(error)
        raise ConfigError(
            f"Prometheus can't be served on {host}:{port}: {reason}. Give another host or port."
        ) from error


def _write_target(folder: Path, name: str, address: str) -> Path:
    """No labels: those of the samples would become ``exported_run_id``."""
    path = folder / f"{name}.json"
    draft = folder / f".{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps([{"targets": [address], "labels": {}}]) + "\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"Can't write the Prometheus target file {path}: {error.strerror}.") from error
    return path
