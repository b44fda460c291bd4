"""Rules at work: each kind of condition with the step at which it fires, derived by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from health_runs import Values, changes, fired, one_rule, steps

from grpo_lightning.errors import ConfigError
from grpo_lightning.health import Judge, Step, build_baseline, parse_rules

NAN, INF = math.nan, math.inf

# (the rule's keys, the series, the steps at which it fires)
FIRES: dict[str, tuple[str, Values, list[int]]] = {
    "below": ("signal: kl, below: 1", [2, 2, 0.5], [3]),
    "above": ("signal: kl, above: 1", [0.5, 1.0, 1.5], [3]),  # 1.0 is not above
    "for 3 steps": ("signal: kl, above: 1, for_steps: 3", [2, 2, 0, 2, 2, 2], [6]),
    "over a window": ("signal: kl, above: 1, over_steps: 3", [1, 1, 1, 0, 2, 2], [6]),  # means 1, 2/3, 1, 4/3
    "absolute": ("signal: kl, above: 1, absolute: true", [0.0, -2.0], [2]),
    "relative": ("signal: kl, above: 1, absolute: true", [0.0, -0.5, 1.5], [3]),
    "not finite": ("signal: kl, not_finite: true", [1e9, NAN], [2]),
    "infinite": ("signal: kl, not_finite: true", [1e9, -INF], [2]),
    "beyond what can be squared": ("signal: kl, not_finite: true", [1e149, 1e308], [2]),
    "NaN violates below": ("signal: kl, below: 1", [2, NAN], [2]),
    "NaN violates above": ("signal: kl, above: 1", [0, NAN], [2]),
    "NaN is in no window": ("signal: kl, above: 1, over_steps: 2, for_steps: 9", [0, NAN, 0, 0], []),
    # start ruler: median 1.0 of the first 20, then 0.4 of it
    "ruler ratio": ("signal: kl, ruler_ratio_below: 0.5", [1.0] * 20 + [0.6, 0.4], [22]),
    "ruler ratio above": ("signal: kl, ruler_ratio_above: 3", [1.0] * 20 + [3.0, 3.1], [22]),
    # spread is 2 % of the level: z = (1.11 - 1) / 0.02 = 5.5
    "ruler z": ("signal: kl, ruler_z_above: 5", [1.0] * 20 + [1.09, 1.11], [22]),
    "no ruler yet": ("signal: kl, ruler_ratio_below: 0.5", [1.0] * 10 + [0.0], []),
    "a ruler of 0, left": ("signal: kl, ruler_ratio_above: 3", [0.0] * 21 + [0.1], [22]),
    "a ruler of 0, not left": ("signal: kl, ruler_ratio_below: 0.5", [0.0] * 30, []),
    # the highest is 2; (1.9 - 2) / 0.02 = -5
    "highest": ("signal: kl, ruler: highest, ruler_z_below: -4", [1.0] * 20 + [2.0, 1.95, 1.9], [23]),
    "highest, by ratio": ("signal: kl, ruler: highest, ruler_ratio_below: 0.5", [1.0, 4.0, 2.0, 1.9], [4]),
    "lowest, by ratio": ("signal: kl, ruler: lowest, ruler_ratio_above: 3", [4.0, 1.0, 3.0, 3.1], [4]),
    # half of recent_steps: 5 rows before it
    "recent": ("signal: kl, ruler: recent, recent_steps: 10, ruler_ratio_below: 0.5", [1.0] * 5 + [0.6, 0.4], [7]),
    "recent is not made": (
        "signal: kl, ruler: recent, recent_steps: 10, ruler_ratio_below: 0.5",
        [1.0] * 4 + [0.1],
        [],
    ),
    "recent forgets": (
        "signal: kl, ruler: recent, recent_steps: 10, ruler_ratio_below: 0.5, keep_firing_steps: 0",
        [9.0] * 20 + [5.0] * 11 + [2.0],  # after 11 steps at 5 the median is 5
        [32],
    ),
    "jump": ("signal: kl, jump_above: 10, recent_steps: 10", [0.1] * 5 + [0.9, 1.1], [7]),
    "jump down": ("signal: kl, jump_below: 0.1, recent_steps: 10", [1.0] * 5 + [0.2, 0.05], [7]),
    "no jump from zero": ("signal: kl, jump_above: 10, recent_steps: 10", [0.0] * 9 + [5.0], []),
    "jump of a minimum": (
        "signal: kl, jump_above: 10, statistic: min, over_steps: 3, recent_steps: 10",
        [0.1] * 9 + [5.0, 0.1, 5.0, 5.0, 5.0],
        [14],
    ),
    "trend": ("signal: kl, trend_above: 0.5, over_steps: 3", [1.0, 1.0, 1.0, 1.4, 2.4], [5]),  # slopes 0.2, 0.7
    "trend down": ("signal: kl, trend_below: -0.5, over_steps: 3", [3.0, 3.0, 3.0, 2.6, 1.6], [5]),
    "stairs": (
        "signal: kl, stairs_above: 1.5, over_steps: 60",
        [x + 0.01 * (i % 2) for i, x in enumerate([1.0] * 10 + [4.0] * 10 + [16.0] * 5)],
        [24],  # the third of five at a new level makes their median, the fourth its score 3 / 0.3
    ),
    "share of zeros": ("signal: kl, above: 0.7, statistic: zero_share, over_steps: 4", [1, 0, 1, 0, 0, 0], [5]),
    "after": ("signal: kl, above: 1, after_steps: 5", [2.0] * 9, [6]),
    "before": ("signal: kl, above: 1, before_steps: 3", [0, 0, 2.0, 2.0], [3]),
    "not before": ("signal: kl, above: 1, before_steps: 3", [0, 0, 0, 2.0], []),
    "a gap neither counts nor breaks": ("signal: kl, above: 1, for_steps: 3", [2, 2, None, None, 2], [5]),
}


@pytest.mark.parametrize(("keys", "series", "expected"), FIRES.values(), ids=FIRES)
def test_a_condition_fires_at_its_step(keys: str, series: Values, expected: list[int]) -> None:
    assert fired(one_rule(keys), {"kl": series}) == expected


# (keys, series, facts of the steps, expected)
MORE: dict[str, tuple[str, dict[str, Values], dict[str, Any], list[int]]] = {
    "relative to": (
        "signal: kl, relative_to: loss, above: 0.9",
        {"kl": [0.5, 0.95, 0.95], "loss": [1, 0, 1]},
        {},
        [3],  # at step 2 nothing can be said
    ),
    "unit of a z": (
        "signal: kl, ruler: highest, ruler_z_below: -2, unit: loss",
        {"kl": [5.0] * 20 + [3.1, 2.9], "loss": [1.0] * 22},
        {},
        [22],
    ),
    "a unit that stands in": (
        "signal: kl, ruler: highest, ruler_z_below: -2, unit: loss, else_unit: lr",
        {"kl": [5.0] * 20 + [3.1, 2.9], "lr": [1.0] * 22},
        {},
        [22],
    ),
    "a unit of 0 says nothing": (
        "signal: kl, ruler: highest, ruler_z_below: -2, unit: loss",
        {"kl": [5.0] * 20 + [3.1, 2.9], "loss": [0.0] * 22},
        {},
        [],
    ),
    "a signal that stands in": ("signal: kl, else_signal: loss, above: 1", {"loss": [0, 2]}, {}, [2]),
    "only where the first is not measured": (
        "signal: kl, else_signal: loss, above: 1",
        {"kl": [0, 0], "loss": [2, 2]},
        {},
        [],
    ),
    "trend per hour": (  # 0.01 a step of 36 s is 1 an hour
        "signal: kl, trend_above: 0.9, over_steps: 3, per: hour",
        {"kl": [0, 0, 0.01, 0.02], "step_seconds": [36] * 4},
        {},
        [4],
    ),
    "when": ("signal: kl, above: 1, when: [{signal: loss, below: 0}]", {"kl": [2, 2], "loss": [1, -1]}, {}, [2]),
    "when is not finite": (
        "signal: kl, above: 1, when: [{signal: loss, below: 0}]",
        {"kl": [2], "loss": [NAN]},
        {},
        [1],
    ),
    "unless is not finite": (
        "signal: kl, above: 1, unless: [{signal: loss, above: 0}]",
        {"kl": [2], "loss": [NAN]},
        {},
        [1],
    ),
    "when not measured": ("signal: kl, above: 1, when: [{signal: loss, below: 0}]", {"kl": [2, 2]}, {}, []),
    "optional when": (
        "signal: kl, above: 1, when: [{signal: loss, below: 0, optional: true}]",
        {"kl": [0, 2]},
        {},
        [2],
    ),
    "optional but measured": (
        "signal: kl, above: 1, when: [{signal: loss, below: 0, optional: true}]",
        {"kl": [2, 2], "loss": [1, 1]},
        {},
        [],
    ),
    "unless": ("signal: kl, above: 1, unless: [{signal: loss, above: 0}]", {"kl": [2, 2], "loss": [1, 0]}, {}, [2]),
    "unless not measured": ("signal: kl, above: 1, unless: [{signal: loss, above: 0}]", {"kl": [2]}, {}, [1]),
    "missing": ("signal: kl, above: 1, when: [{signal: loss, missing: true}]", {"kl": [2]}, {}, [1]),
    "not missing": (
        "signal: kl, above: 1, when: [{signal: loss, missing: true}]",
        {"kl": [2, 2], "loss": [1.0, None]},
        {},
        [],
    ),
    "fewer groups than a step must have": ("signal: kl, above: 1, min_groups: 4", {"kl": [2] * 9}, {"groups": 3}, []),
    "as many groups": ("signal: kl, above: 1, min_groups: 4", {"kl": [2] * 9}, {"groups": 4}, [1]),
    "for so many groups": ("signal: kl, above: 1, for_groups: 10", {"kl": [2] * 9}, {"groups": 4}, [3]),
    "over so many groups": ("signal: kl, above: 1, over_groups: 10", {"kl": [0, 0, 2, 4]}, {"groups": 5}, [4]),
    "for minutes": ("signal: kl, above: 1, for_minutes: 1", {"kl": [2] * 9}, {"seconds": 20.0}, [3]),
    "minutes of the signal step_seconds": (
        "signal: kl, above: 1, for_minutes: 1",
        {"kl": [2] * 9, "step_seconds": [25] * 9},
        {},
        [3],
    ),
    "minutes of steps that nobody timed": ("signal: kl, above: 1, for_minutes: 1", {"kl": [2] * 9}, {}, []),
    "impossible seconds are none": ("signal: kl, above: 1, for_minutes: 1", {"kl": [2] * 9}, {"seconds": NAN}, []),
}


@pytest.mark.parametrize(("keys", "series", "facts", "expected"), MORE.values(), ids=MORE)
def test_what_stands_around_a_condition(
    keys: str, series: dict[str, Values], facts: dict[str, Any], expected: list[int]
) -> None:
    assert fired(one_rule(keys), series, **facts) == expected


ROWS = ["below: 1", "below: 1, over_steps: 20", "ruler_ratio_below: 0.5, over_steps: 10", "below: 1, for_steps: 20"]
ROWS += ["jump_below: 0.5, recent_steps: 40, over_steps: 10", "trend_below: -0.01, over_steps: 25, for_steps: 10"]


@pytest.mark.parametrize("keys", ROWS)
def test_a_row_of_five_steps_is_judged_within_a_row(keys: str) -> None:
    """The series falls from 2 to 0 at step 61; rows of 5 steps give their mean, and their last step."""
    every = [2.0 + 0.01 * (i % 2) for i in range(60)] + [0.1 - 0.001 * i for i in range(60)]
    rows = [sum(every[i : i + 5]) / 5 for i in range(0, 120, 5)]
    (at,) = fired(one_rule("signal: kl, " + keys), {"kl": every})
    (row_at,) = fired(one_rule("signal: kl, " + keys), {"kl": rows}, span=5.0)
    assert at <= row_at <= at + 5


def test_groups_do_what_steps_do() -> None:
    """One prompt a step: a window of 24 groups is 24 steps, whatever over_steps says."""
    rules = one_rule("signal: kl, above: 1, over_steps: 3, over_groups: 24")
    series = {"kl": [0.0] * 30 + [2.0] * 30}
    assert fired(rules, series, groups=8) == [32]  # 3 rows; 2 of 3 above: mean 4/3
    assert fired(rules, series, groups=1) == [43]  # 13 of 24 rows: mean 26/24


def test_the_number_of_groups_is_guessed_from_the_dead_share() -> None:
    rules = one_rule("signal: kl, above: 1, over_groups: 10, after_steps: 8")
    dead = [0.25, 0.5, 0.75, 0.25, 0.5, 0.25, 0.5, 0.25] * 3
    series = {"kl": [0.0] * 20 + [9.0] * 4, "dead_group_fraction": dead}
    assert fired(rules, series) == [21]  # 3 rows of 4 groups: mean 3
    alone = {"kl": [0.0] * 20 + [9.0] * 4, "dead_group_fraction": [float(i % 2) for i in range(24)]}
    assert fired(rules, alone) == [22]  # 10 rows of one group: means 0.9, 1.8


# ---- together

JOINED = """
- {name: spike, signal: grad_norm, above: 10, quiet: true}
- {name: outlier, signal: reward_outlier_fraction, above: 0.1, quiet: true}
- {name: guilty, together: [spike, outlier], within_steps: 3, summary: "{signal} at {step}", keep_firing_steps: 2}
"""


@pytest.mark.parametrize(("lag", "expected"), [(0, [10]), (3, [13]), (4, [])])
def test_rules_that_hold_within_steps_of_each_other(lag: int, expected: list[int]) -> None:
    grad, outliers = [1.0] * 20, [0.0] * 20
    grad[9], outliers[9 + lag] = 50.0, 0.5
    series: dict[str, Values] = {"grad_norm": grad, "reward_outlier_fraction": outliers}
    found = changes(parse_rules(JOINED), series)
    assert [step for change, rule, step in found if change == "firing" and rule == "guilty"] == expected
    assert {rule for _, rule, _ in found} <= {"guilty"}, "quiet rules never alert"


def test_the_joined_alert_names_its_parts() -> None:
    judge = Judge(parse_rules(JOINED))
    for row in steps({"grad_norm": [1.0, 50.0], "reward_outlier_fraction": [0.0, 0.5]}):
        judge.observe(row)
    (alert,) = judge.alerts
    assert (alert.summary, alert.signal, alert.bound) == ("spike,outlier at 2", "spike,outlier", 2.0)


def test_a_rule_may_join_joined_rules_in_any_order() -> None:
    text = """
