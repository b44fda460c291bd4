"""How many groups a step has, where nobody says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MANY", "GroupGuess"]

MANY = 1e6  # groups in a step whose number is not known
_MOST_GROUPS = 64


class GroupGuess:
    """How many groups a row has: the dead share is a multiple of one over their number.

    The smallest number up to 64 that all shares so far agree with, once six of them lie strictly between 0 and 1; or one,
    if they are only ever 0 or 1 and change.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._changes = 0
        self._between = 0
        self._number = 1  # 0: no number agrees

    def groups(self, values: Mapping[str, float]) -> float:
        """Groups in the row, very many where not known."""
        dead = values.get("dead_group_fraction")
        if dead is not None and self._number and 0.0 <= dead <= 1.0:
            self._take(dead)
        known = self._between >= 6 or (not self._between and self._changes >= 3)
        return float(self._number) if known and self._number else MANY

    def _take(self, dead: float) -> None:
        if 0.0 < dead < 1.0:
            self._between += 1
        if self._last is not None and dead != self._last:
            self._changes += 1
        self._last = dead
        while self._number and abs(dead * self._number - round(dead * self._number)) > 2e-3:
            self._number = self._number + 1 if self._number < _MOST_GROUPS else 0

    def state(self) -> list[Any]:
        """Plain types."""
        return [self._last, self._changes, self._between, self._number]

    def load(self, state: Sequence[Any]) -> None:
        """The inverse of `state`."""
        self._last, self._changes, self._between, self._number = state
