"""Partial values that merge: each rank packs its own into one vector, and one gather serves the whole catalogue.

What is kept of a quantity, and how parts of it join:

========  =============================================  ======================================================
sum       one total                                      added
max       one extreme                                    the greatest
vector    a vector of totals (histograms)                added
moments   count, mean, sums of squared and cubed         Chan et al. 1979; Pébay 2008 (Sandia SAND2008-6212),
          deviations, least and greatest                 eq. 2.1 and 2.3
sample    the K least of the hashes seen (bottom-k,      their union, below the least of the full ranks'
          Cohen and Kaplan 2007)                         last hashes
========  =============================================  ======================================================

Sums, extremes, moments and histograms join exactly, up to rounding. Values that are not finite are left out (and counted
by their own signal), so one NaN neither vanishes nor wipes out an average. What has no values is absent afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_lightning.errors import DataError
from grpo_lightning.signals.sketch import Sketch, sketch_size, sketches

__all__ = ["SAMPLE_SIZE", "Layout", "Merged", "Moments", "Partials", "Vector", "finite", "merge", "moments_of"]

SAMPLE_SIZE = 256  # hashes a rank sends: exact counts of distinct values up to here, a sample's above
_MOMENTS = 6
_MANY = 2**15  # values of a histogram that are kept until `pack`

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the places of a packed vector hold. It depends on the configuration alone, never on data."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    moments: tuple[str, ...]
    vectors: Mapping[str, int]  # name: length
    samples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Count, mean, central moment sums and extremes of the finite values."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of (x - mean)^2
    cubes: float = 0.0  # sum of (x - mean)^3
    least: float = math.inf
    greatest: float = -math.inf

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        delta, both = other.mean - self.mean, self.count * other.count
        return Moments(
            count=count,
            mean=self.mean + delta * other.count / count,
            squares=self.squares + other.squares + delta**2 * both / count,
            cubes=self.cubes
            + other.cubes
            + delta**3 * both * (self.count - other.count) / count**2
            + 3 * delta * (self.count * other.squares - other.count * self.squares) / count,
            least=min(self.least, other.least),
            greatest=max(self.greatest, other.greatest),
        )

    def signals(self, name: str, *, std: str = "std") -> dict[str, float | None]:
        """`name` with `_mean`, `_std`, `_min` and `_max`; nothing for no values."""
        if not self.count:
            return {}
        spread = {f"{name}_mean": self.mean, f"{name}_{std}": self.std}
        return spread | {f"{name}_min": self.least, f"{name}_max": self.greatest}

    @property
    def std(self) -> float | None:
        """The sample std; None for fewer than two values."""
        return math.sqrt(max(self.squares, 0.0) / (self.count - 1)) if self.count > 1 else None

    @property
    def skew(self) -> float | None:
        """The third standardised moment; None where nothing is spread."""
        variance = self.squares / self.count if self.count else 0.0
        return self.cubes / self.count / variance**1.5 if variance > 1e-24 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The partials of all ranks, joined, on the host."""

    sums: dict[str, float]
    maxima: dict[str, float]  # those with a value
    moments: dict[str, Moments]
    vectors: dict[str, Vector]
    samples: dict[str, list[Vector]]  # per rank, below the threshold that all ranks share

    def ratio(self, name: str) -> float | None:
        """A mean or share collected with `Partials.ratio`; None where nothing was measured."""
        count = self.sums[f"{name}/count"]
        return self.sums[f"{name}/total"] / count if count else None

    def mean(self, name: str) -> float | None:
        """The mean of what was collected with `Partials.moments`; None where nothing was measured."""
        moments = self.moments[name]
        return moments.mean if moments.count else None

    def sketch(self, name: str) -> Sketch:
        """A histogram collected with `Partials.sketch`."""
        return Sketch.of(self.vectors[name])


