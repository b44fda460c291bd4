"""Windows over a signal: what is judged at a step, and the rulers made of earlier steps. Plain numbers, saved whole.

A window counts optimizer steps and groups, never rows: a row that stands for five steps fills it five times as fast.
Values that are not finite are left out of every window and ruler.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

__all__ = ["Extreme", "Latest", "Recent", "Stairs", "Start", "Window", "median_of"]

_LEAST_ROWS = 4  # in a ruler
_MAD = 1.4826  # median absolute deviation to standard deviation of a normal
_IQR = 1.349
_LEAST_SPREAD = 0.02  # of the level


def median_of(ordered: Sequence[float]) -> float:
    """The median of sorted values."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Window:
    """The last rows of a signal that cover `steps` optimizer steps and `groups` groups.

    `value` is None until the window is covered.
    """

    __slots__ = (
        "_count",
        "_filled",
        "_groups",
        "_least_rows",
        "_mean",
        "_rows",
        "_statistic",
        "_steps",
        "_total",
        "groups",
        "steps",
        "value",
    )

    def __init__(self, *, steps: int, groups: int, statistic: str) -> None:
        self.steps, self.groups = steps, groups
        self._statistic = statistic
        self._mean = statistic == "mean"
        self._least_rows = 3 if statistic in ("median", "min") else 1  # fewer say nothing
        self._rows: deque[tuple[float, float, float]] = deque()  # value, span, groups
        self._steps = self._groups = self._total = 0.0
        self._count = 0
        self._filled = False
        self.value: float | None = None

    def push(self, value: float, span: float, groups: float) -> Sequence[float]:
        """Take a step's value; returns those that left the window."""
        rows = self._rows
        rows.append((value, span, groups))
        steps, total, held = self._steps + span, self._total + value * span, self._groups + groups
        left: list[float] | tuple[()] = ()
        while len(rows) > self._least_rows:
            old, width, prompts = rows[0]
            if steps - width < self.steps or held - prompts < self.groups:
                break
            rows.popleft()
            steps -= width
            held -= prompts
            total -= old * width
            left = [*left, old]
        self._steps, self._total, self._groups = steps, total, held
        self._count += 1
        if self._count >= 64:  # sums drift: make them anew
            self._resum()
        if self._filled or self._covered():
            self.value = self._total / self._steps if self._mean else self._other()
        return left

    def _covered(self) -> bool:
        enough = self._steps >= self.steps and self._groups >= self.groups
        self._filled = enough and len(self._rows) >= self._least_rows
        return self._filled

    def _resum(self) -> None:
        self._count = 0
        self._steps = math.fsum(row[1] for row in self._rows)
        self._groups = math.fsum(row[2] for row in self._rows)
        self._total = math.fsum(row[0] * row[1] for row in self._rows)

    def _other(self) -> float:
        values = [row[0] for row in self._rows]
        if self._statistic == "median":
            return median_of(sorted(values))
        if self._statistic == "zero_share":
            return sum(row[1] for row in self._rows if row[0] == 0.0) / self._steps
        return min(values) if self._statistic == "min" else max(values)

    def slope(self) -> float | None:
        """Least-squares slope of the value over optimizer steps, None until covered or with fewer than 3 rows."""
        if not self._filled or len(self._rows) < 3:
            return None
        x, points = 0.0, []
        for value, span, _ in self._rows:
            x += span
            points.append((x, value))
        mean_x = sum(p[0] for p in points) / len(points)
        mean_y = sum(p[1] for p in points) / len(points)
        spread = sum((p[0] - mean_x) ** 2 for p in points)
        return sum((px - mean_x) * (py - mean_y) for px, py in points) / spread if spread else None

    def state(self) -> dict[str, Any]:
        """Plain types."""
        names = ("_steps", "_groups", "_total", "_count", "_filled", "value")
        return {"rows": [list(row) for row in self._rows]} | {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._rows = deque((v, s, g) for v, s, g in state["rows"])
        for name in ("_steps", "_groups", "_total", "_count", "_filled", "value"):
            setattr(self, name, state[name])


class Latest:
    """A window of one step: the value itself."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def push(self, value: float, span: float, groups: float) -> Sequence[float]:
        """Take a step's value; returns the one before."""
        before, self.value = self.value, value
        return () if before is None else (before,)

    def slope(self) -> float | None:
        """None: one step has no slope."""
        return None

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {"value": self.value}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.value = state["value"]


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
    """The highest window so far, or the lowest."""

    __slots__ = ("_high", "level")

    def __init__(self, *, high: bool) -> None:
        self._high = high
        self.level: float | None = None

    def push(self, value: float | None) -> None:
        """Take a window's value, after it was judged."""
        if value is None:
            return
        if self.level is None or (value > self.level if self._high else value < self.level):
            self.level = value

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {"level": self.level}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.level = state["level"]


class Recent:
    """The rows before a window: median and interquartile spread of the last `steps` steps that left it."""

    __slots__ = ("_covered", "_ordered", "_rows", "_steps", "ready")

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._rows: deque[tuple[float, float]] = deque()
        self._ordered: list[float] = []
        self._covered = 0.0
        self.ready = False  # half of the steps and 4 rows seen

    def push(self, value: float, span: float) -> None:
        """Take a value that has left the window."""
        self._rows.append((value, span))
        insort(self._ordered, value)
        self._covered += span
        while len(self._rows) > _LEAST_ROWS and self._covered - self._rows[0][1] >= self._steps:
            old, width = self._rows.popleft()
            self._covered -= width
            del self._ordered[bisect_left(self._ordered, old)]
        self.ready = self._covered >= self._steps / 2 and len(self._rows) >= _LEAST_ROWS

    @property
    def level(self) -> float | None:
        """The median, None until ready."""
        return median_of(self._ordered) if self.ready else None

    @property
    def spread(self) -> float | None:
        """Interquartile range as a standard deviation, at least 2 % of the level."""
        if not self.ready:
            return None
        ordered, n = self._ordered, len(self._ordered)
        wide = (ordered[(3 * n) // 4] - ordered[n // 4]) / _IQR
        return max(wide, _LEAST_SPREAD * abs(median_of(ordered)), 1e-300)

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {"rows": [list(row) for row in self._rows], "covered": self._covered, "ready": self.ready}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._rows = deque((v, s) for v, s in state["rows"])
        self._ordered = sorted(v for v, _ in self._rows)
        self._covered, self.ready = state["covered"], state["ready"]


class Stairs:
    """Counts step-like rises: the median of 5 rows above that of the 5 before by more than 6 of their mean deviations.

    A rise must at least double the level; it ends where the score falls below 1.
    """

    __slots__ = ("_inside", "_rises", "_rows", "_steps")

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._rows: deque[float] = deque(maxlen=10)
        self._rises: deque[int] = deque()
        self._inside = False

    def push(self, value: float, step: int) -> float:
        """Take a step's value; the rises within the last steps."""
        self._rows.append(value)
        while self._rises and step - self._rises[0] > self._steps:
            self._rises.popleft()
        if len(self._rows) == 10:
            score = self._score()
            if not self._inside and score > 6.0:
                self._inside = True
                self._rises.append(step)
            elif self._inside and score < 1.0:
                self._inside = False
        return float(len(self._rises))

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
        return {"rows": list(self._rows), "rises": list(self._rises), "inside": self._inside}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._rows = deque(state["rows"], maxlen=10)
        self._rises, self._inside = deque(state["rises"]), state["inside"]


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """Median and 1.4826 x median absolute deviation, the spread at least 2 % of the level."""
    level = median_of(sorted(values))
    spread = _MAD * median_of(sorted(abs(v - level) for v in values))
    return level, max(spread, _LEAST_SPREAD * abs(level), 1e-300)
