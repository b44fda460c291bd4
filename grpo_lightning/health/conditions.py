"""A condition made ready: does it hold at this step, and by which value?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from grpo_lightning.health.feeds import Feed, Feeds
from grpo_lightning.health.records import Condition
from grpo_lightning.health.rulers import LateRecent, Recent

__all__ = ["Gauge"]

Measure = Callable[[], float | None]
Test = Callable[[], bool | None]


class Gauge:
    """Holds a condition against its feeds.

    `holds()` is True, False, or None where it can't be said: the signal is not measured at this step, its window is not
    covered, or its ruler not made. A value that is not finite violates.

    Args:
        condition: what is held.
        feeds: of the signals.
        late: it is asked rarely, so its windows are made when it is.
    """

    def __init__(self, condition: Condition, feeds: Feeds, *, late: bool = False) -> None:
        self.condition = condition
        self.feed = feeds.of(condition.signal)
        self.bound = condition.bound
        self._measure = _measure(condition, feeds, late)
        self.test = _test(condition, self._measure, self.bound)  # of a finite value
        self._late = late
        self._missing = condition.missing
        self.other: Gauge | None = None  # judged where the signal is not measured
        if condition.else_signal is not None:
            self.other = Gauge(replace(condition, signal=condition.else_signal, else_signal=None), feeds, late=True)

    @property
    def judged(self) -> Gauge:
        """This gauge, or the one of the signal that stands in."""
        other = self.other
        return other if other is not None and not self.feed.seen and other.feed.seen else self

    def holds(self, *, fresh: bool = True) -> bool | None:
        """Whether the condition holds; with `fresh` only where the signal was measured at this step."""
        gauge = self if self.other is None else self.judged
        feed = gauge.feed
        if gauge._missing:
            return not feed.seen
        if fresh and not feed.fresh:
            return None
        return gauge.test() if feed.finite else True

    @property
    def value(self) -> float | None:
        """What is held against the bound; the signal's own value where that is not finite."""
        gauge = self.judged
        return gauge._measure() if gauge.feed.finite and gauge.condition.kind != "not_finite" else gauge.feed.last

    @property
    def expected(self) -> float | None:
        """The level of the ruler, for the alert's message."""
        gauge = self.judged
        condition, feed = gauge.condition, gauge.feed
        if condition.kind == "jump" or (condition.kind == "ruler" and condition.ruler == "recent"):
            return feed.recent(condition, late=gauge._late).level
        if condition.kind == "ruler" and condition.ruler in ("highest", "lowest"):
            return feed.extreme(condition).level
        band = feed.expected()
        return band[0] if band else None


def _test(condition: Condition, measure: Measure, bound: float) -> Test:
    if condition.kind in ("not_finite", "missing"):
        return lambda: False  # a finite value never violates

    def below() -> bool | None:
        value = measure()
        return None if value is None else value < bound

    def above() -> bool | None:
        value = measure()
        return None if value is None else value > bound

    return below if condition.low else above


def _measure(condition: Condition, feeds: Feeds, late: bool) -> Measure:
    """What is held against the bound."""
    feed = feeds.of(condition.signal)
    if condition.kind in ("not_finite", "missing"):
        return lambda: feed.last
    if condition.kind == "stairs":
        stairs = feed.stairs(condition.over_steps)
        return lambda: stairs.value
    if condition.kind == "trend":
        return _trend(condition, feeds, late)
    judged = _judged(condition, feeds, late)
    if condition.kind == "level":
        return judged
    if condition.kind == "jump":
        return _jump(judged, feed.recent(condition, late=late))
    level, spread = _ruler(condition, feed, late)
    if condition.unit is not None:
        spread = _unit(condition, feeds)
    by_z = condition.ruler_z_above is not None or condition.ruler_z_below is not None
    return _distance(judged, level, spread) if by_z else _ratio(judged, level)


def _judged(condition: Condition, feeds: Feeds, late: bool) -> Measure:
    """The windowed value, relative and absolute as asked."""
    window = feeds.of(condition.signal).window(condition, late=late)
    if condition.relative_to is None and not condition.absolute:
        return lambda: window.value
    other = feeds.of(condition.relative_to).window(condition, late=late) if condition.relative_to is not None else None

    def judged() -> float | None:
        value = window.value
        if value is not None and other is not None:
            below = other.value
            value = None if below is None or below == 0.0 else value / below
        return abs(value) if value is not None and condition.absolute else value

    return judged


def _ruler(condition: Condition, feed: Feed, late: bool) -> tuple[Measure, Measure]:
    if condition.ruler == "recent":
        recent = feed.recent(condition, late=late)
        return (lambda: recent.level), (lambda: recent.spread)
    if condition.ruler in ("highest", "lowest"):
        extreme = feed.extreme(condition)
        return (lambda: extreme.level), (lambda: feed.start.spread)

    def level() -> float | None:
        band = feed.expected()
        return band[0] if band else None

    def spread() -> float | None:
        band = feed.expected()
        return band[1] if band else None

    return level, spread


def _jump(judged: Measure, recent: Recent | LateRecent) -> Measure:
    """The value over the median of the steps before it; nothing can be said where that is 0."""

    def jump() -> float | None:
        value, usual = judged(), recent.level
        return None if value is None or not usual else value / usual

    return jump


def _unit(condition: Condition, feeds: Feeds) -> Measure:
    """What another signal usually is."""
    first = feeds.of(condition.unit or "")
    other = feeds.of(condition.else_unit) if condition.else_unit is not None else None

    def unit() -> float | None:
        feed = other if other is not None and other.seen and not first.seen else first
        usual = feed.usual()
        return usual if usual is not None and usual > 0 else None

    return unit


def _ratio(judged: Measure, level: Measure) -> Measure:
    """The value over the ruler's level."""

    def ratio() -> float | None:
        value, expected = judged(), level()
        if value is None or expected is None:
            return None
        if expected == 0.0:
            return None if value == 0.0 else math.copysign(math.inf, value)
        return value / expected

    return ratio


def _distance(judged: Measure, level: Measure, spread: Measure) -> Measure:
    """How many spreads the value is above the ruler's level."""

    def distance() -> float | None:
        value, expected, width = judged(), level(), spread()
        if value is None or expected is None or width is None:
            return None
        return (value - expected) / width

    return distance


def _trend(condition: Condition, feeds: Feeds, late: bool) -> Measure:
    window = feeds.of(condition.signal).window(condition, late=late)
    unit = _unit(condition, feeds) if condition.unit is not None else None
    seconds = feeds.of("step_seconds").window(condition, late=late) if condition.per == "hour" else None

    def trend() -> float | None:
        slope = window.slope()
        if slope is None:
            return None
        if seconds is not None:
            took = seconds.value
            if not took:
                return None
            slope *= 3600.0 / took
        if unit is not None:
            width = unit()
            return None if width is None else slope / width
        return slope

    return trend
