"""What several families need of a step's record, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.objective import UNSCORABLE, StepRecord, group_status
from grpo_lightning.signals.partials import finite

__all__ = ["FULL_MARKS", "StepView", "view"]

FULL_MARKS = 1.0  # of the first reward function: what `eval_accuracy` counts too


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """A record with what is derived from it in several places."""

    record: StepRecord
    rewards_PG: Tensor  # float64 weighted total, not finite where a rollout could not be scored
    scored_PG: Tensor  # bool
    status_P: Tensor  # LIVE, DEAD or UNSCORABLE
    scorable_P: Tensor  # bool
    range_P: Tensor  # float64, highest less lowest; -inf where nothing is scored
    advantages_PG: Tensor  # float64
    finite_advantages_PG: Tensor  # bool
    lengths_PG: Tensor  # int64, EOS included
    prompt_lengths_P: Tensor  # int64
    correct_PG: Tensor  # bool, full marks from the first reward function
    wrong_PG: Tensor  # bool, less than full marks; neither where that reward is missing

    @property
    def groups(self) -> int:
        """P of this rank."""
        return int(self.rewards_PG.shape[0])

    @property
    def rollouts(self) -> int:
        """P·G of this rank."""
        return self.rewards_PG.numel()


def view(record: StepRecord) -> StepView:
    """The record with its shared derivations."""
    rewards_PG = record.rewards_PG.double()
    scored_PG = finite(rewards_PG)
    lost_PG = ~scored_PG
    highest_P = rewards_PG.masked_fill(lost_PG, -torch.inf).amax(1)
    lowest_P = rewards_PG.masked_fill(lost_PG, torch.inf).amin(1)
    status_P = group_status(rewards_PG)
    first_PG = record.rewards_PGK[..., 0]
    advantages_PG = record.advantages_PG.double()
    return StepView(
        record=record,
        rewards_PG=rewards_PG,
        scored_PG=scored_PG,
        status_P=status_P,
        scorable_P=status_P != UNSCORABLE,
        range_P=highest_P - lowest_P,
        advantages_PG=advantages_PG,
        finite_advantages_PG=finite(advantages_PG),
        lengths_PG=record.rollouts.lengths_PG,
        prompt_lengths_P=record.rollouts.prompt_mask_PS.sum(-1),
        correct_PG=(first_PG >= FULL_MARKS) & (first_PG < torch.inf),
        wrong_PG=(first_PG < FULL_MARKS) & (first_PG > -torch.inf),
    )
