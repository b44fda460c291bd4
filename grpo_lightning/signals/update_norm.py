"""The size of an update: the norm of the change of the trained weights, and that over the weights' own norm.

Up to 50 million trained weights everything is compared. Above, a fixed random sample of coordinates is: each tensor gives
coordinates in proportion to its size, and its squares are scaled up by size / sampled, so that the squared norms are unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.errors import UsageError

__all__ = ["UpdateNorm", "UpdateSize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateSize:
    """Squared norms, which ranks that hold shards of the weights may add up."""

    update_squares: float
    weight_squares: float  # of the weights before the update

    @property
    def update_norm(self) -> float:
        """L2 norm of the change."""
        return math.sqrt(self.update_squares)

    @property
    def update_to_weight(self) -> float | None:
        """The change over the weights; None where all weights are 0."""
        return math.sqrt(self.update_squares / self.weight_squares) if self.weight_squares else None

    def values(self) -> dict[str, float]:
        """The signals."""
        ratio = self.update_to_weight
        return {"update_norm": self.update_norm} | ({} if ratio is None else {"update_to_weight": ratio})


class UpdateNorm:
    """Compares trained weights before and after an update; holds one copy of what it compares.

    Args:
        exact_up_to: trained weights up to which all are compared.
        sample_size: coordinates compared above that.
        seed: of the sample, which is drawn once.
    """

    def __init__(self, *, exact_up_to: int = 50_000_000, sample_size: int = 1_000_000, seed: int = 0) -> None:
        self._exact_up_to, self._sample_size, self._seed = exact_up_to, sample_size, seed
        self._places: list[Tensor | None] | None = None
        self._before: list[Tensor] = []

    @torch.no_grad()
    def before(self, parameters: Iterable[Tensor]) -> None:
        """Remember the weights."""
        trained = [p for p in parameters if p.requires_grad]
        if self._places is None or len(self._places) != len(trained):
            self._places = self._choose(trained)
            self._before = [_taken(p, at).clone() for p, at in zip(trained, self._places, strict=True)]
            return
        for kept, p, at in zip(self._before, trained, self._places, strict=True):
            kept.copy_(_taken(p, at))

    @torch.no_grad()
    def after(self, parameters: Iterable[Tensor]) -> UpdateSize:
        """The size of the change since `before`, with one device-to-host copy."""
        trained = [p for p in parameters if p.requires_grad]
        if self._places is None or len(self._places) != len(trained):
            raise UsageError(
                f"{len(trained)} trained tensors after the update, {len(self._before)} before: give before() the same ones."
            )
        squares = [
            _squares(kept, _taken(p, at), p.numel())
            for kept, p, at in zip(self._before, trained, self._places, strict=True)
            if kept.numel()
        ]
        if not squares:
            return UpdateSize(update_squares=0.0, weight_squares=0.0)
        update, weight = torch.stack([s.to(squares[0].device) for s in squares]).sum(0).tolist()
        return UpdateSize(update_squares=update, weight_squares=weight)

    def _choose(self, trained: list[Tensor]) -> list[Tensor | None]:
        """Coordinates of each tensor; None for all of them."""
        whole = sum(p.numel() for p in trained)
        if whole <= self._exact_up_to:
            return [None] * len(trained)
        generator = torch.Generator().manual_seed(self._seed)
        places: list[Tensor | None] = []
        for p in trained:
            count = math.ceil(self._sample_size * p.numel() / whole)
            at = torch.randint(p.numel(), (count,), generator=generator) if count < p.numel() else None
            places.append(at if at is None else at.to(p.device))
        return places


def _taken(parameter: Tensor, places: Tensor | None) -> Tensor:
    """The weights to compare, flat."""
    flat = parameter.detach().reshape(-1)
    return flat if places is None else flat[places]


def _squares(before: Tensor, after: Tensor, size: int) -> Tensor:
    """Squared norms of the change and of the weights before, of the whole tensor of `size`, float64 [2]."""
    before = before.float()
    change = torch.linalg.vector_norm(after.float() - before, dtype=torch.float64)
    weight = torch.linalg.vector_norm(before, dtype=torch.float64)
    return torch.stack([change, weight]).square() * (size / before.numel())
