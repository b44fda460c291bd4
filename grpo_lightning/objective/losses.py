"""The policy losses, by the names that the field uses.

``grpo``     mean over sequences of their token means (arXiv 2402.03300, eq. 3)
``bnpo``     token mean over the batch
``dr_grpo``  token sum over sequences times the generation limit (arXiv 2503.20783)
``dapo``     token mean over the whole accumulated batch (arXiv 2503.14476, eq. 8)
``cispo``    clipped importance weights, detached, times log-probs (arXiv 2506.13585, eq. 4), normalised as ``dapo``

Deviations from the papers and from TRL 1.16:

1. Token-normalised losses (``bnpo``, ``dapo``, ``cispo``) leave dead and unscorable groups out of the policy term's
   denominator, so that they do not dilute the others; DAPO removes such groups before the loss. ``dead_groups: keep``
   counts them, as TRL does. The KL term and the entropy bonus always count every loss token: dead groups still pull the
   policy towards the reference.
2. ``bnpo`` divides by the tokens of the whole batch and not of one micro-batch: every loss is the same however the
   batch is split into micro-batches or ranks. It then equals ``dapo``.
3. TRL multiplies the KL term by the importance ratio by default (``use_bias_correction_kl``). Here that is
   ``kl_importance: true`` and off by default: the logged KL then is the KL.
4. Importance ratios are computed from log-ratios clamped to +-20, so that one token can't overflow the batch. What
   stands outside the mask, NaN included, reaches neither the loss nor its gradient.
5. The entropy bonus is a mean over all loss tokens of the batch, whatever the split.
6. Sampler weights are per token and capped, at 2 by default: TRL's ``token_truncate``, whereas TRL's default drops
   whole sequences beyond 3.

On-policy GRPO's loss is about 0 at the first update on a batch: it is no health signal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective.advantages import LIVE
from grpo_lightning.objective.kl import LOG_RATIO_LIMIT, KLEstimator, per_token_kl

__all__ = ["LossConfig", "LossName", "LossParts", "LossTotals", "importance_ratio", "loss_mask", "policy_loss"]

LossName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss and its clipping.

    Args:
        loss: how tokens are aggregated.
        importance_level: ratios per token, or per sequence (GSPO, arXiv 2507.18071).
        clip_low: the ratio is clipped below 1 - clip_low.
        clip_high: the ratio is clipped above 1 + clip_high.
        delta: two-sided clip: an upper bound of the unclipped ratio (arXiv 2505.07291); must be above 1 + clip_high.
            `cispo` has no use for it.
        cispo_max: the largest importance weight of `cispo`, which has no use for clip_low and clip_high.
        sampler_is_cap: truncated importance sampling between sampler and trainer: weights are capped here; null: off.
        entropy_coef: weight of the entropy bonus.
        kl_estimator: of the KL term.
        kl_importance: multiply the KL term by the importance ratio, as TRL does by default.
        dead_groups: whether groups without signal count in the token denominator.
    """

    loss: LossName = "dapo"
    importance_level: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    delta: float | None = None
    cispo_max: float = 5.0
    sampler_is_cap: float | None = 2.0
    entropy_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_importance: bool = False
    dead_groups: Literal["exclude", "keep"] = "exclude"

    def __post_init__(self) -> None:
        _known("loss.loss", self.loss, get_args(LossName))
        _known("loss.importance_level", self.importance_level, ("token", "sequence"))
        _known("loss.kl_estimator", self.kl_estimator, get_args(KLEstimator))
        _known("loss.dead_groups", self.dead_groups, ("exclude", "keep"))
        for name, low, high in (("clip_low", 0.0, 1.0), ("clip_high", 0.0, float("inf"))):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"loss.{name} is {value}: give a number from {low} to {high}.")
        if self.delta is not None and not self.delta > 1 + self.clip_high:
            raise ConfigError(
                f"loss.delta is {self.delta}: a two-sided clip must be above 1 + clip_high = {1 + self.clip_high}."
            )
        if not self.cispo_max > 0:
            raise ConfigError(f"loss.cispo_max is {self.cispo_max}: give a weight above 0.")
        if self.sampler_is_cap is not None and not self.sampler_is_cap > 0:
            raise ConfigError(f"loss.sampler_is_cap is {self.sampler_is_cap}: give a weight above 0, or null for off.")
        if not math.isfinite(self.entropy_coef):
            raise ConfigError(f"loss.entropy_coef is {self.entropy_coef}: give a finite number, 0 for no bonus.")

    @property
    def clip_margins(self) -> tuple[float, float]:
        """How far below and above 1 this loss clips ratios, as `clip_binds` takes them; cispo never clips below."""
        return (1.0, self.cispo_max - 1.0) if self.loss == "cispo" else (self.clip_low, self.clip_high)


