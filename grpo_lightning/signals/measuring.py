"""From a step's tensors to its signals.

`measure` gives one rank's partials; `finish` joins the ranks' packed vectors into numbers. The same data split over ranks
in any way gives the same signals, except `rank_overlap_fraction` and `rank_advantage_gap`, which are about the split.
Quantiles are up to 1/32 off, and the same whatever the split (see `sketch`). Not measured is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals import (
    advantage_shape,
    data_fingerprint,
    optimizer,
    overview,
    policy,
    responses,
    reward_structure,
)
from grpo_lightning.signals.partials import Merged, Partials, merge
from grpo_lightning.signals.update_norm import UpdateSize
from grpo_lightning.signals.view import view

__all__ = ["Joined", "finish", "join", "measure"]

_FAMILIES = (overview, reward_structure, policy, responses, optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A step over all ranks."""

    values: dict[str, float]  # the step's signals
    merged: Merged

    @property
    def sources(self) -> list[float]:
        """Prompts by source (hashed into bins), for `TemporalState.update`; all 0 without sources."""
        return [float(n) for n in self.merged.vectors["sources"].tolist()]

    def histogram(self, edges: Sequence[float]) -> list[float]:
        """Advantages between ascending `edges`; those beyond count at the ends."""
        return self.merged.sketch("advantage").histogram(edges)


@torch.inference_mode()
def measure(record: StepRecord, *, update: UpdateSize | None = None, tail: float = advantage_shape.TAIL) -> Partials:
    """This rank's partials; their layout depends on the configuration alone, also for a rank without groups.

    Args:
        record: the step on this rank.
        update: the size of its update, where that was measured.
        tail: advantages beyond it count in `advantage_tail_fraction`.
    """
    v = view(record)
    p = Partials(record.loss_mask_PGL.device)
    advantage_shape.collect(p, v, tail=tail)
    data_fingerprint.collect(p, v)
    for family in _FAMILIES:
        family.collect(p, v)
    optimizer.collect_update(p, update)
    return p


def finish(packs: Sequence[Tensor], own: Partials, record: StepRecord) -> dict[str, float]:
    """The step's signals from every rank's packed partials; see `join`."""
    return join(packs, own, record).values


def join(packs: Sequence[Tensor], own: Partials, record: StepRecord) -> Joined:
    """The step over all ranks, from every rank's packed partials.

    `own` and `record` are any rank's: they give the layout and what is one number for all ranks.
    """
    layout = own.layout()
    packs = [p.cpu() for p in packs] if len(packs) > 1 else packs
    merged = merge(packs, layout)
    by_rank = [merge([p], layout) for p in packs] if len(packs) > 1 else []
    found = advantage_shape.derive(merged, record) | data_fingerprint.derive(merged, record, by_rank)
    for family in _FAMILIES:
        found |= family.derive(merged, record)
    return Joined(values={name: value for name, value in found.items() if value is not None}, merged=merged)
