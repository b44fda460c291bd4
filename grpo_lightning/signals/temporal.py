"""Signals that need the steps before: speeds, ratios to the run's own median, growth per hour, and the sources' shift.

State is plain numbers and lists, for checkpoints. No torch. Values that are not finite are left out of every window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from grpo_lightning.errors import ConfigError

__all__ = ["TemporalState"]

_SPEED, _STAIR, _LENGTH, _NORM, _UPDATE = 10, 5, 20, 50, 20  # steps
_LEAST_NORMS = 5  # before a ratio to the median is given
_RULER_PROMPTS = 256  # the first prompts of a run are its ruler where none is given
_RECENT_PROMPTS = 256  # prompts that the recent mix remembers, about


class TemporalState:
    """Remembers what `update` needs of earlier steps.

    Args:
        source_ruler: shares or counts of prompts by source bin that `source_shift` compares with (`source_mix` of a
            healthy run, summed); the run's own first 256 prompts when not given.
    """

    def __init__(self, *, source_ruler: Sequence[float] | None = None) -> None:
        self._kl: deque[float] = deque(maxlen=2 * _SPEED)
        self._lengths: deque[tuple[float, float]] = deque(maxlen=_LENGTH)  # hours trained, tokens
        self._norms: deque[float] = deque(maxlen=_NORM)
        self._updates: deque[float] = deque(maxlen=_UPDATE)
        self._seconds = 0.0  # trained so far: time between a stop and a resume is none
        self._given_ruler = source_ruler is not None
        self._ruler = [float(n) for n in source_ruler or ()]
        self._recent: list[float] = []

    def update(self, values: dict[str, float], *, sources: Sequence[float] | None = None) -> dict[str, float]:
        """The derived signals of a step with `values`; `sources` is its `source_mix`.

        Example:
            >>> state = TemporalState()
            >>> for norm in [1.0, 1.0, 1.0, 1.0, 1.0]:
            ...     _ = state.update({"grad_norm": norm})
            >>> state.update({"grad_norm": 12.0})
            {'grad_norm_ratio': 12.0}
        """
        out = self._of_kl(values.get("kl")) | self._of_norm(values.get("grad_norm"))
        out |= self._of_update(values.get("update_norm"))
        out |= self._of_length(values.get("response_length_mean"), values.get("step_seconds", 0.0))
        return out | self._of_sources(sources)

    def _of_kl(self, kl: float | None) -> dict[str, float]:
        if kl is None or not math.isfinite(kl):
            return {}
        self._kl.append(kl)
        recent = list(self._kl)
        out = {}
        if len(recent) >= _SPEED:
            out["kl_speed"] = slope(enumerate(recent[-_SPEED:]))
        if len(recent) >= 2 * _STAIR:
            out["kl_stairs"] = stair(recent[-2 * _STAIR : -_STAIR], recent[-_STAIR:])
        if len(recent) == 2 * _SPEED:
            out["kl_acceleration"] = (out["kl_speed"] - slope(enumerate(recent[:_SPEED]))) / _SPEED
        return out

    def _of_norm(self, norm: float | None) -> dict[str, float]:
        if norm is None or not math.isfinite(norm):
            return {}
        usual = median(self._norms) if len(self._norms) >= _LEAST_NORMS else 0.0
        self._norms.append(norm)
        return {"grad_norm_ratio": norm / usual} if usual > 0 else {}

    def _of_update(self, norm: float | None) -> dict[str, float]:
        if norm is None or not math.isfinite(norm):
            return {}
        self._updates.append(norm)
        return {"update_norm_rolling": fmean(self._updates)}

    def _of_length(self, length: float | None, seconds: float) -> dict[str, float]:
        self._seconds += seconds if math.isfinite(seconds) else 0.0
        if length is None or not math.isfinite(length):
            return {}
        self._lengths.append((self._seconds / 3600, length))
        timed = self._lengths[-1][0] > self._lengths[0][0]
        return {"length_growth_per_hour": slope(self._lengths)} if len(self._lengths) >= _SPEED and timed else {}

    def _of_sources(self, counts: Sequence[float] | None) -> dict[str, float]:
        if counts is None or not sum(counts) > 0:
            return {}
        if not self._given_ruler and sum(self._ruler) < _RULER_PROMPTS:
            self._ruler = _added(self._ruler, counts)
            return {}
        kept = max(1.0 - sum(counts) / _RECENT_PROMPTS, 0.0)
        self._recent = _added([kept * n for n in self._recent], counts)
        return {"source_shift": js_distance(self._recent, self._ruler)}

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "kl": list(self._kl),
            "lengths": [list(pair) for pair in self._lengths],
            "norms": list(self._norms),
            "updates": list(self._updates),
            "seconds": self._seconds,
            "ruler": list(self._ruler),
            "given_ruler": self._given_ruler,
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._kl = deque(state["kl"], maxlen=2 * _SPEED)
        self._lengths = deque(((hours, tokens) for hours, tokens in state["lengths"]), maxlen=_LENGTH)
        self._norms = deque(state["norms"], maxlen=_NORM)
        self._updates = deque(state["updates"], maxlen=_UPDATE)
        self._seconds = float(state["seconds"])
        self._ruler, self._given_ruler = list(state["ruler"]), bool(state["given_ruler"])
        self._recent = list(state["recent"])


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Least-squares slope of y over x; 0 where all x are equal."""
    pairs = list(points)
    centre_x, centre_y = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    spread = sum((x - centre_x) ** 2 for x, _ in pairs)
    return sum((x - centre_x) * (y - centre_y) for x, y in pairs) / spread if spread else 0.0


def stair(before: Sequence[float], after: Sequence[float]) -> float:
    """The rise of the median, over the mean deviation from both medians (at least 1 % of the level, and 1e-6)."""
    low, high = median(before), median(after)
    inside = fmean([abs(x - low) for x in before] + [abs(x - high) for x in after])
    return (high - low) / max(inside, 0.01 * abs(low), 1e-6)


def js_distance(counts: Sequence[float], ruler: Sequence[float]) -> float:
    """Jensen-Shannon distance in base 2: 0 for equal mixes, 1 for disjoint ones (Lin 1991; its square root)."""
    if len(counts) != len(ruler):
        raise ConfigError(f"The source ruler has {len(ruler)} bins, the step {len(counts)}: build the ruler again.")
    held = [(a, b) for a, b in zip(counts, ruler, strict=True) if a or b]
    p, q = ([n / sum(mix) for n in mix] for mix in zip(*held, strict=True))
    halves = [(a, b, (a + b) / 2) for a, b in zip(p, q, strict=True)]
    divergence = sum(_term(a, m) + _term(b, m) for a, b, m in halves) / 2
    return math.sqrt(max(divergence, 0.0))


def _term(share: float, middle: float) -> float:
    return share * math.log2(share / middle) if share > 0 else 0.0


def _added(totals: Sequence[float], counts: Sequence[float]) -> list[float]:
    return [float(a + b) for a, b in zip(totals or [0.0] * len(counts), counts, strict=True)]
