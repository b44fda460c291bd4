"""Charts as inline SVG: a signal's line against its ruler, with marks for what happened. Colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from grpo_lightning.report.numbers import nice_ticks, short, step_ticks
from grpo_lightning.report.thinning import Point

__all__ = ["Band", "Chart", "Frame", "Mark", "draw", "frame_of", "sparse", "time_bar"]

MarkKind = Literal["critical", "warning", "segment", "recovery", "note", "accepted"]
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 8.0, 12.0, 20.0
_DOTS = 60  # points up to which each is a dot
_HUGE = 1e150  # no difference overflows
_OUT = 6.0  # times the middle 98 % of the values, beyond which the axis cuts


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened at a step."""

    step: int
    kind: MarkKind
    label: str = ""
    onset: int | None = None  # of an alert
    own: bool = True  # about this signal


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """What the ruler expects from a step on."""

    step: int
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart's content."""

    label: str  # for those who can't see it
    points: Sequence[Point]
    first: int  # the run's first and last step
    last: int
    odd: Sequence[int] = ()  # steps whose value is not finite
    band: Sequence[Band] = ()
    marks: Sequence[Mark] = field(default_factory=tuple)
    seldom: bool = False  # measured every N steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Where values lie on the picture."""

    width: float
    height: float
    first: float
    last: float
    low: float
    high: float
    cut_low: bool = False  # values lie beyond the axis
    cut_high: bool = False

    def x(self, step: float) -> float:
        """Pixels from the left."""
        return _LEFT + (step - self.first) / max(self.last - self.first, 1e-9) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top; beyond the axis, its edge."""
        inside = min(max(value, self.low), self.high)
        share = (inside - self.low) / max(self.high - self.low, 1e-300)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)


def frame_of(chart: Chart, width: float, height: float) -> Frame:
    """Axes that show the values and their ruler. A few values far out do not flatten the rest: the axis cuts them."""
    values = sorted(min(max(value, -_HUGE), _HUGE) for _, value in chart.points) or [0.0]
    low, high = values[0], values[-1]
    inner_low, inner_high = values[len(values) // 100], values[-1 - len(values) // 100]
    if len(values) >= 20:
        middle = values[len(values) // 20], values[-1 - len(values) // 20]
        reach = _OUT * (middle[1] - middle[0]) or math.inf
        low, high = max(low, inner_low - reach, middle[0] - reach), min(high, inner_high + reach, middle[1] + reach)
    for band in chart.band:  # a ruler is shown where it does not squeeze the line
        span = max(high - low, 1e-300)
        low = min(low, max(band.low, low - span))
        high = max(high, min(band.high, high + span))
    low, high = _roomy(low, high)
    last = max(chart.last, chart.first + 1)
    return Frame(
        width=width,
        height=height,
        first=float(chart.first),
        last=float(last),
        low=low,
        high=high,
        cut_low=values[0] < low,
        cut_high=values[-1] > high,
    )


def _roomy(low: float, high: float) -> tuple[float, float]:
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        half = abs(high) * 0.5 or 1.0
        return (0.0, 2.0 * high) if high > 0 else (low - half, high + half) if low < 0 else (-0.5, 1.0)
    room = 0.06 * (high - low)
    return (0.0 if 0.0 <= low < room * 4 else low - room), high + room


def draw(chart: Chart, *, width: float = 440.0, height: float = 140.0) -> tuple[Markup, Frame]:
    """The picture, and its frame, by which a readout finds its way."""
    frame = frame_of(chart, width, height)
    parts = [
        _band(chart, frame),
        _axes(frame),
        *(_mark(mark, frame) for mark in sorted(chart.marks, key=lambda mark: mark.own)),
        _line(chart, frame),
        _odd(chart, frame),
        _cuts(chart, frame),
        Markup(
            f'<g class="cursor" hidden=""><line y1="{_number(_TOP)}" y2="{_number(height - _BOTTOM)}"/><circle r="3.2"/></g>'
        ),
    ]
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        _number(width), _number(height), chart.label
    )
    return head + Markup("").join(parts) + Markup("</svg>"), frame


def _axes(frame: Frame) -> Markup:
    made = []
    right = _number(frame.width - _RIGHT)
    for tick in nice_ticks(frame.low, frame.high, 4):
        y = _number(frame.y(tick))
        made.append(Markup(f'<line class="grid" x1="{_number(_LEFT)}" x2="{right}" y1="{y}" y2="{y}"/>'))
        label = Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>')
        made.append(label.format(_number(_LEFT - 5), _number(frame.y(tick) + 3.3), short(tick)))
    base = _number(frame.height - _BOTTOM)
    made.append(Markup(f'<line class="axis" x1="{_number(_LEFT)}" x2="{right}" y1="{base}" y2="{base}"/>'))
    for step in step_ticks(int(frame.first), int(frame.last), 7):
        label = Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>')
        anchor = "end" if frame.x(step) > frame.width - 24 else "middle"
        made.append(label.format(_number(frame.x(step)), _number(frame.height - 6), anchor, f"{step:,}"))
    return Markup("").join(made)


def _band(chart: Chart, frame: Frame) -> Markup:
    if not chart.band:
        return Markup("")
    ends = [band.step for band in chart.band[1:]] + [int(frame.last)]
    over, under, level = [], [], []
    for band, end in zip(chart.band, ends, strict=True):
        left, right = _number(frame.x(max(band.step, frame.first))), _number(frame.x(min(end, frame.last)))
        over += [f"{left},{_number(frame.y(band.high))}", f"{right},{_number(frame.y(band.high))}"]
        under += [f"{left},{_number(frame.y(band.low))}", f"{right},{_number(frame.y(band.low))}"]
        middle = _number(frame.y((band.low + band.high) / 2))
        level += [f"{left},{middle}", f"{right},{middle}"]
    area = " ".join(over + under[::-1])
    return Markup(f'<polygon class="band" points="{area}"/><polyline class="level" points="{" ".join(level)}"/>')


def _line(chart: Chart, frame: Frame) -> Markup:
    if not chart.points:
        return Markup("")
    places = [(frame.x(step), frame.y(value)) for step, value in chart.points]
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in places)
    line = Markup(f'<polyline class="line" points="{path}"/>')
    if chart.seldom or len(places) == 1:
        dots = "".join(f'<circle class="dot" cx="{_number(x)}" cy="{_number(y)}" r="2.6"/>' for x, y in places[:_DOTS])
        line += Markup(dots)
    return line


def _odd(chart: Chart, frame: Frame) -> Markup:
    """A cross on top for each step that is not finite."""
    made = [
        f'<path class="odd" d="M{_number(frame.x(step) - 3)},{_number(_TOP - 6)}l6,6m0,-6l-6,6"/>'
        for step in chart.odd[:200]
    ]
    title = (
        Markup("<title>{} steps are not finite, the first {}</title>").format(len(chart.odd), chart.odd[0])
        if made
        else ""
    )
    return Markup("<g>") + Markup("".join(made)) + title + Markup("</g>") if made else Markup("")


def _cuts(chart: Chart, frame: Frame) -> Markup:
    """A small wedge where the line goes beyond the axis."""
    made = []
    for step, value in chart.points:
        if value > frame.high:
            made.append(f'<path class="cut" d="M{_number(frame.x(step) - 3)},{_number(_TOP + 1)}h6l-3,-6z"/>')
        elif value < frame.low:
            base = _number(frame.height - _BOTTOM - 1)
            made.append(f'<path class="cut" d="M{_number(frame.x(step) - 3)},{base}h6l-3,6z"/>')
    return Markup("".join(made[:100]))


def _mark(mark: Mark, frame: Frame) -> Markup:
    x, top, base = frame.x(mark.step), _TOP, frame.height - _BOTTOM
    title = Markup("<title>{}</title>").format(mark.label) if mark.label else Markup("")
    if mark.kind in ("recovery", "note"):
        shape = f'<path d="M{_number(x)},{_number(base - 7)}l3.5,3.5l-3.5,3.5l-3.5,-3.5z"/>'
        return Markup(f'<g class="mark {mark.kind}">{shape}') + title + Markup("</g>")
    line = f'<line x1="{_number(x)}" x2="{_number(x)}" y1="{_number(top)}" y2="{_number(base)}"/>'
    if mark.kind == "segment":
        label = Markup('<text class="tick" x="{}" y="{}">{}</text>').format(
            _number(x + 3), _number(top + 8), mark.label
        )
        words = Markup("<title>restart: segment {}</title>").format(mark.label)
        return Markup(f'<g class="mark segment">{line}') + label + words + Markup("</g>")
    if mark.kind == "accepted":
        left = min(max(x, _LEFT), frame.width - _RIGHT)
        place = f'x="{_number(left)}" width="{_number(frame.width - _RIGHT - left)}"'
        shade = f'<rect {place} y="{_number(top)}" height="{_number(base - top)}"/>'
        return Markup(f'<g class="mark accepted">{shade}{line}') + title + Markup("</g>")
    own = "own" if mark.own else "other"
    shade = ""
    if mark.own and mark.onset is not None:
        left = frame.x(max(mark.onset, frame.first))
        place = f'x="{_number(left)}" width="{_number(max(x - left, 1.0))}"'
        shade = f'<rect {place} y="{_number(top)}" height="{_number(base - top)}"/>'
    flag = f'<path d="M{_number(x - 4)},{_number(top - 7)}h8l-4,7z"/>' if mark.own else ""
    return Markup(f'<g class="mark {mark.kind} {own}">{shade}{line}{flag}') + title + Markup("</g>")


def time_bar(parts: Sequence[tuple[str, float]], *, width: float = 600.0) -> Markup:
    """Shares of a whole, side by side."""
    total = math.fsum(seconds for _, seconds in parts)
    made, x = [], 0.0
    for place, (name, seconds) in enumerate(parts):
        share = width * seconds / total if total > 0 else 0.0
        rect = Markup('<rect class="part p{}" x="{}" width="{}" y="0" height="14"><title>{}: {} s</title></rect>')
        made.append(rect.format(place % 6, _number(x), _number(max(share - 1.5, 0.3)), name, short(seconds)))
        x += share
    label = ", ".join(f"{name} {short(seconds)} s" for name, seconds in parts)
    head = Markup('<svg viewBox="0 0 {} 14" preserveAspectRatio="none" role="img" aria-label="{}">').format(
        _number(width), label
    )
    return head + Markup("").join(made) + Markup("</svg>")


def sparse(steps: Sequence[int], total: int) -> bool:
    """Whether a signal is measured every N steps only."""
    return len(steps) * 4 < total


def _number(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
