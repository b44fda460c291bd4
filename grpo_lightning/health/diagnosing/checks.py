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


def drift_findings(case: Case, level: LevelName, *parts: str) -> Iterator[Finding]:
    """What the check of the snapshot found in these parts."""
    whys = {
        "environment": "Another library or interpreter changes numbers without a line of your code: rule it out first.",
        "data": "Prompts that are not those of the snapshot make every curve before and after incomparable.",
        "reward": "The reward is what the policy is told to do: with other code it learns something else.",
        "algorithm": "",
    }
    for drift in case.drifts or ():
        if drift.level in parts and drift.is_problem:
            yield Finding(
                name=f"snapshot_{drift.level}",
                level=level,
                strength="hint" if drift.verdict == "unknown" else "strong",
                what=f"{drift.name}: {drift.verdict} since the snapshot"
                + (f" ({drift.detail})" if drift.detail else ""),
                why=whys[level],
                first="See the difference with `snapshot diff`, then restore it, or start a new run with what is there now.",
            )


def alert_findings(case: Case, level: LevelName, *causes: str) -> Iterator[Finding]:
    """The alerts whose most likely cause belongs to the level, each rule once."""
    by_rule: dict[str, list[Alert]] = {}
    for alert in case.alerts:
        if alert.cause in causes:
            by_rule.setdefault(alert.rule, []).append(alert)
    for rule, fired in by_rule.items():
        yield _alert_finding(case, level, rule, fired)


def _alert_finding(case: Case, level: LevelName, rule: str, fired: Sequence[Alert]) -> Finding:
    alert = next((a for a in fired if a.severity == "critical"), fired[0])
    others = [str(a.step) for a in fired if a is not alert]
    again = f" It fired {len(fired)} times, also at step {', '.join(others[:8])}." if others else ""
    return Finding(
        name=rule,
        level=level,
        strength="strong" if alert.severity == "critical" else "hint",
        what=f"Alert {rule} at step {alert.step}: {alert.summary}{again}",
        numbers=numbers_of(case, *list(alert.values)[:6]),
        steps=Span(first=min(alert.onset_step, alert.step), last=alert.step),
        why=f"The rule's most likely cause is {alert.cause}"
        + (f"; its runbook, {alert.runbook}, says what it means." if alert.runbook else "."),
        first=alert.first or "Read the runbook, in its order.",
    )
