"""Hashes of token sequences as tensor operations: equal sequences have equal hashes, others almost surely not.

A sequence's hash is the sum over its tokens of (token + 1) times a fixed odd random number of the token's place, modulo
2^64. Two given sequences collide with a probability of about 2^-60.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["finish_hash", "place_factors", "prefix_hashes"]

_SEED = 0x6772706F
_MULTIPLIER = -4658895280553007687  # 0xBF58476D1CE4E5B9 of splitmix64, as int64


@lru_cache(maxsize=16)
def place_factors(length: int, device: torch.device) -> Tensor:
    """One odd random number for each place, int64 [length]; the same for a place whatever the length."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randint(-(2**62), 2**62, (length,), generator=generator)
    return (numbers * 2 + 1).to(device)


def prefix_hashes(ids: Tensor) -> Tensor:
    """Hashes of the first 1, 2, … tokens along the last dimension, int64."""
    factors = place_factors(ids.shape[-1], ids.device)
    return ((ids + 1) * factors).cumsum(-1)


def finish_hash(sums: Tensor) -> Tensor:
    """Hashes spread evenly over 0 … 2^53 - 1, exact in float64."""
    mixed = (sums ^ (sums >> 30)) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIER
    return (mixed >> 11) & (2**53 - 1)
