"""The steps before an onset against those after it, signal by signal, in robust numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_lightning.health.diagnosing.columns import Column, Columns
from grpo_lightning.health.diagnosing.records import Moved, Number, Span
from grpo_lightning.health.onset import onset
from grpo_lightning.health.windows import median_of

__all__ = ["Compared", "Comparison", "level_changes", "spread_of"]

_MAD = 1.4826
_LEAST_SPREAD = 0.02  # of the level
_WINDOW = 40  # optimizer steps before, and after
_ROWS = 12  # that a window should have
_START = 20  # optimizer steps of the run's own start
_FEWEST = 4  # rows whose deviations say something
_LEAST_ROWS = 2  # rows without which there is no "before"
_NEAR = 3  # steps by which an onset may be estimated too late
_MOST_MOVED = 12
_SURE = 5.0  # standard errors between two levels
_NOT_MOVING = ("lr", "kl_coef", "loss", "policy_loss")


class Band(Protocol):
    """A baseline."""

    def band(self, signal: str, step: float) -> tuple[float, float] | None:
        """(level, spread) at a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A signal in the windows: medians, and the spread of the steps before."""

    signal: str
    start: float | None  # the run's own first steps, or the baseline there
    before: float | None
    after: float
    spread: float  # 1.4826 x median absolute deviation of `before`, at least 2 % of its level
    t: float  # Welch's t of the means, after against before
    t_start: float  # and against the start
    extreme: float  # the value around the onset that is farthest from `before`
    extreme_step: int

    @property
    def number(self) -> Number:
        """Before and after."""
        return Number(signal=self.signal, before=self.before, after=self.after)

    @property
    def from_start(self) -> Number:
        """The run's start and after."""
        return Number(signal=self.signal, before=self.start, after=self.after)

    @property
    def at_extreme(self) -> Number:
        """Before, and the farthest single step."""
        return Number(signal=self.signal, before=self.before, after=self.extreme, step=self.extreme_step)

    @property
    def z(self) -> float:
        """(after - before) / spread; 0 without a before."""
        return (self.after - self.before) / self.spread if self.before is not None else 0.0

    @property
    def extreme_z(self) -> float:
        """The farthest single step in spreads."""
        return (self.extreme - self.before) / self.spread if self.before is not None else 0.0

    def rose(self, *, times: float = 1.0, z: float = 3.0, least: float = 0.0, since_start: bool = False) -> bool:
        """Above the level before by that factor, that amount, and that many spreads and standard errors, all of them."""
        base = self.start if since_start else self.before
        if base is None or (self.t_start if since_start else self.t) < z:
            return False
        return self.after - base >= max((times - 1.0) * abs(base), z * self.spread, least, 1e-12)

    def fell(self, *, times: float = 1.0, z: float = 3.0, least: float = 0.0, since_start: bool = False) -> bool:
        """Below the level before by that factor (0.5: to half of it), and as in `rose`."""
        base = self.start if since_start else self.before
        if base is None or (self.t_start if since_start else self.t) > -z:
            return False
        return base - self.after >= max((1.0 - times) * abs(base), z * self.spread, least, 1e-12)


class Comparison:
    """The windows around an onset. Without one, the run's start stands before and its end after.

    `before` is the `window` optimizer steps up to the onset (12 rows at least), `after` as many from the onset on, or those up
    to `until` where that is later.
    """

    def __init__(
        self,
        run: Columns,
        *,
        onset: int | None = None,
        until: int | None = None,
        baseline: Band | None = None,
        window: int = _WINDOW,
    ) -> None:
        self.run, self.onset, self._baseline = run, onset, baseline
        self.start = _first_steps(run.steps)
        self.before, self.after = _windows(run.steps, onset, until, window)
        self._known: dict[str, Compared | None] = {}

    def __getitem__(self, signal: str) -> Compared | None:
        """The signal in the windows; None where it isn't measured after the onset."""
        if signal not in self._known:
            self._known[signal] = self._compare(signal)
        return self._known[signal]

    def measured(self, *signals: str) -> bool:
        """Whether all of them are, in the run."""
        return all(signal in self.run for signal in signals)

    def _compare(self, signal: str) -> Compared | None:
        column = self.run[signal]
        after = _finite(column, self.after)
        if self.after is None or not after:
            return None
        before = _finite(column, self.before)
        band = self._baseline.band(signal, self.after.first) if self._baseline is not None else None
        if len(before) >= _LEAST_ROWS or (before and self._seldom(column)):
            level: float | None = median_of(sorted(before))
            few = max(before) - min(before) if len(before) < _FEWEST else 0.0
            spread = max(spread_of(before), few)
        else:
            level, spread = band if band is not None else (None, 0.0)
        level_now = median_of(sorted(after))
        near = column.pairs(self._near(), self.after.last) if self.onset is not None else []
        far = max(near, key=lambda p: abs(p[1] - (level or 0.0)), default=(self.after.last, level_now))
        return Compared(
            signal=signal,
            start=self._start(column, signal),
            before=level,
            after=level_now,
            spread=max(spread, 1e-300),
            t=_welch(before, after)
            if len(before) >= _LEAST_ROWS
            else math.copysign(math.inf, level_now - (level or 0.0)),
            t_start=_welch(_finite(column, self.start), after),
            extreme=far[1],
            extreme_step=far[0],
        )

    def _seldom(self, column: Column) -> bool:
        """An evaluation: measured every N steps."""
        return len(column) * 4 < len(self.run)

    def _near(self) -> int:
        onset = self.onset or 0
        return max(onset - _NEAR, self.before.first if self.before is not None else onset)

    def _start(self, column: Column, signal: str) -> float | None:
        band = self._baseline.band(signal, self.start.first) if self._baseline is not None and self.start else None
        values = _finite(column, self.start)
        if band is not None:
            return band[0]
        return median_of(sorted(values)) if values else None

    def moved(self) -> tuple[Moved, ...]:
        """What went to another level around the onset or in the steps before it, the first first."""
        if self.onset is None or self.after is None:
            return ()
        found = [moved for name in self.run.signals if (moved := self._moved(name)) is not None]
        return tuple(sorted(found, key=lambda moved: (moved.step, -_size(moved.number)))[:_MOST_MOVED])

    def _moved(self, signal: str) -> Moved | None:
        """Where the signal's rows split best into two levels, if these are far apart."""
        column = self.run[signal]
        if self.after is None or signal.endswith("_seconds") or signal in _NOT_MOVING or self._seldom(column):
            return None
        first = self.before.first if self.before is not None else self.after.first
        rows = column.pairs(first, self.after.last)
        if len(rows) < 2 * _LEAST_ROWS:
            return None
        step = onset(rows, streak_start=self.after.last)
        before, after = [v for s, v in rows if s < step], [v for s, v in rows if s >= step]
        if len(before) < _LEAST_ROWS or abs(_welch(before, after)) < _SURE:
            return None
        low, high = median_of(sorted(before)), median_of(sorted(after))
        if abs(high - low) < max(0.3 * max(abs(low), abs(high)), 4.0 * spread_of(before)):
            return None
        return Moved(step=step, number=Number(signal=signal, before=low, after=high))


