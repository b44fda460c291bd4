"""A histogram over logarithmic bins, for quantiles of values that lie on several ranks.

Bins are cut from the bits of a float32: its exponent and the five highest bits of its mantissa, 32 bins an octave from
2^-24 to 2^20, the outermost taking what lies beyond, one for 0, and the same again for negative values. Each bin holds
count and total, so that histograms add up exactly. An order statistic is read as the mean of its bin: at most 1/32 of
its value off between 2^-24 and 2^20, and exact where a bin holds one value only. A quantile lies on the line
between two order statistics, as numpy's does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["RELATIVE_ERROR", "Sketch", "sketch_size", "sketches"]

_LOWEST, _HIGHEST, _BITS = -24, 20, 5
_SHIFT = 23 - _BITS  # of a float32's 23 bits of mantissa
_FIRST = (127 + _LOWEST) << _BITS
_BINS = (_HIGHEST - _LOWEST) << _BITS  # of one sign
RELATIVE_ERROR = 2.0**-_BITS


def sketch_size(*, signed: bool) -> int:
    """The length of a histogram: a count and a total for each bin."""
    return 2 * (2 * _BINS + 1 if signed else _BINS + 1)


def sketches(parts: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
    """A histogram for each tensor, with whether it may be negative: counts, then totals, of its finite values, float64.

    All of them in one go: for small tensors the calls are what costs.
    """
    if not parts:
        return []
    sizes = [sketch_size(signed=signed) for _, signed in parts]
    values = torch.cat([v.flatten() for v, _ in parts]).double()
    zero, bins = _places_of_zero(tuple((v.numel(), signed) for v, signed in parts), values.device)
    kept = (values - values) == 0
    values = values.masked_fill(~kept, 0.0)
    places = zero + _signed_bin(values)
    found = torch.zeros(sum(sizes), dtype=torch.float64, device=values.device)
    found.index_add_(0, torch.cat([places, places + bins]), torch.cat([kept.double(), values]))
    return list(found.split_with_sizes(sizes))


@lru_cache(maxsize=64)
def _places_of_zero(parts: tuple[tuple[int, bool], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each value, where a 0 of its histogram is counted, and how far behind its total is."""
    sizes = [sketch_size(signed=signed) for _, signed in parts]
    zeros = [sum(sizes[:i]) + (_BINS if signed else 0) for i, (_, signed) in enumerate(parts)]
    both = torch.tensor([zeros, [size // 2 for size in sizes]])
    counts = torch.tensor([count for count, _ in parts])
    zero, bins = both.repeat_interleave(counts, dim=1).to(device).unbind()
    return zero, bins


def _signed_bin(values: Tensor) -> Tensor:
    """0 for 0, else 1 … `_BINS` by size, negative for negative values."""
    bits = values.float().view(torch.int32) & 0x7FFFFFFF
    bins = ((bits >> _SHIFT) - (_FIRST - 1)).clamp(1, _BINS)
    return bins * values.sign().long()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """The bins that hold anything, in ascending order, on the host."""

    counts: npt.NDArray[np.float64]
    means: npt.NDArray[np.float64]

    @classmethod
    def of(cls, packed: npt.NDArray[np.float64] | Tensor) -> Sketch:
        """From what `sketches` gave, ranks added up."""
        counts, totals = np.asarray(packed).reshape(2, -1)
        held = np.flatnonzero(counts)
        counts = counts[held]
        return cls(counts=counts, means=totals[held] / counts)

    @property
    def count(self) -> float:
        """How many values."""
        return float(self.counts.sum())

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The quantiles at `shares`; nothing for no values."""
        if not len(self.counts):
            return []
        reached = self.counts.cumsum()
        last = float(reached[-1]) - 1
        places = [last * share for share in shares]
        ends = [(math.floor(p), min(math.floor(p) + 1, last)) for p in places]
        found = self.means[np.searchsorted(reached, ends, side="right")].tolist()
        return [low + (p - math.floor(p)) * (high - low) for p, (low, high) in zip(places, found, strict=True)]

    def share(self, low: float, high: float) -> float | None:
        """The share of values in bins whose mean lies in [low, high]; None for no values."""
        within = (self.means >= low) & (self.means <= high)
        return float(self.counts[within].sum()) / self.count if len(self.counts) else None

    def histogram(self, edges: Sequence[float]) -> list[float]:
        """Counts between `edges`, the last closed; each bin counts where its mean lies, outliers at the ends."""
        places = np.searchsorted(list(edges)[1:-1], self.means, side="right")
        counted: list[float] = np.bincount(places, weights=self.counts, minlength=len(edges) - 1).tolist()
        return counted
