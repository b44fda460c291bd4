"""What needs the steps before, by numbers derived by hand, and its state."""

from __future__ import annotations

import json
import math

import pytest
import torch

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


def test_a_straight_line_has_its_slope_and_no_acceleration() -> None:
    out = _last("kl", [0.1 + 0.02 * n for n in range(20)])
    assert (out["kl_speed"], out["kl_acceleration"]) == pytest.approx((0.02, 0.0), abs=1e-12)


def test_a_parabola_accelerates_by_twice_its_coefficient() -> None:
    # slopes of x^2 over windows centred on 4.5 and 14.5: 9 and 29, so (29 - 9) / 10 = 2
    assert _last("kl", [float(n * n) for n in range(20)])["kl_acceleration"] == pytest.approx(2.0)


def test_a_stair_is_told_from_a_ramp() -> None:
    step = _last("kl", [0.1, 0.11, 0.1, 0.09, 0.1, 0.5, 0.51, 0.5, 0.49, 0.5])["kl_stairs"]
    ramp = _last("kl", [0.1 * n for n in range(10)])["kl_stairs"]
    assert step == pytest.approx(0.4 / 0.004)  # 4 of 10 values are 0.01 from their median
    assert ramp == pytest.approx(0.5 / 0.12)
    assert _last("kl", [0.3] * 10)["kl_stairs"] == 0.0


def test_early_steps_have_no_speed() -> None:
    assert _last("kl", [0.1] * 9) == {}


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_broken_values_stay_out_of_every_window(bad: float) -> None:
    series = [1.0] * 6
    assert _last("grad_norm", [*series, bad, 4.0]) == _last("grad_norm", [*series, 4.0]) == {"grad_norm_ratio": 4.0}
    assert _last("grad_norm", [*series, bad]) == {}


def test_the_norms_median_is_of_the_steps_before() -> None:
    assert _last("grad_norm", [1.0, 2.0, 3.0, 4.0, 100.0, 30.0])["grad_norm_ratio"] == 10.0
    assert _last("grad_norm", [0.0] * 9) == {}


def test_update_norms_are_averaged_over_twenty_steps() -> None:
    assert _last("update_norm", [100.0] + [1.0] * 10 + [3.0] * 10)["update_norm_rolling"] == 2.0


def test_length_growth_counts_trained_hours() -> None:
    out = _last("response_length_mean", [100.0 + n for n in range(12)], step_seconds=36.0)
    assert out["length_growth_per_hour"] == pytest.approx(100.0)
    assert _last("response_length_mean", [100.0] * 12) == {}  # no time passed


def test_other_sources_shift_the_mix() -> None:
    state = TemporalState(source_ruler=[1.0, 1.0, 0.0])
    assert state.update({}, sources=[8.0, 8.0, 0.0]) == {"source_shift": 0.0}
    for _ in range(40):
        out = state.update({}, sources=[0.0, 0.0, 16.0])
    assert out["source_shift"] == pytest.approx(1.0, abs=0.15)


def test_the_first_prompts_are_the_ruler() -> None:
    state = TemporalState()
    assert state.update({}, sources=[200.0, 0.0]) == {}
    assert state.update({}, sources=[0.0, 56.0]) == {}
    assert state.update({}, sources=[200.0, 56.0])["source_shift"] == pytest.approx(0.0, abs=1e-9)
    assert "source_shift" not in TemporalState().update({}, sources=[0.0, 0.0])


def test_js_distance_by_hand() -> None:
    # p = (1, 0), q = (1/2, 1/2), m = (3/4, 1/4): (log2(4/3) + (log2(2/3) + log2(2)) / 2) / 2
    expected = math.sqrt((math.log2(4 / 3) + (math.log2(2 / 3) + 1) / 2) / 2)
    assert js_distance([2.0, 0.0], [5.0, 5.0]) == pytest.approx(expected)
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
