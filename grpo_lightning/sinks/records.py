"""What readers of a journal get back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_lightning.sinks.base import EventRow

__all__ = ["Acknowledgement", "AlertRow", "Cursor", "SegmentRow", "SegmentStatus", "Series"]

SegmentStatus = Literal["running", "finished", "failed", "killed", "paused", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRow:
    """One part of a run between two (re)starts."""

    segment: int  # counted from 1
    from_step: int  # optimizer steps done when it started: 0 for a new run, the checkpoint's step on resume
    started: float  # seconds since the epoch
    ended: float | None  # None while it runs, or after a SIGKILL that nobody has repaired yet
    status: SegmentStatus
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One signal over the run, one value per step, in step order. Steps without it are absent."""

    signal: str
    steps: list[int]
    values: list[float]
    times: list[float]  # seconds since the epoch
    segments: list[int]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledgement:
    """A person's word on an alert."""

    time: float
    cause: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertRow:
    """A recorded alert with its acknowledgement, if any."""

    event: EventRow
    acknowledged: Acknowledgement | None

    @property
    def open(self) -> bool:
        """True until someone acknowledges it."""
        return self.acknowledged is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """How far a consumer has read a stream (``steps``, ``evaluations``, ``segments``)."""

    last_id: int = 0
    state: dict[str, Any] = field(default_factory=dict)
