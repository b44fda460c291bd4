"""The records that carry a step's tensors through the package.

Tensor letters: ``P`` prompts, ``G`` completions per prompt, ``L`` completion tokens, ``S`` prompt tokens,
``K`` reward functions. A name carries its shape: ``rewards_PG``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["PromptBatch", "Rollouts", "StepRecord"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """P prompts, tokenized and left-padded, with what the reward functions need to know of their rows."""

    ids_PS: Tensor  # int64, left-padded
    mask_PS: Tensor  # bool, True on prompt tokens
    row_ids_P: Tensor  # int64, the dataset row behind each prompt: grouping goes by it, never by text
    prompts: list[Any]  # P plain strings or P chat message lists, as in the dataset
    columns: dict[str, list[Any]]  # the other dataset columns, P values each
    sources: list[str]  # P names of where the prompt came from; "" when there is no source column
    epoch: int = 0
    index: int = 0  # which batch of the epoch this is
    final: bool = True  # False while further updates on the same rollouts follow

    def __len__(self) -> int:
        return int(self.ids_PS.shape[0])

    def to(self, device: torch.device | str) -> PromptBatch:
        """The same batch with its tensors on `device`."""
        from dataclasses import replace

        return replace(
            self,
            ids_PS=self.ids_PS.to(device),
            mask_PS=self.mask_PS.to(device),
            row_ids_P=self.row_ids_P.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """G completions for each of P prompts, right-padded, as the sampler made them."""

    prompt_ids_PS: Tensor  # int64, left-padded
    prompt_mask_PS: Tensor  # bool
    completion_ids_PGL: Tensor  # int64, pad id after the end
    completion_mask_PGL: Tensor  # bool, True up to and including the EOS; never after it
    terminated_PG: Tensor  # bool, an EOS was sampled; False means cut at the generation limit
    sampler_logprobs_PGL: Tensor  # float32, log-prob of each token under the distribution before top-p/top-k/min-p
    # (temperature applied); 0 where the mask is False

    @property
    def lengths_PG(self) -> Tensor:  # noqa: N802 - the suffix is its shape
        """Completion lengths in tokens, EOS included, int64 [P, G]."""
        return self.completion_mask_PGL.sum(-1)

    def select(self, groups: Tensor | slice) -> Rollouts:
        """The rollouts of some groups, by index along P."""
        return Rollouts(**{name: getattr(self, name)[groups] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The raw tensors of one optimizer step on one rank, detached, for callbacks and signals. No statistics."""

    step: int  # optimizer step, counted from 1
    rollouts: Rollouts
    row_ids_P: Tensor
    sources: list[str]
    reward_names: list[str]  # K
    reward_weights: list[float]  # K
    rewards_PGK: Tensor  # float64, unweighted, NaN where missing
    rewards_PG: Tensor  # float64, weighted total, NaN where it could not be scored
    advantages_PG: Tensor  # float32, 0 in dead and unscorable groups
    loss_mask_PGL: Tensor  # bool, the tokens that the loss counts (completion mask less masked-out truncated rollouts)
    logprobs_PGL: Tensor  # trainer's log-probs at this step, before the update
    old_logprobs_PGL: Tensor  # trainer's log-probs when the rollouts were made
    ref_logprobs_PGL: Tensor | None  # None when no reference is measured
    entropies_PGL: Tensor | None  # exact, after temperature
    loss: float
    policy_loss: float
    kl_loss: float | None
    kl_coef: float | None
    clip_low: float
    clip_high: float
    importance_level: str  # token | sequence
    grad_norm: float  # before clipping
    grad_norm_clipped: float
    lr: float
    update_skipped: bool
    max_completion_tokens: int
    reward_errors: dict[str, int] = field(default_factory=dict)  # per reward function, this rollout batch
    reward_seconds: dict[str, float] = field(default_factory=dict)
    reward_metrics: dict[str, float] = field(default_factory=dict)  # what reward functions gave `log_metric`
    reward_extras: dict[str, list[Any]] = field(default_factory=dict)  # and `log_extra`: P·G plain values each
    seconds: dict[str, float] = field(default_factory=dict)  # rollout, reward, update, step
    resampled_groups: int = 0  # dropped as broken and sampled again for this batch of rollouts
    unrepaired_groups: int = 0  # still broken after all tries
    dropped: list[Any] = field(default_factory=list)  # what was dropped, kept as evidence
    new_rollouts: bool = True  # False on further updates over rollouts seen before
