"""A run's signals as columns: compact, and quick to look into by step."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from grpo_lightning.health.records import Step

__all__ = ["Column", "Columns"]


class Column:
    """One signal: the steps at which it was measured, in order, and its values."""

    __slots__ = ("steps", "values")

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.values: array[float] = array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def within(self, first: int, last: int) -> Sequence[float]:
        """The values of the steps `first` to `last`, both included."""
        return self.values[bisect_left(self.steps, first) : bisect_right(self.steps, last)]

    def pairs(self, first: int, last: int) -> list[tuple[int, float]]:
        """(step, value) of the steps `first` to `last`, both included; finite values only."""
        places = range(bisect_left(self.steps, first), bisect_right(self.steps, last))
        return [(self.steps[i], self.values[i]) for i in places if math.isfinite(self.values[i])]

    def last(self) -> float | None:
        """The newest value that is finite."""
        return next((v for v in reversed(self.values) if math.isfinite(v)), None)


class Columns:
    """Every signal of a run.

    Example:
        >>> run = Columns.of([Step(step=1, values={"kl": 0.1}), Step(step=2, values={"kl": 0.2, "entropy": 1.0})])
        >>> list(run["kl"].values), list(run["entropy"].steps), run.steps
        ([0.1, 0.2], [2], array('q', [1, 2]))
    """

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self._columns: dict[str, Column] = {}

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Columns:
        """All of the steps. A step that goes back (a log of a restarted run) replaces what came after it."""
        columns = cls()
        for step in steps:
            columns.add(step)
        return columns

    def add(self, step: Step) -> None:
        """Take a step."""
        if self.steps and step.step <= self.steps[-1]:
            self._rewind(step.step)
        self.steps.append(step.step)
        for name, value in step.values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = Column()
            column.steps.append(step.step)
            column.values.append(value)

    def watch(self, steps: Iterable[Step]) -> Iterator[Step]:
        """The same steps, each taken as it passes by."""
        for step in steps:
            self.add(step)
            yield step

    def _rewind(self, step: int) -> None:
        del self.steps[bisect_left(self.steps, step) :]
        for column in self._columns.values():
            place = bisect_left(column.steps, step)
            del column.steps[place:], column.values[place:]

    def __contains__(self, signal: str) -> bool:
        return len(self[signal]) > 0

    def __getitem__(self, signal: str) -> Column:
        return self._columns.get(signal) or Column()

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def signals(self) -> list[str]:
        """What was ever measured, sorted."""
        return sorted(name for name, column in self._columns.items() if len(column))
