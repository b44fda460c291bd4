"""Rulers made of earlier runs: per signal a robust band over the steps, and the steps where something happened."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.errors import ConfigError
from grpo_lightning.health.onset import onset
from grpo_lightning.health.records import Step
from grpo_lightning.health.windows import median_of

__all__ = ["Baseline", "Mark", "SignalBand", "build_baseline", "load_baseline", "save_baseline"]

_FORMAT = "grpo-lightning-baseline/1"
_BINS = 60
_LEAST_SPREAD = 0.02  # of the level
_MAD = 1.4826
_MARK = 4.0  # spreads between the levels before and after
_MARKS = 3  # a signal
_MOST_PLACES = 3000  # rows of a run that changes are looked for in
_LARGEST_FILE = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A step at which a signal changed its level in a run that the ruler is made of."""

    signal: str
    step: int
    before: float
    after: float

    @property
    def summary(self) -> str:
        """A sentence, e.g. `kl began to climb at step 1180 (0.02 to 0.31)`."""
        verb = "climb" if self.after > self.before else "fall"
        return f"{self.signal} began to {verb} at step {self.step} ({self.before:.3g} to {self.after:.3g})"


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalBand:
    """What a signal was: level and spread from each of `steps` on."""

    steps: tuple[float, ...]
    levels: tuple[float, ...]
    spreads: tuple[float, ...]

    def at(self, step: float) -> tuple[float, float]:
        """Level and spread at a step: those of its bin; after the last, the last."""
        place = max(bisect_right(self.steps, step) - 1, 0)
        return self.levels[place], self.spreads[place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The ruler of a kind of run."""

    signals: Mapping[str, SignalBand]
    marks: tuple[Mark, ...]
    runs: tuple[str, ...]  # what it was made of
    steps: int  # the longest of them

    def band(self, signal: str, step: float) -> tuple[float, float] | None:
        """(level, spread) of a signal at a step, None where it isn't held."""
        held = self.signals.get(signal)
        return held.at(step) if held is not None else None

    def near_mark(self, step: int, *, within: int = 20) -> list[Mark]:
        """The marks around a step."""
        return [mark for mark in self.marks if abs(mark.step - step) <= within]


def build_baseline(runs: Mapping[str, Iterable[Step]]) -> Baseline:
    """A ruler of one or several runs, by name.

    A band's level is the median of a bin's values over all runs, its spread 1.4826 x the median absolute deviation, at
    least 2 % of the level. A bin is a sixtieth of the longest run, and 5 steps at least.
    """
    columns: dict[str, dict[str, _Column]] = {}
    longest = 0
    for name, steps in runs.items():
        for step in steps:
            longest = max(longest, step.step)
            for signal, value in step.values.items():
                if math.isfinite(value):
                    columns.setdefault(signal, {}).setdefault(name, _Column()).push(step.step, value)
    if not columns:
        raise ConfigError("There is nothing to build a baseline of: the runs have no steps with finite values.")
    width = max(longest / _BINS, 5.0)
    bands = {signal: _band(by_run.values(), width) for signal, by_run in sorted(columns.items())}
    marks = [
        mark for signal, by_run in sorted(columns.items()) for mark in _marks(signal, max(by_run.values(), key=len))
    ]
    return Baseline(signals=bands, marks=tuple(marks), runs=tuple(runs), steps=longest)


class _Column:
    """A signal's steps and values in one run, in 16 bytes a row."""

    __slots__ = ("_steps", "_values")

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def push(self, step: int, value: float) -> None:
        self._steps.append(step)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._steps)

    def rows(self, every: int = 1) -> Iterator[tuple[int, float]]:
        return zip(self._steps[::every], self._values[::every], strict=True)


