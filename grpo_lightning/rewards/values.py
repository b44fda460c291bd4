"""What a reward function gave, as floats."""

from __future__ import annotations

import inspect
import math
import reprlib
from itertools import islice
from typing import Any

__all__ = ["BadValues", "to_numbers"]

_NOT_LISTS = (str, bytes, bytearray, dict, set, frozenset)


class BadValues(Exception):  # noqa: N818 - a finding about somebody else's values
    """What was given is not one number, or None, for each completion. The text continues "The reward 'x' "."""


def to_numbers(given: Any, count: int) -> list[float]:
    """`count` floats; None becomes NaN, infinities stay. Raises `BadValues` with the rule that was broken.

    >>> to_numbers([True, None, 0.5], 3)
    [1.0, nan, 0.5]
    """
    items = _items(given, count)
    if len(items) != count:
        many = f"more than {count}" if len(items) > count and not hasattr(given, "__len__") else str(len(items))
        raise BadValues(f"gave {many} values for {count} completions: it must give exactly one for each.")
    return [_number(item) for item in items]


def _items(given: Any, count: int) -> list[Any]:
    if inspect.isawaitable(given):
        if inspect.iscoroutine(given):
            given.close()
        raise BadValues(f"gave a {type(given).__name__}, not values: declare it with `async def`.")
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, _NOT_LISTS) or not hasattr(given, "__iter__"):
        raise BadValues(f"gave a {type(given).__name__} ({_shown(given)}): it must give a list of numbers.")
    return list(given) if hasattr(given, "__len__") else list(islice(given, count + 1))


def _number(item: Any) -> float:
    if item is None:
        return math.nan
    if isinstance(item, str | bytes | bytearray):
        raise BadValues(f"gave the text {_shown(item)}: values must be numbers or None. Convert it with float().")
    if not hasattr(item, "__float__") or _is_complex(item):
        raise BadValues(f"gave {_shown(item)} ({type(item).__name__}): values must be numbers or None.")
    try:
        return float(item)
    except OverflowError:
        raise BadValues(f"gave a {type(item).__name__} too large for a float: scale it down.") from None
    except Exception:  # noqa: BLE001 - an item's own __float__ raises what it likes
        raise BadValues(f"gave {_shown(item)} ({type(item).__name__}), which is not one number.") from None


def _is_complex(item: Any) -> bool:
    return bool(getattr(getattr(item, "dtype", None), "kind", "") == "c" or isinstance(item, complex))


def _shown(item: Any) -> str:
    """A short repr that never raises: a hostile object's own may, and an int's does beyond 4,300 digits."""
    try:
        return " ".join(reprlib.repr(item).split())
    except Exception:  # noqa: BLE001
        return "not printable"
