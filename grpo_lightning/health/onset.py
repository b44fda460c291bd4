"""Where an alert began: the split of the signal's last rows into two levels that leaves the least squared error."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["onset"]


def onset(history: Sequence[tuple[int, float]], *, streak_start: int) -> int:
    """The first step of the last rows' new level; at the latest `streak_start`.

    Sum of squared errors of two constant levels, over all splits (Page 1955; Killick et al. 2012 for one change).

    Example:
        >>> onset([(1, 0.0), (2, 0.1), (3, 0.0), (4, 5.0), (5, 5.1)], streak_start=5)
        4
    """
    n = len(history)
    if n < 3:
        return streak_start
    mean = math.fsum(value for _, value in history) / n  # taken off: large levels would hide small changes
    best, best_gain, left = 0, -1.0, 0.0
    for k in range(1, n):
        left += history[k - 1][1] - mean
        gain = left * left * (1 / k + 1 / (n - k))
        if gain > best_gain:
            best, best_gain = k, gain
    return min(history[best][0], streak_start)
