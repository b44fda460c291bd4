"""The size of an update: the norm of the change of the trained weights, and that over the weights' own norm.

Up to 50 million trained weights everything is compared. Above, a fixed random sample of coordinates is: each tensor gives
coordinates in proportion to its size, and its squares are scaled up by size / sampled, so that the squared norms are unbiased.

Of weights that are split over ranks (DTensors) each rank takes its own part; those among them that several ranks hold whole
count once, each rank giving an equal part of their squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
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
        self._sizes: list[int] | None = None
        self._places: list[Tensor | None] = []
        self._before: list[Tensor] = []  # one for each tensor, parts of `_flat`
        self._flat: list[Tensor] = []  # one for each device
        self._scales: list[Tensor | None] = []  # size / compared, for each coordinate; None: 1
        self._weights: list[Tensor] = []  # squared norms before the update

    @torch.no_grad()
    def before(self, parameters: Iterable[Tensor]) -> None:
        """Remember the weights."""
        parameters = list(parameters)
        trained = _trained(parameters)
        if self._sizes != [p.numel() for p in trained]:
            self._prepare(trained, _parts(parameters))
        if trained:
            torch._foreach_copy_(self._before, _taken(trained, self._places))
        self._weights = self._squares()

    @torch.no_grad()
    def after(self, parameters: Iterable[Tensor], *, share: float = 1.0) -> UpdateSize:
        """The size of the change since `before`, with one device-to-host copy. Forgets what was remembered."""
        trained = _trained(parameters)
        if self._sizes is None or len(self._sizes) != len(trained):
            raise UsageError(
                f"{len(trained)} trained tensors after the update, {len(self._before)} before: give before() the same ones."
            )
        if not trained:
            return UpdateSize(update_squares=0.0, weight_squares=0.0, share=share)
        torch._foreach_sub_(self._before, _taken(trained, self._places))
        squares = [*self._squares(), *self._weights]
        found = torch.stack([s.to(squares[0].device) for s in squares]).tolist()
        half = len(found) // 2
        return UpdateSize(update_squares=sum(found[:half]), weight_squares=sum(found[half:]), share=share)

    def _squares(self) -> list[Tensor]:
        """The squared norm of what is kept on each device, float64."""
        return [
            torch.linalg.vector_norm(flat).double().square()
            if scales is None
            else (flat.square() * scales).sum(dtype=torch.float64)
            for flat, scales in zip(self._flat, self._scales, strict=True)
        ]

    def _prepare(self, trained: list[Tensor], parts: list[float]) -> None:
        """Choose coordinates and make room for them, in one piece on each device."""
        self._sizes, self._places = [p.numel() for p in trained], self._choose(trained)
        self._before, self._flat, self._scales = list(trained), [], []
        for device in dict.fromkeys(p.device for p in trained):
            here = [i for i, p in enumerate(trained) if p.device == device]
            shapes = [trained[i].shape if (at := self._places[i]) is None else at.shape for i in here]
            counts = [shape.numel() for shape in shapes]
            dtype = reduce(torch.promote_types, (trained[i].dtype for i in here), torch.float32)
            flat = torch.empty(sum(counts), dtype=dtype, device=device)
            for i, part, shape in zip(here, flat.split(counts), shapes, strict=True):
                self._before[i] = part.view(shape)
            self._flat.append(flat)
            self._scales.append(self._scales_of(here, counts, flat, parts))

    def _scales_of(self, here: list[int], counts: list[int], flat: Tensor, parts: list[float]) -> Tensor | None:
        if self._sizes is None or all(self._places[i] is None and parts[i] == 1.0 for i in here):
            return None
        each = [parts[i] * self._sizes[i] / count for i, count in zip(here, counts, strict=True)]
        return torch.tensor(each, dtype=flat.dtype).repeat_interleave(torch.tensor(counts)).to(flat.device)

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
    return [local.detach() for p in parameters if p.requires_grad and (local := _local(p)).numel()]


def _local(parameter: Tensor) -> Tensor:
    held: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return held


def _parts(parameters: list[Tensor]) -> list[float]:
    """Of each of `_trained`: 1 over how many ranks hold the same of it, where others are split over ranks; else 1."""
    held = [p for p in parameters if p.requires_grad and _local(p).numel()]
    if not any(hasattr(p, "placements") for p in parameters):
        return [1.0] * len(held)
    return [1 / _copies(p, dist.get_world_size()) for p in held]


def _copies(parameter: Tensor, ranks: int) -> int:
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ranks
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    whole = [mesh.size(i) for i, placement in enumerate(placements) if placement.is_replicate()]
    return math.prod([ranks // mesh.size(), *whole])


def _taken(trained: list[Tensor], places: list[Tensor | None]) -> list[Tensor]:
    """The weights to compare."""
    return [p if at is None else p.reshape(-1)[at] for p, at in zip(trained, places, strict=True)]
