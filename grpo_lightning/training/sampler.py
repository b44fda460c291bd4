"""Which prompts make which batch, on which rank.

The order of an epoch is a function of (seed, epoch) alone, so the position in the data is two numbers: the epoch, and
how many of its yields were used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from grpo_lightning.errors import ConfigError

__all__ = ["PromptSampler", "Slot", "check_order_seed", "sequential_shares"]

Order = np.ndarray[Any, np.dtype[np.int64]]

_WINDOW_BATCHES = 16  # batches whose prompts are sorted by length together
_FIXED = ("seed", "rows", "prompts_per_step", "bucket", "updates_per_batch")  # what a position means depends on


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One rank's share of one batch, and whether further updates on it follow."""

    epoch: int
    index: int  # of the batch in its epoch
    repeat: int  # of the update on this batch
    final: bool
    rows: tuple[int, ...]


class PromptSampler:
    """Batches of prompts of similar length, reshuffled each epoch and split disjointly over the ranks.

    N rows make ceil(N / prompts_per_step) batches whose sizes differ by at most one: no batch is a small rest. Every
    batch is yielded `updates_per_batch` times in a row. With so few rows that a rank would go without, there are fewer
    and larger batches.

    Args:
        lengths: prompt lengths in tokens, one a row.
        prompts_per_step: prompts of a batch over all ranks.
        seed: of the order.
        bucket: group prompts of similar length.
        rank: this rank.
        world_size: ranks.
        updates_per_batch: how often each batch is yielded.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        prompts_per_step: int,
        seed: int = 0,
        bucket: bool = True,
        rank: int = 0,
        world_size: int = 1,
        updates_per_batch: int = 1,
    ) -> None:
        if prompts_per_step < world_size:
            raise ConfigError(
                f"data.prompts_per_step is {prompts_per_step} for {world_size} ranks: give one each or more."
            )
        if len(lengths) < world_size:
            raise ConfigError(f"The dataset has {len(lengths)} rows for {world_size} ranks: each needs at least one.")
        check_order_seed(seed)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.rows, self.prompts_per_step = len(lengths), prompts_per_step
        self.batches = _batch_count(len(lengths), prompts_per_step, world_size)
        self.seed, self.bucket = seed, bucket
        self.rank, self.world_size = rank, world_size
        self.updates_per_batch = updates_per_batch
        self.epoch = 0
        self.done = 0  # yields of this epoch that were used

    def __len__(self) -> int:
        """Yields of a whole epoch."""
        return self.batches * self.updates_per_batch

    def order(self, epoch: int) -> list[Order]:
        """The batches of an epoch over all ranks: row numbers, a function of seed and epoch alone."""
        generator = np.random.default_rng([self.seed, epoch])
        batches = np.array_split(generator.permutation(self.rows), self.batches)
        if not self.bucket:
            return batches
        windows = _near_equal(batches, ceil(self.batches / _WINDOW_BATCHES))
        bucketed = [batch for window in windows for batch in self._by_length(window)]
        return [bucketed[i] for i in generator.permutation(self.batches)]

    def _by_length(self, window: list[Order]) -> list[Order]:
        """The rows of these batches, dealt out anew so that each batch holds neighbours in length."""
        rows = np.concatenate(window)
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        return np.split(rows, np.cumsum([len(batch) for batch in window])[:-1])

    def share(self, batch: Order) -> tuple[int, ...]:
        """This rank's rows of a batch: disjoint, at most one row more or less than another's, and as long in tokens."""
        return _share(batch, self.rank, self.world_size)

    def __iter__(self) -> Iterator[Slot]:
        """The rest of the current epoch, from the position on."""
        epoch, order = self.epoch, self.order(self.epoch)
        for place in range(self.done, len(self)):
            index, repeat = divmod(place, self.updates_per_batch)
            yield Slot(
                epoch=epoch,
                index=index,
                repeat=repeat,
                final=repeat + 1 == self.updates_per_batch,
                rows=self.share(order[index]),
            )

    def mark_consumed(self, epoch: int, index: int, *, final: bool) -> None:
        """One yield was used. What is prefetched and not used moves nothing."""
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0
        first = index * self.updates_per_batch
        self.done = first + self.updates_per_batch if final else max(self.done, first) + 1
        if self.done >= len(self):
            self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The position and what gives it its meaning, plain integers."""
        return {name: int(getattr(self, name)) for name in _FIXED} | {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int], *, other_rows: bool = False) -> None:
        """Continue at a saved position; where the rows were changed on purpose, at the next epoch."""
        own = self.state_dict()
        changed = [name for name in _FIXED if state[name] != own[name]]
        if changed == ["rows"] and other_rows:
            self.epoch, self.done = state["epoch"] + 1, 0
            return
        for name in changed:
            hint = " or say --accept_drift '[data]' --note 'why'," if name == "rows" else ""
            raise ConfigError(
                f"The checkpoint was written with {name} {state[name]} in its data and this run has {own[name]}: "
                f"resume with the same,{hint} or start a new run."
            )
        self.epoch, self.done = state["epoch"], state["done"]


def check_order_seed(seed: int) -> None:
    """Raise where no order can be drawn from a seed."""
    if seed < 0:
        raise ConfigError(f"data.seed is {seed}: give 0 or more.")


def sequential_shares(rows: int, *, per_rank: int, rank: int, world_size: int) -> list[tuple[int, ...]]:
    """One rank's batches of rows 0..rows-1 in order, about `per_rank` rows each.

    Over all ranks every row appears exactly once, and all ranks have the same number of batches, none empty, so that a
    collective inside a batch can't hang.
    """
    if rows < world_size:
        raise ConfigError(f"data.val has {rows} rows for {world_size} ranks: each needs at least one.")
    count = _batch_count(rows, per_rank * world_size, world_size)
    return [_share(batch, rank, world_size) for batch in np.array_split(np.arange(rows), count)]


def _batch_count(rows: int, per_batch: int, world_size: int) -> int:
    """As many batches as hold `per_batch` rows at most, and no more than leave every rank a row of each."""
    return min(ceil(rows / per_batch), rows // world_size)


def _share(batch: Order, rank: int, world_size: int) -> tuple[int, ...]:
    return tuple(int(row) for row in batch[rank::world_size])


def _near_equal(batches: list[Order], parts: int) -> list[list[Order]]:
    """The batches in `parts` runs whose lengths differ by at most one."""
    return [[batches[i] for i in run] for run in np.array_split(np.arange(len(batches)), parts)]
