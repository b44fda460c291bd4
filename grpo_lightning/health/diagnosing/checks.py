"""What a level looks at: a case, and checks that give findings or say which signal they lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lightning.health.diagnosing.comparing import Comparison
from grpo_lightning.health.diagnosing.records import Drift, Finding, Level, LevelName, Number, Span
from grpo_lightning.health.records import Alert

__all__ = ["Case", "Check", "alert_findings", "drift_findings", "fixed", "level_of", "numbers_of", "percent"]

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that is looked at."""

    compare: Comparison
    alerts: Sequence[Alert]
    drifts: Sequence[Drift] | None  # None: there is no snapshot to hold against
    why_no_drifts: str
    evidence: Rows
    restarts: Sequence[int]  # steps after which a later segment of the run started

    @property
    def span(self) -> Span | None:
        """The steps from the onset on."""
        return self.compare.after

    @property
    def acute(self) -> bool:
        """Whether something marks an onset."""
        return self.compare.onset is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One look at a case."""

    said: str  # what is looked at, for people
    run: Callable[[Case], Iterable[Finding]]
    needs: tuple[str, ...] = ()  # signals, all of them


def level_of(name: LevelName, case: Case, checks: Sequence[Check]) -> Level:
    """Look at everything; strong findings first, otherwise in the order of the checks."""
    findings: list[Finding] = []
    checked: list[str] = []
    unchecked: list[str] = []
    for check in checks:
        missing = [signal for signal in check.needs if not case.compare.measured(signal)]
        if missing:
            unchecked.append(f"{check.said}: {' and '.join(missing)} not measured")
            continue
        checked.append(check.said)
        findings += check.run(case)
    findings.sort(key=lambda finding: finding.strength == "hint")
    return Level(name=name, findings=tuple(findings), checked=tuple(checked), unchecked=tuple(unchecked))


def numbers_of(case: Case, *signals: str, since_start: bool = False) -> tuple[Number, ...]:
    """Before and after of those that are measured."""
    found = [case.compare[signal] for signal in signals]
    return tuple(it.from_start if since_start else it.number for it in found if it is not None)


def fixed(value: float | None) -> str:
    """A number for a sentence.

    >>> fixed(0.0412345), fixed(None), fixed(1234567.0)
    ('0.0412', 'none', '1.23e+06')
    """
    return "none" if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share for a sentence."""
    return "none" if value is None else f"{value:.0%}"


# ---- the same at every level


_WHY_DRIFT: Mapping[LevelName, str] = {
    "environment": "Another library or interpreter changes numbers without a line of your code: rule it out first.",
    "data": "Prompts that are not those of the snapshot make the curves before and after incomparable.",
    "reward": "The reward is what the policy is told to do: with other code it learns something else.",
    "algorithm": "",
}
_NAMED = 5  # of the parts that drifted


def drift_findings(case: Case, level: LevelName, *parts: str) -> Iterator[Finding]:
    """What the check of the snapshot found in these parts, a finding for each part and verdict."""
    grouped: dict[tuple[str, str], list[Drift]] = {}
    for drift in case.drifts or ():
        if drift.level in parts and drift.is_problem:
            grouped.setdefault((drift.level, drift.verdict), []).append(drift)
    for (part, verdict), drifts in grouped.items():
        strong = case.acute and verdict != "unknown" and part in ("environment", "data", "reward")
        yield Finding(
            name=f"snapshot_{part}",
            level=level,
            strength="strong" if strong else "hint",
            what=f"{part.capitalize()} {verdict} since the snapshot: {_listed(drifts)}.",
            why=f"{_WHY_DRIFT[level]} What changed only after the run is no cause: during it, a drift alert says so.",
            first="`snapshot verify` and `snapshot diff` show it; restore it, or start a new run with what is there now.",
        )


def _listed(drifts: Sequence[Drift]) -> str:
    if len(drifts) == 1:
        return drifts[0].name + (f" ({drifts[0].detail.strip()})" if drifts[0].detail else "")
    names = ", ".join(drift.name for drift in drifts[:_NAMED])
    more = f" and {len(drifts) - _NAMED} more" if len(drifts) > _NAMED else ""
    return f"{names}{more}"


def alert_findings(case: Case, level: LevelName, *causes: str) -> Iterator[Finding]:
    """The alerts whose most likely cause belongs to the level, each rule once; those long after the onset in one line."""
    by_rule: dict[str, list[Alert]] = {}
    for alert in case.alerts:
        if alert.cause in causes:
            by_rule.setdefault(alert.rule, []).append(alert)
    later = {rule: fired for rule, fired in by_rule.items() if not _near(case, fired[0])}
    for rule, fired in by_rule.items():
        if rule not in later:
            yield _alert_finding(case, level, rule, fired)
    if later:
        yield _later(level, later)


def _near(case: Case, alert: Alert) -> bool:
    return case.span is None or alert.step <= case.span.last or not case.acute


def _alert_finding(case: Case, level: LevelName, rule: str, fired: Sequence[Alert]) -> Finding:
    alert = next((a for a in fired if a.severity == "critical"), fired[0])
    others = [str(a.step) for a in fired if a is not alert]
    again = f" It fired {len(fired)} times, also at step {', '.join(others[:8])}." if others else ""
    return Finding(
        name=rule,
        level=level,
        strength="strong" if alert.severity == "critical" else "hint",
        what=f"Alert {rule} at step {alert.step}: {alert.summary}{again}",
        numbers=numbers_of(case, *list(alert.values)[:4]),
        steps=Span(first=min(alert.onset_step, alert.step), last=alert.step),
        why=f"Most likely cause: {alert.cause}." + (f" {alert.runbook} says what it means." if alert.runbook else ""),
        first=alert.first or "Read the runbook, in its order.",
    )


def _later(level: LevelName, by_rule: Mapping[str, Sequence[Alert]]) -> Finding:
    fired = sorted((alert.step, rule) for rule, alerts in by_rule.items() for alert in alerts)
    return Finding(
        name="later_alerts",
        level=level,
        strength="hint",
        what="Alerts later on: " + ", ".join(f"{rule} at step {step}" for step, rule in fired[:12]) + ".",
        steps=Span(first=fired[0][0], last=fired[-1][0]),
        why="What comes long after the onset is mostly its consequence.",
        first="Repair what comes first; `--step N` looks at another time.",
    )
