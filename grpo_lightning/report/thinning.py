"""Long series made short enough to draw: the least and the greatest value of each pixel are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Point", "thinned"]

Point = tuple[int, float]


def thinned(steps: Sequence[int], values: Sequence[float], pixels: int) -> list[Point]:
    """(step, value) in step order, finite ones only; at most two of each of `pixels` equal parts of the steps, and both ends.

    Example:
        >>> thinned([1, 2, 3, 4, 5, 6], [0.0, 5.0, 1.0, 2.0, 9.0, 3.0], 2)
        [(1, 0.0), (2, 5.0), (4, 2.0), (5, 9.0), (6, 3.0)]
    """
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(points) <= 2 * pixels:
        return points if len(points) <= pixels else _kept(points, pixels)
    return _kept(points, pixels)


def _kept(points: Sequence[Point], pixels: int) -> list[Point]:
    first, last = points[0][0], points[-1][0]
    width = max((last - first) / pixels, 1e-9)
    bins: dict[int, tuple[Point, Point]] = {}
    for point in points:
        place = min(int((point[0] - first) / width), pixels - 1)
        low, high = bins.get(place, (point, point))
        bins[place] = (min(low, point, key=_value), max(high, point, key=_value))
    kept = {point for pair in bins.values() for point in pair} | {points[0], points[-1]}
    return sorted(kept)


def _value(point: Point) -> float:
    return point[1]
