"""A condition made ready: does it hold at this step, and by which value?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from grpo_lightning.health.feeds import Feed, Feeds
from grpo_lightning.health.records import Condition
from grpo_lightning.health.windows import Recent

__all__ = ["Gauge"]

Measure = Callable[[], float | None]


class Gauge:
    """Holds a condition against its feeds.

    `holds()` is True, False, or None where it can't be said: the signal is not measured at this step, its window is not
    covered, or its ruler not made. A value that is not finite violates.
    """

    def __init__(self, condition: Condition, feeds: Feeds) -> None:
        self.condition = condition
        self.feed = feeds.of(condition.signal)
        self.bound = condition.bound
        self._low = condition.low
        self.measure = _measure(condition, feeds)
        self.value: float | None = None
        self.other: Gauge | None = None  # judged where the signal is not measured
        if condition.else_signal is not None:
            self.other = Gauge(replace(condition, signal=condition.else_signal, else_signal=None), feeds)

    @property
    def judged(self) -> Gauge:
        """This gauge, or the one of the signal that stands in."""
        other = self.other
        return other if other is not None and not self.feed.seen and other.feed.seen else self

    def holds(self, *, fresh: bool = True) -> bool | None:
        """Whether the condition holds; with `fresh` only where the signal was measured at this step."""
        if self.other is not None and self.judged is not self:
            held = self.other.holds(fresh=fresh)
            self.value = self.other.value
            return held
        feed = self.feed
        if self.condition.missing:
            return not feed.seen
        if fresh and not feed.fresh:
            return None
        if not feed.finite:
            self.value = feed.last
            return True
        value = self.measure()
        self.value = value
        if value is None:
            return None
        return value < self.bound if self._low else value > self.bound

    @property
    def expected(self) -> float | None:
        """The level of the ruler, for the alert's message."""
        if self.judged is not self:
            return self.judged.expected
        condition = self.condition
        if condition.kind == "jump" or condition.ruler == "recent":
            return self.feed.recent(condition).level
        if condition.kind == "ruler" and condition.ruler in ("highest", "lowest"):
            return self.feed.extreme(condition).level
        band = self.feed.expected()
        return band[0] if band else None


def _measure(condition: Condition, feeds: Feeds) -> Measure:
    """What is held against the bound."""
    feed = feeds.of(condition.signal)
    if condition.kind in ("not_finite", "missing"):
        return lambda: -math.inf  # a finite value never violates
    if condition.kind == "stairs":
        feed.stairs(condition.over_steps)
        return lambda: feed.rises
    if condition.kind == "trend":
        return _trend(condition, feed, feeds)
    judged = _judged(condition, feeds)
    if condition.kind == "level":
        return judged
    if condition.kind == "jump":
        return _jump(judged, feed.recent(condition))
    level, spread = _ruler(condition, feed)
    if condition.unit is not None:
        spread = _unit(condition, feeds)
    return _against(condition, judged, level, spread if _by_z(condition) else None)


def _by_z(condition: Condition) -> bool:
    return condition.ruler_z_above is not None or condition.ruler_z_below is not None


def _judged(condition: Condition, feeds: Feeds) -> Measure:
    """The windowed value, relative and absolute as asked."""
    window = feeds.of(condition.signal).window(condition)
    if condition.relative_to is None and not condition.absolute:
        return lambda: window.value
    other = feeds.of(condition.relative_to).window(condition) if condition.relative_to is not None else None

    def judged() -> float | None:
        value = window.value
        if value is not None and other is not None:
            value = None if other.value is None or other.value == 0.0 else value / other.value
        return abs(value) if value is not None and condition.absolute else value

    return judged


def _ruler(condition: Condition, feed: Feed) -> tuple[Measure, Measure]:
    if condition.ruler == "recent":
        recent = feed.recent(condition)
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


def _jump(judged: Measure, recent: Recent) -> Measure:
    """The value over the median of the steps before it; nothing can be said where that is 0."""

    def jump() -> float | None:
        value, usual = judged(), recent.level
        return None if value is None or not usual else value / usual

    return jump


def _unit(condition: Condition, feeds: Feeds) -> Measure:
    """What another signal usually is."""
    names = [name for name in (condition.unit, condition.else_unit) if name is not None]
    candidates = [feeds.of(name) for name in names]

    def unit() -> float | None:
        feed = next((feed for feed in candidates if feed.seen), candidates[0])
        usual = feed.usual()
        return usual if usual is not None and usual > 0 else None

    return unit


def _against(condition: Condition, judged: Measure, level: Measure, spread: Measure | None) -> Measure:
    """(value - level) / spread, or value / level."""

    def ratio() -> float | None:
        value, expected = judged(), level()
        if value is None or expected is None:
            return None
        if expected == 0.0:
            return None if value == 0.0 else math.copysign(math.inf, value)
        return value / expected

    def distance() -> float | None:
        value, expected = judged(), level()
        width = spread() if spread is not None else None
        if value is None or expected is None or width is None:
            return None
        return (value - expected) / width

    return ratio if spread is None else distance


def _trend(condition: Condition, feed: Feed, feeds: Feeds) -> Measure:
    window = feed.window(condition)
    unit = _unit(condition, feeds) if condition.unit is not None else None
    seconds = feeds.of("step_seconds") if condition.per == "hour" else None
    if seconds is not None:
        seconds.window(condition)

    def trend() -> float | None:
        slope = window.slope()
        if slope is None:
            return None
        if seconds is not None:
            took = seconds.window(condition).value
            if not took:
                return None
            slope *= 3600.0 / took
        if unit is not None:
            width = unit()
            return None if width is None else slope / width
        return slope

    return trend