def _band(by_run: Iterable[_Column], width: float) -> SignalBand:
    bins: dict[int, list[float]] = {}
    for column in by_run:
        for step, value in column.rows():
            bins.setdefault(int((step - 1) // width), []).append(value)
    steps, levels, spreads = [], [], []
    for place in sorted(bins):
        near = sorted(bins.get(place - 1, []) + bins[place] + bins.get(place + 1, []))
        level, middle = median_of(sorted(bins[place])), median_of(near)
        spread = _MAD * median_of(sorted(abs(v - middle) for v in near))
        steps.append(place * width + 1)
        levels.append(level)
        spreads.append(max(spread, _LEAST_SPREAD * abs(level), 1e-300))
    return SignalBand(steps=tuple(steps), levels=tuple(levels), spreads=tuple(spreads))


def _marks(signal: str, column: _Column) -> list[Mark]:
    """The greatest changes of level in a run: medians of 20 rows before and after, in their deviations."""
    rows = list(column.rows(max(len(column) // _MOST_PLACES, 1)))
    half = 20
    scores = [_score(rows, place, half) for place in range(half, len(rows) - half + 1)]
    found: list[Mark] = []
    taken: list[int] = []
    for score, place, low, high in sorted(scores, reverse=True):
        if score < _MARK or len(found) == _MARKS:
            break
        if all(abs(place - other) > 2 * half for other in taken):
            taken.append(place)
            step = onset(rows[place - half : place + half], streak_start=rows[place + half - 1][0])
            found.append(Mark(signal=signal, step=step, before=low, after=high))
    return sorted(found, key=lambda mark: mark.step)


def _score(rows: Sequence[tuple[int, float]], place: int, half: int) -> tuple[float, int, float, float]:
    """How far the levels before and after a place are apart, the place, and the levels."""
    before = sorted(value for _, value in rows[place - half : place])
    after = sorted(value for _, value in rows[place : place + half])
    low, high = median_of(before), median_of(after)
    inside = _MAD * median_of(sorted([abs(v - low) for v in before] + [abs(v - high) for v in after]))
    return abs(high - low) / max(inside, _LEAST_SPREAD * abs(low), 1e-12), place, low, high


def save_baseline(baseline: Baseline, path: str | Path) -> None:
    """Write the ruler as JSON, atomically."""
    content = {
        "format": _FORMAT,
        "runs": list(baseline.runs),
        "steps": baseline.steps,
        "signals": {
            name: {"steps": list(b.steps), "levels": list(b.levels), "spreads": list(b.spreads)}
            for name, b in baseline.signals.items()
        },
        "marks": [{"signal": m.signal, "step": m.step, "before": m.before, "after": m.after} for m in baseline.marks],
    }
    target = Path(path)
    try:
        draft = target.with_name(f".{target.name}.draft")
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
        draft.replace(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The baseline {target} can't be written: {error}.") from error


def load_baseline(path: str | Path) -> Baseline:
    """Read a ruler.

    Raises:
        ConfigError: one sentence.
    """
    file = Path(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"{file} has more than 64 MiB: it can't be a baseline.")
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ConfigError(
                f"{file} is a baseline of the format {content['format']!r}: this version reads {_FORMAT}."
            )
        return _parsed(content)
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not a baseline ({type(error).__name__}: {error}): make one with `baseline build`."
        ) from error


def _parsed(content: Any) -> Baseline:
    signals = {}
    for name, band in content["signals"].items():
        columns = [tuple(map(float, band[key])) for key in ("steps", "levels", "spreads")]
        if not columns[0] or len({len(column) for column in columns}) != 1:
            raise ValueError(f"the band of {name} has columns of different lengths")
        if not all(math.isfinite(v) for column in columns for v in column) or min(columns[2]) <= 0:
            raise ValueError(f"the band of {name} has numbers that can't be")
        signals[str(name)] = SignalBand(steps=columns[0], levels=columns[1], spreads=columns[2])
    marks = tuple(
        Mark(signal=str(m["signal"]), step=int(m["step"]), before=float(m["before"]), after=float(m["after"]))
        for m in content["marks"]
    )
    return Baseline(signals=signals, marks=marks, runs=tuple(map(str, content["runs"])), steps=int(content["steps"]))
