"""Thinning, numbers and charts."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.report.charts import Band, Chart, Mark, draw, frame_of, time_bar
from grpo_lightning.report.numbers import nice_ticks, short, step_ticks, times
from grpo_lightning.report.thinning import thinned

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_a_short_series_is_kept_whole_without_what_is_not_finite() -> None:
    assert thinned([1, 2, 3], [0.5, math.nan, 2.0], 10) == [(1, 0.5), (3, 2.0)]
    assert thinned([1, 2], [math.inf, math.nan], 10) == []


def test_least_and_greatest_of_each_part_are_kept() -> None:
    # parts of 3 steps: 1-3 and 4-6
    assert thinned([1, 2, 3, 4, 5, 6], [0.0, 5.0, 1.0, 2.0, 9.0, 3.0], 2) == [
        (1, 0.0),
        (2, 5.0),
        (4, 2.0),
        (5, 9.0),
        (6, 3.0),
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=400), st.integers(1, 40))
def test_thinning_keeps_extremes_and_ends_in_order(values: list[float], pixels: int) -> None:
    steps = [3 * i + 1 for i in range(len(values))]
    kept = thinned(steps, values, pixels)
    whole = list(zip(steps, values, strict=True))
    assert set(kept) <= set(whole)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert (kept[0], kept[-1]) == (whole[0], whole[-1])
    assert min(v for _, v in kept) == min(values)
    assert max(v for _, v in kept) == max(values)
    assert len(kept) <= 2 * pixels + 2


SHORT = [
    (0.0412345, "0.04123"), (12345.6, "12,346"), (1234567.0, "1.235e+06"), (0.0, "0"), (-0.0, "0"), (None, "–"),
    (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "−∞"), (1e-9, "1e-09"), (-12345.6, "-12,346"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), SHORT, ids=[text for _, text in SHORT])
def test_short_numbers(value: float | None, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(0.1, 0.25, "×2.5"), (2.0, 0.5, "×0.25"), (0.0, 1.0, ""), (-1.0, 1.0, ""), (None, 1.0, ""), (1.0, math.nan, "")],
)
def test_factors(before: float | None, after: float | None, text: str) -> None:
    assert times(before, after) == text


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0.0, 1.0) == [0.0, 0.5, 1.0]
    assert nice_ticks(-3.2, 7.9, 4) == [0.0, 5.0]
    assert step_ticks(1, 40, 4) == [20, 40]
    assert step_ticks(7, 8) == [7, 8]
    assert step_ticks(5, 5) == [5]


@settings(max_examples=80, deadline=None)
@given(FINITE, FINITE, st.integers(1, 9))
def test_ticks_never_leave_the_axis(a: float, b: float, count: int) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high, count)
    assert ticks
    assert len(ticks) <= count + 2
    slack = 1e-6 * max(abs(low), abs(high), 1e-300)
    assert all(low - slack <= tick <= high + slack for tick in ticks)


def chart(values: list[float], **settings: object) -> Chart:
    points = [(i + 1, v) for i, v in enumerate(values)]
    return Chart(label="a label", points=points, first=1, last=max(len(values), 2), **settings)  # type: ignore[arg-type]


def parsed(made: str) -> ET.Element:
    return ET.fromstring(made)


def test_the_line_goes_through_the_points() -> None:
    svg, frame = draw(chart([0.0, 1.0, 0.5]), width=440, height=140)
    root = parsed(svg)
    (line,) = [one for one in root.iter("polyline") if one.get("class") == "line"]
    places = [tuple(map(float, pair.split(","))) for pair in (line.get("points") or "").split()]
    assert [x for x, _ in places] == [46.0, 239.0, 432.0]  # from 46 to 440 - 8
    assert (frame.low, round(frame.high, 6)) == (0.0, 1.06)
    assert places[0][1] == 120.0  # 0 lies on the axis
    assert places[1][1] == pytest.approx(120 - 108 / 1.06, abs=0.1)


def test_a_few_values_far_out_do_not_flatten_the_rest() -> None:
    values = [1.0 + 0.1 * (i % 5) for i in range(100)]
    values[50] = 5000.0
    svg, frame = draw(chart(values))
    assert frame.high < 10
    assert frame.cut_high
    assert sum(one.get("class") == "cut" for one in parsed(svg).iter("path")) == 1
    assert not frame_of(chart([float(i) for i in range(100)]), 440, 140).cut_high


def test_what_is_constant_or_mostly_zero_has_an_axis() -> None:
    for values in ([0.0] * 30, [5.0], [-2.0] * 3, [0.0] * 29 + [1.0]):
        frame = frame_of(chart(values), 440, 140)
        assert frame.low <= min(values) <= max(values) <= frame.high
        assert frame.low < frame.high


def test_marks_bands_and_crosses_are_drawn_with_their_words() -> None:
    marks = [
        Mark(step=3, kind="critical", label="<b>fell</b>", onset=2),
        Mark(step=4, kind="warning", label="", own=False),
        Mark(step=2, kind="segment", label="segment 2"),
        Mark(step=5, kind="recovery"),
        Mark(step=4, kind="accepted", label="<i>on purpose</i>"),
    ]
    svg, _ = draw(chart([1.0, 2.0, 3.0, 2.0, 1.0], marks=marks, odd=[4], band=[Band(step=1, low=0.5, high=1.5)]))
    root = parsed(svg)
    classes = [one.get("class") or "" for one in root.iter()]
    for name in (
        "mark critical own",
        "mark warning other",
        "mark segment",
        "mark recovery",
        "mark accepted",
        "odd",
        "band",
        "level",
    ):
        assert name in classes
    assert "<b>fell</b>" in [one.text for one in root.iter("title")]
    assert "<i>on purpose</i>" in [one.text for one in root.iter("title")]
    assert "<b>" not in svg
    assert "<i>" not in svg


def test_a_change_on_purpose_is_shaded_from_its_step_to_the_end() -> None:
    svg, frame = draw(chart([1.0, 2.0, 3.0, 2.0, 1.0], marks=[Mark(step=4, kind="accepted", label="why")]))
    (group,) = [one for one in parsed(svg).iter() if one.get("class") == "mark accepted"]
    (shade,) = [one for one in group if one.tag.endswith("rect")]
    left = float(shade.get("x") or "nan")
    assert left == pytest.approx(frame.x(4), abs=0.1)
    assert left + float(shade.get("width") or "nan") == pytest.approx(frame.x(5), abs=0.2)


PRINTED = st.text(st.characters(min_codepoint=32, max_codepoint=0xD7FF), max_size=9)
KINDS = st.sampled_from(["critical", "warning", "segment", "recovery", "accepted"])
STEPS = st.integers(-5, 80)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(FINITE, max_size=60),
    st.lists(st.tuples(STEPS, FINITE, FINITE), max_size=3),
    st.lists(st.builds(Mark, step=STEPS, kind=KINDS, label=PRINTED, onset=st.none() | STEPS), max_size=4),
)
def test_every_picture_is_xml_with_finite_coordinates(
    values: list[float], bands: list[tuple[int, float, float]], marks: list[Mark]
) -> None:
    band = [Band(step=step, low=min(a, b), high=max(a, b)) for step, a, b in sorted(bands)]
    svg, _ = draw(chart(values, band=band, marks=marks))
    for one in parsed(svg).iter():
        for name in ("points", "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width"):
            assert "nan" not in (one.get(name) or "")
            assert "inf" not in (one.get(name) or "")


def test_shares_of_a_step() -> None:
    root = parsed(time_bar([("rollout", 3.0), ("update", 1.0)], width=400))
    rects = list(root.iter("rect"))
    assert [float(one.get("x") or 0) for one in rects] == [0.0, 300.0]
    assert [float(one.get("width") or 0) for one in rects] == [298.5, 98.5]
    assert root.get("aria-label") == "rollout 3 s, update 1 s"
