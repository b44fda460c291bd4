"""Alert rules: each that Prometheus judges fires at the step at which ours does, by `promtool test rules`."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpo_prometheus import metric_of
from grpo_prometheus.rules import ExportedRules, export_rules, translate

from grpo_lightning.errors import ConfigError
from grpo_lightning.health import Alert, Judge, Rule, Step, parse_rules, shipped_rules

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)"
)
SECONDS = 15  # between two scrapes, and between two steps
STEPS = 40
LABELS = 'run_id="r1", run_name="first"'

RULES = """
- {name: low, signal: group_reward_std, below: 0.05, for_steps: 5, action: pause, severity: critical, cause: reward,
   summary: "Std {value:.3f} stayed below {bound} for {steps} steps.", runbook: runbooks/low.md}
- {name: high_at_once, signal: kl, above: 2.0, summary: "{signal} is {value:.2e}"}
- {name: minutes, signal: truncated_fraction, above: 0.5, for_minutes: 2, summary: "cut"}
- {name: minutes_and_steps, signal: truncated_fraction, above: 0.5, for_minutes: 1, for_steps: 12, summary: "cut"}
- {name: odd, signal: grad_norm, not_finite: true, for_steps: 2, summary: "odd"}
- {name: with_when, signal: entropy, above: 3.0, for_steps: 3, summary: "up",
   when: [{signal: kl, above: 0.5}, {signal: empty_fraction, above: 0.1, optional: true}]}
- {name: with_unless, signal: loss, not_finite: true, summary: "loss", unless: [{signal: updates_skipped, above: 0.0}]}
- {name: late, signal: kl, above: -1.0, after_steps: 20, summary: "late"}
- {name: early, signal: kl, above: 0.5, before_steps: 9, for_steps: 3, summary: "early"}
- {name: relative, signal: advantage_mean, relative_to: reward_mean, above: 0.9, absolute: true, for_steps: 2, summary: "r"}
- {name: of_a_function, signal: reward/exact_mean, below: 0.1, for_steps: 4, summary: "f"}
- {name: nothing_measured, signal: clip_low_fraction, above: 0.1, summary: "n"}
"""
Series = dict[str, list[float | None]]


def judged_by_us(rules: list[Rule], series: Series) -> dict[str, Alert]:
    """The first alert of each rule, from our own judge."""
    judge = Judge(rules)
    for number in range(STEPS):
        values = {name: v for name, row in series.items() if (v := row[number]) is not None}
        judge.observe(Step(step=number + 1, values=values, seconds=SECONDS))
    first: dict[str, Alert] = {}
    for alert in judge.alerts:
        first.setdefault(alert.rule, alert)
    return first


def written(value: float | None) -> str:
    """A sample; Prometheus marks a series that a scrape lacks as stale."""
    if value is None:
        return "stale"
    return "NaN" if math.isnan(value) else repr(value).replace("inf", "Inf")


def input_series(series: Series) -> list[dict[str, str]]:
    steps: Series = {name: [float(k + 1) for k in range(STEPS)] for name in ("grpo_step",)}
    steps["grpo_step_timestamp_seconds"] = [float(SECONDS * (k + 1)) for k in range(STEPS)]
    steps["grpo_step_seconds"] = [float(SECONDS)] * STEPS
    made = [{"series": f"{name}{{{LABELS}}}", "values": " ".join(map(written, row))} for name, row in steps.items()]
    for name, row in series.items():
        metric = metric_of(name)
        labels = ", ".join([LABELS, *(f'{k}="{v}"' for k, v in metric.labels.items())])
        made.append({"series": f"{metric.name}{{{labels}}}", "values": " ".join(map(written, row))})
    return made


def fires_with_prometheus(folder: Path, exported: ExportedRules, series: Series, expected: dict[str, Alert]) -> str:
    """Run `promtool test rules`: silence until the expected step, the alert at it. Its complaints, empty when none."""
    (folder / "rules.yml").write_text(exported.yaml)
    cases: list[dict[str, Any]] = []
    for name in exported.judged:
        alert = expected.get(name)
        last = STEPS if alert is None else alert.step - 1
        for number in range(1, last + 1):
            cases.append({"eval_time": f"{SECONDS * (number - 1)}s", "alertname": name, "exp_alerts": []})
        if alert is not None:
            exp = {"exp_labels": labels_of(exported, name), "exp_annotations": annotations_of(exported, alert)}
            cases.append({"eval_time": f"{SECONDS * last}s", "alertname": name, "exp_alerts": [exp]})
    test = {"interval": f"{SECONDS}s", "input_series": input_series(series), "alert_rule_test": cases}
    (folder / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": f"{SECONDS}s", "tests": [test]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def record_of(exported: ExportedRules, name: str) -> dict[str, Any]:
    groups = yaml.safe_load(exported.yaml)["groups"]
    (record,) = [rule for group in groups for rule in group["rules"] if rule.get("alert") == name]
    return dict(record)


def labels_of(exported: ExportedRules, name: str) -> dict[str, str]:
    return {"run_id": "r1", "run_name": "first", **record_of(exported, name)["labels"]}


def annotations_of(exported: ExportedRules, alert: Alert) -> dict[str, str]:
    """What the run's own alert says: Prometheus must fill in its template to the same words."""
    known = record_of(exported, alert.rule)["annotations"]
    filled = {
        k: v.replace("{{ $labels.run_name }}", "first").replace("{{ $labels.run_id }}", "r1") for k, v in known.items()
    }
    return {**filled, "summary": alert.summary.replace("nan", "NaN").replace("inf", "+Inf")}


