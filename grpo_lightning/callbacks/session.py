"""What the main rank holds open while a run is recorded, and where each row goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lightning.callbacks.sinks import BackgroundSink
from grpo_lightning.sinks import EventRow, Journal, RunDirectory, SegmentStatus, StepRow
from grpo_lightning.sinks.console import ConsoleSink
from grpo_lightning.tracking import MetricPump, MLflowRun

__all__ = ["Session"]

_FLUSH_SECONDS = 60.0


@dataclass(kw_only=True)
class Session:
    """An open run: its journal first, then the sinks, MLflow's pump and the terminal."""

    directory: RunDirectory
    journal: Journal
    console: ConsoleSink
    segment: int
    mlflow: MLflowRun | None = None
    pump: MetricPump | None = None
    sinks: Sequence[BackgroundSink] = field(default_factory=tuple)

    def write_step(self, row: StepRow) -> None:
        """Record a step everywhere."""
        self.journal.write_step(row)
        for sink in self.sinks:
            sink.write_step(row)
        if self.pump is not None:
            self.pump.notify()
        self.console.step(row.step, dict(row.values))

    def write_event(self, row: EventRow) -> None:
        """Record an event everywhere."""
        self.journal.write_event(row)
        for sink in self.sinks:
            sink.write_event(row)
        if self.pump is not None:
            self.pump.notify()
        if row.kind == "evaluation":
            self.console.evaluation(row.step, dict(row.payload))
        else:
            self.console.say(_line(row))

    def in_mlflow(self, action: Callable[[MLflowRun], object], what: str) -> None:
        """Have something done to the MLflow run in the background; nothing without MLflow."""
        if self.pump is not None and self.mlflow is not None:
            run = self.mlflow
            self.pump.submit(lambda: action(run), what)

    def close(self, status: SegmentStatus, reason: str) -> None:
        """End the segment, and wait a while for the sinks and MLflow to get all of it. The console stays usable."""
        self.console.close()
        self.journal.end_segment(status, reason=reason)
        for sink in self.sinks:
            sink.close()
        self.in_mlflow(lambda run: run.set_status(status, reason=reason), "the status")
        if self.pump is not None:
            self.pump.close(timeout=_FLUSH_SECONDS)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path


def _line(row: EventRow) -> str:
    said: Any = row.payload.get("message") or row.payload.get("summary") or ""
    return f"{row.kind} {row.name} at step {row.step}" + (f": {said}" if said else "")
