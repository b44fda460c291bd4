"""Which prompts make which batch, on which rank.

The order of an epoch is a function of (seed, epoch) alone, so the position in the data is three numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from grpo_lightning.errors import ConfigError

__all__ = ["PromptSampler", "Slot"]

_WINDOW_BATCHES = 16  # batches whose prompts are sorted by length together


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
    batch is yielded `updates_per_batch` times in a row.

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
            raise ConfigError(f"data.prompts_per_step is {prompts_per_step} for {world_size} ranks: give each at least one.")
        if len(lengths) < world_size:
            raise ConfigError(f"The dataset has {len(lengths)} rows for {world_size} ranks: each needs at least one.")
        self.lengths = np.asarray(lengths)
        self.batches = min(ceil(len(lengths) / prompts_per_step), len(lengths) // world_size)
        self.seed, self.bucket = seed, bucket
        self.rank, self.world_size = rank, world_size
        self.updates_per_batch = updates_per_batch
        self.epoch = 0
        self.done = 0  # yields of this epoch that were used

    def __len__(self) -> int:
        """Yields of a whole epoch."""
        return self.batches * self.updates_per_batch

    def order(self, epoch: int) -> list[np.ndarray[Any, Any]]:
        """The batches of an epoch over all ranks: row numbers, a function of seed and epoch alone."""
        generator = np.random.default_rng([self.seed, epoch])
        rows = generator.permutation(len(self.lengths))
        if not self.bucket:
            return np.array_split(rows, self.batches)
        window = ceil(len(rows) / ceil(self.batches / _WINDOW_BATCHES))
        parts = [rows[i : i + window] for i in range(0, len(rows), window)]
        by_length = [part[np.argsort(self.lengths[part], kind="stable")] for part in parts]
        batches = np.array_split(np.concatenate(by_length), self.batches)
        return [batches[i] for i in generator.permutation(self.batches)]

    def share(self, batch: np.ndarray[Any, Any]) -> tuple[int, ...]:
        """This rank's rows of a batch; the ranks' shares are disjoint and differ by at most one row."""
        return tuple(int(i) for i in np.array_split(batch, self.world_size)[self.rank])

    def __iter__(self) -> Iterator[Slot]:
        """The rest of the current epoch, from the position on."""
        order = self.order(self.epoch)
        for place in range(self.done, len(self)):
            index, repeat = divmod(place, self.updates_per_batch)
            yield Slot(
                epoch=self.epoch,
                index=index,
                repeat=repeat,
                final=repeat + 1 == self.updates_per_batch,
                rows=self.share(order[index]),
            )

    def mark_consumed(self, epoch: int, index: int, *, final: bool) -> None:
        """One yield was used. What is prefetched and not used moves nothing."""
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0
        self.done = (index + 1) * self.updates_per_batch if final else self.done + 1
        if self.done >= len(self):
            self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The position, plain integers."""
        return {"seed": self.seed, "epoch": self.epoch, "done": self.done, "updates_per_batch": self.updates_per_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a saved position."""
        for name in ("seed", "updates_per_batch"):
            if state[name] != getattr(self, name):
                raise ConfigError(
                    f"The checkpoint's {name} is {state[name]} and this run's is {getattr(self, name)}: resume with the same."
                )
        self.epoch, self.done = state["epoch"], state["done"]
