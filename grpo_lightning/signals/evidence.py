"""Which groups and rollouts of a step tell most, and what is known of each rollout's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals.partials import finite
from grpo_lightning.signals.responses import ngram_repetition
from grpo_lightning.signals.reward_structure import group_spread
from grpo_lightning.signals.view import StepView, view

__all__ = ["Pick", "Why", "rollout_statistics", "select"]

Why = Literal["smallest spread", "largest spread", "reward outlier", "advantage outlier", "most repetitive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pick:
    """Rollouts of one group, and why they were picked."""

    why: Why
    value: float  # the group's reward std; the distance from the median reward; abs(advantage); n-gram repetition
    group: int
    rollouts: tuple[int, ...]  # places in the group


@torch.inference_mode()
def select(record: StepRecord, *, groups: int = 1, rollouts: int = 3) -> list[Pick]:
    """The most telling groups and rollouts of this rank.

    Args:
        record: the step.
        groups: how many of the smallest and of the largest spread, whole; those that can't be scored have none.
        rollouts: how many outliers of reward and advantage, and repetitive responses. A reward that is infinite comes first.
    """
    v = view(record)
    if not v.groups:
        return []
    return [
        *_by_spread(v, groups),
        *_rollouts("reward outlier", _distance_PG(v), rollouts),
        *_rollouts("advantage outlier", v.advantages_PG.abs().nan_to_num(torch.inf, torch.inf, torch.inf), rollouts),
        *_rollouts("most repetitive", rollout_statistics(record)["ngram_repetition"].nan_to_num(0.0), rollouts),
    ]


def rollout_statistics(record: StepRecord) -> dict[str, Tensor]:
    """Of each rollout, [P, G]: mean log-prob and entropy of its tokens (NaN without any), and 4-gram repetition."""
    mask_PGL = record.rollouts.completion_mask_PGL
    lengths_PG = mask_PGL.sum(-1)
    out = {"logprob_mean": _mean_PG(record.logprobs_PGL, mask_PGL, lengths_PG)}
    if record.entropies_PGL is not None:
        out["entropy_mean"] = _mean_PG(record.entropies_PGL, mask_PGL, lengths_PG)
    return out | {"ngram_repetition": ngram_repetition(record.rollouts.completion_ids_PGL, lengths_PG)}


def _mean_PG(values_PGL: Tensor, mask_PGL: Tensor, lengths_PG: Tensor) -> Tensor:  # noqa: N802 - the suffix is its shape
    return values_PGL.masked_fill(~mask_PGL, 0.0).sum(-1) / lengths_PG


def _by_spread(v: StepView, count: int) -> Iterator[Pick]:
    std_P = group_spread(v)[0]
    order = [p for p in std_P.argsort(stable=True).tolist() if bool(finite(std_P[p]))]
    small = order[:count]
    large = [p for p in reversed(order) if p not in small][:count]
    every = tuple(range(v.rewards_PG.shape[1]))
    named: tuple[tuple[Why, list[int]], ...] = (("smallest spread", small), ("largest spread", large))
    for why, found in named:
        for p in found:
            yield Pick(why=why, value=float(std_P[p]), group=p, rollouts=every)


def _distance_PG(v: StepView) -> Tensor:  # noqa: N802
    """From the median reward; infinite where a function gave an infinite one, 0 where there is none."""
    scored = v.rewards_PG[v.scored_PG]
    distance_PG = (v.rewards_PG - (scored.median() if scored.numel() else 0.0)).abs()
    distance_PG = distance_PG.masked_fill(~v.scored_PG, 0.0)
    return distance_PG.masked_fill(torch.isinf(v.record.rewards_PGK).any(-1), torch.inf)


def _rollouts(why: Why, values_PG: Tensor, count: int) -> Iterator[Pick]:
    """The greatest values above 0."""
    found, places = values_PG.flatten().topk(min(count, values_PG.numel()))
    for value, place in zip(found.tolist(), places.tolist(), strict=True):
        if value > 0:
            group, rollout = divmod(place, values_PG.shape[1])
            yield Pick(why=why, value=value, group=group, rollouts=(rollout,))
