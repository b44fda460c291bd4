"""Optimizer: gradient norms, skipped updates, and values that are not finite, by source."""

from __future__ import annotations

import math

import torch

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals.partials import Merged, Partials
from grpo_lightning.signals.update_norm import UpdateSize
from grpo_lightning.signals.view import StepView

__all__ = ["collect", "collect_update", "derive"]

_PREFIX = "nonfinite_count_"


def collect(p: Partials, v: StepView) -> None:
    """Infinite rewards and advantages that are not finite; the policy's values are counted where they are read."""
    rewards = v.record.rewards_PGK
    p.ratio(f"{_PREFIX}rewards", torch.isinf(rewards), rewards.numel())
    p.ratio(f"{_PREFIX}advantages", ~v.finite_advantages_PG, v.rollouts)
    groups = len(v.record.row_ids_P)
    p.ratio("rollouts_resampled", v.record.resampled_groups, groups)
    p.ratio("rollouts_unrepaired", v.record.unrepaired_groups, groups)


def collect_update(p: Partials, update: UpdateSize | None) -> None:
    """Squared norms of the update and the weights; ranks that hold parts of the weights add up, copies are averaged."""
    size = update or UpdateSize(update_squares=0.0, weight_squares=0.0, share=0.0)
    p.ratio("update_squares", size.update_squares, size.share)
    p.ratio("weight_squares", size.weight_squares, size.share)


def derive(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """The family's signals; None where not measured."""
    out: dict[str, float | None] = {
        "grad_norm": record.grad_norm,
        "grad_norm_clipped": record.grad_norm_clipped,
        "updates_skipped": float(record.update_skipped),
        f"{_PREFIX}loss": float(not math.isfinite(record.loss)),
        f"{_PREFIX}grad_norm": float(not math.isfinite(record.grad_norm)),
    }
    out |= {name: m.sums[f"{name}/total"] for name in ("rollouts_resampled", "rollouts_unrepaired")}
    out |= _update_size(m)
    sources = [n.removesuffix("/total") for n in m.sums if n.startswith(_PREFIX) and n.endswith("/total")]
    out |= {n: m.sums[f"{n}/total"] for n in sources if m.sums[f"{n}/count"]}
    out["nonfinite_count"] = sum(v for n, v in out.items() if n.startswith(_PREFIX) and v is not None)
    return out


def _update_size(m: Merged) -> dict[str, float | None]:
    update, weight = m.ratio("update_squares"), m.ratio("weight_squares")
    if update is None or weight is None:
        return {}
    size = UpdateSize(update_squares=update, weight_squares=weight)
    return {"update_norm": size.update_norm, "update_to_weight": size.update_to_weight}
