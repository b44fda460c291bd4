"""Where a run's rows go: the journal, JSON lines, and the sinks that plugins bring."""

from grpo_lightning.sinks.base import (
    SINK_GROUP,
    EventKind,
    EventRow,
    Sink,
    SinkError,
    StepRow,
    available_sinks,
    load_sink,
)
from grpo_lightning.sinks.guard import GuardedSink
from grpo_lightning.sinks.journal import Journal
from grpo_lightning.sinks.jsonl import JsonLines
from grpo_lightning.sinks.records import Acknowledgement, AlertRow, Cursor, SegmentRow, SegmentStatus, Series
from grpo_lightning.sinks.redact import redact_config, redact_text
from grpo_lightning.sinks.run_dir import RunDirectory

__all__ = [
    "SINK_GROUP",
    "Acknowledgement",
    "AlertRow",
    "Cursor",
    "EventKind",
    "EventRow",
    "GuardedSink",
    "Journal",
    "JsonLines",
    "RunDirectory",
    "SegmentRow",
    "SegmentStatus",
    "Series",
    "Sink",
    "SinkError",
    "StepRow",
    "available_sinks",
    "load_sink",
    "redact_config",
    "redact_text",
]