- {name: all, together: [both, c], within_steps: 0, summary: s}
- {name: both, together: [a, b], within_steps: 1, summary: s, quiet: true}
- {name: a, signal: kl, above: 1, quiet: true}
- {name: b, signal: loss, above: 1, quiet: true}
- {name: c, signal: lr, above: 1, quiet: true}
"""
    series: dict[str, Values] = {"kl": [0, 2, 0], "loss": [0, 0, 2], "lr": [0, 0, 2]}
    assert changes(parse_rules(text), series) == [("firing", "all", 3)]


def test_a_joined_rule_has_conditions_too() -> None:
    text = JOINED.replace("keep_firing", "when: [{signal: kl, above: 1}], keep_firing")
    series: dict[str, Values] = {"grad_norm": [50.0] * 3, "reward_outlier_fraction": [0.5] * 3, "kl": [0, 0, 2]}
    assert changes(parse_rules(text), series) == [("firing", "guilty", 3)]


def test_a_judge_refuses_a_joined_rule_without_its_parts() -> None:
    with pytest.raises(ConfigError, match="outlier is not held"):
        Judge([rule for rule in parse_rules(JOINED) if rule.name != "outlier"])


# ---- not measured


def test_a_rule_without_its_signal_never_fires_and_says_so_once() -> None:
    text = """
