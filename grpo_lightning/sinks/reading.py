"""The journal's queries, as functions of a connection."""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from grpo_lightning.sinks.base import EventKind, EventRow, StepRow
from grpo_lightning.sinks.records import Acknowledgement, AlertRow, SegmentRow, Series
from grpo_lightning.sinks.schema import EVENT_TABLES, unpack_values

__all__ = ["alerts", "events", "latest", "rows", "segments", "series", "signals", "steps_after"]

# A row of `steps` is live unless a later segment started before its step or recorded the step itself.
_LIVE = """NOT EXISTS (SELECT 1 FROM segments AS later
               WHERE later.segment > row.segment AND later.from_step < row.step)"""
_LIVE_STEP = f"""{_LIVE} AND NOT EXISTS (SELECT 1 FROM segments AS later JOIN steps AS again
               ON again.segment = later.segment AND again.step = row.step
               WHERE later.segment > row.segment)"""


def segments(db: sqlite3.Connection) -> list[SegmentRow]:
    """All segments, oldest first."""
    found = db.execute("SELECT segment, from_step, started, ended, status, reason FROM segments ORDER BY segment")
    names = ("segment", "from_step", "started", "ended", "status", "reason")
    return [SegmentRow(**dict(zip(names, row, strict=True))) for row in found]


def signals(db: sqlite3.Connection) -> list[str]:
    """Every signal name in a layout, sorted."""
    return sorted({name for names in _layouts(db).values() for name in names})


def series(db: sqlite3.Connection, signal: str) -> Series:
    """The live values of one signal, read from the blobs by their place in them."""
    places = {layout: names.index(signal) for layout, names in _layouts(db).items() if signal in names}
    found: list[tuple[int, float, float, int]] = []
    for layout, place in places.items():
        query = f"""SELECT step, substr(data, ?, 8), time, segment FROM steps AS row
                    WHERE layout = ? AND {_LIVE_STEP} ORDER BY step"""
        for step, data, time, segment in db.execute(query, (8 * place + 1, layout)):
            found.append((step, unpack_values(data)[0], time, segment))
    found.sort(key=lambda point: point[0])
    return Series(
        signal=signal,
        steps=[point[0] for point in found],
        values=[point[1] for point in found],
        times=[point[2] for point in found],
        segments=[point[3] for point in found],
    )


def rows(
    db: sqlite3.Connection, run_id: str, *, after_step: int | None = None, all_segments: bool = False
) -> Iterator[StepRow]:
    """Rows in step order, oldest segment first within a step."""
    live = "1" if all_segments else _LIVE_STEP
    query = f"""SELECT segment, step, time, layout, data FROM steps AS row
                WHERE step > ? AND {live} ORDER BY step, segment"""
    found = db.execute(query, (-(2**62) if after_step is None else after_step,)).fetchall()
    names = _layouts(db)  # after the rows: a writer adds a layout before the first row that has it
    for row in found:
        yield _step_row(run_id, names, row)


def latest(db: sqlite3.Connection, run_id: str) -> StepRow | None:
    """The live row of the highest step."""
    query = f"""SELECT segment, step, time, layout, data FROM steps AS row
                WHERE segment = ? AND {_LIVE_STEP} ORDER BY step DESC LIMIT 1"""
    newest = [
        found
        for (segment,) in db.execute("SELECT DISTINCT segment FROM steps").fetchall()
        if (found := db.execute(query, (segment,)).fetchone())
    ]
    best = heapq.nlargest(1, newest, key=lambda found: (found[1], found[0]))
    return _step_row(run_id, _layouts(db), best[0]) if best else None


def steps_after(db: sqlite3.Connection, run_id: str, last_id: int, limit: int) -> list[tuple[int, StepRow]]:
    """Rows by id, for consumers with a cursor."""
    query = "SELECT id, segment, step, time, layout, data FROM steps WHERE id > ? ORDER BY id LIMIT ?"
    found = db.execute(query, (last_id, limit)).fetchall()
    names = _layouts(db)
    return [(row[0], _step_row(run_id, names, row[1:])) for row in found]


def events(
    db: sqlite3.Connection, run_id: str, kind: EventKind, *, all_segments: bool = False, after_id: int = 0
) -> list[tuple[int, EventRow]]:
    """Events of one kind with their ids, in the order they were first recorded."""
    live = "1" if all_segments else _LIVE
    query = f"""SELECT id, segment, step, time, name, key, payload FROM {EVENT_TABLES[kind]} AS row
                WHERE id > ? AND {live} ORDER BY id"""
    return [(row[0], _event_row(run_id, kind, *row[1:])) for row in db.execute(query, (after_id,))]


def alerts(db: sqlite3.Connection, run_id: str, *, all_segments: bool = False) -> list[AlertRow]:
    """Alerts with their acknowledgements."""
    told = {
        row[0]: Acknowledgement(time=row[1], cause=row[2], note=row[3])
        for row in db.execute("SELECT alert, time, cause, note FROM acknowledgements")
    }
    found = events(db, run_id, "alert", all_segments=all_segments)
    return [AlertRow(event=event, acknowledged=told.get(key)) for key, event in found]


def _layouts(db: sqlite3.Connection) -> dict[int, list[str]]:
    return {layout: json.loads(names) for layout, names in db.execute("SELECT layout, names FROM layouts")}


def _step_row(run_id: str, names: dict[int, list[str]], found: tuple[Any, ...]) -> StepRow:
    segment, step, time, layout, data = found
    values: dict[str, float] = dict(zip(names[layout], unpack_values(data), strict=True))
    return StepRow(run_id=run_id, segment=segment, step=step, time=time, values=values)


def _event_row(run_id: str, kind: EventKind, *found: Any) -> EventRow:
    segment, step, time, name, key, payload = found
    return EventRow(
        run_id=run_id,
        segment=segment,
        step=step,
        time=time,
        kind=kind,
        name=name,
        payload=json.loads(payload),
        id=key,
    )
