"""A condition made ready: does it hold at this step, and by which value?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from grpo_lightning.health.feeds import Feed, Feeds
from grpo_lightning.health.records import Condition
from grpo_lightning.health.windows import WindowLike

__all__ = ["Gauge", "Test"]

Measure = Callable[[], float | None]
Test = Callable[[], bool | None]


class Judged(Protocol):
    """What has a value once there is one."""

    @property
    def value(self) -> float | None: ...


class Level(Protocol):
    """What has a level once there is one."""

    @property
    def level(self) -> float | None: ...


class Spread(Protocol):
    """What has a spread once there is one."""

    @property
    def spread(self) -> float | None: ...


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
    window = _judged(condition, feeds, late)
    if condition.kind == "level":
        return lambda: window.value
    if condition.kind == "jump":
        return _jump(window, feed.recent(condition, late=late))
    level, spread = _ruler(condition, feed, late)
    if condition.unit is not None:
        spread = _Unit(condition, feeds)
    by_z = condition.ruler_z_above is not None or condition.ruler_z_below is not None
    return _distance(window, level, spread) if by_z else _ratio(window, level)


class _Changed:
    """A windowed value, relative to another signal's and absolute as asked."""

    def __init__(self, window: WindowLike, other: WindowLike | None, *, absolute: bool) -> None:
        self._window, self._other, self._absolute = window, other, absolute

    @property
    def value(self) -> float | None:
        """None where there is nothing to divide by."""
        value = self._window.value
        if value is not None and self._other is not None:
            below = self._other.value
            value = None if below is None or below == 0.0 else value / below
        return abs(value) if value is not None and self._absolute else value


def _judged(condition: Condition, feeds: Feeds, late: bool) -> Judged:
    """The windowed value, relative and absolute as asked."""
    window = feeds.of(condition.signal).window(condition, late=late)
    if condition.relative_to is None:
        return _Changed(window, None, absolute=True) if condition.absolute else window
    other = feeds.of(condition.relative_to).window(condition, late=late)
    return _Changed(window, other, absolute=condition.absolute)


def _ruler(condition: Condition, feed: Feed, late: bool) -> tuple[Level, Spread]:
    if condition.ruler == "recent":
        recent = feed.recent(condition, late=late)
        return recent, recent
    if condition.ruler in ("highest", "lowest"):
        return feed.extreme(condition), feed.start
    return feed.ruler, feed.ruler


class _Unit:
    """What another signal usually is."""

    def __init__(self, condition: Condition, feeds: Feeds) -> None:
        self._first = feeds.of(condition.unit or "")
        self._other = feeds.of(condition.else_unit) if condition.else_unit is not None else None

    @property
    def spread(self) -> float | None:
        """None where it is not above 0."""
        first, other = self._first, self._other
        usual = (other if other is not None and other.seen and not first.seen else first).usual()
        return usual if usual is not None and usual > 0 else None


def _jump(window: Judged, recent: Level) -> Measure:
    """The value over the median of the steps before it; nothing can be said where that is 0."""

    def jump() -> float | None:
        value, usual = window.value, recent.level
        return None if value is None or not usual else value / usual

    return jump


def _ratio(window: Judged, ruler: Level) -> Measure:
    """The value over the ruler's level."""

    def ratio() -> float | None:
        value, expected = window.value, ruler.level
        if value is None or expected is None:
            return None
        if expected == 0.0:
            return None if value == 0.0 else math.copysign(math.inf, value)
        return value / expected

    return ratio


def _distance(window: Judged, ruler: Level, spread: Spread) -> Measure:
    """How many spreads the value is above the ruler's level."""

    def distance() -> float | None:
        value, expected, width = window.value, ruler.level, spread.spread
        if value is None or expected is None or width is None:
            return None
        return (value - expected) / width

    return distance


def _trend(condition: Condition, feeds: Feeds, late: bool) -> Measure:
    window = feeds.of(condition.signal).window(condition, late=late)
    unit = _Unit(condition, feeds) if condition.unit is not None else None
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
            width = unit.spread
            return None if width is None else slope / width
        return slope

    return trend
