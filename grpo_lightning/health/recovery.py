"""The two faults that repair themselves: when an update is skipped, and how many repairs a run may make before it pauses."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from grpo_lightning.health.windows import median_of

__all__ = ["Budget", "GradientLimit"]

_NORMS = 50  # steps that the usual norm is taken from
_LEAST_NORMS = 20  # before a ratio to it is judged


class GradientLimit:
    """Whether an update is too large to be made: its gradient norm is not finite, or over a hard limit.

    Args:
        norm: the hard limit; None: none.
        ratio: how many times the median of the last 50 norms; None: never by ratio.

    Example:
        >>> limit = GradientLimit(norm=100.0, ratio=None)
        >>> limit.exceeded(99.0), limit.exceeded(101.0), limit.exceeded(float("nan"))
        (False, True, True)
    """

    def __init__(self, *, norm: float | None, ratio: float | None) -> None:
        self._norm, self._ratio = norm, ratio
        self._norms: deque[float] = deque(maxlen=_NORMS)

    def exceeded(self, norm: float) -> bool:
        """True where the update must not be made."""
        if not math.isfinite(norm) or (self._norm is not None and norm > self._norm):
            return True
        if self._ratio is None or len(self._norms) < _LEAST_NORMS:
            return False
        usual = median_of(sorted(self._norms))
        return usual > 0 and norm > self._ratio * usual

    def push(self, norm: float) -> None:
        """Remember the norm of an update that was made."""
        self._norms.append(norm)

    def state_dict(self) -> list[float]:
        """Plain types."""
        return list(self._norms)

    def load_state_dict(self, state: list[float]) -> None:
        """The inverse of `state_dict`."""
        self._norms = deque(state, maxlen=_NORMS)


class Budget:
    """How many repairs of one kind may be made within a window of steps. An acknowledged one counts no more.

    Example:
        >>> budget = Budget(limit=2, window_steps=100)
        >>> [budget.spend(step) for step in (10, 20, 30)]
        [True, True, False]
    """

    def __init__(self, *, limit: int, window_steps: int) -> None:
        self.limit, self.window_steps = limit, window_steps
        self._spent: deque[tuple[int, int]] = deque()  # step, how many

    def spend(self, step: int, count: int = 1) -> bool:
        """Count repairs at a step. True while the window's are within the limit."""
        self._spent.append((step, count))
        while self._spent and self._spent[0][0] <= step - self.window_steps:
            self._spent.popleft()
        return self.spent <= self.limit

    @property
    def spent(self) -> int:
        """Repairs in the window."""
        return sum(count for _, count in self._spent)

    def forgive(self, steps: Collection[int]) -> None:
        """Forget repairs that someone has acknowledged."""
        self._spent = deque((step, count) for step, count in self._spent if step not in steps)

    def state_dict(self) -> list[list[int]]:
        """Plain types."""
        return [list(row) for row in self._spent]

    def load_state_dict(self, state: list[list[int]]) -> None:
        """The inverse of `state_dict`."""
        self._spent = deque((step, count) for step, count in state)
