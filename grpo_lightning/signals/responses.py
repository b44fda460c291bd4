"""Responses: how long they are, how they end and how much they repeat themselves and each other."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals.hashing import place_factors, prefix_hashes
from grpo_lightning.signals.partials import Merged, Partials
from grpo_lightning.signals.view import StepView

__all__ = ["NGRAM", "collect", "derive", "distinct", "ngram_repetition", "prefix_overlap"]

NGRAM = 4
_POSITIVE = 2**63 - 1
_DIRECT = 2**15  # comparisons that cost less than the calls they save
_SHARES = (
    "reward_conflict_fraction",
    "truncated_fraction",
    "empty_fraction",
    "response_length_correct",
    "response_length_wrong",
)
_MEANS = ("ngram_repetition", "prefix_repetition", "distinct_response_fraction")


def collect(p: Partials, v: StepView) -> None:
    """Lengths, ends and repetition."""
    rollouts, lengths_PG = v.record.rollouts, v.lengths_PG
    ended_PG = rollouts.terminated_PG
    p.moments("response_length", lengths_PG)
    p.ratio("truncated_fraction", ~ended_PG, v.rollouts)
    p.ratio("empty_fraction", (lengths_PG <= 1) & ended_PG, v.rollouts)
    p.ratio("response_length_correct", lengths_PG * v.correct_PG, v.correct_PG)
    p.ratio("response_length_wrong", lengths_PG * v.wrong_PG, v.wrong_PG)
    hashes_PGL = prefix_hashes(rollouts.completion_ids_PGL)
    p.moments("ngram_repetition", ngram_repetition(rollouts.completion_ids_PGL, lengths_PG))
    p.moments("prefix_repetition", prefix_overlap(hashes_PGL, lengths_PG))
    ordered_PG, order_PG = _whole(hashes_PGL, lengths_PG).sort(dim=-1, stable=True)
    same = ordered_PG[:, 1:] == ordered_PG[:, :-1]
    p.moments("distinct_response_fraction", 1.0 - same.sum(-1).double() / ordered_PG.shape[1])
    p.ratio("reward_conflict_fraction", same & _rewards_differ(v, order_PG), same)


def derive(m: Merged, record: StepRecord) -> dict[str, float | None]:
    """The family's signals; None where not measured."""
    out = {name: m.ratio(name) for name in _SHARES} | {name: m.mean(name) for name in _MEANS}
    return out | m.moments["response_length"].signals("response_length")


def ngram_repetition(ids_PGL: Tensor, lengths_PG: Tensor, n: int = NGRAM) -> Tensor:
    """1 - distinct / total n-grams of each completion, float64 [P, G]; NaN where it is shorter than n."""
    total_PG = (lengths_PG - n + 1).clamp(min=0)
    if ids_PGL.shape[-1] < n:
        return torch.full_like(lengths_PG, torch.nan, dtype=torch.float64)
    windows = ids_PGL.unfold(-1, n, 1) + 1
    hashes_PGN = (windows * place_factors(n, ids_PGL.device)).sum(-1) & _POSITIVE
    count = hashes_PGN.shape[-1]
    held = torch.arange(count, device=ids_PGL.device) < total_PG.unsqueeze(-1)
    share_PG = distinct(hashes_PGN, held) / total_PG.double()
    return (1.0 - share_PG).masked_fill_(total_PG == 0, torch.nan)


def distinct(hashes: Tensor, held: Tensor) -> Tensor:
    """How many different hashes (0 or above) there are along the last dimension where `held`."""
    ordered = torch.where(held, hashes, -1).sort(-1).values
    fresh = ordered[..., 1:] != ordered[..., :-1]
    first = ordered[..., 0] >= 0
    return (fresh & (ordered[..., 1:] >= 0)).sum(-1) + first


def prefix_overlap(hashes_PGL: Tensor, lengths_PG: Tensor) -> Tensor:
    """Mean over the pairs of a group of their longest common prefix, over the group's mean length, float64 [P].

    Every prefix of every pair is compared where they are few, which is fewer operations; else by bisection.
    """
    groups, size, length = hashes_PGL.shape
    if size < 2 or not groups:
        return torch.full((groups,), torch.nan, dtype=torch.float64, device=hashes_PGL.device)
    direct = groups * size * size * length <= _DIRECT
    shared_P = (_shared_directly if direct else _shared_by_bisection)(hashes_PGL, lengths_PG)
    return shared_P / lengths_PG.double().mean(1)


def _shared_directly(hashes_PGL: Tensor, lengths_PG: Tensor) -> Tensor:
    """The pairs' mean number of common prefixes: each pair counted from both sides, and each completion with itself."""
    size, length = hashes_PGL.shape[1:]
    within_PGL = torch.arange(length, device=hashes_PGL.device) < lengths_PG.unsqueeze(-1)
    equal_PGGL = hashes_PGL.unsqueeze(2) == hashes_PGL.unsqueeze(1)
    equal_PGGL &= within_PGL.unsqueeze(2)
    equal_PGGL &= within_PGL.unsqueeze(1)
    return (equal_PGGL.sum((1, 2, 3)) - lengths_PG.sum(1)).double() / (size * (size - 1))


def _shared_by_bisection(hashes_PGL: Tensor, lengths_PG: Tensor) -> Tensor:
    """The pairs' mean longest common prefix: equal up to a length means equal at every shorter one."""
    groups, size, length = hashes_PGL.shape
    steps = length.bit_length()
    flat_PX = _padded(hashes_PGL, lengths_PG, 2**steps).flatten(1)
    i, j = torch.triu_indices(size, size, 1, device=hashes_PGL.device) << steps
    start = i.expand(groups, -1)
    at, apart = start, (j - i).expand(groups, -1)
    for step in (2**k for k in reversed(range(steps))):
        trial = at + step
        equal = flat_PX.gather(1, trial) == flat_PX.gather(1, trial + apart)
        at = torch.where(equal, trial, at)
    shared_P: Tensor = (at - start).double().mean(1)
    return shared_P


def _padded(hashes_PGL: Tensor, lengths_PG: Tensor, width: int) -> Tensor:
    """Hashes of the prefixes of 0, 1, … width - 1 tokens; beyond its end each completion has numbers of its own."""
    size, length = hashes_PGL.shape[1:]
    own_G1 = torch.arange(size, device=hashes_PGL.device).unsqueeze(-1)
    ended = torch.arange(1, length + 1, device=hashes_PGL.device) > lengths_PG.unsqueeze(-1)
    out = own_G1.repeat(len(hashes_PGL), 1, width)
    out[..., 1 : length + 1] = torch.where(ended, own_G1, hashes_PGL)
    out[..., 0] = 0
    return out


def _whole(hashes_PGL: Tensor, lengths_PG: Tensor) -> Tensor:
    """A number for each whole completion [P, G]; equal ones have equal numbers."""
    from_none_PGL = torch.nn.functional.pad(hashes_PGL, (1, 0))
    return from_none_PGL.gather(-1, lengths_PG.unsqueeze(-1)).squeeze(-1) + lengths_PG


def _rewards_differ(v: StepView, order_PG: Tensor) -> Tensor:
    """Whether neighbours in an order have rewards that differ, by more than rounding; missing ones don't [P, G - 1]."""
    rewards_PG = v.rewards_PG.gather(1, order_PG)
    before, after = rewards_PG[:, :-1], rewards_PG[:, 1:]
    return (after - before).abs() > 1e-5 * (after.abs() + before.abs()).clamp(min=1e-3)
