"""Advantage shape: what the loss gets to see of the rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lightning.objective import LIVE, StepRecord
from grpo_lightning.signals.partials import Merged, Partials
from grpo_lightning.signals.view import StepView

__all__ = ["FLAT", "TAIL", "collect", "derive"]

TAIL, FLAT = 1.0, 0.02
_PAIR_TOLERANCE = 1e-5  # of a group's range: closer rewards may have equal float32 advantages


def collect(p: Partials, v: StepView, *, tail: float = TAIL) -> None:
    """Moments, quantiles, shares, energy and order of the advantages."""
    p.moments("advantage", v.advantages_PG)
    p.sketch("advantage", v.advantages_PG, signed=True)
    size_PG = v.advantages_PG.abs()
    finite_PG = v.finite_advantages_PG
    filled_PG = size_PG.masked_fill(~finite_PG, 0.0)
    p.ratio("advantage_tail_fraction", filled_PG > tail, finite_PG)
    p.ratio("advantage_flat_fraction", size_PG < FLAT, finite_PG)
    p.ratio("advantage_size", filled_PG, finite_PG)
    energy_P = filled_PG.square().sum(1)
    p.add("advantage_energy", energy_P)
    p.greatest("advantage_energy_max", energy_P.amax() if v.groups else -torch.inf)
    p.ratio("reward_rank_agreement", *_concordance(v))
    loss_tokens_PG = v.record.loss_mask_PGL.sum(-1)
    p.ratio("signal_token_fraction", loss_tokens_PG * (size_PG != 0), loss_tokens_PG)


def derive(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """The family's signals; None where not measured."""
    names = ("advantage_tail_fraction", "advantage_flat_fraction", "reward_rank_agreement", "signal_token_fraction")
    out = {name: m.ratio(name) for name in names}
    moments = m.moments["advantage"]
    if not moments.count:
        return out
    low, high = m.sketch("advantage").quantiles([0.01, 0.99])
    out |= {"advantage_mean": moments.mean, "advantage_std": moments.std, "advantage_skew": moments.skew}
    out["advantage_abs_max"] = max(moments.greatest, -moments.least)
    out |= {"advantage_p01": low, "advantage_p99": high}
    energy = m.sums["advantage_energy"]
    if energy > 0:
        out["advantage_top_group_share"] = m.maxima["advantage_energy_max"] / energy
    return out


def _concordance(v: StepView) -> tuple[Tensor, Tensor]:
    """Pairs of a live group that advantage orders as reward does, and all pairs of different rewards.

    A tie between the advantages of different rewards is disagreement. Each pair appears twice, in both counts.
    """
    rewards_PG = v.rewards_PG.masked_fill(~v.scored_PG, torch.nan)
    by_reward_PGG = rewards_PG.unsqueeze(2) - rewards_PG.unsqueeze(1)
    by_advantage_PGG = v.advantages_PG.unsqueeze(2) - v.advantages_PG.unsqueeze(1)
    least_P = (_PAIR_TOLERANCE * v.range_P).masked_fill(v.status_P != LIVE, torch.inf)
    least_P11 = least_P[:, None, None]
    pairs_PGG = by_reward_PGG.abs() > least_P11  # NaN compares as False
    agreed_PGG = pairs_PGG & (by_reward_PGG * by_advantage_PGG > 0)
    return agreed_PGG, pairs_PGG
