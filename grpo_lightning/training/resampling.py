"""Broken rollouts: which groups can't be learned from, and putting others in their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.objective.batch import PromptBatch, Rollouts
from grpo_lightning.rewards import RewardResult

__all__ = ["CutMemory", "DroppedGroup", "broken_groups", "replace_groups", "replace_rewards", "select_prompts"]

_USUAL = 20  # batches that the usual share of cut completions is taken from
_LEAST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedGroup:
    """A group that was dropped, kept as evidence."""

    why: str  # empty, padding, non-finite reward, all cut at once
    row_id: int
    attempt: int  # 0: the first sampling
    completion_ids: list[list[int]]  # G token lists
    rewards_GK: list[list[float]]


class CutMemory:
    """Remembers how many completions are usually cut at the length limit."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=_USUAL)

    def unusual(self, share: float) -> bool:
        """True where all completions of a step are cut although fewer than half usually are."""
        return share >= 1.0 and len(self._shares) >= _LEAST and fmean(self._shares) < 0.5

    def push(self, share: float) -> None:
        """Remember a batch."""
        self._shares.append(share)

    def state_dict(self) -> list[float]:
        """Plain types."""
        return list(self._shares)

    def load_state_dict(self, state: list[float]) -> None:
        """The inverse of `state_dict`."""
        self._shares = deque(state, maxlen=_USUAL)


def broken_groups(rollouts: Rollouts, rewards_NK: Tensor, *, all_cut: bool) -> dict[int, str]:
    """Groups by index along P that can't be learned from, each with why.

    A group is broken when all its completions are EOS alone, when one has no token at all, when a reward in it is
    infinite, or when the whole step is cut at the length limit at once (`all_cut`).
    """
    P, G, _ = rollouts.completion_ids_PGL.shape
    lengths_PG = rollouts.lengths_PG
    tests = {
        "padding": (lengths_PG == 0).any(-1),
        "empty": ((lengths_PG == 1) & rollouts.terminated_PG).all(-1),
        "non-finite reward": torch.isinf(rewards_NK.view(P, G, -1)).flatten(1).any(-1),
        "all cut at once": torch.full((P,), all_cut),
    }
    broken: dict[int, str] = {}
    for why, found_P in tests.items():
        for p in found_P.nonzero().flatten().tolist():
            broken.setdefault(p, why)
    return broken


def select_prompts(batch: PromptBatch, groups: Sequence[int]) -> PromptBatch:
    """Some prompts of a batch."""
    index = torch.tensor(list(groups), device=batch.ids_PS.device)
    return replace(
        batch,
        ids_PS=batch.ids_PS[index],
        mask_PS=batch.mask_PS[index],
        row_ids_P=batch.row_ids_P[index],
        prompts=[batch.prompts[p] for p in groups],
        columns={name: [values[p] for p in groups] for name, values in batch.columns.items()},
        sources=[batch.sources[p] for p in groups],
    )


def replace_groups(rollouts: Rollouts, groups: Sequence[int], others: Rollouts, *, pad_id: int) -> Rollouts:
    """`rollouts` with some groups replaced, padded to the longer of the two."""
    length = max(rollouts.completion_ids_PGL.shape[-1], others.completion_ids_PGL.shape[-1])
    own, new = _padded(rollouts, length, pad_id), _padded(others, length, pad_id)
    index = torch.tensor(list(groups), device=rollouts.completion_ids_PGL.device)
    names = ("completion_ids_PGL", "completion_mask_PGL", "terminated_PG", "sampler_logprobs_PGL")
    return replace(own, **{name: getattr(own, name).index_copy(0, index, getattr(new, name)) for name in names})


def _padded(rollouts: Rollouts, length: int, pad_id: int) -> Rollouts:
    more = length - rollouts.completion_ids_PGL.shape[-1]
    if not more:
        return rollouts

    def pad(values: Tensor, fill: Any) -> Tensor:
        return torch.nn.functional.pad(values, (0, more), value=fill)

    return replace(
        rollouts,
        completion_ids_PGL=pad(rollouts.completion_ids_PGL, pad_id),
        completion_mask_PGL=pad(rollouts.completion_mask_PGL, False),
        sampler_logprobs_PGL=pad(rollouts.sampler_logprobs_PGL, 0.0),
    )


def replace_rewards(
    result: RewardResult, groups: Sequence[int], others: RewardResult, *, group_size: int
) -> RewardResult:
    """`result` with the rewards of some groups replaced; calls, errors and seconds add up."""
    rows = [p * group_size + g for p in groups for g in range(group_size)]
    rewards_NK = result.rewards_NK.clone()
    rewards_NK[rows] = others.rewards_NK
    extras = dict(result.extras)
    for name, values in others.extras.items():
        if len(extras.get(name, ())) == len(rewards_NK) and len(values) == len(rows):
            extras[name] = list(extras[name])
            for row, value in zip(rows, values, strict=True):
                extras[name][row] = value
    return replace(
        result,
        rewards_NK=rewards_NK,
        errors={name: count + others.errors.get(name, 0) for name, count in result.errors.items()},
        seconds={name: took + others.seconds.get(name, 0.0) for name, took in result.seconds.items()},
        extras=extras,
    )
