"""Rows of prompts from files, datasets and generators, through the `datasets` library."""

from __future__ import annotations

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grpo_lightning import shipped
from grpo_lightning.errors import DataError

__all__ = ["Rows", "held_out_settings", "load_rows", "require_column"]

Rows = list[dict[str, Any]]
HUB, GYM = "hf:", "reasoning_gym:"
_GYM_SIZE = 1000


def load_rows(source: str, *, limit: int | None = None, **settings: Any) -> Rows:
    """All rows of `source`, as dicts.

    `source` is a .jsonl, .json, .parquet or .csv file (every cell of a .csv is a text), a folder saved by `datasets`,
    ``hf:name[:split]`` or ``reasoning_gym:task``; the last two take `settings`.
    """
    if source.startswith(GYM):
        rows = _gym(source.removeprefix(GYM), settings)
    elif source.startswith(HUB):
        rows = _hub(source.removeprefix(HUB), settings)
    elif settings:
        raise DataError(f"{source!r} is a file and takes no settings, but has {', '.join(settings)}: leave them out.")
    else:
        rows = _file(shipped.expand(source))
    if not rows:
        raise DataError(f"{source!r} is empty: it needs at least one row.")
    return rows[:limit] if limit is not None else rows


def held_out_settings(train: str, val: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings for `val` when only those of `train` were given.

    Row i of a reasoning-gym generator is a function of seed + i, so the seed moves past all of the training rows.
    """
    if not val.startswith(GYM):
        return settings if val.startswith(HUB) and train.startswith(HUB) else {}
    own = settings if train.startswith(GYM) else {}
    return own | {"seed": own.get("seed", 0) + own.get("size", _GYM_SIZE)}


def require_column(rows: Rows, column: str, source: str) -> None:
    """Raise when the rows have no such column."""
    names = sorted(rows[0])
    if column in rows[0]:
        return
    near = get_close_matches(column, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(f"{source!r} has no column {column!r}: {hint}Its columns are {', '.join(names)}.")


def _file(path: str) -> Rows:
    where = Path(path).expanduser()
    if where.is_dir():
        return _saved(where)
    if not where.is_file():
        raise DataError(f"The data file {path!r} does not exist: give a .jsonl, .json, .parquet or .csv file, a folder "
                        f"saved by `datasets`, {HUB}name or {GYM}task.")  # fmt: skip
    readers: dict[str, Callable[[Path], Rows]] = {
        ".jsonl": _jsonl,
        ".json": _json,
        ".parquet": _parquet,
        ".csv": _csv,
    }
    reader = readers.get(where.suffix.lower())
    if reader is None:
        raise DataError(f"{path!r} ends in {where.suffix!r}: give a file ending in {', '.join(readers)}.")
    return reader(where)


def _jsonl(path: Path) -> Rows:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            rows.append(_row(line, f"Line {number} of {str(path)!r}"))
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not UTF-8 (byte {error.start}): save it as UTF-8.") from error


def _row(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # not JSON, or a number or a nesting beyond what Python reads
        raise DataError(f"{where} is not JSON ({_json_fault(error)}): each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}: each line must be one JSON object.")
    return row


def _json(path: Path) -> Rows:
    text = _text(path)
    try:
        rows = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        fault = _json_fault(error)
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        hint = "; with one object a line, name it .jsonl" if fault == "Extra data" else ""
        raise DataError(
            f"{str(path)!r} is not JSON ({fault}{place}): it must be a JSON list of objects{hint}."
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{str(path)!r} is a JSON {type(rows).__name__}: it must be a JSON list of objects.")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"Row {number} of {str(path)!r} is a JSON {type(row).__name__}: each must be an object.")
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose names must differ: Python's reader keeps the last of two and says nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _json_fault(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else _reason(error)


def _csv(path: Path) -> Rows:
    """Cells stay as written: guessing types would turn the answer `007` into 7, and `None` into nothing."""
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except pd.errors.EmptyDataError:
        return []
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} can't be read as CSV ({_reason(error)}): save it as UTF-8 CSV.") from error
    return [{str(k): v for k, v in row.items()} for row in table.to_dict("records")]


def _parquet(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: Rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{str(path)!r} can't be read as Parquet ({_reason(error)}): write it again.") from error
    return rows


def _saved(path: Path) -> Rows:
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(
            f"The folder {str(path)!r} holds no dataset saved by `datasets`: give one, or a file."
        ) from error
    if not isinstance(found, Dataset):
        raise DataError(f"{str(path)!r} holds the splits {', '.join(found)}: give the folder of one of them.")
    rows: Rows = found.to_list()
    return rows


def _hub(name: str, settings: dict[str, Any]) -> Rows:
    from datasets import load_dataset

    name, _, split = name.partition(":")
    try:
        rows: Rows = load_dataset(name, split=split or "train", **settings).to_list()
    except Exception as error:
        raise DataError(
            f"The dataset {name!r} can't be loaded from the hub ({_reason(error)}): save it and give its folder."
        ) from error
    return rows


def _gym(task: str, settings: dict[str, Any]) -> Rows:
    import reasoning_gym

    known = list(reasoning_gym.factory.DATASETS)
    if task not in known:
        near = get_close_matches(task, known, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f": it has {', '.join(sorted(known))}."
        raise DataError(f"reasoning_gym has no task {task!r}{hint}")
    try:
        generated = reasoning_gym.create_dataset(task, **({"size": _GYM_SIZE, "seed": 0} | settings))
        rows = list(generated)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"reasoning_gym can't make {task!r} with the settings {settings} ({_reason(error)})."
        ) from error
    return [{"prompt": row["question"], "answer": row["answer"], "entry": row, "task": task} for row in rows]


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