class Partials:
    """Collects one rank's partials. The same calls in the same order give the same layout.

    What is given is kept as it is and reduced by `pack`, all of one shape in one go: for small tensors the calls are what
    costs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._sums: dict[str, Tensor | float] = {}
        self._totals: list[tuple[tuple[str, ...], Tensor]] = []
        self._maxima: dict[str, Tensor | float] = {}
        self._moments: dict[str, Tensor] = {}
        self._sketches: dict[str, tuple[Tensor, bool]] = {}
        self._counted: dict[str, Tensor] = {}  # histograms of what is not kept
        self._vectors: dict[str, Tensor] = {}
        self._samples: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """A total: of all elements of a tensor."""
        self._sums[name] = value

    def ratio(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """A mean or share from its total and its count, each summed over its elements."""
        self.add(f"{name}/total", total)
        self.add(f"{name}/count", count)

    def ratios(self, names: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Several at once, from [M] totals and counts."""
        self._totals.append((tuple(f"{n}/total" for n in names), totals))
        self._totals.append((tuple(f"{n}/count" for n in names), counts))

    def greatest(self, name: str, value: Tensor | float) -> None:
        """An extreme; -inf for none."""
        self._maxima[name] = value

    def moments(self, name: str, values: Tensor) -> None:
        """Moments of the finite values."""
        self._moments[name] = values.flatten()

    def sketch(self, name: str, values: Tensor, *, signed: bool = False) -> None:
        """A histogram of the finite values, for quantiles; `signed` where they may be negative. Values of one name add up.

        Many values are counted at once, so that they need not be kept.
        """
        if values.numel() > _MANY:
            done = sketches([(values, signed)])[0]
            self._counted[name] = self._counted[name] + done if name in self._counted else done
            values = values.flatten()[:0]
        held = self._sketches.get(name)
        self._sketches[name] = (values if held is None else torch.cat([held[0].flatten(), values.flatten()])), signed

    def vector(self, name: str, totals: Tensor) -> None:
        """A vector of totals."""
        self._vectors[name] = totals

    def samples(self, names: Sequence[str], hashes: Tensor) -> None:
        """The least of each row of hashes below 2^53, int64 [M, N], for `names` (M)."""
        least = torch.full((len(names), SAMPLE_SIZE), torch.inf, dtype=torch.float64, device=hashes.device)
        kept = hashes.sort(-1).values[:, :SAMPLE_SIZE]
        least[:, : kept.shape[1]] = kept
        self._samples |= dict(zip(names, least.unbind(), strict=True))

    def layout(self) -> Layout:
        """The layout of `pack`."""
        sketched = {n: sketch_size(signed=signed) for n, (_, signed) in self._sketches.items()}
        return Layout(
            sums=(*self._sums, *(name for names, _ in self._totals for name in names)),
            maxima=tuple(self._maxima),
            moments=tuple(self._moments),
            vectors=sketched | {n: v.numel() for n, v in self._vectors.items()},
            samples=tuple(self._samples),
        )

    @torch.inference_mode()
    def pack(self) -> Tensor:
        """One float64 vector."""
        return torch.cat(
            [
                self._numbers(),
                self._moved().flatten(),
                *self._histograms(),
                *self._vectors.values(),
                *self._samples.values(),
            ]
        )

    def _histograms(self) -> list[Tensor]:
        found = zip(self._sketches, sketches(list(self._sketches.values())), strict=True)
        return [made + self._counted[name] if name in self._counted else made for name, made in found]

    def _numbers(self) -> Tensor:
        """The totals, then the extremes; those of tensors of one shape together, with one copy for those off the device."""
        given: dict[str, Any] = self._sums | self._maxima
        alike: dict[torch.Size, list[str]] = {}
        for name, value in given.items():
            if isinstance(value, Tensor):
                alike.setdefault(value.shape, []).append(name)
        parts = [_added(torch.stack([given[n] for n in names]), shape) for shape, names in alike.items()]
        parts += [totals.double() for _, totals in self._totals]
        known = [name for name, value in given.items() if not isinstance(value, Tensor)]
        parts.append(torch.tensor([given[n] for n in known], dtype=torch.float64, device=self.device))
        in_blocks = [name for names, _ in self._totals for name in names]
        found = [*(name for names in alike.values() for name in names), *in_blocks, *known]
        wanted = (*self._sums, *in_blocks, *self._maxima)
        return torch.cat(parts)[_places(wanted, tuple(found), self.device)]

    def _moved(self) -> Tensor:
        """Moments of all rows, the shorter ones filled up with NaN, [M, 6]."""
        alike: dict[int, list[str]] = {}
        for name, row in self._moments.items():
            alike.setdefault(row.numel(), []).append(name)
        if not alike:
            return torch.empty(0, _MOMENTS, dtype=torch.float64, device=self.device)
        longest = max(alike)
        rows = [torch.stack([self._moments[n] for n in names]).double() for names in alike.values()]
        rows = [r if r.shape[1] == longest else pad(r, (0, longest - r.shape[1]), value=torch.nan) for r in rows]
        found = tuple(name for names in alike.values() for name in names)
        return moments_of(torch.cat(rows))[_places(tuple(self._moments), found, self.device)]


