"""Where to look first: findings in the order environment, data, reward and sampling, algorithm.

What is judged is the time around the onset: the steps before it against those after it. Nothing is read or changed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_lightning.health.diagnosing.algorithm import algorithm
from grpo_lightning.health.diagnosing.checks import Case
from grpo_lightning.health.diagnosing.columns import Column, Columns
from grpo_lightning.health.diagnosing.comparing import Band, Comparison
from grpo_lightning.health.diagnosing.records import (
    LEVELS,
    TITLES,
    Diagnosis,
    Drift,
    Finding,
    Level,
    LevelName,
    Moved,
    Number,
    Span,
)
from grpo_lightning.health.diagnosing.rewards import rewards
from grpo_lightning.health.diagnosing.surroundings import data, environment
from grpo_lightning.health.records import Alert, Step

__all__ = [
    "LEVELS",
    "TITLES",
    "Column",
    "Columns",
    "Diagnosis",
    "Drift",
    "Finding",
    "Level",
    "LevelName",
    "Moved",
    "Number",
    "Span",
    "diagnose",
    "main_alert",
]

_AROUND = 40  # steps before and after an alert's onset, which is an estimate
_ASKED = 20  # and around a step that a person names


def diagnose(
    steps: Iterable[Step] | Columns,
    alerts: Sequence[Alert] = (),
    *,
    baseline: Band | None = None,
    snapshot: Sequence[Drift] | None = None,
    why_no_snapshot: str = "no snapshot",
    evidence: Sequence[Mapping[str, Any]] = (),
    at_step: int | None = None,
    restarts: Sequence[int] = (),
) -> Diagnosis:
    """Findings in order of suspicion.

    Args:
        steps: the run's signals; evaluations at the steps at which they were made.
        alerts: those that ask for a diagnosis. Their most severe one's onset is where the run is cut.
        baseline: what signals are expected to be; without one, the steps before and the run's own start.
        snapshot: what a check of the run's snapshot found; None where there is none to check.
        why_no_snapshot: said in that case.
        evidence: rows of evidence of about these steps.
        at_step: cut the run here instead.
        restarts: steps after which a later segment started.

    Example:
        >>> flat = [Step(step=i, values={"reward_std": 0.3, "kl": 0.1}) for i in range(1, 61)]
        >>> [level.said for level in diagnose(flat).levels][1:]
        ['nothing found, but not all of it was checked', 'nothing found, but not all of it was checked', \
'nothing found, but not all of it was checked']
    """
    run = steps if isinstance(steps, Columns) else Columns.of(steps)
    alert = main_alert(alerts)
    onset, until, chosen = _moment(alert, at_step)
    window = _ASKED if at_step is not None else _AROUND
    compare = Comparison(run, onset=onset, until=until, baseline=baseline, window=window)
    case = Case(
        compare=compare,
        alerts=alerts,
        drifts=snapshot,
        why_no_drifts=why_no_snapshot,
        evidence=evidence,
        restarts=restarts,
    )
    return Diagnosis(
        onset=onset,
        chosen=chosen,
        before=compare.before,
        after=compare.after,
        levels=(environment(case), data(case), rewards(case), algorithm(case)),
        moved=compare.moved(),
    )


def main_alert(alerts: Sequence[Alert]) -> Alert | None:
    """The first critical alert, without one the first."""
    ordered = sorted(alerts, key=lambda alert: (alert.severity != "critical", alert.step))
    return ordered[0] if ordered else None


def _moment(alert: Alert | None, at_step: int | None) -> tuple[int | None, int | None, str]:
    if at_step is not None:
        return at_step, None, f"step {at_step}, as asked"
    if alert is None:
        return None, None, "no alert: the run's start against its end"
    return alert.onset_step, alert.step, f"where {alert.id} began"
