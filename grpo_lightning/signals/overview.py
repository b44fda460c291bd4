"""Overview: loss, learning rate, rewards over all rollouts, seconds and throughput."""

from __future__ import annotations

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals.partials import Merged, Partials
from grpo_lightning.signals.view import StepView

__all__ = ["PARTS", "collect", "derive"]

PARTS = ("step", "rollout", "reward", "score", "update")  # what `StepRecord.seconds` is split into


def collect(p: Partials, v: StepView) -> None:
    """Rewards over all rollouts, tokens and the slowest rank's seconds."""
    p.moments("reward", v.rewards_PG)
    p.sketch("reward", v.rewards_PG, signed=True)
    p.add("tokens", v.lengths_PG)
    for part in PARTS:
        p.greatest(f"{part}_seconds", v.record.seconds.get(part, -float("inf")))


def derive(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """The family's signals; None where not measured."""
    out: dict[str, float | None] = {
        "loss": record.loss,
        "policy_loss": record.policy_loss,
        "kl_loss": record.kl_loss,
        "lr": record.lr,
    }
    out |= m.moments["reward"].signals("reward")
    out |= {f"{part}_seconds": m.maxima.get(f"{part}_seconds") for part in PARTS}
    seconds = m.maxima.get("step_seconds", 0.0)
    if seconds > 0:
        out["tokens_per_second"] = m.sums["tokens"] / seconds
    return out
