"""Policy: distance to the reference and to the sampler, entropy, ratios and clipping, over tokens.

Tokens are taken a part of the groups at a time, so that what is held for a moment does not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from grpo_lightning.objective import StepRecord, clamped, clip_binds, importance_ratio, kl_k1, kl_k2, kl_k3
from grpo_lightning.signals.partials import Merged, Partials, finite
from grpo_lightning.signals.sketch import sketches
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
    parts = [_part(v, groups) for groups in _splits(v.record)]
    sums, counts, maxima, broken, entropies = (torch.stack(list(same)) for same in zip(*parts, strict=True))
    for name, total, count in zip(_MEANS, sums.sum(0).unbind(), counts.sum(0).unbind(), strict=True):
        p.ratio(name, total, count)
    for name, value in zip(_MAXIMA, maxima.amax(0).unbind(), strict=True):
        p.greatest(name, value)
    for source, (count, measured) in zip(_SOURCES, broken.sum(0).unbind(), strict=True):
        p.ratio(f"nonfinite_count_{source}", count, measured)
    p.vector("entropy", entropies.sum(0))


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


def _part(v: StepView, groups: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Totals, counts and extremes of the rows, counts of values that are not finite, and the entropies' histogram."""
    record = v.record
    places = record.rollouts.completion_mask_PGL[groups].flatten().nonzero().squeeze(1)
    given = (
        record.logprobs_PGL,
        record.old_logprobs_PGL,
        record.ref_logprobs_PGL,
        record.entropies_PGL,
        record.rollouts.sampler_logprobs_PGL,
    )
    tokens = [None if t is None else _at(t[groups], places).float() for t in given]
    rows = _rows(v, groups, places, tokens)
    greatest = rows[: len(_MAXIMA)].nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    return (
        rows.nan_to_num(0.0, 0.0, 0.0).sum(1, dtype=torch.float64),
        finite(rows).sum(1),
        greatest.amax(1) if rows.shape[1] else rows.new_full((len(_MAXIMA),), -torch.inf),
        _broken(tokens, same_old=record.old_logprobs_PGL is record.logprobs_PGL),
        sketches([(rows[_MEANS.index("entropy")], False)])[0],
    )


def _at(values_PGL: Tensor, places: Tensor) -> Tensor:
    return values_PGL.flatten().index_select(0, places)


def _rows(v: StepView, groups: slice, places: Tensor, tokens: list[Tensor | None]) -> Tensor:
    """Each of `_MEANS` for every completion token, float32; NaN where it has no value."""
    new, old, ref, entropies, sampler = tokens
    assert new is not None and old is not None and sampler is not None  # noqa: PT018 - never optional
    absent = torch.full_like(new, torch.nan)
    ratio, low, high = _clipping(v.record, groups, places)
    of_loss = torch.stack([ratio, *_reference_rows(new, ref, absent), low, high])
    of_loss.masked_fill_(~_at(v.record.loss_mask_PGL[groups], places), torch.nan)
    ratio, kl, kl_k1_, kl_k2_, clamps, low, high = of_loss.unbind()
    rollouts = places // max(v.record.loss_mask_PGL.shape[-1], 1)
    marks = [~_at(flags_PG[groups], rollouts) for flags_PG in (v.correct_PG, v.wrong_PG)]
    by_marks = [new.masked_fill(other, torch.nan) for other in marks]
    entropy, k1 = absent if entropies is None else entropies, sampler - old
    return torch.stack([ratio, kl, k1.abs(), kl_k1_, kl_k2_, clamps, low, high, entropy, k1, *by_marks])


def _reference_rows(new: Tensor, ref: Tensor | None, absent: Tensor) -> list[Tensor]:
    """k3, k1, k2 and whether k3 was clamped."""
    if ref is None:
        return [absent] * 4
    k1 = kl_k1(new, ref)
    return [kl_k3(new, ref), k1, kl_k2(new, ref), torch.where(finite(k1), clamped(new, ref).float(), torch.nan)]


def _clipping(record: StepRecord, groups: slice, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ratios and where the clip binds, for the completion tokens; NaN where the ratio is."""
    new, old, mask_PGL = record.logprobs_PGL[groups], record.old_logprobs_PGL[groups], record.loss_mask_PGL[groups]
    level: Literal["token", "sequence"] = "sequence" if record.importance_level == "sequence" else "token"
    ratio = importance_ratio(new, old, mask_PGL, level)
    low, high = clip_binds(ratio, record.advantages_PG[groups], mask_PGL, record.clip_low, record.clip_high)
    ratio = _at(ratio.expand_as(new), places).float()
    nothing = ratio - ratio  # 0, or NaN
    return ratio, _at(low, places) + nothing, _at(high, places) + nothing


def _broken(tokens: list[Tensor | None], *, same_old: bool) -> Tensor:
    """For each source, values that are not finite and values in all, [5, 2]. Old log-probs that are the new ones: none."""
    given = [t for i, t in enumerate(tokens) if t is not None and not (same_old and i == 1)]
    places = [i for i, t in enumerate(tokens) if t is not None and not (same_old and i == 1)]
    counts = torch.zeros(len(tokens), 2, dtype=torch.int64, device=given[0].device)
    counts[places, 0] = (~finite(torch.stack(given))).sum(1)
    counts[places, 1] = given[0].numel()
    return counts
