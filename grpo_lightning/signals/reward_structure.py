"""Reward structure: what spread the groups have, which are dead and where, and each reward function by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lightning.objective import DEAD, StepRecord
from grpo_lightning.signals.partials import Merged, Partials
from grpo_lightning.signals.view import StepView

__all__ = ["END_SHARE", "FENCE", "collect", "derive", "group_spread", "reachable"]

END_SHARE = 0.1  # a dead group within this share of the rewards' span from an end counts as all low or all high
FENCE = 3.0  # interquartile ranges beyond the quartiles (Tukey's far-out fence)
_STD_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def collect(p: Partials, v: StepView) -> None:
    """The groups' spread, which are dead and where, and what each function did."""
    record = v.record
    std_P, range_P, dead_level_P = group_spread(v)
    p.moments("group_reward_std", std_P)
    p.moments("group_reward_range", range_P)
    p.sketch("group_reward_std", std_P)
    p.sketch("dead_level", dead_level_P, signed=True)
    p.ratio("dead_group_fraction", v.status_P == DEAD, v.groups)
    p.ratio("dead_group_fraction_unscorable", ~v.scorable_P, v.groups)
    p.add("rollouts", v.rollouts)
    for name, rewards_PG in zip(record.reward_names, record.rewards_PGK.unbind(-1), strict=True):
        p.moments(f"reward/{name}", rewards_PG)
        errors = record.reward_errors.get(name)
        p.ratio(f"reward/{name}_errors", float(errors or 0), 0.0 if errors is None else 1.0)
        p.greatest(f"reward/{name}_seconds", record.reward_seconds.get(name, -float("inf")))


def derive(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """The family's signals; None where not measured."""
    out = {name: m.ratio(name) for name in ("dead_group_fraction", "dead_group_fraction_unscorable")}
    spread, width = m.moments["group_reward_std"], m.moments["group_reward_range"]
    if spread.count:
        out |= {"group_reward_std": spread.mean, "group_reward_std_max": spread.greatest}
        out["group_reward_range"] = width.mean
    quantiles = m.sketch("group_reward_std").quantiles(list(_STD_QUANTILES.values()))
    out |= {f"group_reward_std_{q}": value for q, value in zip(_STD_QUANTILES, quantiles, strict=False)}
    out["reward_outlier_fraction"] = _outliers(m, record)
    out |= _dead_split(m, record)
    for name in record.reward_names:
        out |= _of_function(m, name)
    return out


def reachable(record: StepRecord) -> tuple[float, float]:
    """The weighted totals that functions between 0 and 1 can give."""
    low = sum(min(w, 0.0) for w in record.reward_weights)
    return low, sum(max(w, 0.0) for w in record.reward_weights)


def group_spread(v: StepView) -> tuple[Tensor, Tensor, Tensor]:
    """Sample std and range of each scorable group, exactly 0 in dead ones, and the level of dead ones; else NaN; [P]."""
    count_P, lost_PG = v.scored_PG.sum(1), ~v.scored_PG
    mean_P = v.rewards_PG.masked_fill(lost_PG, 0.0).sum(1) / count_P.clamp(min=1)
    squares_P = (v.rewards_PG - mean_P.unsqueeze(1)).masked_fill_(lost_PG, 0.0).square_().sum(1)
    std_P = (squares_P / (count_P - 1).clamp(min=1)).sqrt()
    dead_P = v.status_P == DEAD
    spreads_2P = torch.stack([std_P, v.range_P])
    spreads_2P = spreads_2P.masked_fill(dead_P, 0.0).masked_fill(~v.scorable_P, torch.nan)
    return spreads_2P[0], spreads_2P[1], mean_P.masked_fill(~dead_P, torch.nan)


def _dead_split(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """Dead groups by their level within the span of rewards: reachable or seen in this step, whichever is wider."""
    whole = m.sums["dead_group_fraction/count"]
    if not whole:
        return {}
    low, high = reachable(record)
    low, high = min(low, m.moments["reward"].least), max(high, m.moments["reward"].greatest)
    margin = END_SHARE * (high - low)
    level = m.sketch("dead_level")
    dead = level.count / whole
    all_low = (level.share(-float("inf"), low + margin) or 0.0) * dead
    all_high = (level.share(high - margin, float("inf")) or 0.0) * dead
    return {
        "dead_group_fraction_all_low": all_low,
        "dead_group_fraction_all_high": all_high,
        "dead_group_fraction_mid": max(dead - all_low - all_high, 0.0),
    }


def _outliers(m: Merged, record: StepRecord) -> float | None:
    """Rewards far outside of the quartiles; ranges below what the functions can reach anyway don't count as narrow.

    A rare success among failures (both quartiles 0) is none: the fence is at least `FENCE` reachable spans away.
    """
    rewards = m.sketch("reward")
    if not len(rewards.counts):
        return None
    low, high = rewards.quantiles([0.25, 0.75])
    floor, top = reachable(record)
    margin = FENCE * max(high - low, top - floor)
    inside = rewards.share(low - margin, high + margin)
    return None if inside is None else 1.0 - inside


def _of_function(m: Merged, name: str) -> dict[str, float | None]:
    moments, rollouts = m.moments[f"reward/{name}"], m.sums["rollouts"]
    called = m.sums[f"reward/{name}_errors/count"]
    return {
        f"reward/{name}_mean": moments.mean if moments.count else None,
        f"reward/{name}_std": moments.std,
        f"reward/{name}_missing": rollouts - moments.count if rollouts else None,
        f"reward/{name}_errors": m.sums[f"reward/{name}_errors/total"] if called else None,
        f"reward/{name}_seconds": m.maxima.get(f"reward/{name}_seconds"),
    }
