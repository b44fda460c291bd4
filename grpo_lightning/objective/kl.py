"""Estimators of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL divergence", 2020).

With x sampled from the policy and d = log ref(x) - log policy(x):

    k1 = -d               unbiased, may be negative
    k2 = d^2 / 2          biased, always positive
    k3 = e^d - 1 - d      unbiased, always positive

As a loss, with the sampled tokens as constants, their gradients are in expectation

    k1                    0: nothing but noise
    k2                    that of KL(policy || reference)
    k3                    that of KL(reference || policy), which is the same to first order while the two are close
    k1, k3 times ratio    that of KL(policy || reference), with the ratio policy / old policy differentiable

Deviation: d is clamped to 20 from above in k3 before the exponential, which overflows float32 at 88; `clamped` marks
where, so that it can be counted. There the gradient is 0. From below nothing overflows and nothing is clamped.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_lightning.errors import ConfigError

__all__ = [
    "AdaptiveKLController",
    "KLEstimator",
    "clamped",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "penalised_rewards",
    "per_token_kl",
    "sequence_kl",
]

KLEstimator = Literal["k1", "k2", "k3"]
LOG_RATIO_LIMIT = 20.0


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log policy - log ref, per token."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, per token."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """e^d - 1 - d with d = log ref - log policy, clamped from above, per token."""
    d = (ref_logprobs - logprobs).clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(d) - d


def clamped(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """True where `kl_k3` clamps."""
    return (ref_logprobs - logprobs) > LOG_RATIO_LIMIT


def per_token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """The chosen estimator, per token."""
    if estimator == "k1":
        return kl_k1(logprobs, ref_logprobs)
    if estimator == "k2":
        return kl_k2(logprobs, ref_logprobs)
    if estimator == "k3":
        return kl_k3(logprobs, ref_logprobs)
    raise ConfigError(f"The KL estimator is {estimator!r}: use 'k1', 'k2' or 'k3'.")


def sequence_kl(logprobs_PGL: Tensor, ref_logprobs_PGL: Tensor, mask_PGL: Tensor) -> Tensor:
    """k1 summed over each completion, [P, G]: what KL in the reward subtracts (Stiennon et al. 2020, eq. 2)."""
    return torch.where(mask_PGL, kl_k1(logprobs_PGL, ref_logprobs_PGL), 0.0).sum(-1)


def penalised_rewards(
    rewards_PG: Tensor,
    logprobs_PGL: Tensor,
    ref_logprobs_PGL: Tensor,
    mask_PGL: Tensor,
    *,
    coef: float,
    reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Rewards less coef times each completion's KL, summed over its tokens or their mean; float64 [P, G].

    A run that charges the KL here gives `policy_loss` no reference: it is charged once. A missing reward stays missing.
    """
    if reduction not in ("sum", "mean"):
        raise ConfigError(f"The KL reduction is {reduction!r}: use 'sum' or 'mean'.")
    kl_PG = sequence_kl(logprobs_PGL, ref_logprobs_PGL, mask_PGL).detach().double()
    if reduction == "mean":
        kl_PG = kl_PG / mask_PGL.sum(-1).clamp(min=1)
    return rewards_PG.double() - coef * kl_PG


class AdaptiveKLController:
    """A KL coefficient that grows while the measured KL is above a bound and falls back below it.

    Each update multiplies the coefficient by 1 + rate * clip(kl / bound - 1, -0.2, 0.2) (Ziegler et al. 2019, arXiv
    1909.08593, section 2.2), never below its initial value. Without a bound it stays as it is.
    """

    def __init__(self, coef: float, *, bound: float | None = None, rate: float = 0.5, maximum: float = 10.0) -> None:
        if not (math.isfinite(coef) and coef >= 0):
            raise ConfigError(f"kl.coef is {coef}: it must be 0 or more.")
        if bound is not None and not (math.isfinite(bound) and bound > 0):
            raise ConfigError(f"kl.adaptive_bound is {bound}: give a KL above 0 nats.")
        if bound is not None and not 0 < coef <= maximum:
            raise ConfigError(
                f"kl.coef is {coef}: kl.adaptive_bound multiplies it, so give a number above 0 and up to {maximum}."
            )
        self.initial, self.coef = coef, coef
        self.bound, self.rate, self.maximum = bound, rate, maximum
        self.refused = 0  # non-finite inputs

    def update(self, kl: float) -> float:
        """Take one measurement; the new coefficient. A non-finite one changes nothing and is counted."""
        if self.bound is None:
            return self.coef
        if not math.isfinite(kl):
            self.refused += 1
            return self.coef
        error = min(max(kl / self.bound - 1.0, -0.2), 0.2)
        self.coef = min(max(self.coef * (1.0 + self.rate * error), self.initial), self.maximum)
        return self.coef

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"coef": float(self.coef), "refused": int(self.refused)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        coef = float(state["coef"])
        if not math.isfinite(coef):
            raise ConfigError(f"The saved KL coefficient is {coef}: resume from a checkpoint where it is finite.")
        self.coef, self.refused = coef, int(state["refused"])