- {name: a, signal: kl, above: 1, summary: s}
- {name: b, signal: loss, above: 1, summary: s, when: [{signal: entropy, above: 1}, {signal: lr, above: 1, optional: true}]}
- {name: c, signal: loss, ruler_z_above: 1, unit: reward_std, else_unit: group_reward_std, summary: s}
- {name: d, signal: loss, above: 1, for_minutes: 1, summary: s}
- {name: e, together: [a, d], within_steps: 1, summary: s}
- {name: f, signal: loss, above: 1, summary: s, when: [{signal: kl, missing: true}]}
"""
    judge = Judge(parse_rules(text))
    for row in steps({"loss": [5.0] * 30, "group_reward_std": [1.0] * 30}):
        judge.observe(row)
    assert judge.not_judged() == [("a", "kl"), ("b", "entropy"), ("d", "step_seconds"), ("e", "kl")]
    assert [alert.rule for alert in judge.alerts] == ["f"]


def test_a_rule_waits_for_its_ruler() -> None:
    judge = Judge(one_rule("signal: kl, ruler_ratio_below: 0.5"))
    for place, row in enumerate(steps({"kl": [1.0] * 25}), 1):
        judge.observe(row)
        assert judge.waiting() == (["r"] if place < 20 else [])


def test_a_baseline_is_the_ruler_at_the_same_step() -> None:
    climb = {"kl": [0.01 * i for i in range(1, 101)]}
    baseline = build_baseline({"good": steps(climb)})
    judge = Judge(one_rule("signal: kl, ruler_ratio_above: 2"), baseline=baseline)
    for row in steps({"kl": [0.01 * i for i in range(1, 51)] + [0.02 * i + 0.2 for i in range(51, 101)]}):
        judge.observe(row)
    (alert,) = judge.alerts
    assert alert.step == 51, "no waiting: a baseline is there from the first step"
    assert alert.expected == pytest.approx(0.53, abs=0.03)
    assert not Judge(one_rule("signal: kl, ruler_ratio_above: 2"), baseline=baseline).waiting()


# ---- steps that can't be

ODD: dict[str, Step] = {
    "span 0": Step(step=1, values={"kl": 2.0}, span=0.0),
    "span negative": Step(step=1, values={"kl": 2.0}, span=-3.0),
    "span NaN": Step(step=1, values={"kl": 2.0}, span=NAN),
    "span infinite": Step(step=1, values={"kl": 2.0}, span=INF),
    "groups 0": Step(step=1, values={"kl": 2.0}, groups=0.0),
    "groups NaN": Step(step=1, values={"kl": 2.0}, groups=NAN),
    "groups infinite": Step(step=1, values={"kl": 2.0}, groups=INF),
    "seconds negative": Step(step=1, values={"kl": 2.0}, seconds=-5.0),
    "seconds infinite": Step(step=1, values={"kl": 2.0, "step_seconds": INF}),
    "a step below 0": Step(step=-(10**12), values={"kl": 2.0}),
    "no values": Step(step=1, values={}),
    "the largest double": Step(step=1, values={"kl": 1.7e308}),
    "the smallest": Step(step=1, values={"kl": 5e-324}),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_step_breaks_nothing_and_is_forgotten(odd: Step) -> None:
    text = """