def made_series(seed: int) -> Series:
    """Signals that cross the rules' bounds now and then, stay beyond them at times, and are absent or not finite at times."""
    chance = random.Random(seed)

    def row(low: float, high: float, *, odd: float = 0.0, absent: float = 0.0) -> list[float | None]:
        values: list[float | None] = []
        while len(values) < STEPS:
            level = chance.choice([low, high])
            for _ in range(chance.randint(1, 14)):
                dice = chance.random()
                broken = chance.choice([math.nan, math.inf, -math.inf])
                values.append(broken if dice < odd else None if dice > 1 - absent else level * chance.uniform(0.9, 1.1))
        return values[:STEPS]

    return {
        "group_reward_std": row(0.01, 0.3, absent=0.2),
        "kl": row(0.1, 3.0),
        "truncated_fraction": row(0.2, 0.8),
        "grad_norm": row(1.0, 2.0, odd=0.3),
        "entropy": row(1.0, 5.0),
        "empty_fraction": row(0.0, 0.5),
        "loss": row(0.1, 0.2, odd=0.2),
        "updates_skipped": row(0.0, 1.0),
        "advantage_mean": row(0.1, 0.5),
        "reward_mean": row(0.5, 0.0),
        "reward/exact_mean": row(0.05, 0.4),
    }


@pytest.mark.parametrize("seed", range(8))
def test_each_rule_fires_where_ours_does(tmp_path: Path, seed: int) -> None:
    rules = parse_rules(RULES)
    series = made_series(seed)
    exported = translate(rules)
    assert set(exported.judged) == {rule.name for rule in rules}
    complaints = fires_with_prometheus(tmp_path, exported, series, judged_by_us(rules, series))
    assert not complaints


def test_the_made_series_fire_every_rule() -> None:
    rules = parse_rules(RULES)
    fired = {name for seed in range(8) for name in judged_by_us(rules, made_series(seed))}
    assert fired == {rule.name for rule in rules} - {"nothing_measured"}


def test_a_condition_that_is_optional_is_true_where_it_is_not_measured(tmp_path: Path) -> None:
    rules = [rule for rule in parse_rules(RULES) if rule.name == "with_when"]
    series: Series = {"entropy": [5.0] * STEPS, "kl": [1.0] * STEPS}
    expected = judged_by_us(rules, series)
    assert expected["with_when"].step == 3
    assert not fires_with_prometheus(tmp_path, translate(rules), series, expected)


BROKEN = {
    "loss_not_finite": {"loss": math.nan},
    "reward_not_finite": {"reward_mean": math.nan},
    "gradient_not_finite": {"grad_norm": math.inf},
    "kl_not_finite": {"kl": math.nan},
    "values_not_finite": {"nonfinite_count": 3.0},
}


@pytest.mark.parametrize(("name", "broken"), BROKEN.items(), ids=BROKEN)
def test_the_shipped_rules_fire_where_they_do_in_the_run(tmp_path: Path, name: str, broken: dict[str, float]) -> None:
    rules = [rule for rule in shipped_rules() if rule.name == name]
    series: Series = {"updates_skipped": [0.0] * STEPS, "rollouts_resampled": [0.0] * STEPS}
    for signal, value in broken.items():
        series[signal] = [0.0 if signal == "nonfinite_count" else 1.0] * 10 + [value] * (STEPS - 10)
    expected = judged_by_us(rules, series)
    assert expected[name].step >= 11
    exported = translate(rules)
    assert exported.judged == (name,)
    assert not fires_with_prometheus(tmp_path, exported, series, expected)


