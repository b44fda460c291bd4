"""Group-relative advantages (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

Deviations from the paper and from other trainers:

1. A *dead* group (all rewards equal) is decided by max - min against a tolerance relative to the rewards' scale, in
   float64, never by ``std == 0``: eight rewards of 0.3 have a float32 std of 3e-8. Its advantages are exactly 0. The
   tolerance is wider than float32's rounding, so that 0.1 + 0.2 and 0.3 from a float32 reward are equal too.
2. A missing reward is neither 0 nor part of the group's mean and std; its rollout's advantage is 0. A group with fewer
   than two rewards is *unscorable*.
3. An infinite reward counts as missing: it must not silently zero or blow up its group.
4. A reward function of weight 0 is only watched: where it is missing, nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo_lightning.errors import ConfigError

__all__ = [
    "DEAD",
    "LIVE",
    "UNSCORABLE",
    "Advantages",
    "combine_rewards",
    "group_advantages",
    "group_status",
    "merge_moments",
    "reward_moments",
]

LIVE, DEAD, UNSCORABLE = 0, 1, 2
DEAD_TOLERANCE = 1e-6  # relative to the largest absolute reward of the group, or to 1 if that is smaller

Scale = Literal["group", "batch", "none"]
Baseline = Literal["group_mean", "leave_one_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """What a group's rewards became."""

    advantages_PG: Tensor  # float32; 0 in dead and unscorable groups and for missing rewards
    group_std_P: Tensor  # float64, sample std over the rewards present; NaN in unscorable groups
    status_P: Tensor  # int64: LIVE, DEAD or UNSCORABLE


def combine_rewards(rewards_PGK: Tensor, weights_K: Tensor) -> Tensor:
    """The weighted sum over K reward functions, float64 [P, G]; NaN where a rollout can't be scored.

    A function that is missing for a whole group does not apply to it and is left out. One that is missing for some
    rollouts of a group makes their totals missing: counted as 0, it would shift them against their siblings.
    Infinite rewards count as missing; functions of weight 0 don't take part.
    """
    takes_part_K = weights_K != 0
    rewards_PGK, weights_K = rewards_PGK.double()[..., takes_part_K], weights_K[takes_part_K]
    present_PGK = torch.isfinite(rewards_PGK)
    applies_P1K = present_PGK.any(dim=1, keepdim=True)
    weighted_PGK = torch.where(present_PGK, rewards_PGK, 0.0) * weights_K.to(rewards_PGK)
    whole_PG = (present_PGK | ~applies_P1K).all(-1) & applies_P1K.any(-1)
    return torch.where(whole_PG, weighted_PGK.sum(-1), torch.nan)


def group_status(rewards_PG: Tensor, *, tolerance: float = DEAD_TOLERANCE) -> Tensor:
    """LIVE, DEAD or UNSCORABLE for each group, int64 [P]."""
    rewards_PG = rewards_PG.double()
    present_PG = torch.isfinite(rewards_PG)
    highest_P = torch.where(present_PG, rewards_PG, -torch.inf).amax(1)
    lowest_P = torch.where(present_PG, rewards_PG, torch.inf).amin(1)
    size_P = torch.maximum(highest_P.abs(), lowest_P.abs()).clamp(min=1.0)
    dead_P = (highest_P - lowest_P) <= tolerance * size_P
    status_P = torch.where(dead_P, DEAD, LIVE)
    return torch.where(present_PG.sum(1) < 2, UNSCORABLE, status_P)


def reward_moments(rewards_PG: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of the rewards present: mergeable over ranks, float64 [3]."""
    present = rewards_PG.double()[torch.isfinite(rewards_PG)]
    count = present.new_tensor(float(present.numel()))
    if not present.numel():
        return present.new_zeros(3)
    mean = present.mean()
    return torch.stack([count, mean, (present - mean).square().sum()])


def merge_moments(parts: Sequence[Tensor]) -> Tensor:
    """Moments of the joined data (Chan et al. 1979)."""
    total = parts[0]
    for part in parts[1:]:
        count = total[0] + part[0]
        delta = part[1] - total[1]
        safe = count.clamp(min=1.0)
        mean = total[1] + delta * part[0] / safe
        total = torch.stack([count, mean, total[2] + part[2] + delta.square() * total[0] * part[0] / safe])
    return total


def group_advantages(
    rewards_PG: Tensor,
    *,
    scale: Scale = "group",
    baseline: Baseline = "group_mean",
    eps: float = 1e-4,
    dead_tolerance: float = DEAD_TOLERANCE,
    moments: Sequence[Tensor] | None = None,
) -> Advantages:
    """Rewards less their group's baseline, over a spread.

    Args:
        rewards_PG: float [P, G], NaN where missing; G at least 2.
        scale: divide by the group's sample std, by the batch's, or by nothing (Dr. GRPO, arXiv 2503.20783).
        baseline: the group's mean, or the mean of the rollout's siblings (RLOO, arXiv 2402.14740).
        eps: added to the spread.
        dead_tolerance: largest max - min of a dead group, relative to its largest absolute reward (or to 1 if smaller).
        moments: `reward_moments` of every rank, for `scale="batch"`; this batch's own when not given.

    With `scale="group"`, abs(A) <= (G - 1) / sqrt(G) always; <= sqrt(G) with siblings as baseline.

    Example:
        >>> group_advantages(torch.tensor([[1.0, 0.0]])).advantages_PG
        tensor([[ 0.7070, -0.7070]])
    """
    group_size = rewards_PG.shape[1]
    if group_size < 2:
        raise ConfigError(
            f"The group size is {group_size}: an advantage compares completions of one prompt, so sample at least 2."
        )
    if baseline not in get_args(Baseline):
        raise ConfigError(f"advantages.baseline is {baseline!r}: use 'group_mean' or 'leave_one_out'.")
    rewards_PG = rewards_PG.double()
    present_PG = torch.isfinite(rewards_PG)
    status_P = group_status(rewards_PG, tolerance=dead_tolerance)
    filled_PG = torch.where(present_PG, rewards_PG, 0.0)
    count_P1 = present_PG.sum(1, keepdim=True).double()
    mean_P1 = filled_PG.sum(1, keepdim=True) / count_P1.clamp(min=1.0)
    centred_PG = torch.where(present_PG, rewards_PG - mean_P1, 0.0)
    std_P1 = (centred_PG.square().sum(1, keepdim=True) / (count_P1 - 1).clamp(min=1.0)).sqrt()
    if baseline == "leave_one_out":
        centred_PG = centred_PG * count_P1 / (count_P1 - 1).clamp(min=1.0)
    spread = _spread(scale, std_P1, rewards_PG, moments)
    advantages_PG = centred_PG if spread is None else centred_PG / (spread + eps)
    live_P1 = (status_P == LIVE).unsqueeze(1)
    return Advantages(
        advantages_PG=torch.where(live_P1 & present_PG, advantages_PG, 0.0).float(),
        group_std_P=torch.where(status_P == UNSCORABLE, torch.nan, std_P1.squeeze(1)),
        status_P=status_P,
    )


def _spread(scale: Scale, std_P1: Tensor, rewards_PG: Tensor, moments: Sequence[Tensor] | None) -> Tensor | None:
    if scale == "group":
        return std_P1
    if scale == "none":
        return None
    if scale != "batch":
        raise ConfigError(f"advantages.scale is {scale!r}: use 'group', 'batch' or 'none'.")
    count, _, squares = merge_moments(moments or [reward_moments(rewards_PG)]).unbind()
    return torch.sqrt(squares / (count - 1).clamp(min=1.0))