def _known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = get_close_matches(value, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{name} is {value!r}: {hint}Use one of {', '.join(known)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTotals:
    """The denominators of a whole minibatch, over its micro-batches and ranks. They add up."""

    sequences: Tensor  # float64 scalars
    tokens: Tensor
    live_tokens: Tensor
    max_completion_tokens: int

    @classmethod
    def of(cls, mask_PGL: Tensor, status_P: Tensor, *, max_completion_tokens: int) -> LossTotals:
        """Of these groups. A sequence counts with or without loss tokens, as in TRL."""
        per_group_P = mask_PGL.sum((1, 2)).double()
        sequences = per_group_P.new_tensor(float(mask_PGL.shape[0] * mask_PGL.shape[1]))
        return cls(
            sequences=sequences,
            tokens=per_group_P.sum(),
            live_tokens=per_group_P[status_P == LIVE].sum(),
            max_completion_tokens=max_completion_tokens,
        )

    def to_tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """What ranks add up, float64 [3]."""
        return torch.stack([self.sequences, self.tokens, self.live_tokens]).to(device)

    @classmethod
    def from_tensor(cls, totals: Tensor, *, like: LossTotals) -> LossTotals:
        """The inverse of `to_tensor`."""
        sequences, tokens, live_tokens = totals.unbind()
        return cls(
            sequences=sequences,
            tokens=tokens,
            live_tokens=live_tokens,
            max_completion_tokens=like.max_completion_tokens,
        )

    def __add__(self, other: LossTotals) -> LossTotals:
        if self.max_completion_tokens != other.max_completion_tokens:
            raise ConfigError(
                f"max_completion_tokens is {self.max_completion_tokens} here and {other.max_completion_tokens} there: "
                "the parts of one batch share one generation limit, so give the same to all."
            )
        return LossTotals.from_tensor(self.to_tensor() + other.to_tensor(), like=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossParts:
    """One micro-batch's share of the batch's loss; the shares of all micro-batches and ranks add up to the whole."""

    loss: Tensor  # scalar with gradient: policy_loss + kl_coef * kl_loss - entropy_coef * entropy
    policy_loss: Tensor  # this and the rest: scalars without gradient
    kl_loss: Tensor  # the KL term before its coefficient; 0 without a reference
    entropy: Tensor  # 0 without entropies

    def __add__(self, other: LossParts) -> LossParts:
        return LossParts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def loss_mask(completion_mask_PGL: Tensor, terminated_PG: Tensor, *, mask_truncated: bool) -> Tensor:
    """The tokens that the loss counts: all of a completion's, or none of those that hit the length limit."""
    if not mask_truncated:
        return completion_mask_PGL
    return completion_mask_PGL & terminated_PG.unsqueeze(-1)


def importance_ratio(
    logprobs_PGL: Tensor, old_logprobs_PGL: Tensor, mask_PGL: Tensor, level: Literal["token", "sequence"]
) -> Tensor:
    """policy / old policy, [P, G, L], 1 outside the mask; or its geometric mean per sequence, [P, G, 1] (GSPO, eq. 5).

    Example:
        >>> one, two = torch.zeros(1, 1, 2), torch.tensor([[[0.0, -1.3863]]])
        >>> importance_ratio(one, two, torch.ones(1, 1, 2, dtype=torch.bool), "sequence")
        tensor([[[2.0000]]])
    """
    log_ratio = torch.where(mask_PGL, logprobs_PGL, 0.0) - torch.where(mask_PGL, old_logprobs_PGL, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask_PGL.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_loss(
    logprobs_PGL: Tensor,
    *,
    old_logprobs_PGL: Tensor,
    advantages_PG: Tensor,
    mask_PGL: Tensor,
    status_P: Tensor,
    totals: LossTotals,
    config: LossConfig,
    sampler_logprobs_PGL: Tensor | None = None,
    ref_logprobs_PGL: Tensor | None = None,
    kl_coef: float = 0.0,
    entropies_PGL: Tensor | None = None,
) -> LossParts:
    """This micro-batch's share of the loss. Only `logprobs_PGL` and `entropies_PGL` carry gradient.

    A term whose coefficient is 0 is measured, without gradient.
    """
    logprobs_PGL = torch.where(mask_PGL, logprobs_PGL, 0.0)
    old_logprobs_PGL = torch.where(mask_PGL, old_logprobs_PGL, 0.0)
    ratio = importance_ratio(logprobs_PGL, old_logprobs_PGL, mask_PGL, config.importance_level)
    token_loss_PGL = _token_loss(ratio, logprobs_PGL, advantages_PG.unsqueeze(-1), config)
    if config.sampler_is_cap is not None and sampler_logprobs_PGL is not None:
        token_loss_PGL = token_loss_PGL * _sampler_weight(old_logprobs_PGL, sampler_logprobs_PGL, config.sampler_is_cap)
    excluded = config.dead_groups == "exclude"
    policy = _aggregate(token_loss_PGL, mask_PGL, totals, config.loss, live_only=excluded)
    loss, kl, entropy = policy, policy.new_zeros(()), policy.new_zeros(())
    if ref_logprobs_PGL is not None:
        kl_PGL = _token_kl(logprobs_PGL, torch.where(mask_PGL, ref_logprobs_PGL, 0.0), ratio, config)
        kl = _aggregate(kl_PGL, mask_PGL, totals, config.loss, live_only=False)
        loss = loss + kl_coef * kl if kl_coef else loss
    if entropies_PGL is not None:
        entropy = _aggregate(entropies_PGL, mask_PGL, totals, "dapo", live_only=False)
        loss = loss - config.entropy_coef * entropy if config.entropy_coef else loss
    return LossParts(loss=loss, policy_loss=policy.detach(), kl_loss=kl.detach(), entropy=entropy.detach())


def _token_kl(logprobs_PGL: Tensor, ref_logprobs_PGL: Tensor, ratio: Tensor, config: LossConfig) -> Tensor:
    kl_PGL = per_token_kl(logprobs_PGL, ref_logprobs_PGL, config.kl_estimator)
    return kl_PGL * ratio if config.kl_importance else kl_PGL


def _token_loss(ratio: Tensor, logprobs_PGL: Tensor, advantages_PG1: Tensor, config: LossConfig) -> Tensor:
    if config.loss == "cispo":
        return -ratio.clamp(max=config.cispo_max).detach() * advantages_PG1 * logprobs_PGL
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    unclipped = ratio if config.delta is None else ratio.clamp(max=config.delta)
    surrogate = torch.minimum(unclipped * advantages_PG1, clipped * advantages_PG1)
    return -surrogate.expand_as(logprobs_PGL)


def _sampler_weight(old_logprobs_PGL: Tensor, sampler_logprobs_PGL: Tensor, cap: float) -> Tensor:
    """min(trainer / sampler, cap) per token, detached: truncated importance sampling.

    1 for a token that the sampler gave no log-prob of (NaN), as in TRL.
    """
    log_ratio = (old_logprobs_PGL - sampler_logprobs_PGL).detach()
    log_ratio = torch.where(torch.isnan(sampler_logprobs_PGL), 0.0, log_ratio)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)


def _aggregate(values_PGL: Tensor, mask_PGL: Tensor, totals: LossTotals, loss: LossName, *, live_only: bool) -> Tensor:
    """The masked sum over this micro-batch, over the whole batch's denominator; 0 where nothing counts."""
    masked_PGL = torch.where(mask_PGL, values_PGL, 0.0)
    if loss == "grpo":
        lengths_PG = mask_PGL.sum(-1).clamp(min=1)
        return _over((masked_PGL.sum(-1) / lengths_PG).sum(), totals.sequences)
    if loss == "dr_grpo":
        return _over(masked_PGL.sum(), totals.sequences * totals.max_completion_tokens)
    return _over(masked_PGL.sum(), totals.live_tokens if live_only else totals.tokens)


def _over(total: Tensor, count: Tensor) -> Tensor:
    """total / count; exactly 0, with a gradient of 0, for a count of 0."""
    safe = torch.where(count > 0, 1.0 / count.clamp(min=1.0), 0.0)
    return total * safe.to(total.dtype).to(total.device)
