"""Windows and rulers: numbers derived by hand, and the two ways to make a window against each other."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.health.onset import onset
from grpo_lightning.health.rulers import Extreme, LateRecent, Recent, Stairs, Start
from grpo_lightning.health.windows import Latest, LateWindow, Row, Window, median_of


class Source:
    """A signal's last rows."""

    def __init__(self, keep: int = 4096) -> None:
        self.rows: deque[Row] = deque(maxlen=keep)
        self.count = 0

    def push(self, row: Row) -> None:
        self.rows.append(row)
        self.count += 1


def filled(values: list[float], *, spans: list[float] | None = None, groups: float = 1.0, **window: Any) -> Window:
    made = Window(**({"steps": 3, "groups": 0, "statistic": "mean"} | window))
    for i, value in enumerate(values):
        made.push((i + 1, value, spans[i] if spans else 1.0, groups))
    return made


WINDOWS: dict[str, tuple[Window, float | None]] = {
    "not covered": (filled([1.0, 2.0]), None),
    "mean of the last three": (filled([9.0, 1.0, 2.0, 6.0]), 3.0),
    "a row of span 5 fills it alone": (filled([9.0, 4.0], spans=[1.0, 5.0]), 4.0),
    "the mean weighs spans": (filled([1.0, 4.0], spans=[2.0, 1.0]), 2.0),  # (1 + 1 + 4) / 3
    "a wide row stays while needed": (filled([1.0, 4.0, 7.0], spans=[5.0, 1.0, 1.0]), (5 + 4 + 7) / 7),
    "median needs three rows": (filled([5.0, 4.0], spans=[5.0, 5.0], statistic="median"), None),
    "median": (filled([9.0, 1.0, 5.0, 2.0], statistic="median"), 2.0),
    "min": (filled([0.0, 3.0, 5.0, 4.0], statistic="min"), 3.0),
    "max": (filled([9.0, 3.0, 5.0, 4.0], statistic="max"), 5.0),
    "share of zeros": (filled([1.0, 0.0, 2.0, 0.0], statistic="zero_share"), 2 / 3),
    "share of zeros, of steps": (filled([0.0, 2.0], spans=[1.0, 3.0], statistic="zero_share", steps=4), 0.25),
}


@pytest.mark.parametrize(("window", "value"), WINDOWS.values(), ids=WINDOWS)
def test_a_window_is_covered_by_steps(window: Window, value: float | None) -> None:
    assert window.value == (pytest.approx(value) if value is not None else None)


def test_a_window_is_covered_by_groups() -> None:
    window, seen = Window(steps=1, groups=6, statistic="mean"), []
    for i, value in enumerate([1.0, 2.0, 3.0, 4.0]):
        window.push((i, value, 1.0, 2.0))
        seen.append(window.value)
    assert seen == [None, None, 2.0, 3.0]  # three rows of two groups


def test_the_slope_is_per_optimizer_step() -> None:
    assert filled([1.0, 2.0, 4.0]).slope() == pytest.approx(1.5)  # x = 1, 2, 3: cov 3 / var 2
    assert filled([0.0, 10.0, 20.0], spans=[5.0] * 3, steps=15).slope() == pytest.approx(2.0)
    assert filled([1.0, 2.0]).slope() is None
    assert filled([1.0, 2.0], steps=2).slope() is None, "two rows have no slope to trust"


@pytest.mark.parametrize("spike", [1e20, 1e150 / 4, -1e30])
def test_a_value_that_leaves_takes_no_digits_with_it(spike: float) -> None:
    window = filled([1.0, spike, 1.0, 1.0, 1.0])
    assert window.value == 1.0


def test_a_window_holds_no_rows_without_end() -> None:
    window = Window(steps=10, groups=0, statistic="mean")
    for i in range(1000):
        window.push((i, 1.0, 1e-6, 1.0))
    assert window.value is None
    assert len(window.state()["rows"]) <= 50


ROWS = st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=60)
KINDS = st.sampled_from(["mean", "median", "min", "max", "zero_share"])


@given(rows=ROWS, steps=st.integers(1, 12), groups=st.integers(0, 30), statistic=KINDS, recent=st.integers(1, 20))
def test_made_late_or_at_every_step_it_is_the_same_window(
    rows: list[tuple[float, int, int]], steps: int, groups: int, statistic: str, recent: int
) -> None:
    source, window = Source(), Window(steps=steps, groups=groups, statistic=statistic)
    late = LateWindow(source, steps=steps, groups=groups, statistic=statistic)
    ruler, late_ruler = Recent(steps=recent), LateRecent(source, late, steps=recent)
    window.recents.append(ruler)
    for i, (value, span, prompts) in enumerate(rows):
        row = (i, round(value, 1), float(span), float(prompts))
        source.push(row)
        window.push(row)
        assert late.value == (None if window.value is None else pytest.approx(window.value, abs=1e-9))
        assert (late.slope() is None) == (window.slope() is None)
        if statistic != "zero_share":  # a share's ruler is made of zeros and ones
            assert late_ruler.level == ruler.level
            assert late_ruler.spread == ruler.spread


