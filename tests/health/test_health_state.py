"""A judge that is saved and loaded goes on as if never interrupted."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from health_runs import one_rule, rows_of, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.health import Judge, Step, parse_rules, shipped_rules

ALL_KINDS = parse_rules("""
- {name: level, signal: kl, above: 0.6, for_steps: 3, keep_firing_steps: 2, summary: "{value}"}
- {name: window, signal: kl, below: 0.3, over_steps: 4, over_groups: 6, summary: "{value}"}
- name: start
  signal: kl
  ruler_z_above: 3
  over_steps: 2
  when: [{signal: reward_mean, ruler: recent, ruler_z_below: 1, over_steps: 3, recent_steps: 8}]
  summary: "{value} {expected}"
- {name: highest, signal: reward_mean, ruler: highest, ruler_z_below: -1, unit: kl, over_steps: 3, summary: "{value}"}
- name: recent
  signal: reward_mean
  ruler: recent
  ruler_ratio_below: 0.6
  over_steps: 2
  recent_steps: 10
  summary: "{value}"
- name: jump
  signal: kl
  jump_above: 1.5
  recent_steps: 10
  severity: critical
  milder_when: [{signal: reward_mean, above: 0.5}]
  summary: "{value}"
- {name: trend, signal: kl, trend_above: 0.1, over_steps: 4, summary: "{value}"}
- {name: stairs, signal: kl, stairs_above: 0.5, over_steps: 20, summary: "{value}"}
- {name: share, signal: reward_mean, above: 0.3, statistic: zero_share, over_steps: 5, for_minutes: 1, summary: "{value}"}
- name: median
  signal: kl
  above: 0.5
  statistic: median
  over_steps: 3
  unless: [{signal: reward_mean, missing: true}]
  summary: "{value}"
- {name: joined, together: [level, trend], within_steps: 4, summary: "{step}"}
""")


def by_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def by_torch(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def told(judge: Judge, row: Step) -> list[dict[str, Any]]:
    return [{"change": c.change, "step": c.step} | c.alert.to_dict() for c in judge.observe(row)]


VALUE = st.one_of(st.floats(0, 1), st.sampled_from([0.0, math.nan, math.inf, 1e308, 50.0]), st.none())
ROW = st.tuples(VALUE, VALUE, st.integers(1, 3), st.one_of(st.none(), st.integers(1, 4)))


@pytest.mark.parametrize("carry", [by_json, by_torch], ids=["json", "torch"])
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=60), at=st.data())
def test_saved_and_loaded_at_any_step(
    carry: Callable[[Any], Any], rows: list[tuple[Any, ...]], at: st.DataObject
) -> None:
    whole, halved = Judge(ALL_KINDS), Judge(ALL_KINDS)
    cut = at.draw(st.integers(1, len(rows) - 1))
    for i, (kl, reward, span, groups) in enumerate(rows):
        given_ = {"kl": kl, "reward_mean": reward}
        row = Step(
            step=i + 1,
            values={k: v for k, v in given_.items() if v is not None},
            span=span,
            groups=groups,
            seconds=25.0,
        )
        if i == cut:
            halved, state = Judge(ALL_KINDS), carry(halved.state_dict())
            halved.load_state_dict(state)
        assert repr(told(halved, row)) == repr(told(whole, row))
    assert repr(halved.state_dict()) == repr(whole.state_dict())
    assert halved.not_judged() == whole.not_judged()
    assert halved.waiting() == whole.waiting()


@pytest.mark.parametrize("fault", ["entropy explosion", "advantages ten times as wide", "NaN loss"])
def test_the_shipped_rules_interrupted_again_and_again(fault: str, generated: Any) -> None:
    """Interrupted again and again and loaded through JSON, all rules say the same at the same steps."""
    series = generated.faulty(fault, generated.FAMILIES[0], 3)
    rules = shipped_rules()
    whole, broken = Judge(rules), Judge(rules)
    seen = 0
    for row in rows_of(series.values, series.prompts)[:220]:
        if row.step % 7 == 0 or 130 < row.step < 145:
            state = by_json(broken.state_dict())
            broken = Judge(rules)
            broken.load_state_dict(state)
        expected = told(whole, row)
        assert repr(told(broken, row)) == repr(expected)
        seen += len(expected)
    assert seen, "something fired on the way"


def test_a_rule_at_19_of_20_steps_fires_on_the_first_after_a_resume() -> None:
    rules = one_rule("signal: kl, above: 1, for_steps: 20")
    judge = Judge(rules)
    rows = list(steps({"kl": [2.0] * 20}))
    for row in rows[:19]:
        assert not judge.observe(row)
    resumed = Judge(rules)
    resumed.load_state_dict(by_torch(judge.state_dict()))
    (change,) = resumed.observe(rows[19])
    assert (change.change, change.alert.id, change.alert.onset_step) == ("firing", "r@20", 1)


def test_an_open_alert_is_still_open_after_a_resume() -> None:
    rules = one_rule("signal: kl, above: 1, keep_firing_steps: 2")
    judge = Judge(rules)
    rows = list(steps({"kl": [2, 2, 0, 0]}))
    judge.observe(rows[0])
    resumed = Judge(rules)
    resumed.load_state_dict(by_json(judge.state_dict()))
    assert [a.id for a in resumed.firing()] == ["r@1"]
    assert not resumed.observe(rows[1]), "one shot"
    assert not resumed.observe(rows[2])
    assert [c.change for c in resumed.observe(rows[3])] == ["resolved"]


def test_rules_that_are_new_start_anew_and_those_that_are_gone_are_forgotten() -> None:
    old, new = (
        one_rule("signal: kl, above: 1, for_steps: 3"),
        parse_rules("""
- {name: r, signal: kl, above: 1, for_steps: 3, summary: s}
- {name: n, signal: kl, above: 1, for_steps: 3, over_steps: 2, summary: s}
"""),
    )
    judge = Judge(old)
    rows = list(steps({"kl": [2.0] * 9}))
    for row in rows[:2]:
        judge.observe(row)
    state = by_json(judge.state_dict())
    more, fewer = Judge(new), Judge(one_rule("signal: loss, above: 1"))
    more.load_state_dict(state)
    fewer.load_state_dict(state)
    found = [(c.alert.rule, c.step) for row in rows[2:] for c in more.observe(row)]
    assert found == [("r", 3), ("n", 6)], "n's window of 2 is covered at step 4, and held for 3 steps"


def test_another_versions_state_keeps_the_alerts_only() -> None:
    judge = Judge(one_rule("signal: kl, above: 1"))
    judge.observe(Step(step=1, values={"kl": 2.0}))
    state = by_json(judge.state_dict()) | {"version": 1}
    del state["feeds"], state["tracks"]
    fresh = Judge(one_rule("signal: kl, above: 1"))
    fresh.load_state_dict(state)
    assert fresh.alerts == judge.alerts
    assert not fresh.firing()


def test_the_state_stays_small(tmp_path: Path) -> None:
    judge = Judge(shipped_rules())
    names = sorted({name for rule in judge.rules for name in rule.signals})
    sizes = []
    for step in range(1, 1801):
        judge.observe(Step(step=step, values=dict.fromkeys(names, 0.5 + 0.001 * (step % 7)), groups=4.0))
        if step % 600 == 0:
            sizes.append(len(json.dumps(judge.state_dict())))
    assert sizes[2] < 1.02 * sizes[1], "it doesn't grow with the run"
    assert sizes[2] < 2_000_000
