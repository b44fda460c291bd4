"""The life of an alert: fires once, rises, is resolved, re-arms; what it carries."""

from __future__ import annotations

import json
import math

import pytest
from health_runs import Values, changes, fired, one_rule, steps

from grpo_lightning.health import Judge, parse_rules, verdict_of

LIVES: dict[str, tuple[str, Values, list[tuple[str, int]]]] = {
    "one shot while it holds": ("above: 1", [2.0] * 50, [("firing", 1)]),
    "resolved after ten steps without": ("above: 1", [2] + [0] * 10, [("firing", 1), ("resolved", 11)]),
    "nine are too few": ("above: 1", [2] + [0] * 9 + [2] + [0] * 9, [("firing", 1)]),
    "re-arms": (
        "above: 1, keep_firing_steps: 2",
        [2, 0, 0, 2, 0, 0],
        [("firing", 1), ("resolved", 3), ("firing", 4), ("resolved", 6)],
    ),
    "resolved at once": ("above: 1, keep_firing_steps: 0", [2, 0, 2], [("firing", 1), ("resolved", 2), ("firing", 3)]),
    "a gap resolves nothing": (
        "above: 1, keep_firing_steps: 2",
        [2, None, None, None, 0, 0],
        [("firing", 1), ("resolved", 6)],
    ),
    "must hold as long again": (
        "above: 1, for_steps: 2, keep_firing_steps: 1",
        [2, 2, 0, 2, 0, 2, 2],
        [("firing", 2), ("resolved", 3), ("firing", 7)],
    ),
    "NaN keeps it firing": ("above: 1, keep_firing_steps: 2", [2, 0, math.nan, 0, math.nan], [("firing", 1)]),
}


@pytest.mark.parametrize(("keys", "series", "expected"), LIVES.values(), ids=LIVES)
def test_life(keys: str, series: Values, expected: list[tuple[str, int]]) -> None:
    assert [(change, step) for change, _, step in changes(one_rule("signal: kl, " + keys), {"kl": series})] == expected


def test_keep_firing_counts_optimizer_steps() -> None:
    rules = one_rule("signal: kl, above: 1")
    assert changes(rules, {"kl": [2, 0, 0]}, span=5.0) == [("firing", "r", 5), ("resolved", "r", 15)]


MILDER = """signal: kl, above: 1, action: pause, severity: critical, keep_firing_steps: 2,
milder_when: [{signal: reward_mean, above: 0.5}, {signal: entropy, above: 1}]"""


def life(kl: Values, reward: Values, entropy: Values) -> list[tuple[str, int, str, str]]:
    judge = Judge(one_rule(MILDER))
    series = {"kl": kl, "reward_mean": reward, "entropy": entropy}
    return [(c.change, c.step, c.alert.severity, c.alert.action) for row in steps(series) for c in judge.observe(row)]


def test_a_milder_alert_warns_and_a_rise_is_told_at_once() -> None:
    found = life([2] * 6, [1, 1, 1, 0, 1, 0], [2] * 6)
    assert found == [("firing", 1, "warning", "notify"), ("escalated", 4, "critical", "pause")]


def test_it_is_mild_only_when_all_say_so() -> None:
    assert life([2], [1], [0]) == [("firing", 1, "critical", "pause")]
    assert life([2], [1], [None]) == [("firing", 1, "critical", "pause")], "what is not measured excuses nothing"


def test_a_critical_alert_never_falls() -> None:
    assert life([2] * 3, [0, 1, 1], [2] * 3) == [("firing", 1, "critical", "pause")]


def test_an_escalation_replaces_the_alert() -> None:
    judge = Judge(one_rule(MILDER))
    for row in steps({"kl": [2] * 4, "reward_mean": [1, 1, 1, 0], "entropy": [2] * 4}):
        judge.observe(row)
    (alert,) = judge.alerts
    assert (alert.id, alert.severity, alert.action) == ("r@1", "critical", "pause")
    assert judge.firing() == [alert]
    assert judge.verdict() == "unhealthy"


