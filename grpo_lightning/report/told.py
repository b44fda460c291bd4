"""Alerts as recorded in a journal: as the judgement made them, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from grpo_lightning.health import Alert
from grpo_lightning.sinks import AlertRow

__all__ = ["Told", "alert_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """An alert and its life."""

    alert: Alert
    state: str = "firing"  # firing | escalated | resolved
    cause: str | None = None  # as acknowledged
    note: str = ""
    evidence: str | None = None  # the file's name
    segment: int = 1

    @property
    def open(self) -> bool:
        """True until a person says what it was."""
        return self.cause is None

    @classmethod
    def of(cls, row: AlertRow) -> Told:
        """From a journal's row."""
        payload, word = row.event.payload, row.acknowledged
        evidence = payload.get("evidence")
        return cls(
            alert=alert_of(payload, id=row.event.key, rule=row.event.name, step=row.event.step),
            state=str(payload.get("state", "firing")),
            cause=word.cause if word is not None else None,
            note=word.note if word is not None else "",
            evidence=str(evidence) if evidence else None,
            segment=row.event.segment,
        )


def alert_of(payload: Mapping[str, Any], *, id: str, rule: str, step: int) -> Alert:
    """A recorded alert, its numbers read back from words. What was not recorded is empty."""
    step = int(_number(payload.get("step"), step))
    texts = {f.name: str(payload.get(f.name) or "") for f in fields(Alert) if f.default is MISSING}
    values = payload.get("values")
    kept = values.items() if isinstance(values, Mapping) else ()
    expected = payload.get("expected")
    known: dict[str, Any] = texts | {
        "id": id,
        "rule": rule,
        "step": step,
        "onset_step": int(_number(payload.get("onset_step"), step)),
        "severity": "critical" if payload.get("severity") == "critical" else "warning",
        "action": texts["action"] or "notify",
        "value": _number(payload.get("value"), float("nan")),
        "bound": _number(payload.get("bound"), float("nan")),
        "expected": _number(expected, float("nan")) if expected is not None else None,
        "values": {str(name): _number(value, float("nan")) for name, value in kept},
    }
    return Alert(**known)


def _number(value: Any, otherwise: float) -> float:
    """Numbers that JSON lacks are recorded as words."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return otherwise