- {name: level, signal: kl, above: 1, over_steps: 5, over_groups: 9, summary: "{value} {expected}"}
- {name: z, signal: kl, ruler_z_above: 4, over_steps: 5, summary: s}
- {name: recent, signal: kl, ruler: recent, ruler_ratio_above: 3, over_steps: 3, recent_steps: 20, summary: s}
- {name: trend, signal: kl, trend_above: 1, over_steps: 5, summary: s}
- {name: steps, signal: kl, stairs_above: 1, over_steps: 10, summary: s}
- {name: minutes, signal: kl, above: 1, for_minutes: 1, summary: s}
"""
    judge = Judge(parse_rules(text))
    for row in steps({"kl": [0.5 + 0.01 * (i % 3) for i in range(30)]}, groups=3.0):
        judge.observe(row)
    for _ in range(3):
        judge.observe(odd)
    before = len(judge.alerts)
    for row in steps({"kl": [0.5 + 0.01 * (i % 3) for i in range(400)]}, groups=3.0):
        judge.observe(row)
    assert not judge.firing()
    assert len(judge.alerts) <= before + 2
    late = [alert for alert in judge.alerts[before:] if alert.step > 60]
    assert not late, "hundreds of ordinary steps later nothing of it is left"
    for row in steps({"kl": [9.0] * 12}, groups=3.0, seconds=10.0):
        judge.observe(row)
    assert {a.rule for a in judge.firing()} >= {"level", "z", "recent", "minutes"}, "and all still work"
