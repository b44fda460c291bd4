"""What a policy makes of a batch, as a step's record without a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from grpo_lightning.objective.batch import PromptBatch, Rollouts, StepRecord
from grpo_lightning.rollout import score_completions

if TYPE_CHECKING:
    from grpo_lightning.training.module import GRPOModule

__all__ = ["observe"]


@torch.no_grad()
def observe(module: GRPOModule, batch: PromptBatch, *, seed: int) -> StepRecord:
    """Sample, reward and score `batch` as training would, with the seed's rollouts; weights and window stay as they are.

    The record's loss, gradient and clipping say nothing. A KL term in the reward is left out. Generators that reward
    functions draw from move on: put them back with `rng`.
    """
    collector = replace(module.collector, seed=seed)
    window = collector.collect(
        module.policy, module._reference, batch, kl_coef=0.0, keep_old=False, step=module.global_step
    )
    logprobs_PGL, entropies_PGL = _scores(module, window.rollouts)
    return StepRecord(
        step=module.global_step,
        rollouts=window.rollouts,
        row_ids_P=window.row_ids_P,
        sources=window.sources,
        reward_names=module.reward_runner.names,
        reward_weights=module.reward_runner.weights,
        rewards_PGK=window.rewards_PGK,
        rewards_PG=window.rewards_PG,
        advantages_PG=window.advantages_PG,
        loss_mask_PGL=window.loss_mask_PGL,
        logprobs_PGL=logprobs_PGL,
        old_logprobs_PGL=logprobs_PGL,
        ref_logprobs_PGL=window.ref_logprobs_PGL,
        entropies_PGL=entropies_PGL,
        loss=0.0,
        policy_loss=0.0,
        kl_loss=None,
        kl_coef=None,
        clip_low=0.0,
        clip_high=0.0,
        importance_level=module.loss_config.importance_level,
        grad_norm=0.0,
        grad_norm_clipped=0.0,
        lr=0.0,
        update_skipped=False,
        max_completion_tokens=collector.sampling.max_new_tokens,
        reward_errors=window.reward_errors,
    )


def _scores(module: GRPOModule, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, as many groups at once as training takes."""
    groups = torch.arange(len(rollouts.prompt_ids_PS), device=rollouts.prompt_ids_PS.device)
    temperature = module.collector.sampling.temperature
    scored = [
        score_completions(module.policy, rollouts.select(part), temperature=temperature, with_entropy=True)
        for part in groups.split(module.micro_batch_groups or len(groups))
    ]
    entropies = [s.entropies for s in scored if s.entropies is not None]
    return torch.cat([s.logprobs for s in scored]), torch.cat(entropies)
