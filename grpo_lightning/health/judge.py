"""The judgement: every rule at every step, and the life of its alerts. It knows only what came before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_lightning.health.conditions import Gauge
from grpo_lightning.health.feeds import Band, Feeds
from grpo_lightning.health.onset import onset
from grpo_lightning.health.records import Alert, AlertChange, Rule, Severity, Step

__all__ = ["Judge", "Verdict", "verdict_of"]

Verdict = str  # healthy | warning | unhealthy
_MANY = 1e6  # groups in a step whose number is not known
_MOST_GROUPS = 64
_SLACK = 1e-9
_STATE_VERSION = 1


class Judge:
    """Holds rules against the steps of a run.

    Args:
        rules: loaded rules, names unique.
        baseline: what signals are expected to be; without one, the run's own first steps.
        start_steps: how many optimizer steps these first steps are.
    """

    def __init__(self, rules: Sequence[Rule], *, baseline: Band | None = None, start_steps: float = 20.0) -> None:
        self._feeds = Feeds(start_steps=start_steps, baseline=baseline)
        self._guess = _GroupGuess()
        self._tracks = [_Track(rule, self._feeds) for rule in rules]
        self._by_name = {track.rule.name: track for track in self._tracks}
        self._plain = [track for track in self._tracks if track.gauge is not None]
        self._together = [track for track in self._tracks if track.gauge is None]
        self._seen = 0.0  # optimizer steps
        self.alerts: list[Alert] = []  # every one that fired, in order

    @property
    def rules(self) -> list[Rule]:
        """The rules that are held."""
        return [track.rule for track in self._tracks]

    def observe(self, step: Step) -> list[AlertChange]:
        """Judge a step. Returns the alerts that fire, rise in severity or are resolved at it."""
        span, values = step.span, step.values
        groups = step.groups if step.groups is not None else self._guess.groups(values, span)
        seconds = step.seconds if step.seconds is not None else values.get("step_seconds", 0.0)
        self._seen += span
        self._feeds.push(values, span, groups, step.step)
        moment = _Moment(step.step, span, groups, seconds, self._seen)
        changes: list[AlertChange] = []
        for track in self._plain:
            change = track.step(moment)
            if change is not None:
                changes.append(change)
        for track in self._together:
            change = track.step_together(moment, self._by_name)
            if change is not None:
                changes.append(change)
        if changes:
            self._keep(changes)
        return changes

    def _keep(self, changes: Iterable[AlertChange]) -> None:
        for change in changes:
            if change.change == "firing":
                self.alerts.append(change.alert)
            elif change.change == "escalated":
                self.alerts = [change.alert if a.id == change.alert.id else a for a in self.alerts]

    def firing(self) -> list[Alert]:
        """The alerts that fire at this step."""
        return [track.alert for track in self._tracks if track.alert is not None]

    def verdict(self) -> Verdict:
        """healthy, warning or unhealthy, by the worst alert so far."""
        return verdict_of(self.alerts)

    def not_judged(self) -> list[tuple[str, str]]:
        """(rule, signal) for every rule that has not been judged because a signal it needs was never measured."""
        return [
            (track.rule.name, missing)
            for track in self._plain
            if (missing := next((s for s, other in track.rule.needed if not self._seen_any(s, other)), None))
            is not None
        ]

    def _seen_any(self, signal: str, other: str | None) -> bool:
        return self._feeds[signal].seen or (other is not None and self._feeds[other].seen)

    def waiting(self) -> list[str]:
        """The rules whose ruler is not made yet."""
        return [track.rule.name for track in self._plain if track.waits()]

    def state_dict(self) -> dict[str, Any]:
        """Plain types, for checkpoints: a judge that loads them goes on as if never interrupted."""
        return {
            "version": _STATE_VERSION,
            "seen": self._seen,
            "guess": self._guess.state(),
            "feeds": {name: feed.state() for name, feed in self._feeds.items()},
            "tracks": {name: track.state() for name, track in self._by_name.items()},
            "alerts": [alert.to_dict() for alert in self.alerts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; rules that the state doesn't know start anew."""
        self._seen = state["seen"]
        self._guess.load(state["guess"])
        for name, feed in self._feeds.items():
            if name in state["feeds"]:
                feed.load(state["feeds"][name])
        for name, track in self._by_name.items():
            if name in state["tracks"]:
                track.load(state["tracks"][name])
        self.alerts = [Alert(**alert) for alert in state["alerts"]]


