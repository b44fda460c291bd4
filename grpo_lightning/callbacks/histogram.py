"""The advantages' histogram as a small picture, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["EDGES", "draw_histogram"]

EDGES = tuple(
    n / 4 for n in range(-12, 13)
)  # the same at every step, so that steps can be compared; outliers at the ends

_SIZE, _LEFT, _RIGHT, _TOP, _BOTTOM = (480, 280), 48, 16, 32, 40
_INK, _PALE, _BAR, _FLAT = "#1f2937", "#d1d5db", "#2563eb", "#9ca3af"


def draw_histogram(counts: Sequence[float], edges: Sequence[float] = EDGES, *, title: str = "") -> Image:
    """Bars of `counts` between ascending `edges`; those beside 0 are grey: they teach nothing."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", _SIZE, "white")
    draw = ImageDraw.Draw(picture)
    width, height = _SIZE[0] - _LEFT - _RIGHT, _SIZE[1] - _TOP - _BOTTOM
    ground, most = _SIZE[1] - _BOTTOM, max([*counts, 1.0])

    def across(value: float) -> float:
        return _LEFT + width * (value - edges[0]) / (edges[-1] - edges[0])

    for share in (0.5, 1.0):
        y = ground - height * share
        draw.line((_LEFT, y, _SIZE[0] - _RIGHT, y), fill=_PALE)
        draw.text((_LEFT - 6, y), f"{most * share:g}", fill=_INK, anchor="rm")
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        if count > 0:
            top = min(ground - height * count / most, ground - 1)
            draw.rectangle((across(low) + 1, top, across(high) - 1, ground), fill=_FLAT if low * high <= 0 else _BAR)
    draw.line((_LEFT, ground, _SIZE[0] - _RIGHT, ground), fill=_INK)
    for tick in range(round(edges[0]), round(edges[-1]) + 1):
        draw.line((across(tick), ground, across(tick), ground + 4), fill=_INK)
        draw.text((across(tick), ground + 14), str(tick), fill=_INK, anchor="mm")
    draw.text((_LEFT, 14), title, fill=_INK, anchor="lm")
    draw.text((_SIZE[0] - _RIGHT, 14), f"{sum(counts):g} rollouts", fill=_INK, anchor="rm")
    return picture
