"""From journal rows to MLflow points: exactly once per (segment, signal, step).

A point is made from its journal row alone, timestamp included, so a batch that is sent again after an unclear
failure makes the same points, which MLflow keeps once. The cursor moves only after a batch has arrived.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo_lightning.sinks import Cursor, EventRow, Journal, SegmentRow, StepRow
from grpo_lightning.tracking.errors import TrackingRefused
from grpo_lightning.tracking.names import Pages, metric_key, nonfinite_key
from grpo_lightning.tracking.run import Point

__all__ = ["CONSUMER", "SEGMENT_KEY", "Feeder"]

CONSUMER = "mlflow"
SEGMENT_KEY = "3_diagnosis/segment"
BATCH = 1000  # MLflow's limit of metric rows a request

_log = logging.getLogger(__name__)


class Feeder:
    """Sends what MLflow has not got yet from a journal.

    Args:
        journal: open for writing; the cursor is kept in it.
        send: takes points and raises `TrackingError` when they did not arrive.
        page_of: a signal's page. The page that a signal first had in this run is kept: its curve stays one.
    """

    def __init__(self, journal: Journal, send: Callable[[Sequence[Point]], None], page_of: Pages | None = None) -> None:
        self._journal = journal
        self._send_points = send
        self._page_of = page_of or (lambda _signal: None)
        self._keys: dict[str, str] = json.loads(journal.meta().get("mlflow_keys", "{}"))
        self._refused: set[str] = set()

    def drain(self) -> int:
        """Send everything that is recorded by now; returns the number of steps sent."""
        self._feed_segments()
        sent = 0
        while count := self._feed_steps():
            sent += count
        while self._feed_evaluations():
            pass
        return sent

    def backlog(self) -> int:
        """Steps that are not sent yet."""
        return self._journal.count_steps_after(self._journal.cursor(CONSUMER, "steps").last_id)

    # ---------------------------------------------------------------- streams

    def _feed_segments(self) -> None:
        cursor = self._journal.cursor(CONSUMER, "segments")
        new = [segment for segment in self._journal.segments() if segment.segment > cursor.last_id]
        if new:
            self._send([_segment_point(segment) for segment in new])
            self._journal.advance(CONSUMER, "segments", Cursor(last_id=new[-1].segment))

    def _feed_steps(self) -> int:
        cursor = self._journal.cursor(CONSUMER, "steps")
        counts: dict[str, int] = dict(cursor.state.get("nonfinite", {}))
        points: list[Point] = []
        done, last_id = 0, cursor.last_id
        for key, row in self._journal.steps_after(cursor.last_id):
            if points and len(points) + len(row.values) > BATCH:
                break
            points += self._points(row, row.values, counts)
            done, last_id = done + 1, key
        return self._deliver("steps", points, Cursor(last_id=last_id, state={"nonfinite": counts}), done)

    def _feed_evaluations(self) -> int:
        cursor = self._journal.cursor(CONSUMER, "evaluations")
        counts: dict[str, int] = dict(cursor.state.get("nonfinite", {}))
        points: list[Point] = []
        done, last_id = 0, cursor.last_id
        for key, row in self._journal.evaluations_after(cursor.last_id):
            points += self._points(row, _numbers(row.payload), counts)
            done, last_id = done + 1, key
        return self._deliver("evaluations", points, Cursor(last_id=last_id, state={"nonfinite": counts}), done)

    def _deliver(self, stream: str, points: Sequence[Point], cursor: Cursor, done: int) -> int:
        if done:
            self._send(points)
            self._journal.advance(CONSUMER, stream, cursor)
        return done

    # ---------------------------------------------------------------- points

    def _points(self, row: StepRow | EventRow, values: Mapping[str, float], counts: dict[str, int]) -> Iterable[Point]:
        """The finite values, and how often each of the others has been NaN or infinite so far in this run."""
        time_ms = round(row.time * 1000)
        for signal, value in values.items():
            if math.isfinite(value):
                yield Point(key=self._key(signal), value=value, time_ms=time_ms, step=row.step)
            else:
                counts[signal] = counts.get(signal, 0) + 1
                yield Point(key=nonfinite_key(signal), value=counts[signal], time_ms=time_ms, step=row.step)

    def _key(self, signal: str) -> str:
        if signal not in self._keys:
            self._keys[signal] = metric_key(signal, self._page_of)
            self._journal.set_meta(mlflow_keys=json.dumps(self._keys))
        return self._keys[signal]

    def _send(self, points: Sequence[Point]) -> None:
        """Send; in a batch that MLflow refuses, find the refused points by halving and send the rest."""
        if not points:
            return
        try:
            self._send_points(points)
        except TrackingRefused as error:
            if len(points) > 1:
                self._send(points[: len(points) // 2])
                self._send(points[len(points) // 2 :])
            elif points[0].key not in self._refused:
                self._refused.add(points[0].key)
                _log.warning("MLflow does not take %s: %s It stays in the journal.", points[0].key, error)


def _segment_point(segment: SegmentRow) -> Point:
    time_ms = round(segment.started * 1000)
    return Point(key=SEGMENT_KEY, value=segment.segment, time_ms=time_ms, step=segment.from_step)


def _numbers(payload: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in payload.items() if isinstance(value, int | float)}
