"""The only place that talks to MLflow, which is imported on first use.

A run is made with `MLflowRun.create`, filled in the background from its journal by a `MetricPump`, and found
again with `resolve_run`. What a crash or an outage left unsent is sent by `sync_run`, or when the run
is resumed.
"""

from grpo_lightning.tracking.errors import TrackingError, TrackingRefused
from grpo_lightning.tracking.feed import Feeder
from grpo_lightning.tracking.names import Pages, clean_key, metric_key
from grpo_lightning.tracking.pump import MetricPump
from grpo_lightning.tracking.read import (
    RecordedRun,
    RunRef,
    download_snapshot,
    metric_rows,
    recorded_runs,
    resolve_run,
    ui_command,
    ui_link,
)
from grpo_lightning.tracking.run import MLflowRun, Point, RunStatus
from grpo_lightning.tracking.store import (
    TRACKING_VARIABLE,
    make_client,
    prepare_store,
    resolve_tracking_uri,
    sqlite_path,
)
from grpo_lightning.tracking.sync import SyncReport, sync_run

__all__ = [
    "TRACKING_VARIABLE",
    "Feeder",
    "MLflowRun",
    "MetricPump",
    "Pages",
    "Point",
    "RecordedRun",
    "RunRef",
    "RunStatus",
    "SyncReport",
    "TrackingError",
    "TrackingRefused",
    "clean_key",
    "download_snapshot",
    "make_client",
    "metric_key",
    "metric_rows",
    "prepare_store",
    "recorded_runs",
    "resolve_run",
    "resolve_tracking_uri",
    "sqlite_path",
    "sync_run",
    "ui_command",
    "ui_link",
]
