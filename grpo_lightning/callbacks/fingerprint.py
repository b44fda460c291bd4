"""A run's fingerprint: the signals of its first steps as one table, to compare other runs with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from grpo_lightning.sinks import RunDirectory, StepRow

__all__ = ["FINGERPRINT", "write_fingerprint"]

FINGERPRINT = "fingerprint.json"


def write_fingerprint(directory: RunDirectory, *, steps: int, probe: dict[str, Any]) -> Path | None:
    """Write ``fingerprint.json`` from the journal's first `steps` steps; nothing for no steps.

    A JSON object: `run_id`, `steps` (asked for), `probe` (its identity), `columns` (``step`` and signal names, no timings) and
    `rows`. Not measured is null; what is not finite is the text ``NaN``, ``Infinity`` or ``-Infinity``.
    """
    with directory.journal(read_only=True) as journal:
        rows = [row for row in journal.rows() if row.step <= steps]
    if not rows:
        return None
    columns = sorted({name for row in rows for name in row.values if not _is_timing(name)})
    table = [[row.step, *(_cell(row, name) for name in columns)] for row in rows]
    found = {"run_id": directory.run_id, "steps": steps, "probe": probe, "columns": ["step", *columns], "rows": table}
    path = directory.path / FINGERPRINT
    draft = path.with_name(f".{FINGERPRINT}.part")
    draft.write_text(json.dumps(found, allow_nan=False), encoding="utf-8")
    draft.replace(path)
    return path


def _is_timing(name: str) -> bool:
    return name.endswith(("_seconds", "_per_second", "_per_hour"))


def _cell(row: StepRow, name: str) -> float | str | None:
    value = row.values.get(name)
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
