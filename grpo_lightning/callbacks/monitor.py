"""What of a step becomes numbers: this rank's partials, gathered, joined, and what needs the steps before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from grpo_lightning import signals
from grpo_lightning.objective.batch import StepRecord
from grpo_lightning.training import ranks

__all__ = ["StepMonitor", "holds_shards"]


class StepMonitor:
    """Measures steps. Every rank calls it alike; the main rank alone gets the numbers and remembers them."""

    def __init__(self) -> None:
        self.temporal = signals.TemporalState()
        self._norm = signals.UpdateNorm()
        self._updated: Sequence[Tensor] | None = None  # the weights that an update is being made on
        self._share = 1.0
        self._seconds = 0.0  # spent on monitoring since the last step's number

    def before_update(self, parameters: Sequence[Tensor], *, sharded: bool = False) -> None:
        """Remember the weights; not called when the update is skipped."""
        started = perf_counter()
        self._norm.before(parameters)
        self._updated, self._share = parameters, 1 / ranks.world_size() if sharded else 1.0
        self.spend(started)

    def measure(self, record: StepRecord, device: torch.device, *, main: bool) -> signals.Joined | None:
        """The step's signals, on the main rank.

        `monitor_seconds` is what was spent since the step before: on recording that one, and on measuring this one.
        """
        started = perf_counter()
        own = signals.measure(record, update=self._update_size(record))
        packs = ranks.all_gather_tensor(own.pack().to(device))
        metrics = ranks.all_gather_object(record.reward_metrics) if record.new_rollouts else []
        if not main:
            return None
        joined = signals.join(packs, own, record)
        joined.values.update({f"reward_metric/{name}": value for name, value in _means(metrics).items()})
        joined.values.update(self.temporal.update(joined.values, sources=joined.sources))
        self.spend(started)
        joined.values["monitor_seconds"], self._seconds = self._seconds, 0.0
        return joined

    def spend(self, started: float) -> None:
        """Count the time since `started` (of `perf_counter`) as monitoring."""
        self._seconds += perf_counter() - started

    def _update_size(self, record: StepRecord) -> signals.UpdateSize | None:
        if record.update_skipped:
            self._updated = None
            return signals.UpdateSize(update_squares=0.0, weight_squares=0.0)
        if self._updated is None:  # an optimizer that Lightning's hooks don't see
            return None
        updated, self._updated = self._updated, None
        return self._norm.after(updated, share=self._share)

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"temporal": self.temporal.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.temporal.load_state_dict(state["temporal"])


def _means(ranks_metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each name, the mean of the finite values that ranks have; NaN where a rank has it and none is finite."""
    given = {name: [m[name] for m in ranks_metrics if name in m] for m in ranks_metrics for name in m}
    kept = {name: [v for v in values if math.isfinite(v)] for name, values in given.items()}
    return {name: fmean(values) if values else math.nan for name, values in kept.items()}


def holds_shards(strategy: Any, parameters: Sequence[Tensor]) -> bool:
    """Whether a rank holds a part of the trained weights instead of a copy."""
    from lightning.pytorch.strategies import FSDPStrategy

    return isinstance(strategy, FSDPStrategy) or any(hasattr(p, "to_local") for p in parameters)
