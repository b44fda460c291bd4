"""What would have fired: rules held against recorded steps, in order, knowing only what came before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lightning.health.feeds import Band
from grpo_lightning.health.judge import Judge, Verdict
from grpo_lightning.health.records import Alert, Rule, Step

__all__ = ["Replay", "replay"]

_SHOWN = ("rule", "step", "onset_step", "severity", "action", "cause", "value", "bound", "summary", "first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The judgement on a recorded run."""

    verdict: Verdict
    steps: int  # rows that were judged
    alerts: list[Alert]
    not_judged: list[tuple[str, str]]  # (rule, the signal that it lacks)

    def to_dict(self) -> dict[str, Any]:
        """What `check --json` and `rules replay --json` print."""
        return {
            "verdict": self.verdict,
            "steps": self.steps,
            "alerts": [{name: getattr(alert, name) for name in _SHOWN} for alert in self.alerts],
            "not_judged": [{"rule": rule, "missing": missing} for rule, missing in self.not_judged],
        }


def replay(steps: Iterable[Step], rules: Sequence[Rule], *, baseline: Band | None = None) -> Replay:
    """Hold `rules` against `steps`.

    Example:
        >>> from grpo_lightning.health import Step, parse_rules, replay
        >>> rules = parse_rules("[{name: low, signal: reward_mean, below: 0.1, summary: 'fell to {value}'}]")
        >>> replay([Step(step=i, values={"reward_mean": 1.0 / i}) for i in range(1, 12)], rules).alerts[0].step
        11
    """
    judge = Judge(rules, baseline=baseline)
    count = 0
    for step in steps:
        judge.observe(step)
        count += 1
    return Replay(verdict=judge.verdict(), steps=count, alerts=judge.alerts, not_judged=judge.not_judged())
