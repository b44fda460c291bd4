"""Reading rows from files, one after the other: JSON lines, JSON, CSV, text, Parquet, Arrow, folders saved by `datasets`."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from run_snapshot.errors import DigestError

__all__ = ["can_read", "rows_in"]

_csv_limit = 2**31 - 1


def can_read(path: Path) -> bool:
    """Whether rows can be read from this file or folder."""
    return path.is_dir() or _suffix(path) in _READERS


def rows_in(path: Path, files: list[Path]) -> Iterator[Any]:
    """Every row of `files`, which lie in or are `path`."""
    if (path / "state.json").is_file():
        files = [path / name for name in _saved_files(path)]
    for file in files:
        reader = _READERS.get(_suffix(file))
        if reader is not None:
            yield from reader(file)


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return suffixes[-2] if len(suffixes) == 2 and suffixes[-1] == ".gz" else (suffixes or [""])[-1]


def _saved_files(folder: Path) -> list[str]:
    state = json.loads((folder / "state.json").read_bytes())
    if state.get("_indices_data_files"):
        raise DigestError(f"{str(folder)!r} holds an indices mapping: save it again with `dataset.flatten_indices()`.")
    return [str(entry["filename"]) for entry in state["_data_files"]]


def _text(path: Path, newline: str | None = None) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _jsonl(path: Path) -> Iterator[Any]:
    with _text(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise DigestError(f"{path.name}, line {number} is not JSON: {error}.") from error


def _json(path: Path) -> Iterator[Any]:
    with _text(path) as file:
        try:
            loaded = json.load(file)
        except ValueError as error:
            raise DigestError(f"{path.name} is not JSON: {error}.") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("data"), list):
        loaded = loaded["data"]
    yield from loaded if isinstance(loaded, list) else [loaded]


def _csv(path: Path) -> Iterator[Any]:
    csv.field_size_limit(_csv_limit)
    with _text(path, newline="") as file:
        yield from csv.DictReader(file, restkey="\0rest", delimiter="\t" if _suffix(path) == ".tsv" else ",")


def _lines(path: Path) -> Iterator[Any]:
    with _text(path) as file:
        for line in file:
            yield {"text": line.rstrip("\n")}


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            batches: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            opened = pyarrow.ipc.open_file(source)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".txt": _lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
