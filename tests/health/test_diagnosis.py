"""The diagnosis: each pattern in series made for it, silence without it, levels in order, numbers and steps."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.health import Alert, Baseline, Step, build_baseline
from grpo_lightning.health.diagnosing.comparing import Comparison, level_changes
from grpo_lightning.health.diagnosing.evidence import evidence_findings, shared_form
from grpo_lightning.health.diagnosis import LEVELS, Column, Columns, Diagnosis, Drift, diagnose, main_alert

ONSET, LAST = 101, 140
USUAL = {
    "reward_mean": 0.5, "reward_std": 0.4, "group_reward_std": 0.3, "dead_group_fraction": 0.3, "kl": 0.05, "entropy": 1.2,
    "response_length_mean": 200.0, "ngram_repetition": 0.06, "distinct_response_fraction": 0.95, "truncated_fraction": 0.03,
    "grad_norm": 0.5, "update_norm": 0.02, "update_to_weight": 1e-4, "lr": 1e-5, "rollout_mismatch_kl": 0.002,
    "prompt_length_mean": 120.0, "prompt_length_spread": 40.0, "source_shift": 0.05, "duplicate_prompt_fraction": 0.0,
    "rank_overlap_fraction": 0.0, "reward_rank_agreement": 1.0, "ratio_max": 1.2, "tokens_per_second": 1000.0,
    "advantage_std": 0.9, "advantage_tail_fraction": 0.3, "reward_outlier_fraction": 0.0, "reward_max": 1.0,
    "reward/exact_mean": 0.4, "reward/exact_std": 0.4, "reward/exact_missing": 0.0, "reward/exact_errors": 0.0,
    "reward/format_mean": 0.6, "reward/format_std": 0.4, "reward/format_missing": 0.0, "reward/format_errors": 0.0,
    "dead_group_fraction_all_low": 0.15, "dead_group_fraction_all_high": 0.1, "nonfinite_count_loss": 0.0,
    "empty_fraction": 0.0,
}  # fmt: skip
_EXACT = {"rank_overlap_fraction", "reward_rank_agreement", "lr", "reward_outlier_fraction", "nonfinite_count_loss"}
Change = Callable[[int, dict[str, float]], None]


def series(change: Change | None = None, *, last: int = LAST, seed: int = 0) -> list[Step]:
    """A healthy run with noise; `change` gets the steps since the onset (from 0) and edits the values."""
    noise = random.Random(seed)
    made = []
    for step in range(1, last + 1):
        values = {
            name: value if name in _EXACT else value * math.exp(noise.gauss(0, 0.05)) for name, value in USUAL.items()
        }
        if step % 20 == 0:
            values["eval_accuracy"] = 0.5 + noise.gauss(0, 0.005)
        if change is not None and step >= ONSET:
            change(step - ONSET, values)
        made.append(Step(step=step, values=values))
    return made


def alert(rule: str = "some_rule", **settings: Any) -> Alert:
    known: dict[str, Any] = {
        "id": f"{rule}@{ONSET + 9}", "rule": rule, "step": ONSET + 9, "onset_step": ONSET, "severity": "critical",
        "action": "pause", "cause": "algorithm", "signal": "kl", "value": 1.0, "bound": 0.5, "expected": None,
        "summary": "It went wrong.", "first": "Look.", "runbook": "runbooks/x.md", "values": {"kl": 1.0},
    }  # fmt: skip
    return Alert(**(known | settings))


def named(diagnosis: Diagnosis) -> dict[str, tuple[str, str]]:
    return {f.name: (level.name, f.strength) for level in diagnosis.levels for f in level.findings}


def times(**factors: float) -> Change:
    def change(since: int, values: dict[str, float]) -> None:
        for name, factor in factors.items():
            values[name.replace("__", "/")] *= factor

    return change


def to(**levels: float) -> Change:
    def change(since: int, values: dict[str, float]) -> None:
        values.update({name.replace("__", "/"): level for name, level in levels.items()})

    return change


def at(since: int, **levels: float) -> Change:
    def change(now: int, values: dict[str, float]) -> None:
        if now == since:
            values.update(levels)

    return change


def hacked(since: int, values: dict[str, float]) -> None:
    values["reward_mean"] = 0.9
    values["group_reward_std"] *= 0.3
    values["response_length_mean"] *= 1.6
    values["ngram_repetition"] = 0.3
    if "eval_accuracy" in values:
        values["eval_accuracy"] = 0.4


def apart(since: int, values: dict[str, float]) -> None:
    values["reward_mean"] = 0.8
    if "eval_accuracy" in values:
        values["eval_accuracy"] = 0.3


def scaled_in_stairs(since: int, values: dict[str, float]) -> None:
    values["reward_std"] *= 2.0 if since < 20 else 4.0
    values["kl"] *= 1.0 if since < 2 else 4.0 if since < 22 else 16.0


def lengths_jump_about(since: int, values: dict[str, float]) -> None:
    values["prompt_length_mean"] *= 1.35 if since % 2 else 0.65


PATTERNS: list[tuple[str, Change, str, str, str]] = [
    ("long prompts bunched in one batch", at(0, prompt_length_mean=400.0), "prompts_bunched", "data", "strong"),
    ("long prompts from the onset on", times(prompt_length_mean=2.5), "prompts_bunched", "data", "strong"),
    ("other prompts", times(prompt_length_mean=0.4), "prompts_changed", "data", "strong"),
    ("other sources", to(source_shift=0.8), "sources_shifted", "data", "strong"),
    ("duplicates", to(duplicate_prompt_fraction=0.5), "duplicates", "data", "hint"),
    ("rank overlap", to(rank_overlap_fraction=0.5), "ranks_overlap", "data", "strong"),
    ("too hard", to(dead_group_fraction_all_low=0.9), "prompts_too_hard", "data", "hint"),
    ("solved", to(dead_group_fraction_all_high=0.9), "prompts_solved", "data", "hint"),
    ("slower", times(tokens_per_second=0.3), "slower", "environment", "hint"),
    ("one function moves", times(reward__format_mean=1.5), "reward_function_moved", "reward", "strong"),
    ("a function fails", to(reward__exact_errors=3.0), "reward_function_fails", "reward", "strong"),
    ("a function gives nothing", to(reward__exact_missing=12.0), "reward_function_fails", "reward", "strong"),
    ("scale and kl in stairs", scaled_in_stairs, "reward_scale_stairs", "reward", "strong"),
    ("scale alone", times(reward_std=3.0), "reward_scale", "reward", "strong"),
    ("hacked by a template", hacked, "template_hacking", "reward", "strong"),
    ("reward and evaluation apart", apart, "reward_and_evaluation_apart", "reward", "strong"),
    ("no spread", times(group_reward_std=0.05), "spread_gone", "reward", "strong"),
    ("cut", to(truncated_fraction=0.97), "cut_responses", "reward", "strong"),
    ("empty", to(empty_fraction=0.5), "empty_responses", "reward", "strong"),
    ("sampler against trainer", to(rollout_mismatch_kl=0.2), "rollout_mismatch", "reward", "strong"),
    ("sampler's balance", lengths_jump_about, "sampler_imbalance", "reward", "hint"),
    ("not finite", to(loss=math.nan), "not_finite", "algorithm", "strong"),
    ("frozen", to(update_norm=0.0), "policy_frozen", "algorithm", "strong"),
    ("order of rewards", to(reward_rank_agreement=0.1), "rewards_and_advantages_apart", "algorithm", "strong"),
    ("gradient spike", at(1, grad_norm=40.0), "gradient_spike", "algorithm", "hint"),
    ("learning rate", times(lr=10.0), "lr_changed", "algorithm", "strong"),
    ("updates too large", times(update_to_weight=30.0), "update_too_large", "algorithm", "strong"),
    ("ratios", times(ratio_max=100.0), "ratios_far", "algorithm", "hint"),
    ("narrow and away", times(entropy=0.2, kl=8.0), "entropy_low_kl_rising", "algorithm", "strong"),
    ("narrow and still", times(entropy=0.2), "entropy_low_kl_stalled", "algorithm", "strong"),
    ("wide and away", times(entropy=4.0, kl=8.0, reward_mean=0.2), "entropy_high_kl_rising", "algorithm", "strong"),
    ("wide and still", times(entropy=4.0), "entropy_high_kl_stalled", "algorithm", "strong"),
]


@pytest.mark.parametrize(
    ("change", "name", "level", "strength"), [p[1:] for p in PATTERNS], ids=[p[0] for p in PATTERNS]
)
def test_each_pattern_is_found_at_its_level_and_not_without_it(
    change: Change, name: str, level: str, strength: str
) -> None:
    asked = [alert()]
    assert named(diagnose(series(change), asked)).get(name) == (level, strength)
    assert name not in named(diagnose(series(), asked))


def test_a_finding_has_numbers_steps_and_words() -> None:
    found = diagnose(series(times(prompt_length_mean=2.5)), [alert()])
    (finding,) = [f for level in found.levels for f in level.findings if f.name == "prompts_bunched"]
    number = finding.numbers[0]
    assert number.signal == "prompt_length_mean"
    assert number.before == pytest.approx(120, rel=0.05)
    assert number.after == pytest.approx(300, rel=0.05)
    assert number.ratio == pytest.approx(2.5, rel=0.1)
    assert (finding.steps.first, finding.steps.last) == (ONSET, LAST)
    assert finding.why
    assert finding.first


def test_levels_stand_in_the_order_of_suspicion_and_say_that_nothing_was_found() -> None:
    found = diagnose(series(), [], snapshot=[])
    assert tuple(level.name for level in found.levels) == LEVELS == ("environment", "data", "reward", "algorithm")
    environment, _, reward, algorithm = found.levels
    assert environment.said == algorithm.said == "nothing found"
    assert not environment.unchecked
    assert reward.said == "nothing found, but not all of it was checked"
    assert any("no evidence" in said for said in reward.unchecked)
    assert found.look_first is None


def test_what_is_not_measured_is_said_to_be_not_checked() -> None:
    found = diagnose([Step(step=i, values={"reward_mean": 0.1}) for i in range(1, 50)])
    assert "entropy and KL together: entropy and kl not measured" in found.levels[3].unchecked
    assert "data files against the snapshot: no snapshot" in found.levels[1].unchecked
    assert "data files against the snapshot" not in found.levels[1].checked


DRIFTS = [
    Drift(level="environment", name="torch", verdict="changed", detail="2.8 -> 2.9"),
    Drift(level="environment", name="numpy", verdict="ok"),
    Drift(level="data", name="train.jsonl", verdict="missing"),
    Drift(level="reward", name="my.rewards", verdict="changed"),
    Drift(level="code", name="a.py", verdict="changed"),
    Drift(level="code", name="b.py", verdict="changed"),
    Drift(level="weights", name="model", verdict="unknown"),
    Drift(level="data", name="eval.jsonl", verdict="not checked"),
]


def test_what_changed_since_the_snapshot_comes_first() -> None:
    found = diagnose(series(hacked), [alert()], snapshot=DRIFTS)
    assert found.look_first is not None
    assert found.look_first.what == "Environment changed since the snapshot: torch (2.8 -> 2.9)."
    kinds = named(found)
    assert kinds["snapshot_environment"] == ("environment", "strong")
    assert kinds["snapshot_code"] == ("environment", "hint")
    assert kinds["snapshot_weights"] == ("environment", "hint")
    assert kinds["snapshot_data"] == ("data", "strong")
    assert kinds["snapshot_reward"] == ("reward", "strong")
    (code,) = [f for f in found.levels[0].findings if f.name == "snapshot_code"]
    assert code.what == "Code changed since the snapshot: a.py, b.py."


def test_drift_alone_is_a_hint_in_a_run_without_alerts() -> None:
    assert named(diagnose(series(), [], snapshot=DRIFTS))["snapshot_environment"] == ("environment", "hint")


def test_a_snapshot_that_holds_gives_no_finding() -> None:
    found = diagnose(series(), [], snapshot=[Drift(level="environment", name="torch", verdict="ok")])
    assert found.levels[0].said == "nothing found"


CHOICES = [
    ("no alert", [], None, None),
    ("the first critical", [alert("b", severity="warning", step=40, onset_step=30), alert("a")], None, ONSET),
    ("a warning alone", [alert("b", severity="warning", step=40, onset_step=30)], None, 30),
    ("as asked", [alert("a")], 60, 60),
]


@pytest.mark.parametrize(("alerts", "at_step", "onset"), [c[1:] for c in CHOICES], ids=[c[0] for c in CHOICES])
def test_the_run_is_cut_at_the_onset(alerts: list[Alert], at_step: int | None, onset: int | None) -> None:
    found = diagnose(series(), alerts, at_step=at_step)
    assert found.onset == onset
    window = 40 if at_step is None else 20
    if onset is not None:
        assert found.before is not None
        assert (found.before.first, found.before.last) == (max(onset - window, 1), onset - 1)
        assert found.after is not None
        assert found.after.first == onset


def test_a_step_that_is_asked_for_finds_what_no_alert_saw() -> None:
    run = series(times(prompt_length_mean=2.5))
    assert "prompts_bunched" not in named(diagnose(run, [], at_step=50))
    assert "prompts_bunched" in named(diagnose(run, [], at_step=ONSET))


def test_an_onset_at_the_first_step_has_no_before() -> None:
    found = diagnose(series(), [alert(step=20, onset_step=1)])
    assert found.before is None
    assert "reward_function_moved" not in named(found)


def test_a_baseline_stands_in_where_nothing_is_before_the_onset() -> None:
    baseline: Baseline = build_baseline({"earlier": series(seed=3)})
    asked = [alert(step=20, onset_step=1)]
    run = [Step(step=s.step, values=dict(s.values) | {"prompt_length_mean": 300.0}) for s in series()]
    assert "prompts_bunched" in named(diagnose(run, asked, baseline=baseline))
    assert "prompts_bunched" not in named(diagnose(run, asked))


def test_alerts_stand_at_the_level_of_their_cause_each_rule_once() -> None:
    fired = [
        alert("overlap", cause="data"),
        alert("hack", cause="reward"),
        alert("cold", cause="sampling", severity="warning"),
        alert("again", step=ONSET + 5),
        alert("again", step=ONSET + 30),
        alert("drift", cause="environment"),
    ]
    kinds = named(diagnose(series(), fired))
    assert kinds["overlap"] == ("data", "strong")
    assert kinds["hack"] == ("reward", "strong")
    assert kinds["cold"] == ("reward", "hint")
    assert kinds["drift"] == ("environment", "strong")
    (again,) = [f for f in diagnose(series(), fired).levels[3].findings if f.name == "again"]
    assert again.what.endswith(f"It fired 2 times, also at step {ONSET + 30}.")


def test_alerts_long_after_the_onset_are_one_line() -> None:
    fired = [alert("first"), alert("x", step=300, onset_step=250), alert("y", step=310, onset_step=260)]
    found = diagnose(series(last=320), fired)
    later = [f for f in found.levels[3].findings if f.name == "later_alerts"]
    assert [f.what for f in later] == ["Alerts later on: x at step 300, y at step 310."]
    assert "x" not in named(found)


def test_what_moved_first_is_told_in_order() -> None:
    def change(since: int, values: dict[str, float]) -> None:
        values["prompt_length_mean"] *= 3
        if since >= 6:
            values["kl"] *= 20
        if since >= 12:
            values["entropy"] *= 0.2

    moved = diagnose(series(change), [alert()]).moved
    assert [(m.number.signal, m.step) for m in moved] == [
        ("prompt_length_mean", ONSET), ("kl", ONSET + 6), ("entropy", ONSET + 12),
    ]  # fmt: skip
    assert diagnose(series(), [alert()]).moved == ()


def test_an_alert_that_came_late_points_at_what_moved_before() -> None:
    def change(since: int, values: dict[str, float]) -> None:
        values["reward_mean"] *= 0.1

    found = diagnose(series(change), [alert(step=ONSET + 25, onset_step=ONSET + 20)])
    assert found.earlier is not None
    assert (found.earlier.number.signal, found.earlier.step) == ("reward_mean", ONSET)
    assert diagnose(series(change), [alert()]).earlier is None


def test_learning_alone_is_no_finding() -> None:
    def learned(step: Step) -> Step:
        share = step.step / LAST
        values = dict(step.values)
        values["reward_mean"] += 0.4 * share
        values["entropy"] *= 1 - 0.8 * share
        values["kl"] *= 1 + 20 * share
        if "eval_accuracy" in values:
            values["eval_accuracy"] += 0.4 * share
        return Step(step=step.step, values=values)

    found = diagnose([learned(step) for step in series()], [], snapshot=[])
    assert named(found) == {}


def test_a_spike_names_what_came_with_it_and_the_groups() -> None:
    change = at(2, grad_norm=50.0, reward_outlier_fraction=0.1, advantage_tail_fraction=0.9)
    rows = [{"step": ONSET + 2, "why": "reward outlier", "row_id": 17, "response": "x", "rollout": 0}]
    found = diagnose(series(change), [alert()], evidence=rows)
    (spike,) = [f for f in found.levels[3].findings if f.name == "gradient_spike"]
    assert spike.strength == "strong"
    assert {n.signal for n in spike.numbers} == {"grad_norm", "reward_outlier_fraction", "advantage_tail_fraction"}
    assert all(n.step == ONSET + 2 for n in spike.numbers)
    assert "groups of rows 17" in spike.what


def test_stairs_are_told_with_their_steps() -> None:
    found = diagnose(series(scaled_in_stairs), [alert()])
    (stairs,) = [f for f in found.levels[2].findings if f.name == "reward_scale_stairs"]
    assert [n.step for n in stairs.numbers if n.signal == "reward_std"] == [ONSET, ONSET + 20]
    assert [n.step for n in stairs.numbers if n.signal == "kl"] == [ONSET + 2, ONSET + 22]


def test_where_the_first_number_that_is_none_comes_from() -> None:
    def change(since: int, values: dict[str, float]) -> None:
        values["nonfinite_count_loss"] = 4.0
        if since >= 1:
            values["kl"] = math.inf

    found = diagnose(series(change), [alert()])
    (first,) = [f for f in found.levels[3].findings if f.name == "not_finite"]
    assert first.what == f"The first value that is not finite is at step {ONSET}, in loss; with it: kl."


def test_a_restart_just_before_the_onset_is_a_hint() -> None:
    assert named(diagnose(series(), [alert()], restarts=[ONSET - 3]))["restarted"] == ("environment", "hint")
    assert "restarted" not in named(diagnose(series(), [alert()], restarts=[20]))


def rollouts(texts: list[str], *, prompts: int = 4, reward: float = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "step": ONSET,
            "row_id": i % prompts,
            "rollout": i // prompts,
            "response": text,
            "reward": reward,
            "advantage": 0.1,
        }
        for i, text in enumerate(texts)
    ]


FORM = "I have thought about it step by step and I am certain: "
UNEQUAL = [{**row, "advantage": 9.0 if row["row_id"] == 2 else 0.1} for row in rollouts([str(i) for i in range(16)])]
PAYS_LESS = rollouts([FORM + str(i) for i in range(8)], reward=0.1) + rollouts(
    [f"{i} is my answer" for i in range(90, 93)]
)
EVIDENCE: list[tuple[str, list[dict[str, Any]], dict[str, str]]] = [
    ("a template", rollouts([FORM + str(i) for i in range(12)]), {"responses_share_a_form": "strong"}),
    ("a template that pays less", PAYS_LESS, {"responses_share_a_form": "hint"}),
    ("different responses", rollouts([f"{i * 7919} is what comes out of it" for i in range(12)]), {}),
    ("one prompt only", rollouts([FORM + str(i) for i in range(12)], prompts=1), {}),
    ("equal inside groups", rollouts([str(i % 4) for i in range(12)]), {"responses_alike": "strong"}),
    ("one group dominates", UNEQUAL, {"one_group_dominates": "hint"}),
    ("nothing", [], {}),
]


@pytest.mark.parametrize(("rows", "expected"), [e[1:] for e in EVIDENCE], ids=[e[0] for e in EVIDENCE])
def test_evidence(rows: list[dict[str, Any]], expected: dict[str, str]) -> None:
    assert {f.name: f.strength for f in evidence_findings(rows)} == expected


def test_the_shared_form_is_the_longest_that_most_share() -> None:
    rows = [{"row_id": i, "response": FORM + "yes" * (i < 7) + f"-{i}"} for i in range(10)]
    assert shared_form(rows) == (FORM + "yes-", 7)


SHORT = series(last=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["response", "row_id", "rollout", "step", "rank", "reward", "advantage", "source", "why"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(KEYS, JSON, max_size=9), max_size=12))
def test_odd_evidence_never_raises(rows: list[dict[str, Any]]) -> None:
    diagnose(SHORT, [alert(step=15, onset_step=10)], evidence=rows)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([p[1] for p in PATTERNS]),
    st.sampled_from(["kl", "grad_norm", "prompt_length_mean", "reward_std", "entropy"]),
)
def test_a_signals_unit_changes_no_finding(change: Change, signal: str) -> None:
    run = series(change)
    scaled = [Step(step=s.step, values=dict(s.values) | {signal: s.values[signal] * 40}) for s in run]
    assert named(diagnose(run, [alert()])) == named(diagnose(scaled, [alert()]))


VALUES = st.floats() | st.just(0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(sorted(USUAL)), VALUES, max_size=8), max_size=30),
    st.integers(-3, 40),
    st.integers(0, 40),
)
def test_odd_series_never_raise(rows: list[dict[str, float]], onset: int, length: int) -> None:
    run = [Step(step=i + 1, values=row) for i, row in enumerate(rows)]
    found = diagnose(run, [alert(step=onset + length, onset_step=onset)])
    assert len(found.levels) == 4
    json.dumps(found.to_dict())


def test_json_has_everything() -> None:
    facts = diagnose(series(hacked), [alert()], snapshot=DRIFTS).to_dict()
    assert json.loads(json.dumps(facts)) == facts
    assert [level["level"] for level in facts["levels"]] == list(LEVELS)
    assert facts["look_first"]["level"] == "environment"
    assert facts["onset_step"] == ONSET
    assert facts["before"] == [ONSET - 40, ONSET - 1]
    hack = next(f for f in facts["levels"][2]["findings"] if f["name"] == "template_hacking")
    assert {"signal", "before", "after", "step"} == set(hack["numbers"][0])
    assert hack["steps"] == [ONSET, LAST]


def test_windows_count_rows_of_several_steps() -> None:
    run = Columns.of([Step(step=10 * i, values={"kl": 1.0}) for i in range(1, 31)])
    compare = Comparison(run, onset=200)
    assert compare.before is not None
    assert (compare.before.first, compare.before.last) == (80, 190)  # 12 rows, though 40 steps are 4
    assert compare.after is not None
    assert (compare.after.first, compare.after.last) == (200, 300)


def test_compared_numbers_by_hand() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 11.0, 10.0]
    run = Columns.of([Step(step=i + 1, values={"kl": v}) for i, v in enumerate(values)])
    it = Comparison(run, onset=6)["kl"]
    assert it is not None
    assert (it.before, it.after) == (3.0, 10.0)
    assert it.spread == pytest.approx(1.4826)  # deviations 2 1 0 1 2, median 1
    assert it.z == pytest.approx(7 / 1.4826)
    assert it.t == pytest.approx(7.0 / math.sqrt(2.5 / 3 + 2.5 / 5))  # variances 2.5 before, 1 after, taken as 2.5
    assert (it.extreme, it.extreme_step) == (11.0, 7)
    assert it.rose(times=3.0)
    assert not it.rose(times=4.0)
    assert not it.fell()


def test_a_rewound_log_replaces_what_came_after() -> None:
    run = Columns.of([Step(step=s, values={"kl": v}) for s, v in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 9.0), (3, 8.0)]])
    assert list(run.steps) == [1, 2, 3]
    assert list(run["kl"].values) == [0.1, 9.0, 8.0]


def test_level_changes_of_a_staircase() -> None:
    column = Column()
    for step, value in enumerate([1.0] * 10 + [2.0] * 10 + [4.0] * 10, start=1):
        column.steps.append(step)
        column.values.append(value)
    found = level_changes(column, times=1.5, first=0, last=99)
    assert [(m.step, m.number.before, m.number.after) for m in found] == [(11, 1.0, 2.0), (21, 2.0, 4.0)]


def test_main_alert_is_the_first_critical_one() -> None:
    early, late = alert("early", severity="warning", step=5), alert("late", step=50)
    assert main_alert([late, early]) is late
    assert main_alert([early]) is early
    assert main_alert([]) is None
