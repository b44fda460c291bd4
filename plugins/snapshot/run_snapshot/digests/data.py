"""The digest of a data set's rows, `rows-xxh3-128-v1`: every row, nested chat messages included.

* row: xxh3-128 of its canonical JSON: sorted keys, no spaces, ASCII escapes. Keys whose value is null are left out at
  every depth (Parquet writes null where JSON lines write nothing); 1, 1.0 and "1" are three values. Bytes, dates and
  decimals become {"$type": text}.
* ordered: xxh3-128 of framed(SPEC, "ordered", count as 8 bytes LE, the rows' digests joined).
* unordered: xxh3-128 of framed(SPEC, "unordered", count as 8 bytes LE, the sum of the rows' digests modulo 2**128 as 16 bytes
  LE): a sum and not an exclusive or, under which two equal rows would vanish.

The same rows in JSON lines and in Parquet have the same digest; what a file's bytes are is the files' own digest.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run_snapshot.digests.files import FileDigest, digest_file
from run_snapshot.digests.rows import can_read, rows_in
from run_snapshot.digests.spec import ROWS_SPEC, framed, xxh3
from run_snapshot.errors import DigestError

__all__ = ["DataSource", "Rows", "RowsDigest", "data_files", "digest_rows", "explain_rows", "read_source", "splits"]

_SHORT = 8  # bytes of a row's digest that are kept to name rows later
_MOST_KEPT = 1_000_000  # row digests; beyond it several rows share one
_NAMED = 5  # rows that a message names


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows that lie in memory: a generator's, a dataset's of the hub."""

    name: str
    rows: Iterable[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsDigest:
    """All rows of one source."""

    count: int
    ordered: str
    unordered: str
    schema: dict[str, list[str]]  # path of a value -> the types met there
    kept: bytes  # `_SHORT` bytes per row, or per `per` rows
    per: int = 1

    def to_json(self) -> dict[str, Any]:
        """As plain types, without `kept`."""
        return {
            "spec": ROWS_SPEC,
            "count": self.count,
            "ordered": self.ordered,
            "unordered": self.unordered,
            "schema": self.schema,
            "per": self.per,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One data file or folder, or rows in memory."""

    name: str
    path: Path | None  # absolute
    files: dict[str, FileDigest] = field(default_factory=dict)  # by path relative to `path`; "" is the file itself
    rows: RowsDigest | None
    note: str = ""  # why rows is None
    failed: bool = False  # the rows should have been readable


def splits(path: Path) -> list[Path]:
    """The folders of a saved `DatasetDict`'s splits, or the path itself."""
    listing = path / "dataset_dict.json"
    if not listing.is_file():
        return [path]
    return [path / str(split) for split in json.loads(listing.read_bytes())["splits"]]


def data_files(path: Path) -> list[Path]:
    """The files of a source, in order of their names; what `datasets` caches beside a saved set is left out."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DigestError(f"The data {str(path)!r} does not exist.")
    inside = (file for file in path.rglob("*") if file.is_file())
    kept = [f for f in inside if not f.name.startswith(("cache-", ".")) and f.suffix != ".lock"]
    return sorted(kept, key=lambda file: file.relative_to(path).as_posix())


def read_source(source: Path | Rows) -> DataSource:
    """Digest a source. Rows that can't be read leave the files' digests and the reason."""
    if isinstance(source, Rows):
        return DataSource(name=source.name, path=None, rows=digest_rows(source.rows))
    path = source.absolute()
    files = data_files(path)
    digests = {_relative(file, path): digest_file(file) for file in files}
    if not any(can_read(file) for file in files):
        suffix = path.suffix or "this folder's files"
        note = f"no rows are read from {suffix}: the bytes alone are covered"
        return DataSource(name=str(source), path=path, files=digests, rows=None, note=note)
    try:
        rows = digest_rows(rows_in(path, files))
    except (DigestError, OSError, ValueError, KeyError) as error:
        return DataSource(
            name=str(source), path=path, files=digests, rows=None, note=f"rows unread: {error}", failed=True
        )
    return DataSource(name=str(source), path=path, files=digests, rows=rows)


def digest_rows(rows: Iterable[Any]) -> RowsDigest:
    """Digest every row.

    >>> a, b = {"q": "1+1"}, {"q": "2+2"}
    >>> digest_rows([a, b]).unordered == digest_rows([b, a]).unordered
    True
    """
    digests, total, count = bytearray(), 0, 0
    schema: dict[str, set[str]] = {}
    shapes: set[tuple[Any, ...]] = set()
    for row in rows:
        digest = xxh3(_canonical_row(row))
        digests += digest
        total += int.from_bytes(digest, "big")
        count += 1
        _note_schema(row, schema, shapes)
    size = count.to_bytes(8, "little")
    spec = ROWS_SPEC.encode()
    kept, per = _shortened(digests, count)
    return RowsDigest(
        count=count,
        ordered=xxh3(framed(spec, b"ordered", size, bytes(digests))).hex(),
        unordered=xxh3(framed(spec, b"unordered", size, (total % 2**128).to_bytes(16, "little"))).hex(),
        schema={path: sorted(types) for path, types in sorted(schema.items())},
        kept=kept,
        per=per,
    )


def explain_rows(before: RowsDigest, after: RowsDigest) -> str:
    """What became of the rows, in one line; empty when nothing did.

    >>> rows = [{"n": n} for n in range(4)]
    >>> explain_rows(digest_rows(rows), digest_rows([*rows, {"n": 4}]))
    'row 5 appended: 4 rows became 5'
    """
    if before.ordered == after.ordered:
        return ""
    if before.unordered == after.unordered:
        return f"the {before.count} rows are the same in another order{_first_moved(before, after)}"
    if before.per == after.per == 1:
        return _by_row(_split(before.kept), _split(after.kept))
    if before.count != after.count:
        return f"{before.count} rows became {after.count}"
    blocks = [i for i, (a, b) in enumerate(zip(_split(before.kept), _split(after.kept), strict=False)) if a != b]
    near = ", ".join(f"{i * before.per + 1} to {(i + 1) * before.per}" for i in blocks[:_NAMED])
    return (
        f"of {before.count} rows some changed, in rows {near}" if blocks else f"some of the {before.count} rows changed"
    )


def _relative(file: Path, path: Path) -> str:
    return "" if file == path else file.relative_to(path).as_posix()


def _canonical_row(row: Any) -> bytes:
    text = _dump(row)
    if "null" in text:
        text = _dump(_without_nulls(row))
    return text.encode("ascii")


def _dump(row: Any) -> str:
    return json.dumps(row, sort_keys=True, separators=(",", ":"), default=_plain)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """Values that JSON lacks."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return {f"${type(value).__name__.lower()}": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"$seconds": repr(value.total_seconds())}
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # numpy's scalars and arrays, tensors
        return value.tolist()
    raise DigestError(f"A row holds a {type(value).__module__}.{type(value).__name__}, which has no canonical form.")


def _note_schema(row: Any, schema: dict[str, set[str]], shapes: set[tuple[Any, ...]]) -> None:
    """Add the row's types; rows of flat values that look like one before are not walked again."""
    if isinstance(row, dict):
        shape = tuple((key, type(value)) for key, value in row.items())
        nested = any(isinstance(value, dict | list) for value in row.values())
        if shape in shapes and not nested:
            return
        shapes.add(shape)
    _walk(row, "", schema)


def _walk(value: Any, path: str, schema: dict[str, set[str]]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if item is not None:
                _walk(item, f"{path}.{key}" if path else str(key), schema)
    elif isinstance(value, list | tuple):
        schema.setdefault(path, set()).add("list")
        for item in value:
            _walk(item, f"{path}[]", schema)
    else:
        schema.setdefault(path, set()).add(type(value).__name__)


def _shortened(digests: bytearray, count: int) -> tuple[bytes, int]:
    per = max(1, -(-count // _MOST_KEPT))
    if per == 1:
        return b"".join(digests[i : i + _SHORT] for i in range(0, len(digests), 16)), 1
    step = 16 * per
    return b"".join(xxh3(digests[i : i + step])[:_SHORT] for i in range(0, len(digests), step)), per


def _split(kept: bytes) -> list[bytes]:
    return [kept[i : i + _SHORT] for i in range(0, len(kept), _SHORT)]


def _first_moved(before: RowsDigest, after: RowsDigest) -> str:
    pairs = zip(_split(before.kept), _split(after.kept), strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return f", from row {first * before.per + 1} on" if first is not None else ""


def _by_row(before: list[bytes], after: list[bytes]) -> str:
    change = f"{len(before)} rows became {len(after)}"
    if after[: len(before)] == before:
        return f"{_rows(range(len(before), len(after)))} appended: {change}"
    removed, added = Counter(before) - Counter(after), Counter(after) - Counter(before)
    moved = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if len(before) == len(after) and len(moved) == added.total():
        return f"{_rows(moved)} changed, of {len(before)}"
    parts = []
    if removed:
        parts.append(f"{_rows(_positions(before, removed))} removed")
    if added:
        parts.append(f"{_rows(_positions(after, added))} added")
    return f"{' and '.join(parts)}: {change}"


def _positions(rows: list[bytes], wanted: Counter[bytes]) -> list[int]:
    left, positions = Counter(wanted), []
    for i in range(len(rows) - 1, -1, -1):  # of equal rows, the last ones
        if left[rows[i]] > 0:
            left[rows[i]] -= 1
            positions.append(i)
    return positions[::-1]


def _rows(positions: Iterable[int]) -> str:
    """Rows by number, from 1 on."""
    numbers = [position + 1 for position in positions]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"rows {numbers[0]} to {numbers[-1]}"
    named = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"row{'s' if len(numbers) > 1 else ''} {named}{more}"
