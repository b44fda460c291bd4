"""The groups of settings that GRPOModule's constructor takes; they are the YAML schema of ``model:``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal

from grpo_lightning.errors import ConfigError
from grpo_lightning.rollout import SamplingConfig

__all__ = [
    "AdvantageSettings",
    "KLSettings",
    "LoraSettings",
    "OptimizerSettings",
    "RecoverySettings",
    "SamplingSettings",
    "check_counts",
    "check_seed",
]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How completions are sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    max_new_tokens: int = 64

    def for_tokenizer(self, tokenizer: Any) -> SamplingConfig:
        """What an engine takes, with the tokenizer's end and padding."""
        return SamplingConfig(
            **asdict(self), eos_ids=(int(tokenizer.eos_token_id),), pad_id=int(tokenizer.pad_token_id)
        )


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages."""

    scale: Literal["group", "batch", "none"] = "group"
    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    mask_truncated: bool = False  # leave completions that hit the length limit out of the loss
    overlong_cache_tokens: int = 0  # soft overlong punishment over the last tokens before the limit; 0: off


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """What the divergence from the reference model is used for. No reference is kept while `use` is `off`."""

    use: Literal["off", "measure", "loss", "reward"] = "off"
    coef: float = 0.04
    adaptive_bound: float | None = None  # let the coefficient grow while the measured KL is above this, in nats
    reference_sync_steps: int = 0  # copy the policy into the reference every N steps; 0: never
    reference_sync_mix: float = 1.0  # share of the policy in the new reference

    def __post_init__(self) -> None:
        _require(0 <= self.coef < inf, f"kl.coef is {self.coef}: it must be a finite number of 0 or more.")
        _require(
            self.reference_sync_steps >= 0,
            f"kl.reference_sync_steps is {self.reference_sync_steps}: give a number of steps, or 0 for never.",
        )
        _require(
            0 < self.reference_sync_mix <= 1,
            f"kl.reference_sync_mix is {self.reference_sync_mix}: it must be above 0 and at most 1.",
        )
        _require(
            self.adaptive_bound is None or self.use in ("loss", "reward"),
            f"kl.adaptive_bound is set but kl.use is {self.use!r}: an adaptive coefficient needs use: loss or reward.",
        )


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters through peft; the model with the adapter switched off is the reference."""

    r: int = 8
    alpha: int = 16
    target_modules: list[str] | str = "all-linear"

    def __post_init__(self) -> None:
        _require(self.r >= 1, f"lora.r is {self.r}: the rank must be 1 or more.")
        _require(self.alpha >= 1, f"lora.alpha is {self.alpha}: the adapter's scale must be 1 or more.")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule, counted in optimizer steps."""

    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0  # clip above this norm; null: never

    def __post_init__(self) -> None:
        _require(0 < self.lr < inf, f"optimizer.lr is {self.lr}: the learning rate must be a finite number above 0.")
        _require(0 < self.eps < inf, f"optimizer.eps is {self.eps}: give a small number above 0, such as 1e-8.")
        _require(
            0 <= self.weight_decay < inf, f"optimizer.weight_decay is {self.weight_decay}: give 0 or more; 0 is none."
        )
        _require(self.warmup_steps >= 0, f"optimizer.warmup_steps is {self.warmup_steps}: give 0 or more.")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas is {self.betas}: AdamW takes two values from 0 to below 1, such as [0.9, 0.999].",
        )
        _require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"optimizer.max_grad_norm is {self.max_grad_norm}: give a norm above 0, or null for no clipping.",
        )


@dataclass(frozen=True, kw_only=True)
class RecoverySettings:
    """The two faults that repair themselves, and how often they may before the run pauses.

    Args:
        skip_above_grad_norm: skip an update whose gradient norm is above this; null: no such limit.
        skip_above_ratio: skip one above this many times the median of the last 50 norms; null: none. One that is not
            finite is always skipped.
        skip_budget: updates that may be skipped within the window.
        resample_tries: how often broken groups of rollouts are dropped and sampled again within a step; 0: never.
        resample_budget: groups that may be sampled again within the window.
        window_steps: the window, in optimizer steps.
    """

    skip_above_grad_norm: float | None = None
    skip_above_ratio: float | None = 100.0
    skip_budget: int = 3
    resample_tries: int = 2
    resample_budget: int = 16
    window_steps: int = 100

    def __post_init__(self) -> None:
        for name in ("skip_above_grad_norm", "skip_above_ratio"):
            limit = getattr(self, name)
            _require(limit is None or limit > 0, f"recovery.{name} is {limit}: give a number above 0, or null.")
        for name in ("skip_budget", "resample_tries", "resample_budget"):
            _require(getattr(self, name) >= 0, f"recovery.{name} is {getattr(self, name)}: give 0 or more.")
        _require(self.window_steps >= 1, f"recovery.window_steps is {self.window_steps}: give 1 or more.")


def check_counts(
    group_size: int, num_iterations: int, num_minibatches: int, micro_batch_groups: int | None, rewards: list[Any]
) -> None:
    """Raise where GRPOModule's counts can't hold."""
    if group_size < 2:
        raise ConfigError(
            f"model.group_size is {group_size}: an advantage compares completions of one prompt, so give at least 2."
        )
    for name, value in (("num_iterations", num_iterations), ("num_minibatches", num_minibatches)):
        if value < 1:
            raise ConfigError(f"model.{name} is {value}: give at least 1.")
    if micro_batch_groups is not None and micro_batch_groups < 1:
        raise ConfigError(
            f"model.micro_batch_groups is {micro_batch_groups}: give at least 1, or null for no splitting."
        )
    if not rewards:
        raise ConfigError("model.rewards is empty: name at least one reward function.")


def check_seed(seed: int) -> None:
    """Raise where a seed is not a number that fits an int64."""
    _require(0 <= seed < 2**63, f"model.seed is {seed}: give a number from 0 to 2^63 - 1.")