@given(rows=ROWS, steps=st.integers(1, 12), groups=st.integers(0, 30))
def test_a_window_is_the_fewest_rows_that_cover_it(rows: list[tuple[float, int, int]], steps: int, groups: int) -> None:
    window = Window(steps=steps, groups=groups, statistic="mean")
    for i, (value, span, prompts) in enumerate(rows):
        window.push((i, value, float(span), float(prompts)))
        seen = rows[: i + 1]
        suffixes = (seen[k:] for k in range(i, -1, -1))
        enough = (s for s in suffixes if sum(r[1] for r in s) >= steps and sum(r[2] for r in s) >= groups)
        fewest = next(enough, None)
        expected = sum(v * s for v, s, _ in fewest) / sum(s for _, s, _ in fewest) if fewest else None
        assert window.value == (pytest.approx(expected, abs=1e-9) if expected is not None else None)


def test_the_latest_is_a_window_of_one_step() -> None:
    source = Source()
    latest = Latest(source)
    assert (latest.value, latest.size, latest.slope()) == (None, 0, None)
    source.push((1, 3.0, 1.0, 1.0))
    source.push((2, 5.0, 1.0, 1.0))
    assert (latest.value, latest.size) == (5.0, 1)


# ---- rulers


def test_the_start_ruler_is_the_median_of_the_first_steps() -> None:
    start = Start(steps=5)
    for value in [1.0, 2.0, 3.0, 4.0]:
        start.push(value, 1.0, 10.0)
    assert start.level is None
    start.push(100.0, 1.0, 10.0)
    assert start.level == 3.0
    assert start.spread == pytest.approx(1.4826)  # deviations 2 1 0 1 97: median 1
    assert start.mean == 22.0
    start.push(1e6, 1.0, 10.0)
    assert start.level == 3.0, "later steps are not the start"


def test_the_start_ruler_waits_for_groups_and_rows() -> None:
    few_groups, few_rows = Start(steps=5), Start(steps=5)
    for _ in range(9):
        few_groups.push(1.0, 1.0, 1.0)
    assert few_groups.level is None, "9 groups of 10"
    few_groups.push(1.0, 1.0, 1.0)
    assert few_groups.level == 1.0
    for _ in range(3):
        few_rows.push(1.0, 5.0, 50.0)
    assert few_rows.level is None, "three rows are no ruler"


def test_a_spread_is_at_least_two_percent_of_the_level() -> None:
    start, recent = Start(steps=4), Recent(steps=4)
    for _ in range(4):
        start.push(-50.0, 1.0, 99.0)
        recent.push(-50.0, 1.0)
    assert start.spread == recent.spread == 1.0


def test_the_recent_ruler_is_the_rows_that_left_the_window() -> None:
    recent = Recent(steps=10)
    for value in [1.0, 2.0, 3.0, 4.0]:
        recent.push(value, 1.0)
    assert not recent.ready, "4 of 10 steps"
    recent.push(5.0, 1.0)
    assert recent.level == 3.0
    assert recent.spread == pytest.approx(2 / 1.349)  # quartiles 2 and 4
    for value in range(6, 20):
        recent.push(float(value), 1.0)
    assert recent.level == median(range(10, 20))


def test_the_recent_ruler_counts_the_steps_of_the_row_that_left() -> None:
    recent = Recent(steps=10)
    for value in [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]:
        recent.push(value, 5.0)
    assert recent.level == median([3, 4, 5, 6]), "four rows are kept, though two cover ten steps"


def test_extremes() -> None:
    highest, lowest = Extreme(high=True), Extreme(high=False)
    for value in [2.0, 5.0, -1.0, 3.0]:
        highest.push(value)
        lowest.push(value)
    assert (highest.level, lowest.level) == (5.0, -1.0)


def test_stairs_are_counted_and_forgotten() -> None:
    levels = [1.0] * 10 + [3.0] * 10 + [9.0] * 10 + [9.0] * 40
    stairs, counts = Stairs(steps=30), []
    for step, level in enumerate(levels, 1):
        stairs.push((step, level + 0.01 * (step % 3), 1.0, 1.0))
        counts.append(stairs.value)
    assert counts[9] == 0.0
    assert counts[19] == 1.0
    assert counts[29] == 2.0
    assert counts[-1] == 0.0, "both are more than 30 steps ago"


def test_a_ramp_is_no_stairs() -> None:
    stairs = Stairs(steps=80)
    for step in range(1, 200):
        stairs.push((step, 0.01 * step, 1.0, 1.0))
        assert stairs.value <= 1.0


# ---- onset

ONSETS: dict[str, tuple[list[float], int, int]] = {
    "a new level": ([0.0] * 20 + [5.0] * 5, 24, 21),
    "on a large level": ([1e9] * 20 + [1e9 + 1.0] * 5, 24, 21),
    "never after the streak's start": ([0.0] * 20 + [5.0] * 5, 15, 15),
    "no level at all": ([1.0, 2.0], 2, 2),
}


@pytest.mark.parametrize(("values", "streak", "expected"), ONSETS.values(), ids=ONSETS)
def test_onset(values: list[float], streak: int, expected: int) -> None:
    assert onset(list(enumerate(values, 1)), streak_start=streak) == expected


@settings(max_examples=50)
@given(values=st.lists(st.floats(-1e150, 1e150), min_size=3, max_size=40))
def test_onset_is_the_split_of_least_squared_error(values: list[float]) -> None:
    found = onset(list(enumerate(values, 1)), streak_start=10**6)
    assert 1 <= found <= len(values)

    def error(k: int) -> float:
        parts = (values[:k], values[k:])
        return sum(sum((v / 1e150 - math.fsum(p) / 1e150 / len(p)) ** 2 for v in p) for p in parts)

    if found > 1:
        assert error(found - 1) <= min(error(k) for k in range(1, len(values))) + 1e-9


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_median(values: list[float]) -> None:
    assert median_of(sorted(values)) == pytest.approx(median(values))
