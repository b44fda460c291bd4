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
    """Squared norms, which ranks that hold shards of the weights add up."""

    update_squares: float
    weight_squares: float  # of the weights before the update
    share: float = 1.0  # of the weights that this rank holds: 1 for a whole copy, 1 / ranks for a shard

    @property
    def update_norm(self) -> float:
        """L2 norm of the change."""
        return math.sqrt(self.update_squares)

    @property
    def update_to_weight(self) -> float | None:
        """The change over the weights; None where all weights are 0, or none were looked at."""
        return math.sqrt(self.update_squares / self.weight_squares) if self.weight_squares else None

    def values(self) -> dict[str, float]:
        """The signals."""
        ratio = self.update_to_weight
        return {"update_norm": self.update_norm} | ({} if ratio is None else {"update_to_weight": ratio})


class UpdateNorm:
    """Compares trained weights before and after an update; holds one float32 copy of what it compares.

    Args:
        exact_up_to: trained weights up to which all are compared.
        sample_size: coordinates compared above that.
        seed: of the sample, which is drawn once.
    """

    def __init__(self, *, exact_up_to: int = 50_000_000, sample_size: int = 1_000_000, seed: int = 0) -> None:
        self._exact_up_to, self._sample_size, self._seed = exact_up_to, sample_size, seed
        self._places: list[Tensor | None] | None = None
        self._before: list[Tensor] = []
        self._scales: list[float] = []  # size / compared, of each tensor
        self._weights: list[Tensor] = []  # norms before the update

    @torch.no_grad()
    def before(self, parameters: Iterable[Tensor]) -> None:
        """Remember the weights."""
        trained = _trained(parameters)
        if self._places is None or len(self._places) != len(trained):
            self._places = self._choose(trained)
            self._before = [_room(p, at) for p, at in zip(trained, self._places, strict=True)]
            self._scales = [p.numel() / kept.numel() for p, kept in zip(trained, self._before, strict=True)]
        if not trained:
            return
        torch._foreach_copy_(self._before, _taken(trained, self._places))
        self._weights = list(torch._foreach_norm(self._before))

    @torch.no_grad()
    def after(self, parameters: Iterable[Tensor], *, share: float = 1.0) -> UpdateSize:
        """The size of the change since `before`, with one device-to-host copy. Forgets what was remembered."""
        trained = _trained(parameters)
        if self._places is None or len(self._places) != len(trained):
            raise UsageError(
                f"{len(trained)} trained tensors after the update, {len(self._before)} before: give before() the same ones."
            )
        if not trained:
            return UpdateSize(update_squares=0.0, weight_squares=0.0, share=share)
        torch._foreach_sub_(self._before, _taken(trained, self._places))
        norms = [*torch._foreach_norm(self._before), *self._weights]
        if len({n.device for n in norms}) > 1:
            norms = [n.cpu() for n in norms]
        squares = torch.stack(norms).double().square().tolist()
        return UpdateSize(
            update_squares=self._scaled(squares[: len(trained)]),
            weight_squares=self._scaled(squares[len(trained) :]),
            share=share,
        )

    def _scaled(self, squares: list[float]) -> float:
        return sum(scale * square for scale, square in zip(self._scales, squares, strict=True))

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


def _trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of the trained weights, without empty tensors."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters if p.requires_grad]
    return [p.detach() for p in local if p.numel()]


def _room(parameter: Tensor, places: Tensor | None) -> Tensor:
    """An empty copy of what is compared, at least float32."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    shape = parameter.shape if places is None else places.shape
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _taken(trained: list[Tensor], places: list[Tensor | None]) -> list[Tensor]:
    """The weights to compare."""
    return [p if at is None else p.reshape(-1)[at] for p, at in zip(trained, places, strict=True)]
