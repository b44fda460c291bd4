"""JSON lines: one object a row, on a file or on stdout. Strict JSON: NaN and ±inf are written as strings."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks.base import EventRow, SinkError, StepRow

__all__ = ["JsonLines"]


class JsonLines:
    """Append rows to `path` as JSON lines, flushed one by one; ``-`` is stdout.

    A step is ``{"run_id", "segment", "step", "time", <signal>: value, …}``, an event has ``kind``, ``name``,
    ``id`` and ``payload``. A line cut short by a crash stays alone on its line when the file is opened again.
    """

    def __init__(self, path: str | Path = "-") -> None:
        self.path = None if str(path) == "-" else Path(path).absolute()
        self._file: TextIO | None = None if self.path is None else _open(self.path)
        self._closed = False

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

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._closed:
            raise SinkError(f"Can't write to {self.path or 'stdout'}: the sink is closed.")
        stream = sys.stdout if self._file is None else self._file
        try:
            stream.write(json.dumps(_strict(record), ensure_ascii=False, allow_nan=False, default=str) + "\n")
            stream.flush()
        except (OSError, ValueError) as error:
            raise SinkError(f"Can't write to {self.path or 'stdout'}: {error}.") from error


def _open(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        stream = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Can't write JSON lines to {path}: {error.strerror}. Give a writable path.") from error
    if cut:
        stream.write("\n")
    return stream


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
