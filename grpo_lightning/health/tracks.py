"""One rule's streak and its alert."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from grpo_lightning.health.conditions import Gauge, Test
from grpo_lightning.health.feeds import Feed, Feeds
from grpo_lightning.health.onset import onset
from grpo_lightning.health.records import Alert, AlertChange, Rule, Severity

__all__ = ["Moment", "Track"]

_SLACK = 1e-9
_HISTORY = 256  # rows that an onset is looked for in
_SAVED = ("_steps", "_rows", "_groups", "_seconds", "_quiet", "_since", "met_at")


class Moment:
    """Where the run is: a step, the optimizer steps, groups and seconds that it stands for, and the steps so far."""

    __slots__ = ("groups", "seconds", "seen", "span", "step")

    def __init__(self, step: int, span: float, groups: float, seconds: float, seen: float) -> None:
        self.step, self.span, self.groups, self.seconds, self.seen = step, span, groups, seconds, seen


class Track:
    """Holds one rule; `complete` makes it ready, once the main conditions of all rules have their windows."""

    def __init__(self, rule: Rule, feeds: Feeds) -> None:
        self.rule = rule
        early = rule.before_steps < math.inf  # asked at the run's start only
        self.gauge = Gauge(rule.condition, feeds, late=early) if rule.condition is not None else None
        self._feeds = feeds
        self._when: list[tuple[Gauge, bool]] = []
        self._unless: list[Gauge] = []
        self._milder: list[Gauge] = []
        self._before, self._min_groups = rule.before_steps, rule.min_groups
        self._steps = self._groups = self._seconds = self._quiet = 0.0
        self._rows = 0
        self._since: int | None = None
        self.met_at: int | None = None  # when it last held long enough
        self.alert: Alert | None = None
        self.busy = False  # a streak or an alert is open

    def complete(self) -> None:
        """Make the other conditions ready: what they read and no main condition does, is made when they are asked."""
        rule, feeds = self.rule, self._feeds
        self._when = [(Gauge(c, feeds, late=True), c.optional) for c in rule.when]
        self._unless = [Gauge(c, feeds, late=True) for c in rule.unless]
        self._milder = [Gauge(c, feeds, late=True) for c in rule.milder_when]
        for name in rule.show:
            feeds.of(name)

    def waits(self) -> bool:
        """True while the ruler of a measured signal is not made."""
        condition = self.rule.condition
        if condition is None or self.gauge is None or condition.kind != "ruler" or condition.ruler != "start":
            return False
        feed = self.gauge.judged.feed
        return feed.seen and feed.expected() is None

    # ---- a step

    @property
    def quick(self) -> tuple[Feed, Test | None]:
        """The signal's feed and the main condition's test, which the judge asks first; None where `step` must be."""
        gauge = self.gauge
        if gauge is None:
            raise ValueError(f"{self.rule.name} joins rules and has no signal of its own")
        return gauge.feed, gauge.test if gauge.other is None and self._before == math.inf else None

    def step(self, moment: Moment) -> AlertChange | None:
        """Judge the step. Where the signal is not measured at it nothing begins and nothing ends."""
        gauge = self.gauge
        if gauge is None or (moment.seen > self._before and self.alert is None):
            return None
        gauge = gauge.judged
        if not gauge.feed.fresh:
            return None
        return self.judge(gauge.test() if gauge.feed.finite else True, moment)

    def judge(self, held: bool | None, moment: Moment) -> AlertChange | None:
        """What follows from whether the main condition held."""
        if held:
            holds = moment.groups >= self._min_groups * moment.span and self._others_hold()
            return self._hold(moment) if holds else self._let_go(moment)
        if held is None and self.gauge is not None and self.gauge.condition.relative_to is not None:
            return None  # what it is relative to is 0 or not measured: nothing to compare with
        return self._let_go(moment) if self.busy else None

    def step_together(self, moment: Moment, tracks: Mapping[str, Track]) -> AlertChange | None:
        """Whether all of the rule's parts held within its steps."""
        met = [tracks[name].met_at for name in self.rule.together]
        held = all(at is not None and moment.step - at <= self.rule.within_steps for at in met)
        return self._hold(moment) if held and self._others_hold() else self._let_go(moment)

    def _others_hold(self) -> bool:
        for gauge, optional in self._when:
            held = gauge.holds(fresh=False)
            if held is None and optional and not gauge.judged.feed.seen:
                continue
            if not held:
                return False
        return not any(g.judged.feed.finite and g.holds(fresh=False) for g in self._unless)

    def _let_go(self, moment: Moment) -> AlertChange | None:
        self._steps = self._groups = self._seconds = 0.0
        self._rows, self._since = 0, None
        self.busy = self.alert is not None
        if self.alert is None:
            return None
        self._quiet += moment.span
        if self._quiet < self.rule.keep_firing_steps:
            return None
        alert, self.alert, self._quiet, self.busy = self.alert, None, 0.0, False
        return AlertChange(change="resolved", step=moment.step, alert=alert)

    def _hold(self, moment: Moment) -> AlertChange | None:
        if self._since is None:
            self._since, self.busy = moment.step, True
        self._steps += moment.span
        self._rows += 1
        self._groups += moment.groups
        self._seconds += moment.seconds
        self._quiet = 0.0
        if not self._long_enough(moment):
            return None
        self.met_at = moment.step
        return None if self.rule.quiet else self._fire(moment)

    def _long_enough(self, moment: Moment) -> bool:
        rule = self.rule
        return (
            self._steps >= rule.for_steps - _SLACK
            and self._rows >= rule.for_samples
            and moment.seen > rule.after_steps
            and self._groups >= rule.for_groups
            and self._seconds >= rule.for_minutes * 60.0 - _SLACK
        )

    # ---- the alert

    def _fire(self, moment: Moment) -> AlertChange | None:
        milder = bool(self._milder) and all(gauge.holds(fresh=False) for gauge in self._milder)
        severity: Severity = "warning" if milder else self.rule.severity
        if self.alert is None:
            self.alert = self._alert(moment, severity, milder=milder)
            return AlertChange(change="firing", step=moment.step, alert=self.alert)
        if severity in ("warning", self.alert.severity):
            return None
        self.alert = replace(self.alert, severity=severity, action=self.rule.action)
        return AlertChange(change="escalated", step=moment.step, alert=self.alert)

    def _alert(self, moment: Moment, severity: Severity, *, milder: bool) -> Alert:
        rule, gauge = self.rule, self.gauge
        value = gauge.value if gauge is not None else None
        expected = gauge.expected if gauge is not None else None
        facts: dict[str, Any] = {
            "value": math.nan if value is None else value,
            "bound": gauge.bound if gauge is not None else float(len(rule.together)),
            "signal": gauge.judged.feed.signal if gauge is not None else ",".join(rule.together),
        }
        began = self._onset(moment)
        said = {
            "steps": round(self._steps),
            "expected": math.nan if expected is None else expected,
            "step": moment.step,
            "onset": began,
        }
        return Alert(
            id=f"{rule.name}@{moment.step}",
            rule=rule.name,
            step=moment.step,
            onset_step=began,
            severity=severity,
            action="notify" if milder else rule.action,
            cause=rule.cause,
            expected=expected,
            summary=rule.summary.format(**facts, **said),
            first=rule.first,
            runbook=rule.runbook,
            values=self._values(),
            **facts,
        )

    def _values(self) -> dict[str, float]:
        feeds = self._feeds
        return {s: last for s in self.rule.signals if s in feeds and (last := feeds[s].last) is not None}

    def _onset(self, moment: Moment) -> int:
        since = self._since if self._since is not None else moment.step
        if self.gauge is None:
            return since
        history = _history(self.gauge.judged.feed)
        if self._before < math.inf and history:
            return history[0][0]
        return since if self.rule.kind == "not_finite" else onset(history, streak_start=since)

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Plain types."""
        return {name: getattr(self, name) for name in _SAVED} | {"alert": self.alert.to_dict() if self.alert else None}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        for name in _SAVED:
            setattr(self, name, state[name])
        self.alert = Alert(**state["alert"]) if state["alert"] else None
        self.busy = self._since is not None or self.alert is not None


def _history(feed: Feed) -> list[tuple[int, float]]:
    """The feed's last rows: step and value."""
    return [(step, value) for step, value, _, _ in islice(feed.rows, max(len(feed.rows) - _HISTORY, 0), None)]