def test_what_an_alert_carries() -> None:
    text = """
- name: kl_high
  signal: kl
  ruler_ratio_above: 3
  for_steps: 2
  action: pause
  severity: critical
  cause: data
  summary: "{value:.1f} of {expected:.2f} over {bound:.0f} for {steps} steps at {step}, began {onset}: {signal}"
  first: look
  runbook: kl.md
  show: [entropy, lr]
"""
    judge = Judge(parse_rules(text))
    for row in steps({"kl": [0.5] * 30 + [2.0] * 5, "entropy": [1.25] * 35}):
        judge.observe(row)
    (alert,) = judge.alerts
    assert alert.summary == "4.0 of 0.50 over 3 for 2 steps at 32, began 31: kl"
    assert alert.values == {"kl": 2.0, "entropy": 1.25}, "lr was not measured"
    assert (alert.id, alert.step, alert.onset_step, alert.value, alert.bound) == ("kl_high@32", 32, 31, 4.0, 3.0)
    assert (alert.cause, alert.first, alert.runbook, alert.expected) == ("data", "look", "kl.md", 0.5)
    assert json.loads(json.dumps(alert.to_dict()))["summary"] == alert.summary


EXPECTED: dict[str, tuple[str, float | None]] = {
    "a level is shown beside the start": ("above: 1", 0.5),
    "jump": ("jump_above: 3, recent_steps: 10", 0.5),
    "recent": ("ruler: recent, recent_steps: 10, ruler_ratio_above: 3", 0.5),
    "highest": ("ruler: highest, ruler_ratio_below: 0.5", 2.0),
}


@pytest.mark.parametrize(("keys", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_the_ruler_is_named(keys: str, expected: float | None) -> None:
    judge = Judge(one_rule("signal: kl, " + keys))
    for row in steps({"kl": [0.5] * 25 + [2.0, 0.2]}):
        judge.observe(row)
    assert judge.alerts[0].expected == expected


def test_values_that_are_none_are_said() -> None:
    judge = Judge(one_rule("signal: kl, above: 1"))
    for row in steps({"kl": [0.5, math.nan]}):
        judge.observe(row)
    (alert,) = judge.alerts
    assert math.isnan(alert.value)
    assert alert.summary == "nan"


def test_the_onset_lies_before_the_window_and_the_streak() -> None:
    """A fall at step 61 is seen by a slow rule much later; the estimate goes back to where the level changed."""
    judge = Judge(one_rule("signal: kl, below: 1, over_steps: 20, for_steps: 20"))
    for row in steps({"kl": [2.0 + 0.05 * (i % 3) for i in range(60)] + [0.1] * 60}):
        judge.observe(row)
    (alert,) = judge.alerts
    assert alert.step == 90  # the mean of 20 is below 1 with 11 low ones: from 71 on, for 20 steps
    assert alert.onset_step == 61


def test_a_rule_for_the_start_begins_at_the_start() -> None:
    judge = Judge(one_rule("signal: kl, below: 1, before_steps: 50, over_steps: 10"))
    for row in steps({"kl": [0.5] * 20}):
        judge.observe(row)
    assert (judge.alerts[0].step, judge.alerts[0].onset_step) == (10, 1)


def test_verdicts() -> None:
    judge = Judge(
        parse_rules("""
- {name: warn, signal: kl, above: 1, summary: s}
- {name: stop, signal: kl, above: 5, summary: s, severity: critical, action: pause}
""")
    )
    verdicts = []
    for row in steps({"kl": [0, 2, 9, 0]}):
        judge.observe(row)
        verdicts.append(judge.verdict())
    assert verdicts == ["healthy", "warning", "unhealthy", "unhealthy"]
    assert verdict_of([]) == "healthy"


def test_minutes_are_training_time() -> None:
    """Two hours of downtime between steps 2 and 3 pass unseen: each step brings its own seconds."""
    rules = one_rule("signal: kl, above: 1, for_minutes: 2")
    assert fired(rules, {"kl": [2] * 9}, seconds=30.0) == [4]
    broken: Values = [2, 2, 2, 0, 2, 2, 2, 2, 2]
    assert fired(rules, {"kl": broken}, seconds=30.0) == [8], "in a row"
