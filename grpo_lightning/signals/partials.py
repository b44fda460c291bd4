"""Partial values that merge exactly: each rank packs its own into one vector, and one gather serves the whole catalogue.

A mean carries total and count; a spread carries count, total and total of squares about a shift that all ranks share
(0, in float64); extremes carry themselves. Values that are not finite are counted and left out, so one NaN neither
vanishes nor wipes out an average. What has no values is absent afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Partials", "merge"]


class Partials:
    """Collects named partials of one rank. The same calls in the same order give the same layout."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """A total that adds up."""
        self.sums[name] = value.double()

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Total and count of the finite values where `mask`."""
        finite = torch.isfinite(values) if mask is None else torch.isfinite(values) & mask
        self.add(f"{name}/total", torch.where(finite, values, 0.0).double().sum())
        self.add(f"{name}/count", finite.sum())

    def moments(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """What mean and sample std need."""
        self.mean(name, values, mask)
        finite = torch.isfinite(values) if mask is None else torch.isfinite(values) & mask
        self.add(f"{name}/squares", torch.where(finite, values, 0.0).double().square().sum())

    def greatest(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """The greatest finite value; -inf when there is none."""
        finite = torch.isfinite(values) if mask is None else torch.isfinite(values) & mask
        masked = torch.where(finite, values.double(), -torch.inf)
        self.maxima[name] = masked.max() if masked.numel() else masked.new_tensor(-torch.inf)

    def least(self, name: str, values: Tensor) -> None:
        """The least finite value, kept as the greatest of the negated ones under `-name`."""
        self.greatest(f"-{name}", -values)

    def pack(self) -> Tensor:
        """One float64 vector: sums, then maxima."""
        parts = [*self.sums.values(), *self.maxima.values()]
        return torch.stack([p.reshape(()).double() for p in parts])

    def names(self) -> tuple[list[str], list[str]]:
        """The layout of `pack`: names of sums and of maxima."""
        return list(self.sums), list(self.maxima)


def merge(packs: Sequence[Tensor], names: tuple[list[str], list[str]]) -> dict[str, float]:
    """The partials over all ranks, by name: sums added, maxima taken; one device-to-host copy."""
    sums, maxima = names
    stacked = torch.stack(list(packs))
    joined = torch.cat([stacked[:, : len(sums)].sum(0), stacked[:, len(sums) :].amax(0)])
    return dict(zip([*sums, *maxima], joined.tolist(), strict=True))
