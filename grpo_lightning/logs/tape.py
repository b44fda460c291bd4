"""Parsed rows kept compactly, so that a log is parsed once; past a budget they are parsed again instead."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from grpo_lightning.logs.records import Kind, Parsed

__all__ = ["Tape"]

BUDGET_BYTES = 64 << 20
ROW_BYTES = 200  # a row's own cost beside its numbers
_NOWHERE = (float("nan"),) * 3


class Tape:
    """Rows in the order they were put in. `full` once they no longer fit: then it holds none."""

    def __init__(self, budget: int = BUDGET_BYTES) -> None:
        self.full = False
        self._left = budget
        self._layouts: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._rows: list[tuple[Kind, int | None, int | None, int | None, tuple[str, ...], bytes]] = []

    def append(self, row: Parsed) -> None:
        """Keeps a row, without its place and its bar's total."""
        if self.full:
            return
        names = tuple(row.values)
        names = self._layouts.setdefault(names, names)
        self._rows.append((row.kind, row.step, row.bar, row.after, names, array("d", row.values.values()).tobytes()))
        self._left -= ROW_BYTES + 8 * len(names)
        if self._left < 0 or len(self._layouts) > 10_000:
            self.full = True
            self._rows.clear()

    def __iter__(self) -> Iterator[Parsed]:
        """The rows again."""
        for kind, step, bar, after, names, data in self._rows:
            numbers = array("d")
            numbers.frombytes(data)
            yield Parsed(kind, step, bar, None, after, _NOWHERE, dict(zip(names, numbers, strict=True)))
