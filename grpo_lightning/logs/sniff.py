"""Which format a log has, by its content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from grpo_lightning.errors import DataError
from grpo_lightning.logs.console import VERL_LINE, dict_rows, nemo_rows, verl_rows
from grpo_lightning.logs.documents import json_rows, line_rows, notebook_rows
from grpo_lightning.logs.names import STEP_KEYS, knows
from grpo_lightning.logs.numbers import parse_dict
from grpo_lightning.logs.records import Row, Tally
from grpo_lightning.logs.source import Source
from grpo_lightning.logs.tabular import csv_rows, delimiter_of

__all__ = ["FORMATS", "rows_of", "sniff"]

Reader = Callable[[Source, Tally, "int | None"], Iterator[Row]]


def _by_lines(read: Callable[[Iterator[str], Tally], Iterator[Row]]) -> Reader:
    return lambda source, tally, run: read(source.lines(tally), tally)


_READERS: dict[str, Reader] = {
    "trl-console": _by_lines(dict_rows),
    "openrlhf": _by_lines(dict_rows),
    "verl-console": _by_lines(verl_rows),
    "nemo-rl": _by_lines(nemo_rows),
    "trainer-state": lambda source, tally, run: json_rows(source, tally, history=True),
    "json": lambda source, tally, run: json_rows(source, tally, history=False),
    "wandb-json": lambda source, tally, run: _json_or_lines(source, tally),
    "jsonl": _by_lines(line_rows),
    "swift-jsonl": _by_lines(line_rows),
    "verl-jsonl": _by_lines(line_rows),
    "notebook": lambda source, tally, run: notebook_rows(source, tally),
    "csv": lambda source, tally, run: csv_rows(source.lines(tally), tally, run=run),
    "wandb-csv": lambda source, tally, run: csv_rows(source.lines(tally), tally, run=run),
}
FORMATS: tuple[str, ...] = tuple(_READERS)
_OPENRLHF = re.compile(r"[Gg]lobal step \d+: \{")
_NEMO = re.compile(r"={5,} Step \d+(?:/\d+)? ={5,}")
_LINES = (("verl-console", VERL_LINE), ("openrlhf", _OPENRLHF), ("nemo-rl", _NEMO))


def rows_of(source: Source, format: str, tally: Tally, run: int | None = None) -> Iterator[Row]:
    """The rows of a log in a format."""
    if format not in _READERS:
        raise DataError(f"{format!r} is not a log format: choose one of {', '.join(FORMATS)}.")
    return _READERS[format](source, tally, run)


def sniff(source: Source) -> str:
    """The format of a log, or DataError where nothing in it looks like one."""
    head = source.head.lstrip("\ufeff \t\r\n")
    if head.startswith("SQLite format 3"):
        raise DataError(f"{source.path} is a database, not a log: give the run's directory.")
    found = _of_json(head) or _of_table(source) or _of_lines(source)
    if found is None:
        raise DataError(
            f"{source.path} is not a log that can be read: it holds no step, dict or table of a trainer's metrics. "
            f"Where it does, name the format: {', '.join(FORMATS)}."
        )
    return found


def _of_json(head: str) -> str | None:
    if not re.match(r"\{\s*\"|\[\s*\{\s*\"|\{\s*\}", head):
        return None
    first = head.split("\n", 1)[0]
    values = parse_dict(first) if len(first) < len(head) or len(head) < 100_000 else None
    if values is not None and not ({"log_history", "cells", "history"} & values.keys()):
        return _of_object(values)
    if '"log_history"' in head:
        return "trainer-state"
    if '"cell_type"' in head or '"nbformat"' in head:
        return "notebook"
    if head.startswith("{") and re.match(r"\{[^{}\[\]\n]*\}", first):  # a first line that is cut or joined
        return "jsonl"
    return "wandb-json" if '"_step"' in head else "json"


def _of_object(values: dict[str, Any]) -> str:
    if "global_step/max_steps" in values:
        return "swift-jsonl"
    if isinstance(values.get("data"), dict) and "step" in values:
        return "verl-jsonl"
    return "wandb-json" if "_step" in values else "jsonl"


def _of_table(source: Source) -> str | None:
    head = next(source.lines(Tally()), "")
    if "{" in head or len(head) > 1_000_000:
        return None
    columns = [name.strip().strip('"') for name in head.split(delimiter_of(head))]
    names = [name.rpartition(" - ")[2] for name in columns]
    known = [name for name in names if knows(name)]
    if len(columns) < 2 or not known or (len(known) == 1 and known[0] not in STEP_KEYS and len(columns) > 6):
        return None
    exported = "_step" in names or any(name.startswith(("train/", "eval/")) for name in names) or names != columns
    return "wandb-csv" if exported else "csv"


def _of_lines(source: Source) -> str | None:
    for line in source.lines(Tally()):
        for name, sign in _LINES:
            if sign.search(line):
                return name
        if "{" in line and any(not row.mark for row in dict_rows([line], Tally())):
            return "trl-console"
    return None


def _json_or_lines(source: Source, tally: Tally) -> Iterator[Row]:
    """A W&B history as a list, under a key, or as lines."""
    head = source.head.lstrip("\ufeff \t\r\n")
    if parse_dict(head.split("\n", 1)[0]) is not None and not re.match(r"\{\s*\"(history|data|rows)\"", head):
        return line_rows(source.lines(tally), tally)
    return json_rows(source, tally, history=False)
