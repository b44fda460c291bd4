"""Policy: distance to the reference and to the sampler, entropy, ratios and clipping, over tokens.

Tokens are taken a part of the groups at a time, so that what is held for a moment does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.objective import StepRecord, clamped, clip_binds, importance_ratio, kl_k1, kl_k2, kl_k3
from grpo_lightning.signals.partials import Merged, Partials, finite
from grpo_lightning.signals.view import StepView

__all__ = ["collect", "derive"]

_PART_TOKENS = {"cpu": 2**18}  # at once, padding included
_PART_TOKENS_ELSEWHERE = 2**22

_MEANS = (
    "ratio_mean",  # the first three also give their greatest value
    "kl",
    "rollout_mismatch",
    "kl_k1",
    "kl_k2",
    "kl_clamped_fraction",
    "clip_low_fraction",
    "clip_high_fraction",
    "entropy",
    "rollout_mismatch_kl",
    "logprob_correct",
    "logprob_wrong",
)
_MAXIMA = ("ratio_max", "kl_max", "rollout_mismatch_max")
_SOURCES = ("logprobs", "old_logprobs", "ref_logprobs", "entropies", "sampler_logprobs")


def collect(p: Partials, v: StepView) -> None:
    """Means and extremes over tokens, the histogram of entropies, and values that are not finite."""
    parts = [_part(p, v, groups) for groups in _splits(v.record)]
    p.ratios(_MEANS, _joined(part.totals for part in parts), _joined(part.counts for part in parts))
    maxima = reduce(torch.maximum, (part.maxima for part in parts))
    for name, value in zip(_MAXIMA, maxima.unbind(), strict=True):
        p.greatest(name, value)
    broken = dict(zip(_given(v.record), _joined(part.broken for part in parts).unbind(), strict=True))
    tokens = sum(part.tokens for part in parts)
    for source in _SOURCES:
        p.ratio(f"nonfinite_count_{source}", broken.get(source, 0.0), float(tokens if source in broken else 0))


def _joined(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def derive(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """The family's signals; None where not measured."""
    out = {name: m.ratio(name) for name in _MEANS if name != "rollout_mismatch"}
    out |= {name: m.maxima.get(name) for name in _MAXIMA}
    out["kl_coef"] = record.kl_coef
    quantiles = m.sketch("entropy").quantiles([0.1])
    return out | ({"entropy_p10": quantiles[0]} if quantiles else {})


def _splits(record: StepRecord) -> Iterator[slice]:
    """The groups in parts of bounded size; one empty part for no groups."""
    groups, size, length = record.loss_mask_PGL.shape
    limit = _PART_TOKENS.get(record.loss_mask_PGL.device.type, _PART_TOKENS_ELSEWHERE)
    step = max(limit // max(size * length, 1), 1)
    for start in range(0, max(groups, 1), step):
        yield slice(start, start + step)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What the tokens of some groups add up to."""

    tokens: int
    totals: Tensor  # [12], of `_MEANS`
    counts: Tensor  # [12]
    maxima: Tensor  # [3]
    broken: Tensor  # values that are not finite, of each source given


def _given(record: StepRecord) -> dict[str, Tensor]:
    """The sources that there are; old log-probs that are the new ones are not counted twice."""
    same_old = record.old_logprobs_PGL is record.logprobs_PGL
    every = {
        "logprobs": record.logprobs_PGL,
        "old_logprobs": None if same_old else record.old_logprobs_PGL,
        "ref_logprobs": record.ref_logprobs_PGL,
        "entropies": record.entropies_PGL,
        "sampler_logprobs": record.rollouts.sampler_logprobs_PGL,
    }
    return {name: values for name, values in every.items() if values is not None}


def _part(p: Partials, v: StepView, groups: slice) -> _Part:
    record = v.record
    places = record.rollouts.completion_mask_PGL[groups].flatten().nonzero().squeeze(1)
    given = _given(record)
    tokens = torch.stack([t[groups].float() for t in given.values()]).flatten(1).index_select(1, places)
    rows = _rows(v, groups, places, dict(zip(given, tokens.unbind(), strict=True)))
    p.sketch("entropy", rows[_MEANS.index("entropy")])
    lost = ~finite(rows)
    greatest = rows[: len(_MAXIMA)].masked_fill(lost[: len(_MAXIMA)], -torch.inf)
    return _Part(
        tokens=len(places),
        totals=rows.masked_fill(lost, 0.0).sum(1, dtype=torch.float64),
        counts=len(places) - lost.sum(1),
        maxima=greatest.amax(1) if len(places) else rows.new_full((len(_MAXIMA),), -torch.inf),
        broken=(~finite(tokens)).sum(1),
    )


def _at(values_PGL: Tensor, places: Tensor) -> Tensor:
    return values_PGL.flatten().index_select(0, places)


def _rows(v: StepView, groups: slice, places: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    """Each of `_MEANS` for every completion token, float32; NaN where it has no value."""
    new = tokens["logprobs"]
    old = tokens.get("old_logprobs", new)
    absent = torch.full_like(new, torch.nan)
    ratio, low, high = _clipping(v.record, groups, places, new)
    of_loss = torch.stack([ratio, *_reference_rows(new, tokens.get("ref_logprobs"), absent), low, high])
    of_loss.masked_fill_(~_at(v.record.loss_mask_PGL[groups], places), torch.nan)
    ratio, kl, kl_k1_, kl_k2_, clamps, low, high = of_loss.unbind()
    rollouts = places // max(v.record.loss_mask_PGL.shape[-1], 1)
    marks_2PG = torch.stack([v.correct_PG[groups], v.wrong_PG[groups]])
    marks = ~marks_2PG.flatten(1).index_select(1, rollouts)
    by_marks = torch.stack([new, new]).masked_fill_(marks, torch.nan)
    entropy, k1 = tokens.get("entropies", absent), tokens["sampler_logprobs"] - old
    return torch.stack([ratio, kl, k1.abs(), kl_k1_, kl_k2_, clamps, low, high, entropy, k1, *by_marks.unbind()])


def _reference_rows(new: Tensor, ref: Tensor | None, absent: Tensor) -> list[Tensor]:
    """k3, k1, k2 and whether k3 was clamped; k3 has no value where a log-prob is infinite, though its clamp would give one."""
    if ref is None:
        return [absent] * 4
    k1 = kl_k1(new, ref)
    nothing = k1 - k1  # 0, or NaN
    return [kl_k3(new, ref) + nothing, k1, kl_k2(new, ref), clamped(new, ref) + nothing]


def _clipping(record: StepRecord, groups: slice, places: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ratios and where the clip binds, for the completion tokens; NaN where the ratio is."""
    if record.old_logprobs_PGL is record.logprobs_PGL and record.importance_level != "sequence":
        nothing = logprobs - logprobs  # the ratio is exactly 1, where no clip binds
        return nothing + 1.0, nothing, nothing
    new, old, mask_PGL = record.logprobs_PGL[groups], record.old_logprobs_PGL[groups], record.loss_mask_PGL[groups]
    level: Literal["token", "sequence"] = "sequence" if record.importance_level == "sequence" else "token"
    ratio = importance_ratio(new, old, mask_PGL, level)
    low, high = clip_binds(ratio, record.advantages_PG[groups], mask_PGL, record.clip_low, record.clip_high)
    ratio = _at(ratio.expand_as(new), places).float()
    nothing = ratio - ratio  # 0, or NaN
    return ratio, _at(low, places) + nothing, _at(high, places) + nothing
