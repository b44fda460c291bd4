"""Prometheus alert rules from our health rules.

A rule that looks at the newest step's signals only (levels, values that are not finite) becomes PromQL over them, and Prometheus
judges it by itself. All others (windows, rulers, trends, jumps, stairs, groups, joined rules) can't be said exactly in
PromQL: their alert passes on the run's own judgement, ``grpo_alert_open``. The output says which is which, and why.

``for_steps`` counts optimizer steps and ``for_minutes`` training time, which PromQL's ``for`` can't: a recorded series, made from
its own last sample, grows with ``grpo_step`` while the condition holds, is 0 when it doesn't, and waits where the signal
was not measured. Where steps are faster than scrapes, what happened between two scrapes is not seen.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.health import load_rules, shipped_rules
from grpo_lightning.health.records import Condition, Rule
from grpo_lightning.signals import signal
from grpo_prometheus.promql import ON_RUN, STEP, TIME, broken, measured, number, why_not

__all__ = ["ExportedRules", "export_rules", "translate"]

_STEPS = "grpo:rule_steps", STEP, "grpo:step_seen"  # the streak, what it is counted in, and that of the last evaluation
_SECONDS = "grpo:rule_seconds", TIME, "grpo:step_timestamp_seconds_seen"
_STEP_NOW = "{{ with printf \"max(grpo_step{run_id='%s'})\" .Labels.run_id | query }}{{ . | first | value }}{{ end }}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedRules:
    """What `export_rules` made."""

    yaml: str  # a rules file for Prometheus
    judged: tuple[str, ...]  # rules that Prometheus judges itself
    passed_on: dict[str, str]  # rules whose alerts are the run's own, and why
    left_out: tuple[str, ...]  # rules that never alert: they feed others

    @property
    def summary(self) -> str:
        """What became of the rules, in plain words."""
        lines = [f"{len(self.judged)} rules are judged by Prometheus: {', '.join(self.judged) or 'none'}."]
        if self.passed_on:
            lines.append(
                f"{len(self.passed_on)} rules can't be expressed in PromQL; they pass on the run's own alerts:"
            )
            lines += [f"  {name}: {reason}" for name, reason in self.passed_on.items()]
        if self.left_out:
            lines.append(f"Left out, since they only feed other rules: {', '.join(self.left_out)}.")
        return "\n".join(lines)


def export_rules(path: str | Path | None = None) -> ExportedRules:
    """The rules in `path`, or the shipped ones, for Prometheus."""
    return translate(load_rules(path) if path is not None else shipped_rules())


def translate(rules: Sequence[Rule]) -> ExportedRules:
    """Health rules as a Prometheus rules file."""
    for rule in rules:
        for name in rule.signals:
            signal(name)  # an unknown one would never fire, and nobody would know
    loud = [rule for rule in rules if not rule.quiet]
    reasons = {rule.name: why_not(rule) for rule in loud}
    judged = [(rule, rule.condition) for rule in loud if rule.condition is not None and not reasons[rule.name]]
    passed_on = [rule for rule in loud if reasons[rule.name]]
    groups = [
        {
            "name": "grpo-lightning, judged by Prometheus",
            "rules": [r for rule, main in judged for r in _judged(rule, main)],
        },
        {"name": "grpo-lightning, judged by the run", "rules": [_passed_on(rule) for rule in passed_on]},
    ]
    made = ExportedRules(
        yaml="",
        judged=tuple(rule.name for rule, _ in judged),
        passed_on={rule.name: reasons[rule.name] for rule in passed_on},
        left_out=tuple(rule.name for rule in rules if rule.quiet),
    )
    content = {"groups": [group for group in groups if group["rules"]]}
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return ExportedRules(
        yaml=_comment(made.summary) + text, judged=made.judged, passed_on=made.passed_on, left_out=made.left_out
    )


class _Dumper(yaml.SafeDumper):
    """YAML that keeps the lines of an expression."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in ("Made by `grpo-lightning export prometheus`.", *text.splitlines()))


def _group(judged: Iterable[tuple[Rule, Condition]]) -> list[dict[str, Any]]:
    """In order: streaks before the alerts that read them, and last what the next evaluation compares with."""
    made = [record for rule, main in judged for record in _judged(rule, main)]
    recorded = {record.get("record") for record in made}
    return made + [{"record": seen, "expr": now} for streak, now, seen in (_STEPS, _SECONDS) if streak in recorded]