def verdict_of(alerts: Sequence[Alert]) -> Verdict:
    """The worst of them: unhealthy with a critical one, warning with any, else healthy."""
    if any(alert.severity == "critical" for alert in alerts):
        return "unhealthy"
    return "warning" if alerts else "healthy"


class _Moment:
    """Where the run is."""

    __slots__ = ("groups", "seconds", "seen", "span", "step")

    def __init__(self, step: int, span: float, groups: float, seconds: float, seen: float) -> None:
        self.step, self.span, self.groups, self.seconds, self.seen = step, span, groups, seconds, seen


class _Track:
    """One rule's streak and its alert."""

    def __init__(self, rule: Rule, feeds: Feeds) -> None:
        self.rule = rule
        self.gauge = Gauge(rule.condition, feeds) if rule.condition is not None else None
        self._when = [(Gauge(c, feeds), c.optional) for c in rule.when]
        self._unless = [Gauge(c, feeds) for c in rule.unless]
        self._milder = [Gauge(c, feeds) for c in rule.milder_when]
        self._feeds = feeds
        for gauge in (self.gauge, self.gauge.other) if self.gauge is not None else ():
            if gauge is not None:
                gauge.feed.keeps_history = True
        for name in rule.show:
            feeds.of(name)
        self._steps = self._groups = self._seconds = self._quiet = 0.0
        self._since: int | None = None
        self.met_at: int | None = None  # when it last held long enough
        self.alert: Alert | None = None

    def waits(self) -> bool:
        """True while the ruler of a measured signal is not made."""
        condition = self.rule.condition
        if condition is None or self.gauge is None or condition.kind != "ruler" or condition.ruler != "start":
            return False
        return self.gauge.feed.seen and self.gauge.feed.expected() is None

    # ---- a step

    def step(self, moment: _Moment) -> AlertChange | None:
        """Judge the step."""
        gauge = self.gauge
        holds = gauge.holds() if gauge is not None else None
        if gauge is None or (holds is None and not gauge.judged.feed.fresh):
            return None  # not measured at this step: nothing begins and nothing ends
        if holds:
            holds = moment.groups >= self.rule.min_groups * moment.span and self._others_hold()
        return self._advance(bool(holds), moment)

    def _others_hold(self) -> bool:
        for gauge, optional in self._when:
            held = gauge.holds(fresh=False)
            if held is None and optional and not gauge.feed.seen:
                continue
            if not held:
                return False
        return not any(g.feed.finite and g.holds(fresh=False) for g in self._unless)

    def step_together(self, moment: _Moment, tracks: Mapping[str, _Track]) -> AlertChange | None:
        """Whether all of the rule's parts held within its steps."""
        met = [tracks[name].met_at for name in self.rule.together]
        held = all(at is not None and moment.step - at <= self.rule.within_steps for at in met)
        return self._advance(held, moment)

    def _advance(self, holds: bool, moment: _Moment) -> AlertChange | None:
        if not holds:
            self._steps = self._groups = self._seconds = 0.0
            self._since = None
            return self._calm(moment) if self.alert is not None else None
        rule = self.rule
        if moment.seen > rule.before_steps and self.alert is None:
            return None
        if self._since is None:
            self._since = moment.step
        self._steps += moment.span
        self._groups += moment.groups
        self._seconds += moment.seconds
        self._quiet = 0.0
        if not self._long_enough(moment):
            return None
        self.met_at = moment.step
        if rule.quiet:
            return None
        return self._fire(moment)

    def _long_enough(self, moment: _Moment) -> bool:
        rule = self.rule
        return (
            self._steps >= rule.for_steps - _SLACK
            and moment.seen > rule.after_steps
            and self._groups >= rule.for_groups
            and self._seconds >= rule.for_minutes * 60.0 - _SLACK
        )

    def _calm(self, moment: _Moment) -> AlertChange | None:
        self._quiet += moment.span
        if self._quiet < self.rule.keep_firing_steps or self.alert is None:
            return None
        alert, self.alert, self._quiet = self.alert, None, 0.0
        return AlertChange(change="resolved", step=moment.step, alert=alert)

    def _fire(self, moment: _Moment) -> AlertChange | None:
        milder = bool(self._milder) and all(gauge.holds(fresh=False) for gauge in self._milder)
        severity: Severity = "warning" if milder else self.rule.severity
        if self.alert is not None:
            if severity in ("warning", self.alert.severity):
                return None
            self.alert = replace(self.alert, severity=severity, action=self.rule.action)
            return AlertChange(change="escalated", step=moment.step, alert=self.alert)
        self.alert = self._alert(moment, severity, milder=milder)
        return AlertChange(change="firing", step=moment.step, alert=self.alert)

    def _alert(self, moment: _Moment, severity: Severity, *, milder: bool) -> Alert:
        rule, gauge = self.rule, self.gauge
        value = gauge.value if gauge is not None and gauge.value is not None else float("nan")
        expected = gauge.expected if gauge is not None else None
        began = self._onset(moment)
        bound = gauge.bound if gauge is not None else float(len(rule.together))
        signal = gauge.judged.feed.signal if gauge is not None else ",".join(rule.together)
        facts = {
            "value": value,
            "bound": bound,
            "steps": round(self._steps),
            "expected": expected if expected is not None else float("nan"),
            "signal": signal,
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
            signal=signal,
            value=value,
            bound=bound,
            expected=expected,
            summary=rule.summary.format(**facts),
            first=rule.first,
            runbook=rule.runbook,
            values={s: last for s in rule.signals if s in self._feeds and (last := self._feeds[s].last) is not None},
        )

    def _onset(self, moment: _Moment) -> int:
        since = self._since if self._since is not None else moment.step
        if self.gauge is None:
            return since
        history = list(self.gauge.judged.feed.history)
        if self.rule.before_steps < float("inf") and history:
            return history[0][0]
        if self.rule.kind == "not_finite":
            return since
        return onset(history, streak_start=since)

    def state(self) -> dict[str, Any]:
        """Plain types."""
        names = ("_steps", "_groups", "_seconds", "_quiet", "_since", "met_at")
        return {name: getattr(self, name) for name in names} | {"alert": self.alert.to_dict() if self.alert else None}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        for name in ("_steps", "_groups", "_seconds", "_quiet", "_since", "met_at"):
            setattr(self, name, state[name])
        self.alert = Alert(**state["alert"]) if state["alert"] else None


