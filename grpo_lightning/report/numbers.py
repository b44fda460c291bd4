"""Numbers for people: short, and axes that end at round ones."""

from __future__ import annotations

import math

__all__ = ["nice_ticks", "short", "step_ticks", "times"]


def short(value: float | None) -> str:
    """Four significant digits at most.

    >>> short(0.0412345), short(1234567.0), short(12345.6), short(0.0), short(None), short(float("nan"))
    ('0.04123', '1.235e+06', '12,346', '0', '–', 'NaN')
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e4 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def times(before: float | None, after: float | None) -> str:
    """after over before, "" where that says nothing.

    >>> times(0.1, 0.25), times(0.0, 1.0), times(-1.0, 1.0)
    ('×2.5', '', '')
    """
    if before is None or after is None or not (math.isfinite(before) and math.isfinite(after)):
        return ""
    if before == 0 or before * after <= 0:
        return ""
    ratio = after / before
    return f"×{ratio:.2f}" if ratio < 1 else f"×{ratio:.3g}"


def nice_ticks(low: float, high: float, count: int = 3) -> list[float]:
    """Round numbers inside low … high.

    >>> nice_ticks(0.03, 0.97)
    [0.5]
    >>> nice_ticks(0.0, 1.0)
    [0.0, 0.5, 1.0]
    """
    span = high - low
    if not 1e-290 < span < 1e290:
        return [low]
    raw = span / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999), 10.0 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") + 0.0 for k in range(first, last + 1)][: count + 2] or [low]


def step_ticks(first: int, last: int, count: int = 4) -> list[int]:
    """Round steps inside first … last.

    >>> step_ticks(1, 40)
    [10, 20, 30, 40]
    """
    ticks = [int(tick) for tick in nice_ticks(float(first), float(last), count) if float(tick).is_integer()]
    return sorted({tick for tick in ticks if first <= tick <= last}) or [first]
