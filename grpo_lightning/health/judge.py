"""The judgement: every rule at every step, and the life of its alerts. It knows only what came before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from grpo_lightning.errors import ConfigError
from grpo_lightning.health.feeds import Band, Feeds
from grpo_lightning.health.grouping import MANY, GroupGuess
from grpo_lightning.health.records import Alert, AlertChange, Rule, Step
from grpo_lightning.health.tracks import Moment, Track

__all__ = ["Judge", "Verdict", "verdict_of"]

Verdict = str  # healthy | warning | unhealthy
_LEAST_SPAN = 1e-6  # of a row that stands for no step, such as one that is printed twice
_LARGEST_SPAN = 1e9
_STATE_VERSION = 2


class Judge:
    """Holds rules against the steps of a run.

    Args:
        rules: loaded rules, names unique.
        baseline: what signals are expected to be; without one, the run's own first steps.
        start_steps: how many optimizer steps these first steps are.

    Raises:
        ConfigError: a `together` rule names one that is not among the rules, or itself.
    """

    def __init__(self, rules: Sequence[Rule], *, baseline: Band | None = None, start_steps: float = 20.0) -> None:
        self._feeds = Feeds(start_steps=start_steps, baseline=baseline)
        self._guess = GroupGuess()
        self._tracks = [Track(rule, self._feeds) for rule in rules]
        for track in self._tracks:
            track.complete()
        self._by_name = {track.rule.name: track for track in self._tracks}
        self._plain = [(*track.quick, track) for track in self._tracks if track.gauge is not None]
        self._together = [self._by_name[name] for name in _in_order(rules) if self._by_name[name].gauge is None]
        self._seen = 0.0  # optimizer steps
        self._timed = False  # the training time of steps is known
        self.alerts: list[Alert] = []  # every one that fired, in order

    @property
    def rules(self) -> list[Rule]:
        """The rules that are held."""
        return [track.rule for track in self._tracks]

    def observe(self, step: Step) -> list[AlertChange]:
        """Judge a step. Returns the alerts that fire, rise in severity or are resolved at it."""
        moment = self._moment(step)
        self._feeds.push(step.values, moment.span, moment.groups, moment.step)
        changes: list[AlertChange] = []
        for feed, test, track in self._plain:
            if test is None:
                change = track.step(moment)
            elif not feed.fresh:
                continue
            else:
                held = test() if feed.finite else True
                if not held and not track.busy:
                    continue
                change = track.judge(held, moment)
            if change is not None:
                changes.append(change)
        for track in self._together:
            change = track.step_together(moment, self._by_name)
            if change is not None:
                changes.append(change)
        if changes:
            self._keep(changes)
        return changes

    def _moment(self, step: Step) -> Moment:
        """What the step stands for; numbers that can't be are those of a step of which nothing is known."""
        span, groups, seconds = step.span, step.groups, step.seconds
        if not _LEAST_SPAN <= span <= _LARGEST_SPAN:
            span = _LEAST_SPAN if span < _LEAST_SPAN else 1.0
        if groups is None or not 0.0 < groups <= MANY * span:
            groups = self._guess.groups(step.values)
        if seconds is None:
            seconds = step.values.get("step_seconds")
        if seconds is None or not 0.0 <= seconds < 1e12:
            seconds = 0.0
        else:
            self._timed = True
        self._seen += span
        return Moment(step.step, span, groups, seconds, self._seen)

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
        missing = ((track.rule.name, self._missing(track)) for track in self._tracks)
        return [(name, signal) for name, signal in missing if signal is not None]

    def _missing(self, track: Track) -> str | None:
        rule = track.rule
        for signal, other in rule.needed:
            if not (self._feeds[signal].seen or (other is not None and self._feeds[other].seen)):
                return signal
        if rule.for_minutes and not self._timed:
            return "step_seconds"
        parts = (self._missing(self._by_name[name]) for name in rule.together)
        return next((signal for signal in parts if signal is not None), None)

    def waiting(self) -> list[str]:
        """The rules whose ruler is not made yet."""
        return [track.rule.name for track in self._tracks if track.waits()]

    def state_dict(self) -> dict[str, Any]:
        """Plain types, for checkpoints: a judge that loads them goes on as if never interrupted."""
        return {
            "version": _STATE_VERSION,
            "seen": self._seen,
            "timed": self._timed,
            "guess": self._guess.state(),
            "feeds": {name: feed.state() for name, feed in self._feeds.items()},
            "tracks": {name: track.state() for name, track in self._by_name.items()},
            "alerts": [alert.to_dict() for alert in self.alerts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; rules that the state doesn't know start anew, all of them for another version's."""
        self.alerts = [Alert(**alert) for alert in state["alerts"]]
        if state.get("version") != _STATE_VERSION:
            return
        self._seen, self._timed = state["seen"], state["timed"]
        self._guess.load(state["guess"])
        for name, feed in self._feeds.items():
            if name in state["feeds"]:
                feed.load(state["feeds"][name])
        for name, track in self._by_name.items():
            if name in state["tracks"]:
                track.load(state["tracks"][name])


def _in_order(rules: Sequence[Rule]) -> list[str]:
    """Names, each after those that its rule joins."""
    names = {rule.name for rule in rules}
    for rule in rules:
        lacking = [part for part in rule.together if part not in names]
        if lacking:
            raise ConfigError(
                f"The rule {rule.name} joins {', '.join(rule.together)}, and {lacking[0]} is not held: "
                f"hold it too, or leave {rule.name} out."
            )
    try:
        return list(TopologicalSorter({rule.name: rule.together for rule in rules}).static_order())
    except CycleError as error:
        raise ConfigError(
            f"The rules {' and '.join(dict.fromkeys(error.args[1]))} join each other: they never can hold."
        ) from error


def verdict_of(alerts: Sequence[Alert]) -> Verdict:
    """The worst of them: unhealthy with a critical one, warning with any, else healthy."""
    if any(alert.severity == "critical" for alert in alerts):
        return "unhealthy"
    return "warning" if alerts else "healthy"
