"""Windows over a signal: what is judged at a step. Plain numbers, saved whole.

A window is the fewest last rows that cover so many optimizer steps and groups, never so many rows: a row that stands for five
steps fills it five times as fast. Only finite values are in it. `Window` is kept up to date at every step; `LateWindow` is the
same, made of the signal's last rows when somebody asks, for what is asked for rarely.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

__all__ = ["LateWindow", "Latest", "Leavers", "Row", "Rows", "Window", "WindowLike", "median_of", "most_rows"]

Row = tuple[int, float, float, float]  # step, value, optimizer steps, groups
_RESUM_EVERY = 256  # rows: a running sum drifts
_CANCELS = 1e6  # a value that leaves and was so many times the rest took digits of the sum with it


class Rows(Protocol):
    """A signal's last rows, and how many there have been."""

    rows: deque[Row]
    count: int


class WindowLike(Protocol):
    """What conditions read."""

    @property
    def value(self) -> float | None:
        """What is judged; None until the window is covered."""

    def slope(self) -> float | None:
        """How fast the signal changes, per optimizer step."""


class Leavers(Protocol):
    """What takes the rows that leave a window."""

    def push(self, value: float, span: float) -> None:
        """Take a row's value and its steps."""


def median_of(ordered: Sequence[float]) -> float:
    """The median of sorted values."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def most_rows(steps: float, groups: float) -> int:
    """The most rows that a window keeps, covered or not: rows that stand for next to nothing don't fill the memory."""
    return 2 * int(steps + groups) + 16


def _least_rows(statistic: str) -> int:
    return 3 if statistic in ("median", "min") else 1  # fewer say nothing


def _statistic(name: str, values: list[float]) -> float:
    if name == "median":
        return median_of(sorted(values))
    return min(values) if name == "min" else max(values)


def _zero(row: Row) -> Row:
    """1 where the value is 0: the mean of these is the share of zeros."""
    return (row[0], 1.0 if row[1] == 0.0 else 0.0, row[2], row[3])


def _slope(rows: Iterable[Row]) -> float | None:
    """Least-squares slope of the value over optimizer steps; None with fewer than 3 rows."""
    x, xs, ys = 0.0, [], []
    for _, value, span, _ in rows:
        x += span
        xs.append(x)
        ys.append(value)
    if len(xs) < 3:
        return None
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else None


class Window:
    """The window at every step."""

    __slots__ = (
        "_count",
        "_groups",
        "_least",
        "_mean",
        "_most",
        "_rows",
        "_share",
        "_statistic",
        "_steps",
        "_total",
        "groups",
        "recents",
        "steps",
        "value",
    )

    def __init__(self, *, steps: int, groups: int, statistic: str) -> None:
        self.steps, self.groups = steps, groups
        self._statistic = statistic
        self._share = statistic == "zero_share"
        self._mean = statistic in ("mean", "zero_share")
        self._least, self._most = _least_rows(statistic), most_rows(steps, groups)
        self._rows: deque[Row] = deque()
        self._steps = self._groups = self._total = 0.0
        self._count = 0
        self.recents: list[Leavers] = []  # take what leaves
        self.value: float | None = None

    def push(self, row: Row) -> None:
        """Take a step's row."""
        if self._share:
            row = _zero(row)
        rows, enough, least = self._rows, self.steps, self._least
        rows.append(row)
        _, value, span, groups = row
        steps, total, held = self._steps + span, self._total + value * span, self._groups + groups
        count = self._count + 1
        _, value, span, groups = rows[0]
        while steps - span >= enough and held - groups >= self.groups and len(rows) > least:
            rows.popleft()
            for recent in self.recents:
                recent.push(value, span)
            steps -= span
            held -= groups
            weight = value * span
            total -= weight
            if abs(weight) > _CANCELS * abs(total):
                count = _RESUM_EVERY
            _, value, span, groups = rows[0]
        self._steps, self._total, self._groups, self._count = steps, total, held, count
        if count >= _RESUM_EVERY or len(rows) > self._most:
            self._resum()
        if steps < enough or held < self.groups or len(rows) < least:
            self.value = None
        else:
            self.value = self._total / self._steps if self._mean else _statistic(self._statistic, [r[1] for r in rows])

    def _resum(self) -> None:
        while len(self._rows) > self._most:
            self._rows.popleft()
        self._count = 0
        self._steps = math.fsum(row[2] for row in self._rows)
        self._groups = math.fsum(row[3] for row in self._rows)
        self._total = math.fsum(row[1] * row[2] for row in self._rows)

    def slope(self) -> float | None:
        """Least-squares slope over the window; None until covered."""
        return _slope(self._rows) if self.value is not None else None

    def state(self) -> dict[str, Any]:
        """Plain types."""
        names = ("_steps", "_groups", "_total", "_count", "value")
        return {"rows": [list(row) for row in self._rows]} | {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._rows = deque(tuple(row) for row in state["rows"])
        for name in ("_steps", "_groups", "_total", "_count", "value"):
            setattr(self, name, state[name])


class LateWindow:
    """The window when it is asked for."""

    __slots__ = ("_at", "_covered", "_least", "_most", "_source", "_statistic", "_value", "groups", "steps")

    def __init__(self, source: Rows, *, steps: int, groups: int, statistic: str) -> None:
        self.steps, self.groups = steps, groups
        self._source, self._statistic = source, statistic
        self._least, self._most = _least_rows(statistic), most_rows(steps, groups)
        self._at = -1  # the row count that the rest is of
        self._covered: list[Row] = []  # newest first; none where not covered
        self._value: float | None = None

    @property
    def value(self) -> float | None:
        """What is judged; None until covered."""
        if self._at != self._source.count:
            self._make()
        return self._value

    @property
    def size(self) -> int:
        """How many of the last rows it covers; 0 until covered."""
        if self._at != self._source.count:
            self._make()
        return len(self._covered)

    def _make(self) -> None:
        self._at, self._value = self._source.count, None
        steps, groups, rows = 0.0, 0.0, []
        for row in islice(reversed(self._source.rows), self._most):
            rows.append(row)
            steps += row[2]
            groups += row[3]
            if steps >= self.steps and groups >= self.groups and len(rows) >= self._least:
                self._covered = rows
                self._value = self._judged(rows, steps)
                return
        self._covered = []

    def _judged(self, rows: list[Row], steps: float) -> float:
        if self._statistic in ("mean", "zero_share"):
            weighed = map(_zero, rows) if self._statistic == "zero_share" else rows
            return math.fsum(row[1] * row[2] for row in weighed) / steps
        return _statistic(self._statistic, [row[1] for row in rows])

    def slope(self) -> float | None:
        """Least-squares slope over the window; None until covered."""
        return _slope(reversed(self._covered)) if self.size else None


class Latest:
    """A window of one step: the last finite value itself."""

    __slots__ = ("_source",)

    def __init__(self, source: Rows) -> None:
        self._source = source

    @property
    def value(self) -> float | None:
        """The last finite value."""
        rows = self._source.rows
        return rows[-1][1] if rows else None

    @property
    def size(self) -> int:
        """1, or 0 before the first row."""
        return min(len(self._source.rows), 1)

    def slope(self) -> float | None:
        """None: one step has no slope."""
        return None
