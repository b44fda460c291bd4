"""JSON lines: one object a row, on a file or on stdout. Strict JSON: NaN and ±inf are written as strings."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks.base import EventRow, SinkError, StepRow

__all__ = ["JsonLines"]


class JsonLines:
    """Append rows to `path` as JSON lines, each in one write; ``-`` is stdout.

    A step is ``{"run_id", "segment", "step", "time", <signal>: value, …}``, an event has ``kind``, ``name``,
    ``id`` and ``payload``. A line cut short, by a crash or a full disk, stays alone on its line. A named pipe is opened
    when somebody reads it; until then, and while nobody does, rows are refused and so tried again.
    """

    def __init__(self, path: str | Path = "-") -> None:
        self.path = None if str(path) == "-" else Path(path).absolute()
        self._file: BinaryIO | None = None
        self._cut = False  # the last line has no end
        self._closed = False
        if self.path is not None:
            self._prepare(self.path)

    def write_step(self, row: StepRow) -> None:
        """Write one step."""
        self._write({**_head(row), **row.values})

    def write_event(self, row: EventRow) -> None:
        """Write one event."""
        said = {"kind": row.kind, "name": row.name, "id": row.key, "payload": row.payload}
        self._write({**_head(row), **said})

    def close(self) -> None:
        """Close the file; stdout stays open."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _prepare(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_fifo():
                self._cut = _is_cut(path)
                self._file = _open(path)
        except OSError as error:
            raise UsageError(f"Can't write JSON lines to {path}: {error.strerror}. Give a writable path.") from error

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._closed:
            raise SinkError(f"Can't write to {self.path or 'stdout'}: the sink is closed.")
        try:
            line = json.dumps(_strict(record), ensure_ascii=False, allow_nan=False, default=str) + "\n"
            if self.path is None:
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                self._append(self.path, line.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError) as error:
            raise SinkError(f"Can't write to {self.path or 'stdout'}: {error}.") from error

    def _append(self, path: Path, line: bytes) -> None:
        """Write a line; what a failure leaves of it gets an end before the next one."""
        self._file = self._file or _open(path)
        rest = memoryview(b"\n" + line if self._cut else line)
        try:
            while rest:
                written = self._file.write(rest) or 0
                self._cut = rest[written - 1] != 10 if written else self._cut
                rest = rest[written:]
        except BrokenPipeError:  # the reader went away, and what it had not read with it
            self._file.close()
            self._file, self._cut = None, False
            raise


def _open(path: Path) -> BinaryIO:
    """Unbuffered, so that a line that failed is not written later besides; a pipe that nobody reads is an OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "ab", buffering=0)


def _is_cut(path: Path) -> bool:
    """Whether a file's last line has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _head(row: StepRow | EventRow) -> dict[str, Any]:
    return {"run_id": row.run_id, "segment": row.segment, "step": row.step, "time": row.time}


def _strict(value: Any) -> Any:
    """The same value with NaN, Infinity and -Infinity as strings, and numpy's values as plain ones."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if hasattr(value, "tolist"):
        return _strict(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
