"""Reward functions: loading, running, built-in ones."""

from grpo_lightning.rewards.loading import BUILT_IN, RewardSpec, load_reward
from grpo_lightning.rewards.runner import RewardResult, RewardRunner

__all__ = ["BUILT_IN", "RewardResult", "RewardRunner", "RewardSpec", "load_reward"]