def _welch(before: Sequence[float], after: Sequence[float]) -> float:
    """Difference of the means in its standard errors; few rows after the onset are taken to vary as those before."""
    if not before or not after:
        return 0.0
    unit = max(*map(abs, before), *map(abs, after), 1e-300)  # squares of huge numbers overflow
    before, after = [v / unit for v in before], [v / unit for v in after]
    mean_a, mean_b = sum(after) / len(after), sum(before) / len(before)
    var_a = sum((v - mean_a) ** 2 for v in after) / max(len(after) - 1, 1)
    var_b = sum((v - mean_b) ** 2 for v in before) / max(len(before) - 1, 1)
    error = math.sqrt(max(var_a, var_b) / len(after) + var_b / len(before))
    if error > 0:
        return (mean_a - mean_b) / error
    return math.copysign(math.inf, mean_a - mean_b) if mean_a != mean_b else 0.0


def _size(number: Number) -> float:
    ratio = number.ratio
    return abs(math.log(ratio)) if ratio else 0.0


def _finite(column: Column, span: Span | None) -> list[float]:
    return [v for v in column.within(span.first, span.last) if math.isfinite(v)] if span is not None else []


def _first_steps(steps: Sequence[int]) -> Span | None:
    """The first 20 optimizer steps, and 4 rows at least; at most a third of the run."""
    if not steps:
        return None
    rows = max(sum(step <= _START for step in steps[:_START]), min(_FEWEST, len(steps)))
    return Span(first=steps[0], last=steps[min(rows, max(len(steps) // 3, 1)) - 1])


def _windows(
    steps: Sequence[int], onset: int | None, until: int | None, window: int
) -> tuple[Span | None, Span | None]:
    if not steps:
        return None, None
    if onset is None:
        rows = min(_START, max(len(steps) // 3, 1))
        if len(steps) < 2 * _FEWEST:
            return None, Span(first=steps[0], last=steps[-1])
        return Span(first=steps[0], last=steps[rows - 1]), Span(first=steps[-rows], last=steps[-1])
    earlier = [step for step in steps if step < onset]
    later = [step for step in steps if step >= onset] or [steps[-1]]
    rows_before = max(sum(step >= onset - window for step in earlier), min(_ROWS, len(earlier)))
    rows_after = max(sum(step < onset + window for step in later), min(_ROWS, len(later)))
    last = max(later[rows_after - 1], min(until or 0, later[-1]))
    before = Span(first=earlier[-rows_before], last=earlier[-1]) if rows_before else None
    return before, Span(first=later[0], last=last)


def spread_of(values: Sequence[float]) -> float:
    """1.4826 x the median absolute deviation, at least 2 % of the level; 0 for fewer than 2 values."""
    if len(values) < 2:
        return _LEAST_SPREAD * abs(values[0]) if values else 0.0
    level = median_of(sorted(values))
    return max(_MAD * median_of(sorted(abs(v - level) for v in values)), _LEAST_SPREAD * abs(level))


def level_changes(column: Column, *, times: float, first: int, last: int, half: int = 5) -> list[Moved]:
    """Steps at which a signal goes to another level and stays: medians of `half` rows before and after.

    They must differ by the factor and by 4 deviations inside the halves; of neighbours the greatest is kept.
    """
    rows = column.pairs(first, last)
    scored = []
    for place in range(half, len(rows) - half + 1):
        before = [value for _, value in rows[place - half : place]]
        after = [value for _, value in rows[place : place + half]]
        low, high = median_of(sorted(before)), median_of(sorted(after))
        inside = max(spread_of(before), spread_of(after), 1e-300)
        far = max(abs(low), abs(high)) >= times * min(abs(low), abs(high)) or low * high < 0
        if far and abs(high - low) >= 4.0 * inside:
            number = Number(signal="", before=low, after=high, step=rows[place][0])
            gap = abs(math.fsum(after) - math.fsum(before)) / half
            scored.append((gap / inside, place, Moved(step=rows[place][0], number=number)))
    kept: list[tuple[int, Moved]] = []
    for _, place, moved in sorted(scored, key=lambda item: -item[0]):
        if all(abs(place - other) >= half for other, _ in kept):
            kept.append((place, moved))
    return [moved for _, moved in sorted(kept, key=lambda pair: pair[0])]
