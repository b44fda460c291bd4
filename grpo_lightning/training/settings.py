"""The groups of settings that GRPOModule's constructor takes; they are the YAML schema of ``model:``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from grpo_lightning.errors import ConfigError

__all__ = ["AdvantageSettings", "KLSettings", "LoraSettings", "OptimizerSettings", "SamplingSettings"]


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
        _require(self.coef >= 0, f"kl.coef is {self.coef}: it must be 0 or more.")
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
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _require(self.r >= 1, f"lora.r is {self.r}: the rank must be 1 or more.")


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
        _require(self.lr > 0, f"optimizer.lr is {self.lr}: the learning rate must be above 0.")
        _require(
            len(self.betas) == 2, f"optimizer.betas is {self.betas}: AdamW takes two values, such as [0.9, 0.999]."
        )
        _require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"optimizer.max_grad_norm is {self.max_grad_norm}: give a norm above 0, or null for no clipping.",
        )
