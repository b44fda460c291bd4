"""Optimizer: gradient norms, skipped updates, and values that are not finite, by source."""

from __future__ import annotations

import math

import torch

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals.partials import Merged, Partials, finite
from grpo_lightning.signals.view import StepView

__all__ = ["collect", "derive"]

_PREFIX = "nonfinite_count_"


def collect(p: Partials, v: StepView) -> None:
    """Infinite rewards and advantages that are not finite; the policy's values are counted where they are read."""
    rewards = v.record.rewards_PGK
    p.ratio(f"{_PREFIX}rewards", torch.isinf(rewards).sum(), rewards.numel())
    p.ratio(f"{_PREFIX}advantages", (~finite(v.advantages_PG)).sum(), v.rollouts)


def derive(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """The family's signals; None where not measured."""
    out: dict[str, float | None] = {
        "grad_norm": record.grad_norm,
        "grad_norm_clipped": record.grad_norm_clipped,
        "updates_skipped": float(record.update_skipped),
        f"{_PREFIX}loss": float(not math.isfinite(record.loss)),
        f"{_PREFIX}grad_norm": float(not math.isfinite(record.grad_norm)),
    }
    sources = [n.removesuffix("/total") for n in m.sums if n.startswith(_PREFIX) and n.endswith("/total")]
    out |= {n: m.sums[f"{n}/total"] for n in sources if m.sums[f"{n}/count"]}
    out["nonfinite_count"] = sum(v for n, v in out.items() if n.startswith(_PREFIX) and v is not None)
    return out
