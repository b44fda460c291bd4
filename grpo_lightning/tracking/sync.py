"""Send what a finished, crashed or offline run still has in its journal, and repair its status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.tracking.feed import Feeder
from grpo_lightning.tracking.names import Pages
from grpo_lightning.tracking.run import MLflowRun

__all__ = ["SyncReport", "sync_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What `sync_run` did."""

    run_id: str
    steps_sent: int
    status: str | None  # the status now set in MLflow, None while a process still trains the run


def sync_run(path: str | Path, *, page_of: Pages | None = None, tracking_uri: str | None = None) -> SyncReport:
    """Send the rest of a run directory's journal to MLflow, exactly once, and set the status it ended with.

    A run whose process was killed is closed as ``interrupted`` (KILLED in MLflow). One that is being trained
    keeps its status.
    """
    directory = RunDirectory.open(path)
    live = directory.is_live()
    with directory.journal() as journal:
        if not live:
            journal.repair()
        meta = journal.meta()
        if "tracking_uri" not in meta:
            raise UsageError(f"The run {directory.run_id} was not recorded in MLflow: its journal names no store.")
        run = MLflowRun.open(meta["run_id"], tracking_uri=tracking_uri, recorded_uri=meta["tracking_uri"])
        sent = Feeder(journal, run.log_points, page_of).drain()
        segments = journal.segments()
    if live or not segments:
        return SyncReport(run_id=run.run_id, steps_sent=sent, status=None)
    run.set_status(segments[-1].status, reason=segments[-1].reason)
    return SyncReport(run_id=run.run_id, steps_sent=sent, status=segments[-1].status)