def _added(stacked: Tensor, shape: torch.Size) -> Tensor:
    """The sum of each of the tensors of `shape`."""
    return stacked.flatten(1).sum(1, dtype=torch.float64) if shape else stacked.double()


@lru_cache(maxsize=32)
def _places(wanted: tuple[str, ...], found: tuple[str, ...], device: torch.device) -> Tensor:
    """Where each name stands."""
    at = {name: i for i, name in enumerate(found)}
    return torch.tensor([at[name] for name in wanted], dtype=torch.int64, device=device)


def finite(values: Tensor) -> Tensor:
    """`torch.isfinite` in two operations instead of five: for small tensors the calls are what costs."""
    return (values - values) == 0


def moments_of(rows: Tensor) -> Tensor:
    """Count, mean, sums of squared and cubed deviations and extremes of each row's finite values, float64 [M, 6]."""
    lost = ~finite(rows)
    count = rows.shape[1] - lost.sum(1)
    mean = rows.masked_fill(lost, 0.0).sum(1) / count.clamp(min=1)
    deviations = (rows - mean.unsqueeze(1)).masked_fill_(lost, 0.0)
    squared = deviations.square()
    sums = [count, mean, squared.sum(1), (squared * deviations).sum(1)]
    if not rows.shape[1]:
        return torch.stack([*sums, torch.full_like(mean, torch.inf), torch.full_like(mean, -torch.inf)], dim=1)
    least = rows.masked_fill(lost, torch.inf).amin(1)
    greatest = rows.masked_fill(lost, -torch.inf).amax(1)
    return torch.stack([*sums, least, greatest], dim=1)


def merge(packs: Sequence[Tensor], layout: Layout) -> Merged:
    """The partials of all ranks, joined, with one device-to-host copy."""
    sizes = sorted({len(p) for p in packs})
    lengths = [len(layout.sums), len(layout.maxima), _MOMENTS * len(layout.moments)]
    lengths += [sum(layout.vectors.values()), SAMPLE_SIZE * len(layout.samples)]
    if sizes != [sum(lengths)]:
        raise DataError(
            f"The ranks packed {sizes} values where {sum(lengths)} are expected: give all ranks the same configuration."
        )
    stacked: Vector = (torch.stack(list(packs)) if len(packs) > 1 else packs[0].unsqueeze(0)).cpu().numpy()
    sums, maxima, moments, vectors, samples = _cut(stacked, lengths)
    return Merged(
        sums=dict(zip(layout.sums, sums.sum(0).tolist(), strict=True)),
        maxima=_extremes(layout.maxima, maxima.max(0).tolist() if layout.maxima else []),
        moments=_joined_moments(layout.moments, moments.tolist()),
        vectors={
            n: v[0] if len(v) == 1 else v.sum(0)
            for n, v in zip(layout.vectors, _cut(vectors, list(layout.vectors.values())), strict=True)
        },
        samples={
            n: _joined_samples(s)
            for n, s in zip(layout.samples, _cut(samples, [SAMPLE_SIZE] * len(layout.samples)), strict=True)
        },
    )


def _cut(rows: Vector, lengths: Sequence[int]) -> list[Vector]:
    """Columns in parts of these lengths."""
    ends = list(accumulate(lengths, initial=0))
    return [rows[:, start:end] for start, end in pairwise(ends)]


def _extremes(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {n: v for n, v in zip(names, values, strict=True) if v != -math.inf}


def _joined_moments(names: Sequence[str], ranks: list[list[float]]) -> dict[str, Moments]:
    fields = ("count", "mean", "squares", "cubes", "least", "greatest")
    joined = {}
    for i, name in enumerate(names):
        parts = (values[_MOMENTS * i : _MOMENTS * (i + 1)] for values in ranks)
        joined[name] = reduce(add, (Moments(**dict(zip(fields, part, strict=True))) for part in parts))
    return joined


def _joined_samples(ranks: Vector) -> list[Vector]:
    """Each rank's hashes below the least last place: a sample in which every copy of a value is in or every one is out."""
    threshold = ranks[:, -1].min()
    return [rank[rank < threshold] for rank in ranks]
