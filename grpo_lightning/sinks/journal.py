"""The run directory's own crash-safe record: SQLite in WAL mode, one transaction a row.

A row that `write_step` returned from survives a SIGKILL of the process; `sync` makes it survive a power cut
as well. After a rewind (resumed at 8 when 10 was already recorded) the older rows stay, and readers see the
later segment's: a row of step s is *live* unless a later segment started before s
(``from_step < s``) or recorded s.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time as clock
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks import reading
from grpo_lightning.sinks.base import EventKind, EventRow, SinkError, StepRow
from grpo_lightning.sinks.records import AlertRow, Cursor, SegmentRow, SegmentStatus, Series
from grpo_lightning.sinks.schema import (
    APPLICATION_ID,
    EVENT_TABLES,
    SCHEMA_VERSION,
    create_tables,
    pack_values,
)

__all__ = ["Journal"]


class Journal:
    """A run's journal. Any number of readers may be open while one process writes.

    Args:
        path: the file; made when missing (its folder must exist).
        read_only: open an existing journal and write nothing, not even beside it where that can be avoided.
        timeout: seconds to wait for another writer before giving up with a `SinkError`.

    Safe to use from several threads; open one journal a process, never across a fork.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, timeout: float = 30.0) -> None:
        self.path = Path(path).absolute()
        self.read_only = read_only
        self._lock = threading.RLock()
        self._layouts: dict[tuple[str, ...], int] = {}
        self._connection: sqlite3.Connection | None = _open(self.path, read_only=read_only, timeout=timeout)

    # ---------------------------------------------------------------- writing

    def start_segment(self, *, from_step: int, time: float | None = None, reason: str = "") -> int:
        """Open the next segment and return its number, counted from 1.

        `from_step` is the number of optimizer steps done so far: 0 for a new run, the checkpoint's step on
        resume. A segment left open by a crash is closed as ``interrupted`` at its last row's time.
        """
        with self._write("start a segment") as db:
            self._close_interrupted(db)
            row = db.execute(
                "INSERT INTO segments (segment, from_step, started, status, reason)"
                " SELECT coalesce(max(segment), 0) + 1, ?, ?, 'running', ? FROM segments RETURNING segment",
                (from_step, _now(time), reason),
            ).fetchone()
        return int(row[0])

    def end_segment(self, status: SegmentStatus, *, reason: str = "", time: float | None = None) -> None:
        """Close the newest segment. Closing a closed one changes nothing."""
        with self._write("end a segment") as db:
            db.execute(
                "UPDATE segments SET ended = ?, status = ?, reason = ?"
                " WHERE ended IS NULL AND segment = (SELECT max(segment) FROM segments)",
                (_now(time), status, reason),
            )

    def repair(self) -> bool:
        """Close a segment that a crash left open as ``interrupted``; True when there was one.

        Only for a caller that knows that no process writes the run: see `RunDirectory.lock`.
        """
        with self._write("repair a segment") as db:
            return self._close_interrupted(db)

    def write_step(self, row: StepRow) -> None:
        """Record one optimizer step. A segment records each step once."""
        values = dict(sorted(row.values.items()))
        with self._write(f"record step {row.step}") as db:
            layout = self._layout(db, tuple(values))
            data = pack_values([float(value) for value in values.values()])
            try:
                db.execute(
                    "INSERT INTO steps (segment, step, time, layout, data) VALUES (?, ?, ?, ?, ?)",
                    (row.segment, row.step, row.time, layout, data),
                )
            except sqlite3.IntegrityError as error:
                raise SinkError(
                    f"Step {row.step} of segment {row.segment} is already recorded in {self.path}. "
                    "A segment records each step once: start a new segment to record it again."
                ) from error

    def write_event(self, row: EventRow) -> None:
        """Record an alert, a recovery, an evaluation or a note. The same key in a segment is updated."""
        payload = _json(row.payload)
        with self._write(f"record {row.kind} {row.key!r}") as db:
            db.execute(
                f"INSERT INTO {EVENT_TABLES[row.kind]} (segment, step, time, name, key, payload)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (segment, key) DO UPDATE SET"
                " step = excluded.step, time = excluded.time, payload = excluded.payload",
                (row.segment, row.step, row.time, row.name, row.key, payload),
            )

    def acknowledge(self, alert: str, *, cause: str, note: str, time: float | None = None) -> None:
        """Close every recorded alert of this id. One that fires again in a later segment is open again."""
        with self._write(f"acknowledge {alert!r}") as db:
            ids = [row[0] for row in db.execute("SELECT id FROM alerts WHERE key = ?", (alert,))]
            if not ids:
                known = [row[0] for row in db.execute("SELECT DISTINCT key FROM alerts ORDER BY id")]
                raise UsageError(f"There is no alert {alert!r} in {self.path}; it has: {', '.join(known) or 'none'}.")
            db.executemany(
                "INSERT OR REPLACE INTO acknowledgements (alert, time, cause, note) VALUES (?, ?, ?, ?)",
                [(key, _now(time), cause, note) for key in ids],
            )

    def set_meta(self, **values: str) -> None:
        """Set facts about the run, such as its name."""
        with self._write("write meta") as db:
            db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", list(values.items()))

    def advance(self, consumer: str, stream: str, cursor: Cursor) -> None:
        """Remember how far `consumer` has read `stream`. It never goes back."""
        with self._write(f"advance the cursor of {consumer}") as db:
            db.execute(
                "INSERT INTO cursors (consumer, stream, last_id, state) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (consumer, stream) DO UPDATE SET last_id = excluded.last_id,"
                " state = excluded.state WHERE excluded.last_id >= cursors.last_id",
                (consumer, stream, cursor.last_id, json.dumps(cursor.state)),
            )

    def sync(self) -> None:
        """Bring what is written onto the disk itself: call it before a checkpoint is saved."""
        with self._use("sync") as db:
            db.execute("PRAGMA wal_checkpoint(FULL)")

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- reading

    def meta(self) -> dict[str, str]:
        """The facts about the run."""
        with self._use("read meta") as db:
            return dict(db.execute("SELECT key, value FROM meta").fetchall())

    @property
    def run_id(self) -> str:
        """The run's id, "" before it is set."""
        return self.meta().get("run_id", "")

    def segments(self) -> list[SegmentRow]:
        """All segments, oldest first."""
        with self._use("read the segments") as db:
            return reading.segments(db)

    def signals(self) -> list[str]:
        """Every signal that was ever recorded, sorted."""
        with self._use("read the signals") as db:
            return reading.signals(db)

    def series(self, signal: str) -> Series:
        """One signal over the run: the live rows that have it, in step order."""
        with self._use(f"read {signal!r}") as db:
            return reading.series(db, signal)

    def rows(self, *, after_step: int | None = None, all_segments: bool = False) -> Iterator[StepRow]:
        """The live rows in step order; with `all_segments` every row as recorded, abandoned ones too."""
        with self._use("read the steps") as db:
            run_id = self.run_id
            yield from reading.rows(db, run_id, after_step=after_step, all_segments=all_segments)

    def latest(self) -> StepRow | None:
        """The live row of the highest step."""
        with self._use("read the latest step") as db:
            return reading.latest(db, self.run_id)

    def alerts(self, *, open_only: bool = False, all_segments: bool = False) -> list[AlertRow]:
        """Alerts of the live branch (or of every segment), oldest first."""
        with self._use("read the alerts") as db:
            found = reading.alerts(db, self.run_id, all_segments=all_segments)
        return [alert for alert in found if alert.open or not open_only]

    def events(self, kind: EventKind, *, all_segments: bool = False) -> list[EventRow]:
        """Events of one kind on the live branch (or of every segment), oldest first."""
        with self._use(f"read the {EVENT_TABLES[kind]}") as db:
            return [event for _, event in reading.events(db, self.run_id, kind, all_segments=all_segments)]

    def recoveries(self) -> list[EventRow]:
        """The automatic recoveries of the live branch."""
        return self.events("recovery")

    def evaluations(self) -> list[EventRow]:
        """The evaluations of the live branch."""
        return self.events("evaluation")

    def cursor(self, consumer: str, stream: str) -> Cursor:
        """How far `consumer` has read `stream`."""
        with self._use("read a cursor") as db:
            row = db.execute(
                "SELECT last_id, state FROM cursors WHERE consumer = ? AND stream = ?", (consumer, stream)
            ).fetchone()
        return Cursor(last_id=row[0], state=json.loads(row[1])) if row else Cursor()

    def steps_after(self, last_id: int, limit: int = 100) -> list[tuple[int, StepRow]]:
        """The next rows in the order they were written, each with its id: for consumers with a cursor."""
        with self._use("read the steps") as db:
            return reading.steps_after(db, self.run_id, last_id, limit)

    def count_steps_after(self, last_id: int) -> int:
        """How many rows `steps_after` would give without a limit."""
        with self._use("count the steps") as db:
            return int(db.execute("SELECT count(*) FROM steps WHERE id > ?", (last_id,)).fetchone()[0])

    def evaluations_after(self, last_id: int, limit: int = 100) -> list[tuple[int, EventRow]]:
        """The next evaluations in the order they were written, each with its id."""
        with self._use("read the evaluations") as db:
            return reading.events(db, self.run_id, "evaluation", all_segments=True, after_id=last_id)[:limit]

    # ---------------------------------------------------------------- inside

    def _layout(self, db: sqlite3.Connection, names: tuple[str, ...]) -> int:
        if names not in self._layouts:
            text = _json(names)
            db.execute("INSERT OR IGNORE INTO layouts (names) VALUES (?)", (text,))
            row = db.execute("SELECT layout FROM layouts WHERE names = ?", (text,)).fetchone()
            self._layouts[names] = int(row[0])
        return self._layouts[names]

    def _close_interrupted(self, db: sqlite3.Connection) -> bool:
        closed = db.execute(
            "UPDATE segments SET status = 'interrupted', reason = 'the process ended without a word', ended ="
            " coalesce((SELECT max(time) FROM steps WHERE steps.segment = segments.segment), started)"
            " WHERE ended IS NULL"
        )
        return closed.rowcount > 0

    @contextmanager
    def _use(self, action: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._connection is None:
                raise SinkError(f"Can't {action}: the journal {self.path} is closed.")
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise SinkError(f"Can't {action} in {self.path}: {error}. {_fix(error)}") from error

    @contextmanager
    def _write(self, action: str) -> Iterator[sqlite3.Connection]:
        if self.read_only:
            raise SinkError(f"Can't {action}: the journal {self.path} was opened to be read only.")
        with self._use(action) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                self._layouts.clear()  # the transaction may have made one
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise


def _open(path: Path, *, read_only: bool, timeout: float) -> sqlite3.Connection:
    if read_only and not path.is_file():
        raise UsageError(f"There is no journal at {path}. A run directory has one: give the folder of a run.")
    try:
        connection = _connect_to_read(path, timeout) if read_only else _connect(path.as_posix(), timeout)
        _check_format(connection, path, may_create=not read_only)
    except sqlite3.Error as error:
        raise UsageError(f"Can't open the journal {path}: {error}. {_fix(error)}") from error
    return connection


def _connect(name: str, timeout: float, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=timeout, isolation_level=None, check_same_thread=False, uri=uri)


def _connect_to_read(path: Path, timeout: float) -> sqlite3.Connection:
    """A read-only connection; in a folder that can't be written, a journal at rest is read as immutable."""
    address = path.as_uri()
    connection = _connect(f"{address}?mode=ro", timeout, uri=True)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        connection = _connect(f"{address}?mode=ro&immutable=1", timeout, uri=True)
    return connection


def _check_format(connection: sqlite3.Connection, path: Path, *, may_create: bool) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if may_create and tables == 0 and version == 0:
        connection.execute("PRAGMA journal_mode = WAL")
        create_tables(connection)
    elif application != APPLICATION_ID:
        raise UsageError(f"{path} is a SQLite file but not a journal: move it away or give another path.")
    elif version > SCHEMA_VERSION:
        raise UsageError(
            f"The journal {path} has format {version}; this version reads up to {SCHEMA_VERSION}: "
            "upgrade grpo-lightning."
        )
    connection.execute("PRAGMA synchronous = NORMAL")


def _fix(error: sqlite3.Error) -> str:
    text = str(error)
    if "full" in text or "disk I/O" in text:
        return "Free some space on that disk; what was recorded so far is safe."
    if "readonly" in text or "unable to open" in text:
        return "Its folder must exist and be writable: check the path and the permissions."
    if "locked" in text:
        return "Another process holds it: end that process or try again."
    if "not a database" in text or "malformed" in text:
        return "The file is not a journal or is damaged: move it away, or restore it from a copy."
    return "Check the path, the permissions and the free space."


def _now(time: float | None) -> float:
    return clock.time() if time is None else time


def _json(value: Any) -> str:
    """Compact JSON that SQLite takes: half a surrogate pair, as of a file's name, is written out and read as it was."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=_plain)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    """JSON for what is nearly plain: numpy scalars and arrays, paths, mappings, sets."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__float__"):
        number = float(value)
        return int(number) if math.isfinite(number) and number.is_integer() else number
    return str(value)
