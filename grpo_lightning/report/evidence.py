"""Reading the evidence of a run: which files tell of an onset, and their rows. What they hold is text of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.report.told import Told

__all__ = ["EvidenceFile", "read_evidence"]

_NAME = re.compile(r"step-(\d+)-(.+)\.jsonl")
_LARGEST = 16 * 1024 * 1024
_FILES = 4
_NEAR = 60  # steps after the onset


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceFile:
    """The rows of one file."""

    name: str
    step: int
    reason: str
    before: bool  # written before the onset
    rows: tuple[dict[str, Any], ...]
    unread: int  # lines that are no rows


def read_evidence(folder: Path, told: Sequence[Told], onset: int | None) -> list[EvidenceFile]:
    """The files that the alerts name, those nearest after the onset, and the last one before it. Without an onset the newest."""
    found = sorted((int(m[1]), m[2], path) for path in folder.glob("step-*.jsonl") if (m := _NAME.fullmatch(path.name)))
    named = {Path(one.evidence).name for one in told if one.evidence}
    if onset is None:
        chosen = found[-_FILES:]
    else:
        after = [one for one in found if one[0] >= onset and (one[2].name in named or one[0] <= onset + _NEAR)]
        after.sort(key=lambda one: (one[2].name not in named, one[0]))
        chosen = sorted(after[:_FILES]) + [one for one in found if one[0] < onset][-1:]
    return [_read(path, step, reason, onset) for step, reason, path in chosen]


def _read(path: Path, step: int, reason: str, onset: int | None) -> EvidenceFile:
    rows, unread = [], 0
    try:
        with path.open("rb") as stream:
            text = stream.read(_LARGEST).decode("utf-8", errors="backslashreplace")
    except OSError:
        text, unread = "", 1
    for line in text.splitlines():
        row = _row(line)
        if row is None:
            unread += 1
        else:
            rows.append(row)
    before = onset is not None and step < onset
    return EvidenceFile(name=path.name, step=step, reason=reason, before=before, rows=tuple(rows), unread=unread)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
