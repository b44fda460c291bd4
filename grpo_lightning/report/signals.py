"""What the page shows of each signal: title, unit and reading from the catalogue, its chart, its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from grpo_lightning.errors import ConfigError
from grpo_lightning.health import Alert
from grpo_lightning.health.diagnosing.comparing import spread_of
from grpo_lightning.health.diagnosis import Column
from grpo_lightning.health.windows import median_of
from grpo_lightning.report.charts import Band, Chart, Frame, Mark, draw, sparse
from grpo_lightning.report.examining import Examined
from grpo_lightning.report.numbers import short, times
from grpo_lightning.report.thinning import thinned
from grpo_lightning.signals import CATALOGUE
from grpo_lightning.signals.catalogue import Signal, signal
from grpo_lightning.sinks import EventRow
from grpo_lightning.sinks.terminal import plain

__all__ = ["ACCEPTED", "FAMILIES", "MOST_DRAWN", "SignalView", "families", "view_signals"]

FAMILIES: dict[str, str] = {
    "reward": "Reward structure",
    "advantage": "Advantages",
    "policy": "Policy",
    "response": "Responses",
    "optimizer": "Update",
    "data": "Data",
    "overview": "Overview and time",
    "evaluation": "Evaluation",
    "probe": "Probe",
    "other": "Further numbers",
}
MOST_DRAWN = 400
ACCEPTED = "drift_accepted"  # the note of a change that was made on purpose
_MOST_OWN, _MOST_OTHER, _MOST_EVENTS = 20, 12, 25  # marks in a chart
_LONGEST = 200  # characters of a name
_START = 20
_FEWEST = 4  # rows that a ruler is made of
_WIDE = 2.0  # spreads that the band reaches from its level
_ORDER = {name: place for place, name in enumerate(CATALOGUE)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalView:
    """One signal on the page."""

    id: str
    signal: str
    name: str  # for people
    family: str
    page: str
    unit: str
    formula: str
    reading: str
    start: float | None
    last: float | None
    svg: Markup
    data: dict[str, Any]  # for the readout
    concerned: bool  # an alert is about it
    constant: bool

    @property
    def now(self) -> str:
        """Start, end and their ratio, in words."""
        ratio = times(self.start, self.last)
        return f"{short(self.start)} → {short(self.last)}" + (f"  {ratio}" if ratio else "")


def view_signals(found: Examined, *, pixels: int) -> list[SignalView]:
    """The signals that were measured: those that an alert is about first, then in the catalogue's order; 400 at most."""
    about = {name for one in found.told for name in one.alert.signal.split(",")}
    names = sorted(found.run.signals, key=lambda name: (name not in about, _ORDER.get(name, len(_ORDER)), name))
    return [_view(found, name, f"s{place}", pixels) for place, name in enumerate(names[:MOST_DRAWN])]


def families(views: Iterable[SignalView]) -> list[tuple[str, list[SignalView], list[SignalView], list[SignalView]]]:
    """(title, those of health, those of diagnosis, the constant ones) by family, families in order."""
    by_family: dict[str, list[SignalView]] = {}
    for view in views:
        by_family.setdefault(view.family, []).append(view)
    made = []
    for family, title in FAMILIES.items():
        members = by_family.get(family, [])
        moving = [view for view in members if not view.constant]
        main = [view for view in moving if view.page != "3_diagnosis" or view.concerned]
        rest = [view for view in moving if view not in main]
        if members:
            made.append((title, main, rest, [view for view in members if view.constant]))
    return made


def _view(found: Examined, name: str, id: str, pixels: int) -> SignalView:
    column, entry = found.run[name], _entry(name)
    points = thinned(column.steps, column.values, pixels)
    finite = [value for _, value in points]
    start = _start(column)
    concerned = any(name in one.alert.signal.split(",") for one in found.told)
    chart = Chart(
        label=_label(plain(name[:_LONGEST]), entry, column, start),
        points=points,
        first=found.run.steps[0],
        last=found.run.steps[-1],
        odd=[s for s, v in zip(column.steps, column.values, strict=True) if not math.isfinite(v)],
        band=_band(found, name, column, start),
        marks=_marks(found, name),
        seldom=sparse(column.steps, len(found.run)),
    )
    svg, frame = draw(chart)
    return SignalView(
        id=id,
        signal=name,
        name=plain(name[:_LONGEST]),
        family=entry.family if entry is not None and entry.family in FAMILIES else "other",
        page=entry.page if entry is not None else "2_health",
        unit=entry.unit if entry is not None else "",
        formula=entry.formula if entry is not None else "not in the catalogue",
        reading=entry.reading if entry is not None else "",
        start=start,
        last=column.last(),
        svg=svg,
        data=_data(points, frame),
        concerned=concerned,
        constant=bool(finite) and min(finite) == max(finite) and not chart.odd and not concerned and len(column) > 1,
    )


