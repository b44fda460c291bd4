"""Rows out of CSV: plain tables and W&B exports."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from typing import Any

from grpo_lightning.logs.numbers import number
from grpo_lightning.logs.records import Row, Tally

__all__ = ["csv_rows", "delimiter_of", "sparse"]

DELIMITERS = ",\t;|"
SPARSE = ("eval", "val", "train_")  # columns that hold a number on a few rows only: NaN is "no number" there


def csv_rows(lines: Iterable[str], tally: Tally, *, run: int | None = None) -> Iterator[Row]:
    """Rows of a table with a head. Of a W&B chart with several runs (``name - train/reward``), one: the first, or `run`."""
    lines = iter(lines)
    head_line = next(lines, "")
    delimiter = delimiter_of(head_line)
    head = _split(head_line, delimiter)
    wanted = _one_run(head, tally, run)
    reader = csv.reader(lines, delimiter=delimiter)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            tally.skip()
            continue
        if cells == head:  # two exports in one file
            continue
        if len(cells) != len(head):
            tally.skip()
        yield Row(sparse({name: cell for name, cell in zip(wanted, cells, strict=False) if name is not None}))


def delimiter_of(head: str) -> str:
    """The delimiter that splits a head into the most columns."""
    return max(DELIMITERS, key=lambda sign: (head.count(sign), sign == ","))


def sparse(cells: dict[str, Any]) -> dict[str, Any]:
    """Without empty cells, and without NaN in columns that are filled on a few rows only."""
    return {
        name: cell
        for name, cell in cells.items()
        if cell.strip() and not (name.startswith(SPARSE) and math.isnan(number(cell) or 0.0))
    }


def _split(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
    except (csv.Error, StopIteration):
        return []


def _one_run(head: list[str], tally: Tally, run: int | None) -> list[str | None]:
    """The columns' names with the run's name taken off; None for columns that are not read."""
    runs = list(dict.fromkeys(name.rpartition(" - ")[0] for name in head if " - " in name))
    if not runs:
        return list(head)
    chosen = runs[run - 1] if run is not None and 1 <= run <= len(runs) else runs[0]
    if len(runs) > 1:
        tally.note(
            f"{len(runs)} runs in this export: reading {chosen[:80]!r}, choose another with run=1 to {len(runs)}"
        )
    return [name if " - " not in name else _column(name, chosen) for name in head]


def _column(name: str, run: str) -> str | None:
    of, _, column = name.rpartition(" - ")
    return column if of == run and not column.endswith(("__MIN", "__MAX")) else None
