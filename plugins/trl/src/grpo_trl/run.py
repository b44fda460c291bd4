"""The record of a watched run: run directory and journal first, then the sinks and MLflow."""

from __future__ import annotations

import io
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import time
from typing import Any

from rich.console import Console

from grpo_lightning import signals
from grpo_lightning.callbacks import RunSettings
from grpo_lightning.callbacks.session import Session
from grpo_lightning.callbacks.sinks import open_sinks
from grpo_lightning.sinks import EventRow, RunDirectory, SegmentStatus, StepRow
from grpo_lightning.sinks.base import EventKind
from grpo_lightning.sinks.console import ConsoleSink
from grpo_lightning.sinks.redact import redact_text
from grpo_lightning.tracking import MetricPump, MLflowRun

__all__ = ["RunLog"]

_log = logging.getLogger("grpo_trl")


class _Nowhere(io.StringIO):
    """Takes text and keeps none."""

    def write(self, text: str) -> int:
        """As if written."""
        return len(text)


class RunLog:
    """An open run. Make one with `begin` or `resume`."""

    def __init__(self, session: Session, lock: Any, name: str) -> None:
        self._session, self._lock, self.name = session, lock, name

    @classmethod
    def begin(cls, settings: RunSettings, config: Mapping[str, Any], name: str | None) -> RunLog:
        """A new run."""
        mlflow = None
        if settings.mlflow:
            mlflow = MLflowRun.create(
                experiment=settings.experiment, name=name, description=settings.description, config=_plain(config)
            )
        run_id = mlflow.run_id if mlflow else uuid.uuid4().hex
        directory = RunDirectory.create(settings.dir, run_id)
        return cls._open(settings, config, directory, mlflow, mlflow.name if mlflow else name, from_step=0)

    @classmethod
    def resume(
        cls, settings: RunSettings, config: Mapping[str, Any], directory: RunDirectory, from_step: int
    ) -> RunLog:
        """The next segment of a run."""
        return cls._open(settings, config, directory, None, None, from_step=from_step, resumed=True)

    @classmethod
    def _open(
        cls,
        settings: RunSettings,
        config: Mapping[str, Any],
        directory: RunDirectory,
        mlflow: MLflowRun | None,
        name: str | None,
        *,
        from_step: int,
        resumed: bool = False,
    ) -> RunLog:
        lock = directory.lock()
        lock.__enter__()
        directory.write_config(_plain(config))
        journal = directory.journal()
        segment = journal.start_segment(from_step=from_step, reason="resumed" if resumed else "")
        known = journal.meta()
        name = name or known.get("name") or directory.run_id
        description = settings.description or known.get("description", "")
        journal.set_meta(name=name, description=description, trainer="trl")
        if resumed and settings.mlflow:
            mlflow = MLflowRun.resume(
                directory.run_id,
                segment=segment,
                from_step=from_step,
                config=_plain(config),
                recorded_uri=known.get("tracking_uri"),
            )
        quiet = ConsoleSink(total_steps=None, console=Console(file=_Nowhere()), live=False)  # TRL has the terminal
        session = Session(directory=directory, journal=journal, console=quiet, segment=segment)
        if mlflow is not None:
            journal.set_meta(tracking_uri=redact_text(mlflow.tracking_uri))
            session.mlflow = mlflow
            session.pump = MetricPump(journal, mlflow, page_of=signals.page_of).start()
            where = str(directory.path)
            session.in_mlflow(
                lambda run: run.set_tags({"grpo.run_dir": where, "grpo.trainer": "trl"}), "the run directory"
            )
        session.sinks = open_sinks(settings.sinks, run_id=directory.run_id, run_name=name, description=description)
        _log.info("watching: run %s (%s) in %s", name, directory.run_id, directory.path)
        return cls(session, lock, name)

    # ---- what it is

    @property
    def directory(self) -> RunDirectory:
        """Where it is recorded."""
        return self._session.directory

    @property
    def run_id(self) -> str:
        """Its id."""
        return self.directory.run_id

    @property
    def segment(self) -> int:
        """Its part between two (re)starts, counted from 1."""
        return self._session.segment

    # ---- rows

    def write_step(self, step: int, values: Mapping[str, float]) -> StepRow:
        """Record a step's signals."""
        row = StepRow(run_id=self.run_id, segment=self.segment, step=step, time=time(), values=values)
        self._session.write_step(row)
        return row

    def write_event(self, kind: EventKind, name: str, step: int, payload: Mapping[str, Any], *, id: str = "") -> None:
        """Record an event."""
        row = EventRow(
            run_id=self.run_id,
            segment=self.segment,
            step=step,
            time=time(),
            kind=kind,
            name=name,
            payload=payload,
            id=id,
        )
        self._session.write_event(row)

    def in_mlflow(self, action: Callable[[MLflowRun], object], what: str) -> None:
        """Have something done to the MLflow run in the background; nothing where there is none."""
        self._session.in_mlflow(action, what)

    def log_evidence(self, path: Path, rows: Sequence[Mapping[str, Any]], slug: str) -> None:
        """Copy a file of evidence to MLflow, and show it as a table."""
        self.in_mlflow(lambda run: run.log_artifact(path, "evidence"), "the evidence")
        self.in_mlflow(lambda run: run.log_table(rows, f"evidence/{slug}.json"), "the table of evidence")

    def sync(self) -> None:
        """Bring the journal onto the disk: before a checkpoint says that it goes on from there."""
        self._session.journal.sync()

    def close(self, status: SegmentStatus, reason: str) -> None:
        """End the segment."""
        self._session.close(status, reason)
        self._session.journal.close()
        self._lock.__exit__(None, None, None)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return found