def _entry(name: str) -> Signal | None:
    try:
        return signal(name)
    except ConfigError:
        return None


def _label(name: str, entry: Signal | None, column: Column, start: float | None) -> str:
    unit = f" in {entry.unit}" if entry is not None and entry.unit else ""
    finite = [v for v in column.values if math.isfinite(v)]
    if not finite:
        return f"{name}: never finite"
    return (
        f"{name}{unit}, steps {column.steps[0]} to {column.steps[-1]}: start {short(start)}, end {short(finite[-1])},"
        f" least {short(min(finite))}, greatest {short(max(finite))}"
    )


def _first_values(column: Column) -> list[float]:
    """Of the run's first 20 optimizer steps, and 4 rows at least; at most a third of the rows."""
    if not column:
        return []
    rows = max(sum(step < column.steps[0] + _START for step in column.steps[:_START]), _FEWEST)
    return [v for v in column.values[: max(min(rows, len(column) // 3), 1)] if math.isfinite(v)]


def _start(column: Column) -> float | None:
    values = _first_values(column)
    return median_of(sorted(values)) if values else None


def _band(found: Examined, name: str, column: Column, start: float | None) -> list[Band]:
    """The baseline's band, or the run's own first steps."""
    held = found.baseline.signals.get(name) if found.baseline is not None else None
    if held is not None:
        last = found.run.steps[-1]
        rows = zip(held.steps, held.levels, held.spreads, strict=True)
        return [
            Band(step=round(step), low=level - _WIDE * spread, high=level + _WIDE * spread)
            for step, level, spread in rows
            if step <= last
        ]
    first = _first_values(column)
    if start is None or len(first) < _FEWEST:
        return []
    reach = _WIDE * spread_of(first)
    return [Band(step=found.run.steps[0], low=start - reach, high=start + reach)]


def _marks(found: Examined, name: str) -> list[Mark]:
    """The alerts about this signal with their words; others, restarts and events as mere marks. A few tens at most."""
    own = [one.alert for one in found.told if name in one.alert.signal.split(",")]
    others = [one.alert for one in found.told if one.alert not in own]
    marks = [_alert_mark(alert, own=True, shaded=alert is own[0]) for alert in own[:_MOST_OWN]]
    marks += [_alert_mark(alert, own=False, shaded=False) for alert in others[:_MOST_OTHER]]
    restarts = found.segments[1:]
    marks += [Mark(step=s.from_step, kind="segment", label=str(s.segment)) for s in restarts[-_MOST_OTHER:]]
    accepted = [event for event in found.events if event.name == ACCEPTED]
    marks += [Mark(step=e.step, kind="accepted", label=_accepted(e)) for e in accepted[-_MOST_OTHER:]]
    for event in [event for event in found.events if event.name != ACCEPTED][:_MOST_EVENTS]:
        marks.append(Mark(step=event.step, kind="recovery" if event.kind == "recovery" else "note"))
    return marks


def _accepted(event: EventRow) -> str:
    """What was changed on purpose, from which step on, and why."""
    levels = event.payload.get("levels")
    what = ", ".join(map(str, levels)) if isinstance(levels, list) else "what the run is made of"
    note = event.payload.get("note") or event.payload.get("message") or ""
    return plain(f"from step {event.step} on, changed on purpose: {what}: {note}"[:_LONGEST])


def _alert_mark(alert: Alert, *, own: bool, shaded: bool) -> Mark:
    words = f"{alert.rule} at step {alert.step}, began about {alert.onset_step}: {alert.summary}" if own else ""
    onset = alert.onset_step if shaded else None
    return Mark(step=alert.step, kind=alert.severity, label=plain(words[:_LONGEST]), onset=onset, own=own)


def _data(points: Sequence[tuple[int, float]], frame: Frame) -> dict[str, Any]:
    """Steps and values of the points, and the frame's numbers."""
    return {
        "s": [step for step, _ in points],
        "v": [float(f"{value:.5g}") for _, value in points],
        "f": [frame.first, frame.last, frame.low, frame.high, frame.width, frame.height],
    }
