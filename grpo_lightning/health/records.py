"""What the judgement is made of: a step of signals, a condition, a rule, an alert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Action",
    "Alert",
    "AlertChange",
    "Cause",
    "Change",
    "Condition",
    "Kind",
    "Rule",
    "RulerName",
    "Severity",
    "Statistic",
    "Step",
]

Action = Literal["notify", "pause", "skip_update", "resample"]
Severity = Literal["warning", "critical"]
Cause = Literal["environment", "data", "reward", "sampling", "algorithm"]
RulerName = Literal["start", "highest", "lowest", "recent"]
Statistic = Literal["mean", "median", "min", "max", "zero_share"]
Kind = Literal["level", "ruler", "trend", "jump", "stairs", "not_finite", "missing", "together"]
Change = Literal["firing", "escalated", "resolved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The signals of one optimizer step, or of one log row that stands for several."""

    step: int
    values: Mapping[str, float]  # not measured is absent; NaN and ±inf are kept
    span: float = 1.0  # optimizer steps that the values stand for
    groups: float | None = None  # prompts in the step, where known
    seconds: float | None = None  # training time of the step; `step_seconds` where not given


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One comparison over a signal's window. Exactly one kind of bound is set.

    The value judged is `statistic` over the last `over_steps` optimizer steps, and at least `over_groups` groups where
    their number is known. A ruler is what the signal is expected to be: the run's first steps or a baseline
    (`start`), the `highest` or `lowest` window so far, or the steps before the window (`recent`).
    """

    signal: str
    below: float | None = None
    above: float | None = None
    not_finite: bool = False
    missing: bool = False  # holds where the signal is not measured
    ruler_ratio_below: float | None = None
    ruler_ratio_above: float | None = None
    ruler_z_below: float | None = None  # (value - ruler) / the ruler's spread, or the level of `unit`
    ruler_z_above: float | None = None
    trend_below: float | None = None  # least-squares slope over the window, in `unit` where given
    trend_above: float | None = None
    jump_below: float | None = None  # the window's value / the median of the `recent_steps` before it
    jump_above: float | None = None
    stairs_above: float | None = None  # step-like rises inside the window
    ruler: RulerName = "start"
    unit: str | None = None  # a signal whose usual size is the unit of a z or a trend
    else_signal: str | None = None  # judged where `signal` is not measured
    else_unit: str | None = None
    over_steps: int = 1
    over_groups: int = 0
    recent_steps: int = 50
    statistic: Statistic = "mean"
    per: Literal["step", "hour"] = "step"
    relative_to: str | None = None  # judge signal / this signal
    absolute: bool = False  # judge the absolute value
    optional: bool = False  # in `when`: taken as true where the signal is not measured

    @property
    def signals(self) -> tuple[str, ...]:
        """Every signal that it reads."""
        names = (self.signal, self.else_signal, self.unit, self.else_unit, self.relative_to)
        return tuple(name for name in names if name is not None)

    @property
    def bound(self) -> float:
        """The number that the value is held against."""
        bounds = [b for b in self._bounds() if b is not None]
        return bounds[0] if bounds else float("inf")

    @property
    def low(self) -> bool:
        """True where values under the bound violate it."""
        return any(b is not None for b in (self.below, self.ruler_ratio_below, self.ruler_z_below)) or (
            self.trend_below is not None or self.jump_below is not None
        )

    def _bounds(self) -> tuple[float | None, ...]:
        return (
            self.below,
            self.above,
            self.ruler_ratio_below,
            self.ruler_ratio_above,
            self.ruler_z_below,
            self.ruler_z_above,
            self.trend_below,
            self.trend_above,
            self.jump_below,
            self.jump_above,
            self.stairs_above,
        )

    @property
    def kind(self) -> Kind:
        """Which of the rule kinds the bound makes it."""
        if self.not_finite or self.missing:
            return "not_finite" if self.not_finite else "missing"
        names: tuple[Kind, ...] = ("level",) * 2 + ("ruler",) * 4 + ("trend",) * 2 + ("jump",) * 2 + ("stairs",)
        return next(kind for kind, bound in zip(names, self._bounds(), strict=True) if bound is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A condition that must hold for a while, and what to do then."""

    name: str
    condition: Condition | None  # None: a `together` rule
    together: tuple[str, ...] = ()
    within_steps: int = 0
    when: tuple[Condition, ...] = ()  # must all hold at the same step
    unless: tuple[Condition, ...] = ()  # none may hold; what is not measured doesn't
    milder_when: tuple[Condition, ...] = ()  # if all hold, a warning to notify
    for_steps: float = 1.0  # optimizer steps in a row
    for_minutes: float = 0.0  # training time, downtime excluded
    for_samples: int = 1  # rows at which the signal was measured, for those that are measured now and then
    for_groups: float = 0.0  # groups seen meanwhile, where their number is known
    after_steps: float = 0.0  # silent until then
    before_steps: float = float("inf")  # silent after
    min_groups: float = 0.0  # groups that a step must have, where known
    keep_firing_steps: float = 10.0  # steps without the condition before it is resolved
    action: Action = "notify"
    severity: Severity = "warning"
    cause: Cause = "algorithm"
    summary: str = ""
    first: str = ""  # what to do first, in a sentence
    runbook: str = ""
    quiet: bool = False  # feeds `together` rules only, never alerts itself
    show: tuple[str, ...] = ()  # further signals whose values the alert carries

    @property
    def kind(self) -> Kind:
        """Which of the kinds its condition is."""
        return self.condition.kind if self.condition is not None else "together"

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """All of them, the main one first."""
        main = (self.condition,) if self.condition is not None else ()
        return (*main, *self.when, *self.unless, *self.milder_when)

    @property
    def needed(self) -> tuple[tuple[str, str | None], ...]:
        """The signals without which it can't be judged, each with the one that may stand in."""
        main = (self.condition,) if self.condition is not None else ()
        needed = [c for c in (*main, *self.when) if not (c.optional or c.missing)]
        names = [(c.signal, c.else_signal) for c in needed] + [(c.unit, c.else_unit) for c in needed]
        names += [(c.relative_to, None) for c in needed]
        return tuple(dict.fromkeys((first, other) for first, other in names if first is not None))

    @property
    def signals(self) -> tuple[str, ...]:
        """Every signal that it reads."""
        read = [s for c in self.conditions for s in c.signals]
        return tuple(dict.fromkeys((*read, *self.show)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A rule that fired."""

    id: str  # <rule>@<step>
    rule: str
    step: int  # the step at which it fired, knowing only what came before
    onset_step: int  # where it began, as estimated at that step
    severity: Severity
    action: Action
    cause: Cause
    signal: str
    value: float
    bound: float
    expected: float | None  # the ruler's level, where there is one
    summary: str
    first: str
    runbook: str
    values: Mapping[str, float] = field(default_factory=dict)  # the signals that it was judged by

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = tuple(self.__dataclass_fields__)
        return {name: getattr(self, name) for name in names} | {"values": dict(self.values)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertChange:
    """A change in an alert's life, at a step."""

    change: Change
    step: int
    alert: Alert
