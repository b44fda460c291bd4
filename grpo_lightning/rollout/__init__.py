"""Sampling completions and scoring them, each prompt read once for its group."""

from grpo_lightning.rollout.causal_lm import check_context, check_vocabulary
from grpo_lightning.rollout.engine import RolloutEngine, SamplingConfig, make_engine
from grpo_lightning.rollout.sampling import rollout_seeds
from grpo_lightning.rollout.scoring import score_completions

__all__ = [
    "RolloutEngine",
    "SamplingConfig",
    "check_context",
    "check_vocabulary",
    "make_engine",
    "rollout_seeds",
    "score_completions",
]
