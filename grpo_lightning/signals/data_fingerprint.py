"""Data fingerprint: what the prompts of a step are, whether any come twice, and whether the ranks get equal shares."""

from __future__ import annotations

import zlib
from collections import Counter

import torch
from torch import Tensor

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals.hashing import finish_hash, place_factors
from grpo_lightning.signals.partials import Merged, Partials, Vector
from grpo_lightning.signals.view import StepView

__all__ = ["SOURCE_BINS", "collect", "derive", "prompt_hashes"]

SOURCE_BINS = 64  # sources are counted by a hash of their name: two in one bin count as one source


def collect(p: Partials, v: StepView) -> None:
    """Lengths and hashes of prompts, hashes of rows, and the mix of sources."""
    record = v.record
    p.moments("prompt_length", v.prompt_lengths_P)
    p.sketch("prompt_length", v.prompt_lengths_P)
    p.samples(["prompts", "rows"], finish_hash(torch.stack([prompt_hashes(record), _row_hashes(record)])))
    p.vector("sources", _source_counts(record.sources).to(record.row_ids_P.device))


def derive(m: Merged, record: StepRecord, by_rank: list[Merged]) -> dict[str, float | None]:
    """The family's signals; None where not measured. `by_rank`: each rank's own partials."""
    out: dict[str, float | None] = {
        "duplicate_prompt_fraction": _duplicates(m.samples["prompts"]),
        "rank_overlap_fraction": _overlap(m.samples["rows"]),
        "rank_advantage_gap": _gap(by_rank),
    }
    lengths = m.moments["prompt_length"]
    if lengths.count:
        out |= lengths.signals("prompt_length", std="spread")
        out["prompt_length_p95"] = m.sketch("prompt_length").quantiles([0.95])[0]
        out["prompt_tokens_total"] = lengths.mean * lengths.count
    return out


def prompt_hashes(record: StepRecord) -> Tensor:
    """A hash of each left-padded prompt that its padding does not change, int64 [P]."""
    ids_PS, mask_PS = record.rollouts.prompt_ids_PS, record.rollouts.prompt_mask_PS
    from_end_PS = ((ids_PS + 1) * mask_PS).flip(-1)
    return (from_end_PS * place_factors(ids_PS.shape[1], ids_PS.device)).sum(-1)


def _row_hashes(record: StepRecord) -> Tensor:
    return (record.row_ids_P + 1) * place_factors(1, record.row_ids_P.device)


def _source_counts(sources: list[str]) -> Tensor:
    counts = [0.0] * SOURCE_BINS
    for source, count in Counter(s for s in sources if s).items():
        counts[zlib.crc32(source.encode()) % SOURCE_BINS] += count
    return torch.tensor(counts, dtype=torch.float64)


def _duplicates(ranks: list[Vector]) -> float | None:
    """1 - distinct / all prompts, by their tokens."""
    every = [value for rank in ranks for value in rank.tolist()]
    return 1.0 - len(set(every)) / len(every) if every else None


def _overlap(ranks: list[Vector]) -> float | None:
    """Rows on more than one rank, of all rows; None with one rank."""
    if len(ranks) < 2:
        return None
    holders = Counter(value for rank in ranks for value in set(rank.tolist()))
    return sum(n > 1 for n in holders.values()) / len(holders) if holders else None


def _gap(by_rank: list[Merged]) -> float | None:
    """Greatest less least rank's mean abs(advantage): the plain mean is 0 on every rank by construction."""
    found = [value for m in by_rank if (value := m.ratio("advantage_size")) is not None]
    return max(found) - min(found) if len(found) > 1 else None