def test_the_shipped_rules_pass_promtool_and_every_one_is_accounted_for(tmp_path: Path) -> None:
    exported = export_rules()
    path = tmp_path / "rules.yml"
    path.write_text(exported.yaml)
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [*exported.judged, *exported.passed_on, *exported.left_out]
    assert sorted(told) == sorted(rule.name for rule in shipped_rules())
    for name, reason in exported.passed_on.items():
        assert f"# {'  '}{name}: {reason}" in exported.yaml
        assert reason


def test_a_rule_that_can_not_be_expressed_passes_on_the_runs_own_alert(tmp_path: Path) -> None:
    name = next(iter(export_rules().passed_on))
    exported = translate([rule for rule in shipped_rules() if rule.name == name])
    (tmp_path / "rules.yml").write_text(exported.yaml)
    labels = record_of(exported, name)["labels"]
    assert labels["judged_by"] == "run"
    record = record_of(exported, name)
    annotations = {
        k: v.replace("{{ $labels.run_name }}", "first").replace("{{ $labels.run_id }}", "r1")
        for k, v in record["annotations"].items()
    }
    alert = {"exp_labels": {"run_id": "r1", "run_name": "first", **labels}, "exp_annotations": annotations}
    test = {
        "interval": "15s",
        "input_series": [
            {
                "series": f'grpo_alert_open{{{LABELS}, rule="{name}", severity="critical", action="pause"}}',
                "values": "_ _ 1 1",
            }
        ],
        "alert_rule_test": [
            {"eval_time": "15s", "alertname": name, "exp_alerts": []},
            {"eval_time": "30s", "alertname": name, "exp_alerts": [alert]},
        ],
    }
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_runs_do_not_share_a_streak(tmp_path: Path) -> None:
    """Four low steps of one run and four of another are no eight of either."""
    exported = translate([rule for rule in parse_rules(RULES) if rule.name == "low"])
    (tmp_path / "rules.yml").write_text(exported.yaml)
    series = []
    for run, values in (("r1", "0.01 0.01 0.01 0.01 0.5 0.5 0.5 0.5"), ("r2", "0.5 0.5 0.5 0.5 0.01 0.01 0.01 0.01")):
        series.append({"series": f'grpo_group_reward_std{{run_id="{run}", run_name="x"}}', "values": values})
        series.append({"series": f'grpo_step{{run_id="{run}", run_name="x"}}', "values": "1+1x7"})
    cases = [{"eval_time": f"{15 * k}s", "alertname": "low", "exp_alerts": []} for k in range(8)]
    test = {"interval": "15s", "input_series": series, "alert_rule_test": cases}
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_has_gone_leaves_no_series_behind(tmp_path: Path) -> None:
    """The recorded streak must not keep itself alive."""
    exported = translate([rule for rule in parse_rules(RULES) if rule.name == "low"])
    (tmp_path / "rules.yml").write_text(exported.yaml)
    series = [
        {"series": f"grpo_group_reward_std{{{LABELS}}}", "values": "0.01 0.01 stale"},
        {"series": f"grpo_step{{{LABELS}}}", "values": "1 2 stale"},
    ]
    sample = [{"labels": f'grpo:rule_steps{{rule="low", {LABELS}}}', "value": 2}]
    cases = [
        {"expr": "grpo:rule_steps", "eval_time": "15s", "exp_samples": sample},
        {"expr": "grpo:rule_steps", "eval_time": "45s", "exp_samples": []},
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": cases}
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_signal_that_is_not_in_the_catalogue_is_refused() -> None:
    rules = parse_rules('[{name: a, signal: group_reward_sdt, below: 1, summary: "s"}]')
    with pytest.raises(ConfigError, match="'group_reward_sdt' is not a signal: did you mean group_reward_std"):
        translate(rules)


def test_text_that_looks_like_a_template_stays_text() -> None:
    rules = parse_rules("[{name: a, signal: kl, above: 1, summary: '{{{{ .Labels }}}} {value:.1f}'}]")
    summary = record_of(translate(rules), "a")["annotations"]["summary"]
    assert summary == '{{ "{{" }} .Labels }} {{ printf "%.1f" $value }}'