def _judged(rule: Rule, main: Condition) -> Iterator[dict[str, Any]]:
    """The streaks that the rule needs, then its alert."""
    held = _held(rule, main)
    parts = [held]
    if rule.for_steps > 1:
        yield _streak(rule.name, held, measured(main), *_STEPS, first=f"({STEP} * 0 + 1)")
        parts.append(f'({_STEPS[0]}{{rule="{rule.name}"}} >= {number(rule.for_steps)})')
    if rule.for_minutes > 0:
        yield _streak(rule.name, held, measured(main), *_SECONDS, first="max by (run_id, run_name) (grpo_step_seconds)")
        parts.append(f'({_SECONDS[0]}{{rule="{rule.name}"}} >= {number(rule.for_minutes * 60)})')
    if rule.after_steps > 0:
        parts.append(f"({STEP} > {number(rule.after_steps)})")
    if rule.before_steps < float("inf"):
        parts.append(f"({STEP} <= {number(rule.before_steps)})")
    yield _alert(rule, f"\nand {ON_RUN} ".join(parts), summary=_template(rule), judged_by="prometheus")


def _held(rule: Rule, main: Condition) -> str:
    """The rule's conditions at the newest step, with the main one's value."""
    held = f"({broken(main)})"
    for condition in rule.when:
        said = f"({broken(condition)})"
        if condition.optional:
            said = f"({said} or {ON_RUN} ({STEP} unless {ON_RUN} ({measured(condition)})))"
        held += f" and {ON_RUN} {said}"
    for condition in rule.unless:
        held += f" unless {ON_RUN} ({broken(condition, finite_only=True)})"
    return f"({held})" if rule.when or rule.unless else held


def _streak(rule: str, held: str, value: str, record: str, now: str, seen: str, *, first: str) -> dict[str, Any]:
    """How long the rule has held: 0 where it does not, grown where it does, kept where its signal was not measured."""
    before = f'{record}{{rule="{rule}"}}'
    grown = f"({now} - {ON_RUN} {seen} or {ON_RUN} {first})"
    steps = [
        f"(0 * ({now} and {ON_RUN} ({value}) unless {ON_RUN} {held}))",
        f"(({before} + {ON_RUN} {grown}) and {ON_RUN} {held})",
        f"({grown} and {ON_RUN} {held})",
        f"({before} and {ON_RUN} {now})",
    ]
    return {"record": record, "labels": {"rule": rule}, "expr": f"\nor {ON_RUN} ".join(steps)}


def _passed_on(rule: Rule) -> dict[str, Any]:
    expr = f'max by (run_id, run_name) (grpo_alert_open{{rule="{rule.name}"}}) > 0'
    summary = f"The run's own judgement: {rule.name.replace('_', ' ')}."
    return _alert(rule, expr, summary=summary, judged_by="run")


def _alert(rule: Rule, expr: str, *, summary: str, judged_by: str) -> dict[str, Any]:
    annotations = {
        "summary": summary,
        "run": "{{ $labels.run_name }} ({{ $labels.run_id }})",
        "action": f"grpo-lightning diagnose {{{{ $labels.run_id }}}} (the rule's action: {rule.action})",
    }
    if rule.runbook:
        annotations["runbook"] = _literal(rule.runbook)
    labels = {"rule": rule.name, "severity": rule.severity, "cause": rule.cause, "judged_by": judged_by}
    kept = {"keep_firing_for": "1h"} if rule.action == "pause" else {}  # the run has ended by then
    return {"alert": rule.name, "expr": expr, **kept, "labels": labels, "annotations": annotations}


def _template(rule: Rule) -> str:
    """The rule's summary as a Go template."""
    facts = {
        "bound": number(rule.condition.bound) if rule.condition else "",
        "steps": f"{rule.for_steps:g}",
        "signal": rule.condition.signal if rule.condition else "",
        "expected": "what is expected",
        "step": _STEP_NOW,
        "onset": _STEP_NOW,
        "value": "",
    }
    parts, text = [], ""
    for literal, name, spec, _ in string.Formatter().parse(rule.summary):
        text += literal  # a `{{` comes in two pieces
        if name is not None:
            parts += [_literal(text), _value(spec or "") if name == "value" else facts[name]]
            text = ""
    return "".join([*parts, _literal(text)])


def _value(spec: str) -> str:
    if spec.endswith("%"):
        return "{{ $value | humanizePercentage }}"
    return f'{{{{ printf "%{spec}" $value }}}}' if spec[-1:] in tuple("efgEFG") else "{{ $value }}"


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')
