"""Text that is safe on a terminal, and numbers as small pictures. Model and file text is hostile."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

__all__ = ["plain", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"
_MIDDLE = 3  # a flat line is drawn here
_KEPT = "\n\t"
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # controls, directions, surrogates, private use, line separators


def plain(text: str) -> str:
    r"""`text` with everything that could move the cursor, colour or reorder it written out.

    >>> plain("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_written(c) if unicodedata.category(c) in _HIDDEN and c not in _KEPT else c for c in text)


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode()


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """The last `width` values as blocks between their least and greatest; None is a gap, a value not finite ``!``.

    >>> sparkline([0.0, 1.0, None, 7.0, float("nan")], 8)
    '▁▂ █!'
    """
    shown = values[-width:]
    finite = [v for v in shown if v is not None and math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    blocks = _ASCII if ascii_only else _BLOCKS
    return "".join(_block(value, low, high, blocks) for value in shown)


def _block(value: float | None, low: float, high: float, blocks: str) -> str:
    if value is None:
        return " "
    if not math.isfinite(value):
        return "!"
    span = high / 2 - low / 2  # halves: the difference of two huge numbers overflows
    if span <= 0:
        return blocks[_MIDDLE]
    return blocks[min(int((value / 2 - low / 2) / span * len(blocks)), len(blocks) - 1)]
