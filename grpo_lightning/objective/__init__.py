"""The maths of GRPO: advantages, losses, KL, log-probs, entropy. Torch only."""

from grpo_lightning.objective.advantages import (
    DEAD,
    LIVE,
    UNSCORABLE,
    Advantages,
    combine_rewards,
    group_advantages,
    group_status,
    merge_moments,
    reward_moments,
)
from grpo_lightning.objective.batch import PromptBatch, Rollouts, StepRecord
from grpo_lightning.objective.kl import (
    AdaptiveKLController,
    clamped,
    kl_k1,
    kl_k2,
    kl_k3,
    penalised_rewards,
    per_token_kl,
    sequence_kl,
)
from grpo_lightning.objective.logprobs import TokenScores, score_tokens, selected_logprobs, token_entropy
from grpo_lightning.objective.losses import (
    LossConfig,
    LossParts,
    LossTotals,
    importance_ratio,
    loss_mask,
    policy_loss,
)
from grpo_lightning.objective.shaping import check_overlong_cache, clip_binds, soft_overlong_penalty

__all__ = [
    "DEAD",
    "LIVE",
    "UNSCORABLE",
    "AdaptiveKLController",
    "Advantages",
    "LossConfig",
    "LossParts",
    "LossTotals",
    "PromptBatch",
    "Rollouts",
    "StepRecord",
    "TokenScores",
    "check_overlong_cache",
    "clamped",
    "clip_binds",
    "combine_rewards",
    "group_advantages",
    "group_status",
    "importance_ratio",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "loss_mask",
    "merge_moments",
    "penalised_rewards",
    "per_token_kl",
    "policy_loss",
    "reward_moments",
    "score_tokens",
    "selected_logprobs",
    "sequence_kl",
    "soft_overlong_penalty",
    "token_entropy",
]
