"""What needs the steps before, by numbers derived by hand, and its state."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.errors import ConfigError
from grpo_lightning.signals import TemporalState
from grpo_lightning.signals.temporal import js_distance, slope, stair

NAN = math.nan


def _last(name: str, series: list[float], **fixed: float) -> dict[str, float]:
    state = TemporalState()
    out: dict[str, float] = {}
    for value in series:
        out = state.update({name: value, **fixed})
    return out


# name: the series of one signal, what else each step has, and the derived signals after the last step
SERIES: dict[str, tuple[str, list[float], dict[str, float], dict[str, float]]] = {
    "a straight line": ("kl", [0.1 + 0.02 * n for n in range(20)], {}, {"kl_speed": 0.02, "kl_acceleration": 0.0}),
    # slopes of x^2 over windows centred on 4.5 and 14.5: 9 and 29, so (29 - 9) / 10 = 2
    "a parabola": ("kl", [float(n * n) for n in range(20)], {}, {"kl_speed": 29.0, "kl_acceleration": 2.0}),
    # 4 of 10 values are 0.01 from their median
    "a stair": ("kl", [0.1, 0.11, 0.1, 0.09, 0.1, 0.5, 0.51, 0.5, 0.49, 0.5], {}, {"kl_stairs": 0.4 / 0.004}),
    "a ramp": ("kl", [0.1 * n for n in range(10)], {}, {"kl_stairs": 0.5 / 0.12}),
    "a level": ("kl", [0.3] * 10, {}, {"kl_stairs": 0.0, "kl_speed": 0.0}),
    # of the five before, the median is 3
    "a spike of the gradient": ("grad_norm", [1.0, 2.0, 3.0, 4.0, 100.0, 30.0], {}, {"grad_norm_ratio": 10.0}),
    "the last twenty updates": ("update_norm", [100.0] + [1.0] * 10 + [3.0] * 10, {}, {"update_norm_rolling": 2.0}),
    # a token a step of 36 s is 100 an hour
    "growing answers": (
        "response_length_mean",
        [100.0 + n for n in range(12)],
        {"step_seconds": 36.0},
        {"length_growth_per_hour": 100.0},
    ),
}


@pytest.mark.parametrize(("name", "series", "fixed", "expected"), SERIES.values(), ids=SERIES.keys())
def test_numbers_derived_by_hand(
    name: str, series: list[float], fixed: dict[str, float], expected: dict[str, float]
) -> None:
    out = _last(name, series, **fixed)
    assert {key: out.get(key) for key in expected} == pytest.approx(expected, abs=1e-12)


def test_early_steps_have_no_speed() -> None:
    assert _last("kl", [0.1] * 9) == {}


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "series", "fixed", "expected"), SERIES.values(), ids=SERIES.keys())
def test_broken_values_stay_out_of_every_window(
    name: str, series: list[float], fixed: dict[str, float], expected: dict[str, float], bad: float
) -> None:
    state, out = TemporalState(), dict[str, float]()
    for n, value in enumerate(series):
        out = state.update({name: value, **fixed})
        if n % 3 == 0 and value != series[-1]:
            assert not set(state.update({name: bad})) & set(expected), "nothing is derived from it"
    assert {key: out.get(key) for key in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["kl", "grad_norm", "update_norm", "response_length_mean"])
def test_what_was_not_measured_is_derived_from_nothing(name: str) -> None:
    state = TemporalState()
    for value in (1.0, 2.0) * 10:
        state.update({name: value, "step_seconds": 36.0})
    assert state.update({"step_seconds": 36.0}) == {}


def test_without_a_norm_or_time_there_is_no_ratio() -> None:
    assert _last("grad_norm", [0.0] * 9) == {}
    assert _last("response_length_mean", [100.0] * 12) == {}  # no time passed


# the mix of one step against a ruler of equal halves
# p = (1, 0), q = (1/2, 1/2), m = (3/4, 1/4): (log2(4/3) + (log2(2/3) + log2(2)) / 2) / 2
ONE_SIDED = math.sqrt((math.log2(4 / 3) + (math.log2(2 / 3) + 1) / 2) / 2)
MIXES = {
    "the same": ([8.0, 8.0, 0.0], {"source_shift": 0.0}),
    "one side": ([300.0, 0.0, 0.0], {"source_shift": ONE_SIDED}),
    "all other": ([0.0, 0.0, 300.0], {"source_shift": 1.0}),
}


@pytest.mark.parametrize(("sources", "expected"), MIXES.values(), ids=MIXES.keys())
def test_the_mix_of_sources_by_hand(sources: list[float], expected: dict[str, float]) -> None:
    assert TemporalState(source_ruler=[1.0, 1.0, 0.0]).update({}, sources=sources) == pytest.approx(expected)


def test_other_sources_shift_the_mix_slowly() -> None:
    state = TemporalState(source_ruler=[1.0, 1.0, 0.0])
    found = [state.update({}, sources=s)["source_shift"] for s in [[8.0, 8.0, 0.0], *[[0.0, 0.0, 16.0]] * 40]]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(1.0, abs=0.15)


def test_the_first_prompts_are_the_ruler() -> None:
    state = TemporalState()
    assert state.update({}, sources=[200.0, 0.0]) == {}
    assert state.update({}, sources=[0.0, 56.0]) == {}
    assert state.update({}, sources=[200.0, 56.0])["source_shift"] == pytest.approx(0.0, abs=1e-9)
    assert "source_shift" not in TemporalState().update({}, sources=[0.0, 0.0])


def test_js_distance_by_hand() -> None:
    assert js_distance([2.0, 0.0], [5.0, 5.0]) == pytest.approx(ONE_SIDED)
    assert js_distance([1.0, 0.0], [0.0, 3.0]) == 1.0


def test_a_ruler_of_other_bins_is_refused() -> None:
    with pytest.raises(ConfigError, match="build the ruler again"):
        js_distance([1.0], [1.0, 2.0])


def test_slope_and_stair_of_constants() -> None:
    assert slope([(1.0, 2.0), (1.0, 5.0)]) == 0.0
    assert stair([0.0] * 5, [0.0] * 5) == 0.0


def _step(n: int) -> dict[str, float]:
    return {
        "kl": 0.01 * n * n,
        "grad_norm": 1.0 + n % 3,
        "update_norm": 0.1 * n,
        "response_length_mean": 50.0 + n % 7,
        "step_seconds": 1.5,
    }


numbers = st.floats(-1e3, 1e3) | st.sampled_from([NAN, math.inf])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, st.floats(0, 60)), min_size=1, max_size=60), st.integers(0, 59))
def test_a_stop_anywhere_changes_no_derived_signal(steps: list[tuple[float, float, float]], stop: int) -> None:
    """Whatever the values: a stopped and resumed run derives what an uninterrupted one does."""

    def values(kl: float, other: float, seconds: float) -> dict[str, float]:
        return {"kl": kl, "grad_norm": other, "update_norm": kl, "response_length_mean": other, "step_seconds": seconds}

    straight, parted = TemporalState(), TemporalState()
    for n, (kl, other, seconds) in enumerate(steps):
        if n == stop:
            saved, parted = json.loads(json.dumps(parted.state_dict())), TemporalState()
            parted.load_state_dict(saved)
        mix = [abs(seconds) * 10, 1.0]
        assert parted.update(values(kl, other, seconds), sources=mix) == straight.update(
            values(kl, other, seconds), sources=mix
        )


@pytest.mark.parametrize("stop", [0, 3, 25, 70])
def test_a_restored_state_goes_on_bit_for_bit(stop: int, tmp_path: object) -> None:
    straight, first = TemporalState(), TemporalState()
    for n in range(stop):
        for state in (straight, first):
            state.update(_step(n), sources=[float(n % 4), 9.0])
    resumed = TemporalState()
    saved = first.state_dict()
    torch.save(saved, f"{tmp_path}/state.pt")
    resumed.load_state_dict(torch.load(f"{tmp_path}/state.pt", weights_only=True))
    assert json.loads(json.dumps(saved)) == saved == first.state_dict()
    for n in range(stop, stop + 40):
        assert resumed.update(_step(n), sources=[1.0, n]) == straight.update(_step(n), sources=[1.0, n])


def test_saved_state_does_not_change_with_later_steps() -> None:
    state = TemporalState()
    state.update(_step(1))
    saved = state.state_dict()
    before = json.dumps(saved)
    state.update(_step(2))
    assert json.dumps(saved) == before
