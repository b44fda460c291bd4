"""Shaping of rewards by length, and counting where clipping binds."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lightning.errors import ConfigError

__all__ = ["check_overlong_cache", "clip_binds", "soft_overlong_penalty"]


def soft_overlong_penalty(lengths_PG: Tensor, max_tokens: int, cache_tokens: int) -> Tensor:
    """0 up to max - cache tokens, then linearly to -1 at the limit, float64 [P, G] (DAPO, arXiv 2503.14476, eq. 13).

    Example:
        >>> soft_overlong_penalty(torch.tensor([[6, 8, 10]]), 10, 4)
        tensor([[ 0.0000, -0.5000, -1.0000]], dtype=torch.float64)
    """
    check_overlong_cache(max_tokens, cache_tokens)
    start = max_tokens - cache_tokens
    return -((lengths_PG.double() - start) / cache_tokens).clamp(0.0, 1.0)


def check_overlong_cache(max_tokens: int, cache_tokens: int) -> None:
    """Raise where the tokens over which the penalty grows are not some before the limit."""
    if not 0 < cache_tokens <= max_tokens:
        raise ConfigError(
            f"advantages.overlong_cache_tokens is {cache_tokens}: give 1 to {max_tokens}, the generation limit, "
            "or 0 for off."
        )


def clip_binds(
    ratio: Tensor, advantages_PG: Tensor, mask_PGL: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Where the clip binds below and above, bool [P, G, L].

    A ratio below 1 - clip_low binds for a negative advantage only, one above 1 + clip_high for a positive one only:
    elsewhere the minimum of the surrogate takes the unclipped term and gradient flows. `LossConfig.clip_margins` are
    the margins at which a loss clips.
    """
    advantages_PG1 = advantages_PG.unsqueeze(-1)
    low = (ratio < 1 - clip_low) & (advantages_PG1 < 0) & mask_PGL
    high = (ratio > 1 + clip_high) & (advantages_PG1 > 0) & mask_PGL
    return torch.broadcast_to(low, mask_PGL.shape), torch.broadcast_to(high, mask_PGL.shape)
