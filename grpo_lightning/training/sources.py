"""Rows of prompts from files, datasets and generators, through the `datasets` library."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grpo_lightning import shipped
from grpo_lightning.errors import DataError

__all__ = ["Rows", "load_rows", "require_column"]

Rows = list[dict[str, Any]]
HUB, GYM = "hf:", "reasoning_gym:"


def load_rows(source: str, *, limit: int | None = None, **settings: Any) -> Rows:
    """All rows of `source`, as dicts.

    `source` is a .jsonl, .json, .parquet or .csv file, a folder saved by `datasets`, ``hf:name[:split]``, or
    ``reasoning_gym:task`` whose generator takes `settings`.
    """
    if source.startswith(GYM):
        rows = _gym(source.removeprefix(GYM), settings)
    elif source.startswith(HUB):
        rows = _hub(source.removeprefix(HUB))
    else:
        rows = _file(shipped.expand(source))
    if not rows:
        raise DataError(f"{source!r} is empty: it needs at least one row.")
    return rows[:limit] if limit is not None else rows


def require_column(rows: Rows, column: str, source: str) -> None:
    """Raise when the rows have no such column."""
    names = sorted(rows[0])
    if column in rows[0]:
        return
    near = get_close_matches(column, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(f"{source!r} has no column {column!r}: {hint}Its columns are {', '.join(names)}.")


def _file(path: str) -> Rows:
    where = Path(path)
    if where.is_dir():
        return _saved(where)
    if not where.is_file():
        raise DataError(f"The data file {path!r} does not exist: give a .jsonl, .json, .parquet or .csv file, a folder "
                        f"saved by `datasets`, {HUB}name or {GYM}task.")  # fmt: skip
    readers: dict[str, Callable[[Path], Rows]] = {
        ".jsonl": _jsonl,
        ".json": _json,
        ".parquet": _table,
        ".csv": _table,
    }
    reader = readers.get(where.suffix.lower())
    if reader is None:
        raise DataError(f"{path!r} ends in {where.suffix!r}: give a file ending in {', '.join(readers)}.")
    return reader(where)


def _jsonl(path: Path) -> Rows:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_row(line, f"line {number} of {str(path)!r}"))
    return rows


def _row(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error.msg}): each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}: each line must be one JSON object.")
    return row


def _json(path: Path) -> Rows:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{str(path)!r} is not JSON ({error.msg}, line {error.lineno}).") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise DataError(f"{str(path)!r} must be a JSON list of objects.")
    return rows


def _table(path: Path) -> Rows:
    from datasets import Dataset

    try:
        read = Dataset.from_parquet if path.suffix.lower() == ".parquet" else Dataset.from_csv
        table: Rows = read(str(path), keep_in_memory=True).to_list()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if path.stat().st_size == 0:
            return []
        raise DataError(f"{str(path)!r} can't be read ({reason}).") from error
    return table


def _saved(path: Path) -> Rows:
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(f"The folder {str(path)!r} holds no dataset saved by `datasets`: give one, or a file.") from error
    if not isinstance(found, Dataset):
        raise DataError(f"{str(path)!r} holds the splits {', '.join(found)}: give the folder of one of them.")
    rows: Rows = found.to_list()
    return rows


def _hub(name: str) -> Rows:
    from datasets import load_dataset

    name, _, split = name.partition(":")
    try:
        rows: Rows = load_dataset(name, split=split or "train").to_list()
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"The dataset {name!r} can't be loaded from the hub ({reason}): save it to disk and give its "
                        f"folder.") from error  # fmt: skip
    return rows


def _gym(task: str, settings: dict[str, Any]) -> Rows:
    import reasoning_gym

    try:
        generated = reasoning_gym.create_dataset(task, **({"size": 1000, "seed": 0} | settings))
    except (ValueError, TypeError, AssertionError) as error:
        near = get_close_matches(task, list(reasoning_gym.factory.DATASETS), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(f"reasoning_gym can't make {task!r} with {settings}: {error}.{hint}") from error
    return [{"prompt": row["question"], "answer": row["answer"], "entry": row, "task": task} for row in generated]
