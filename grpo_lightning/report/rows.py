"""Evidence as tables: one block a group, its prompt once, its rollouts in order. Model text is shown, never obeyed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lightning.report.evidence import EvidenceFile
from grpo_lightning.report.numbers import short
from grpo_lightning.sinks.terminal import plain

__all__ = ["FileView", "GroupView", "RowView", "view_evidence"]

_HEAD, _TAIL = 1600, 500  # characters of a text that are shown
_MOST_ROWS = 16  # of a group


@dataclass(frozen=True, kw_only=True, slots=True)
class RowView:
    """One rollout."""

    rollout: str
    reward: str
    parts: tuple[tuple[str, str], ...]  # of each reward function
    advantage: float | None
    bar: float  # -1 … 1, for a bar
    length: str
    truncated: bool
    response: str
    left_out: int  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """One group, or the rollouts of it that were picked."""

    why: str
    value: str
    row_id: str
    source: str
    prompt: str
    left_out: int
    rows: tuple[RowView, ...]
    more: int  # rollouts that are not shown


@dataclass(frozen=True, kw_only=True, slots=True)
class FileView:
    """One file of evidence."""

    name: str
    step: int
    reason: str
    before: bool
    groups: tuple[GroupView, ...]
    more: int  # groups that are not shown


def view_evidence(files: Iterable[EvidenceFile], *, budget: int) -> list[FileView]:
    """The files' groups, as many as `budget` characters of text hold; a prompt counts with its responses."""
    made = []
    for file in files:
        groups = _grouped(file.rows)
        kept: list[GroupView] = []
        for key, rows in groups.items():
            view = _group(key, rows)
            size = len(view.prompt) + sum(len(row.response) + 400 for row in view.rows)
            if size > budget:
                break
            budget -= size
            kept.append(view)
        made.append(
            FileView(
                name=file.name,
                step=file.step,
                reason=file.reason,
                before=file.before,
                groups=tuple(kept),
                more=len(groups) - len(kept),
            )
        )
    return made


def _grouped(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (str(row.get("why", "")), str(row.get("rank", 0)), str(row.get("row_id", "")))
        groups.setdefault(key, []).append(row)
    return groups


def _group(key: tuple[str, str, str], rows: Sequence[Mapping[str, Any]]) -> GroupView:
    prompt, left_out = _shown(rows[0].get("prompt"))
    largest = max((abs(a) for row in rows if (a := _number(row.get("advantage"))) is not None), default=0.0)
    return GroupView(
        why=_brief(key[0]),
        value=short(_number(rows[0].get("value"))),
        row_id=_brief(key[2]),
        source=_brief(rows[0].get("source") or ""),
        prompt=prompt,
        left_out=left_out,
        rows=tuple(_row(row, largest) for row in rows[:_MOST_ROWS]),
        more=max(len(rows) - _MOST_ROWS, 0),
    )


def _row(row: Mapping[str, Any], largest: float) -> RowView:
    response, left_out = _shown(row.get("response"))
    parts = row.get("rewards")
    advantage = _number(row.get("advantage"))
    return RowView(
        rollout=_brief(row.get("rollout", "")),
        reward=_said(row.get("reward")),
        parts=tuple((_brief(n), _said(v)) for n, v in list(parts.items())[:12]) if isinstance(parts, Mapping) else (),
        advantage=advantage,
        bar=advantage / largest if advantage is not None and largest > 0 else 0.0,
        length=_said(row.get("length")),
        truncated=row.get("truncated") is True,
        response=response,
        left_out=left_out,
    )


def _shown(text: Any) -> tuple[str, int]:
    """The beginning and the end of a long text, controls written out, and how much is left out between them."""
    whole = text if isinstance(text, str) else "" if text is None else str(text)
    if len(whole) <= _HEAD + _TAIL + 200:
        return plain(whole), 0
    left_out = len(whole) - _HEAD - _TAIL
    return f"{plain(whole[:_HEAD])}\n… {left_out:,} characters left out …\n{plain(whole[-_TAIL:])}", left_out


def _brief(text: Any) -> str:
    return plain(str(text)[:120])


def _said(value: Any) -> str:
    number = _number(value)
    return short(number) if number is not None else _brief(value) if isinstance(value, str) else "–"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
