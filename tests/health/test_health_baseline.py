"""Rulers of earlier runs: bands, marks, and files that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from health_runs import steps
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.errors import ConfigError
from grpo_lightning.health import build_baseline, load_baseline, save_baseline


def test_a_band_is_the_median_of_its_bin_over_all_runs() -> None:
    """Bins of 5 steps: the second holds steps 6 to 10 of three runs."""
    runs = {str(level): list(steps({"kl": [level] * 20})) for level in (1.0, 2.0, 6.0)}
    baseline = build_baseline(runs)
    assert baseline.band("kl", 7) == (2.0, pytest.approx(1.4826))  # deviations 1 0 4, five times each
    assert baseline.band("loss", 7) is None
    assert (baseline.steps, baseline.runs) == (20, ("1.0", "2.0", "6.0"))


def test_a_band_follows_the_run() -> None:
    baseline = build_baseline({"a": steps({"kl": [0.1 * i for i in range(300)]})})
    for step in (20, 150, 290):
        band = baseline.band("kl", step)
        assert band is not None
        assert band[0] == pytest.approx(0.1 * step, abs=0.6)
    assert baseline.band("kl", 10**9) == baseline.band("kl", 300), "after its end, the last"
    assert baseline.band("kl", -5) == baseline.band("kl", 1)


def test_values_that_are_not_finite_are_left_out() -> None:
    baseline = build_baseline({"a": steps({"kl": [1.0, math.nan, math.inf, 1.0, 1.0]})})
    assert baseline.band("kl", 1) == (1.0, 0.02)
    with pytest.raises(ConfigError, match="nothing to build"):
        build_baseline({"a": steps({"kl": [math.nan]})})
    with pytest.raises(ConfigError, match="nothing to build"):
        build_baseline({"a": []})


def test_marks_are_the_steps_where_a_level_changed() -> None:
    levels = [0.02] * 60 + [0.31] * 60 + [0.1] * 60
    baseline = build_baseline({"a": steps({"kl": [v + 1e-4 * (i % 3) for i, v in enumerate(levels)]})})
    assert [(mark.step, round(mark.after, 2)) for mark in baseline.marks] == [(61, 0.31), (121, 0.1)]
    assert baseline.marks[0].summary == "kl began to climb at step 61 (0.0201 to 0.31)"
    assert baseline.marks[1].summary.startswith("kl began to fall at step 121")
    assert [mark.step for mark in baseline.near_mark(70)] == [61]
    assert baseline.near_mark(90) == []
    noise = [0.5 + 0.1 * math.sin(7.3 * i) for i in range(180)]
    assert build_baseline({"a": steps({"kl": noise})}).marks == ()


@settings(max_examples=40)
@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=120))
def test_it_is_the_same_after_a_file(values: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    baseline = build_baseline({"a\u202e": steps({"kl": values, "reward/x_mean": [1.0] * len(values)})})
    path = tmp_path_factory.mktemp("ruler") / "r.json"
    save_baseline(baseline, path)
    assert load_baseline(path) == baseline
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


GOOD = {
    "format": "grpo-lightning-baseline/1",
    "runs": ["a"],
    "steps": 10,
    "signals": {"kl": {"steps": [1.0], "levels": [0.5], "spreads": [0.1]}},
    "marks": [{"signal": "kl", "step": 5, "before": 0.1, "after": 0.2}],
}
BROKEN = {
    "no signals": {"signals": None},
    "signals in a list": {"signals": []},
    "no columns": {"signals": {"kl": {}}},
    "no rows": {"signals": {"kl": {"steps": [], "levels": [], "spreads": []}}},
    "text": {"signals": {"kl": {"steps": ["a"], "levels": [0.5], "spreads": [0.1]}}},
    "NaN": {"signals": {"kl": {"steps": [1.0], "levels": [math.nan], "spreads": [0.1]}}},
    "a spread below 0": {"signals": {"kl": {"steps": [1.0], "levels": [1.0], "spreads": [-0.1]}}},
    "a mark without a step": {"marks": [{"signal": "kl"}]},
    "a mark at infinity": {"marks": [{"signal": "kl", "step": math.inf, "before": 0.1, "after": 0.2}]},
    "no runs": {"runs": None},
    "another format": {"format": 5},
    "steps that are text": {"steps": "many"},
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(GOOD))
    assert load_baseline(path).band("kl", 3) == (0.5, 0.1)
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ConfigError) as caught:
        load_baseline(path)
    assert "\n" not in str(caught.value)
    assert "r.json" in str(caught.value)
