"""Conditions of health rules as PromQL, one sample a run. What can't be said exactly is refused with the reason."""

from __future__ import annotations

import math

from grpo_lightning.health.records import Condition, Rule
from grpo_prometheus.names import metric_of

__all__ = ["ON_RUN", "STEP", "TIME", "Inexact", "broken", "measured", "number", "why_not"]

_BY = "max by (run_id, run_name)"
ON_RUN = "on (run_id, run_name)"
STEP = f"{_BY} (grpo_step)"
TIME = f"{_BY} (grpo_step_timestamp_seconds)"


class Inexact(Exception):  # noqa: N818 - an answer, not a fault
    """The rule looks at more than the newest step's signals; the message says at what."""


def number(value: float) -> str:
    """A number as PromQL writes it.

    >>> number(float("inf")), number(0.05)
    ('Inf', '0.05')
    """
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return repr(float(value))


def measured(condition: Condition) -> str:
    """The value that the condition judges; no sample where it was not measured."""
    _refuse(condition)
    value = _series(condition.signal)
    if condition.relative_to is not None:
        value = f"{value} / {ON_RUN} ({_series(condition.relative_to)} != 0)"
    return f"abs({value})" if condition.absolute else value


def broken(condition: Condition, *, finite_only: bool = False) -> str:
    """The value where the condition holds, no sample elsewhere. A value that is not finite violates, as in our rules."""
    value, signal = measured(condition), _series(condition.signal)
    odd = [f"({signal} != {signal})", f"(abs({signal}) == Inf)"]
    if condition.not_finite:
        return " or ".join(odd)
    held = f"(({value}) {'<' if condition.low else '>'} {number(condition.bound)})"
    return f"({held} and (abs({signal}) < Inf))" if finite_only else " or ".join([held, *odd])


def why_not(rule: Rule) -> str:
    """Why the rule can't be told from the newest step's signals; empty where it can."""
    if rule.condition is None:
        return "it joins other rules"
    if rule.milder_when:
        return "its severity depends on other signals"
    if rule.for_groups or rule.min_groups:
        return "it counts groups"
    try:
        for condition in rule.conditions:
            _refuse(condition)
    except Inexact as reason:
        return str(reason)
    return ""


def _refuse(condition: Condition) -> None:
    if condition.kind not in ("level", "not_finite"):
        words = {"ruler": "a ruler", "trend": "a trend", "jump": "a jump", "stairs": "stairs"}
        raise Inexact(f"it holds {condition.signal} against {words.get(condition.kind, condition.kind)}")
    if condition.over_steps > 1 or condition.over_groups > 1:
        raise Inexact(f"it judges {condition.signal} over a window of steps")
    if condition.statistic == "zero_share":
        raise Inexact(f"it counts the zeros of {condition.signal}")


def _series(signal: str) -> str:
    metric = metric_of(signal)
    labels = ", ".join(f"{name}={_quoted(value)}" for name, value in metric.labels.items())
    return f"{_BY} ({metric.name}{{{labels}}})" if labels else f"{_BY} ({metric.name})"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
