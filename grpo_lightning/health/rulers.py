"""Rulers: what a signal is expected to be, made of the run's own earlier steps. Plain numbers, saved whole."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from grpo_lightning.health.windows import Latest, LateWindow, Row, Rows, median_of, most_rows

__all__ = ["Extreme", "LateRecent", "Recent", "Stairs", "Start", "recent_rows"]

_LEAST_ROWS = 4  # in a ruler
_MAD = 1.4826  # median absolute deviation to standard deviation of a normal
_IQR = 1.349
_LEAST_SPREAD = 0.02  # of the level


class Start:
    """The run's own first steps: median and robust spread of the rows of `steps` steps, twice as many groups, and 4 rows."""

    __slots__ = ("_covered", "_groups", "_rows", "_steps", "level", "mean", "spread")

    def __init__(self, *, steps: float) -> None:
        self._steps = steps
        self._covered = self._groups = 0.0
        self._rows: list[float] = []
        self.level: float | None = None
        self.mean: float | None = None  # not 0 where most rows are
        self.spread: float | None = None

    def push(self, value: float, span: float, groups: float) -> None:
        """Take a step's value, until the ruler is made."""
        if self.level is not None:
            return
        self._rows.append(value)
        self._covered += span
        self._groups += groups
        if self._covered >= self._steps and self._groups >= 2 * self._steps and len(self._rows) >= _LEAST_ROWS:
            self.level, self.spread = _robust(self._rows)
            self.mean = math.fsum(self._rows) / len(self._rows)
            self._rows = []

    def state(self) -> dict[str, Any]:
        """Plain types."""
        names = ("level", "mean", "spread")
        seen = {"covered": self._covered, "groups": self._groups, "rows": list(self._rows)}
        return seen | {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._covered, self._groups, self._rows = state["covered"], state["groups"], list(state["rows"])
        self.level, self.mean, self.spread = state["level"], state["mean"], state["spread"]


class Extreme:
    """The highest window so far, this one included, or the lowest."""

    __slots__ = ("_high", "level")

    def __init__(self, *, high: bool) -> None:
        self._high = high
        self.level: float | None = None

    def push(self, value: float) -> None:
        """Take a window's value."""
        if self.level is None or (value > self.level if self._high else value < self.level):
            self.level = value

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {"level": self.level}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.level = state["level"]


def recent_rows(steps: int) -> int:
    """The most rows that the steps before a window are taken from."""
    return most_rows(steps, _LEAST_ROWS)


def _recent_spread(ordered: Sequence[float]) -> float:
    """Interquartile range as a standard deviation, at least 2 % of the level."""
    n = len(ordered)
    wide = (ordered[(3 * n) // 4] - ordered[n // 4]) / _IQR
    return max(wide, _LEAST_SPREAD * abs(median_of(ordered)), 1e-300)


class Recent:
    """The rows before a window: median and interquartile spread of the last `steps` steps that left it."""

    __slots__ = ("_covered", "_most", "_ordered", "_rows", "_steps", "ready")

    def __init__(self, *, steps: int) -> None:
        self._steps, self._most = steps, recent_rows(steps)
        self._rows: deque[tuple[float, float]] = deque()
        self._ordered: list[float] = []
        self._covered = 0.0
        self.ready = False  # half of the steps and 4 rows seen

    def push(self, value: float, span: float) -> None:
        """Take a value that has left the window."""
        rows = self._rows
        rows.append((value, span))
        insort(self._ordered, value)
        covered = self._covered + span
        while len(rows) > _LEAST_ROWS and (covered - rows[0][1] >= self._steps or len(rows) > self._most):
            old, width = rows.popleft()
            covered -= width
            del self._ordered[bisect_left(self._ordered, old)]
        self._covered = covered
        self.ready = covered >= self._steps / 2 and len(rows) >= _LEAST_ROWS

    @property
    def level(self) -> float | None:
        """The median, None until ready."""
        return median_of(self._ordered) if self.ready else None

    @property
    def spread(self) -> float | None:
        """The interquartile spread, None until ready."""
        return _recent_spread(self._ordered) if self.ready else None

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {"rows": [list(row) for row in self._rows], "covered": self._covered, "ready": self.ready}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._rows = deque((v, s) for v, s in state["rows"])
        self._ordered = sorted(v for v, _ in self._rows)
        self._covered, self.ready = state["covered"], state["ready"]


class LateRecent:
    """The same when it is asked for, of the signal's last rows."""

    __slots__ = ("_at", "_most", "_ordered", "_source", "_steps", "_window")

    def __init__(self, source: Rows, window: LateWindow | Latest, *, steps: int) -> None:
        self._source, self._window, self._steps, self._most = source, window, steps, recent_rows(steps)
        self._at = -1
        self._ordered: list[float] = []  # none until ready

    def _make(self) -> list[float]:
        if self._at == self._source.count:
            return self._ordered
        self._at, self._ordered = self._source.count, []
        inside = self._window.size
        covered, values = 0.0, []
        for row in islice(reversed(self._source.rows), inside, inside + self._most) if inside else ():
            values.append(row[1])
            covered += row[2]
            if covered >= self._steps and len(values) >= _LEAST_ROWS:
                break
        if covered >= self._steps / 2 and len(values) >= _LEAST_ROWS:
            self._ordered = sorted(values)
        return self._ordered

    @property
    def level(self) -> float | None:
        """The median, None until ready."""
        ordered = self._make()
        return median_of(ordered) if ordered else None

    @property
    def spread(self) -> float | None:
        """The interquartile spread, None until ready."""
        ordered = self._make()
        return _recent_spread(ordered) if ordered else None


class Stairs:
    """Counts step-like rises: the median of 5 rows above that of the 5 before by more than 6 of their mean deviations.

    A rise must at least double the level; it ends where the score falls below 1.
    """

    __slots__ = ("_inside", "_rises", "_rows", "_steps", "value")

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._rows: deque[float] = deque(maxlen=10)
        self._rises: deque[int] = deque()
        self._inside = False
        self.value = 0.0  # rises within the last steps

    def push(self, row: Row) -> None:
        """Take a step's row."""
        step = row[0]
        self._rows.append(row[1])
        while self._rises and step - self._rises[0] > self._steps:
            self._rises.popleft()
        if len(self._rows) == 10:
            score = self._score()
            if not self._inside and score > 6.0:
                self._inside = True
                self._rises.append(step)
            elif self._inside and score < 1.0:
                self._inside = False
        self.value = float(len(self._rises))

    def _score(self) -> float:
        rows = list(self._rows)
        before, after = rows[:5], rows[5:]
        low, high = sorted(before)[2], sorted(after)[2]
        if high < 2.0 * abs(low):
            return 0.0
        inside = (sum(abs(x - low) for x in before) + sum(abs(x - high) for x in after)) / 10
        return (high - low) / max(inside, 1e-3 * abs(high), 1e-300)

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {"rows": list(self._rows), "rises": list(self._rises), "inside": self._inside, "value": self.value}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._rows = deque(state["rows"], maxlen=10)
        self._rises, self._inside, self.value = deque(state["rises"]), state["inside"], state["value"]


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """Median and 1.4826 x median absolute deviation, the spread at least 2 % of the level."""
    level = median_of(sorted(values))
    spread = _MAD * median_of(sorted(abs(v - level) for v in values))
    return level, max(spread, _LEAST_SPREAD * abs(level), 1e-300)