class _GroupGuess:
    """How many groups a row has, where nobody says: the dead share is a multiple of one over their number.

    The smallest number up to 64 that all shares so far agree with, once six of them lie strictly between 0 and 1; or one,
    if they are only ever 0 or 1 and change.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._changes = 0
        self._between = 0
        self._number = 1  # 0: no number agrees

    def groups(self, values: Mapping[str, float], span: float) -> float:
        """Groups in the row, very many where not known."""
        dead = values.get("dead_group_fraction")
        if dead is not None and self._number and 0.0 <= dead <= 1.0:
            self._take(dead)
        known = self._between >= 6 or (not self._between and self._changes >= 3)
        return float(self._number) if known and self._number else _MANY

    def _take(self, dead: float) -> None:
        if 0.0 < dead < 1.0:
            self._between += 1
        if self._last is not None and dead != self._last:
            self._changes += 1
        self._last = dead
        while self._number and abs(dead * self._number - round(dead * self._number)) > 2e-3:
            self._number = self._number + 1 if self._number < _MOST_GROUPS else 0

    def state(self) -> list[Any]:
        """Plain types."""
        return [self._last, self._changes, self._between, self._number]

    def load(self, state: Sequence[Any]) -> None:
        """The inverse of `state`."""
        self._last, self._changes, self._between, self._number = state
