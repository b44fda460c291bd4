"""What must not matter: a signal's unit, the level of input that doesn't change, who feeds the judge."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from health_runs import rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.health import Judge, Step, replay, shipped_rules

RULES = shipped_rules()
UNITS = {
    "reward": ("reward_mean", "reward_std", "group_reward_std"),
    "kl": ("kl",),
    "grad_norm": ("grad_norm",),
    "length": ("response_length_mean",),
}


def said(rows: Iterable[Step]) -> list[tuple[str, str, int, str]]:
    judge = Judge(RULES)
    return [(c.change, c.alert.rule, c.step, c.alert.severity) for row in rows for c in judge.observe(row)]


def series_of(generated: ModuleType, fault: str | None, family: int, seed: int) -> Any:
    chosen = generated.FAMILIES[family % len(generated.FAMILIES)]
    return generated.healthy(chosen, seed) if fault is None else generated.faulty(fault, chosen, seed)


FAULTS = [None, "variance collapse", "KL explosion", "gradient explosion", "length explosion", "declining reward"]
FAULTS += ["entropy explosion", "reward hacking"]


@settings(max_examples=12, deadline=None)
@given(
    fault=st.sampled_from(FAULTS),
    family=st.integers(0, 19),
    seed=st.integers(0, 50),
    unit=st.sampled_from(sorted(UNITS)),
    factor=st.sampled_from([1 / 40, 40.0, 1 / 7, 1000.0]) | st.floats(1 / 40, 40),
)
def test_the_unit_of_a_signal_changes_no_verdict(
    generated: ModuleType, fault: str | None, family: int, seed: int, unit: str, factor: float
) -> None:
    series = series_of(generated, fault, family, seed)
    scaled = {n: v * factor if n in UNITS[unit] else v for n, v in series.values.items()}
    assert said(rows_of(scaled, series.prompts)) == said(rows_of(series.values, series.prompts))


FRACTION = st.floats(0.0, 1.0)


@st.composite
def constants(draw: st.DrawFn) -> dict[str, float]:
    """Ordinary values, each of any size where the unit is free; a step that is all cut or all dead is no ordinary one."""
    free = {
        name: draw(st.floats(1e-6, 1e4))
        for name in ("kl", "grad_norm", "entropy", "response_length_mean", "reward_std", "group_reward_std")
    }
    bounded = {name: draw(FRACTION) for name in ("ngram_repetition", "eval_accuracy", "advantage_flat_fraction")}
    return (
        free
        | bounded
        | {
            "reward_mean": draw(st.floats(-100, 100)),
            "advantage_std": draw(st.floats(0.01, 2.0)),
            "advantage_mean": 0.0,
            "dead_group_fraction": draw(st.floats(0.0, 0.9)),
            "truncated_fraction": draw(st.floats(0.0, 0.7)),
            "loss": draw(st.floats(-1, 1)),
            "update_norm": draw(st.floats(1e-12, 1.0)),
            "update_to_weight": draw(st.floats(1e-12, 1.0)),
            "reward_rank_agreement": 1.0,
            "step_seconds": draw(st.floats(0.001, 1e4)),
        }
    )


@settings(max_examples=12, deadline=None)
@given(values=constants(), groups=st.sampled_from([1.0, 4.0, 64.0, None]), span=st.sampled_from([1.0, 5.0]))
def test_input_that_never_changes_never_alarms(values: dict[str, float], groups: float | None, span: float) -> None:
    rows = (Step(step=round(i * span), values=values, span=span, groups=groups) for i in range(1, 301))
    assert said(rows) == []


@st.composite
def learning(draw: st.DrawFn) -> list[Step]:
    """A run in which everything goes steadily where it should."""
    steps, prompts = 300, draw(st.sampled_from([4.0, 16.0]))
    t = np.arange(steps) / steps
    low, high = draw(st.floats(0.0, 0.4)), draw(st.floats(0.5, 0.9))
    shape = draw(st.sampled_from([0.3, 1.0, 2.0]))
    reward = (low + (high - low) * t**shape) * draw(st.sampled_from([1.0, 10.0]))
    dead = draw(st.floats(0.1, 0.5)) * (1 + 0.3 * t)
    spread = np.full(steps, 0.45) * (1 - dead)
    columns = {
        "reward_mean": reward,
        "reward_std": spread * 1.2,
        "group_reward_std": spread,
        "dead_group_fraction": dead,
        "advantage_std": np.sqrt(1 - dead),
        "entropy": draw(st.floats(0.3, 3.0)) * (1 - draw(st.floats(0.0, 0.6)) * t),
        "kl": draw(st.floats(1e-4, 1.0)) * np.sqrt(t + 1e-3),
        "grad_norm": np.full(steps, draw(st.floats(0.01, 100.0))) * (1 - 0.5 * t),
        "response_length_mean": 200 * (1 + draw(st.floats(-0.5, 0.4)) * t),
        "truncated_fraction": draw(st.floats(0.0, 0.5)) * (1 - t),
        "ngram_repetition": np.full(steps, 0.05),
        "loss": 0.01 * t,
    }
    return [Step(step=i + 1, values={n: float(v[i]) for n, v in columns.items()}, groups=prompts) for i in range(steps)]


@settings(max_examples=15, deadline=None)
@given(rows=learning())
def test_steady_learning_never_alarms(rows: list[Step]) -> None:
    assert said(rows) == []


@pytest.mark.parametrize("fault", ["KL explosion", "variance collapse"])
def test_a_replay_is_what_the_judge_said_live(generated: ModuleType, fault: str) -> None:
    series = series_of(generated, fault, 0, 5)
    rows = rows_of(series.values, series.prompts)
    judge = Judge(RULES)
    for row in rows:
        judge.observe(row)
    replayed = replay(iter(rows), RULES)
    assert replayed.alerts == judge.alerts
    assert replayed.alerts, "it fires"
    assert (replayed.verdict, replayed.steps, replayed.not_judged) == ("unhealthy", 300, judge.not_judged())
    listed = replayed.to_dict()
    assert [(a["rule"], a["step"]) for a in listed["alerts"]] == [(a.rule, a.step) for a in judge.alerts]
    assert {entry["missing"] for entry in listed["not_judged"]} == {signal for _, signal in judge.not_judged()}


def test_a_replay_knows_only_what_came_before(generated: ModuleType) -> None:
    series = series_of(generated, "gradient explosion", 2, 1)
    rows = rows_of(series.values, series.prompts)
    whole = replay(rows, RULES).alerts
    for alert in whole:
        assert alert in replay(rows[: alert.step], RULES).alerts
        assert alert not in replay(rows[: alert.step - 1], RULES).alerts
    assert whole


def test_every_shipped_rule_is_silent_without_signals() -> None:
    assert said(Step(step=i, values={}) for i in range(1, 200)) == []
    judge = Judge(RULES)
    judge.observe(Step(step=1, values={"kl": math.nan}))
    told = {rule for rule, _ in judge.not_judged()}
    assert told >= {rule.name for rule in RULES if rule.needed and "kl" not in rule.signals}
