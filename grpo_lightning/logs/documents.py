"""Rows out of JSON: lines, lists, trainer_state.json, executed notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from html import unescape
from typing import Any

from grpo_lightning.errors import DataError
from grpo_lightning.logs.console import dict_rows
from grpo_lightning.logs.numbers import flatten, parse_dict
from grpo_lightning.logs.records import Row, Tally
from grpo_lightning.logs.source import Source
from grpo_lightning.logs.tabular import sparse

__all__ = ["json_rows", "line_rows", "notebook_rows"]

OBJECT_CHARS = 8 << 20
NOTEBOOK_BYTES = 128 << 20
BROKEN_AT_MOST = 1000
_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_LIST = re.compile(r"\[\s*(?=\{)")
_TOKEN = re.compile(r"<(/?)([a-zA-Z]\w*)[^<>]*>|[^<]+|<")
_NEXT = re.compile(r"[{\]]")
_decode = json.JSONDecoder(parse_int=float).raw_decode


def line_rows(lines: Iterable[str], tally: Tally) -> Iterator[Row]:
    """One JSON object per line."""
    for line in lines:
        values = parse_dict(line.strip())
        if values is None:
            tally.skip()
            continue
        yield Row(_flat(values))


def json_rows(source: Source, tally: Tally, *, history: bool) -> Iterator[Row]:
    """The objects of a document's list, one at a time: `log_history`, or else the first list of objects."""
    for values in _objects(source.chunks(), _HISTORY if history else _LIST, tally):
        yield Row(_flat(values))


def notebook_rows(source: Source, tally: Tally) -> Iterator[Row]:
    """The tables and the dicts in an executed notebook's outputs, in order. A table that is there twice is read once."""
    if source.size() > NOTEBOOK_BYTES:
        raise DataError(
            f"{source.path} is a notebook of more than {NOTEBOOK_BYTES >> 20} MiB: export its table as CSV."
        )
    try:
        document = json.loads("".join(source.chunks()), parse_int=float)
        outputs = [output for cell in document["cells"] for output in cell.get("outputs", ())]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{source.path} is not a whole notebook ({type(error).__name__}: {error}): save it again."
        ) from error
    seen: set[int] = set()
    for output in outputs:
        if isinstance(output, dict):
            yield from _output_rows(output, seen, tally)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return flatten(values) if any(type(value) is dict for value in values.values()) else values


def _objects(chunks: Iterator[str], start: re.Pattern[str], tally: Tally) -> Iterator[dict[str, Any]]:
    buffer, place, broken = _begin(chunks, start)
    if broken:
        return
    while broken < BROKEN_AT_MOST:
        match = _NEXT.search(buffer, place)
        if match is None:
            buffer, place, more = _refill(buffer[-1:], 0, chunks)
            if not more:
                tally.cut = True
                return
            continue
        if match[0] == "]":
            return
        try:
            found, place = _decode(buffer, match.start())
        except (ValueError, RecursionError) as error:
            buffer, place, more = _after_error(error, buffer, match.start(), chunks)
            if not more:
                broken += 1
                tally.skip()
            continue
        if isinstance(found, dict):
            yield found
    tally.note(f"reading stopped after {BROKEN_AT_MOST} broken objects")


def _begin(chunks: Iterator[str], start: re.Pattern[str]) -> tuple[str, int, int]:
    """The text from the list's start on; broken where there is none."""
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        if match := start.search(buffer):
            return buffer, match.end(), 0
        buffer = buffer[-(64 << 10) :]
    return "", 0, BROKEN_AT_MOST


def _refill(buffer: str, place: int, chunks: Iterator[str]) -> tuple[str, int, bool]:
    chunk = next(chunks, "")
    return buffer[place:] + chunk, 0, bool(chunk)


def _after_error(error: Exception, buffer: str, place: int, chunks: Iterator[str]) -> tuple[str, int, bool]:
    """More text where the object may only be cut by the buffer's end, else the place after its brace."""
    inside = isinstance(error, json.JSONDecodeError) and (
        error.pos < len(buffer) - 1000 and not error.msg.startswith("Unterminated string")
    )
    if not inside and not isinstance(error, RecursionError) and len(buffer) - place < OBJECT_CHARS:
        longer, start, more = _refill(buffer, place, chunks)
        if more:
            return longer, start, True
        buffer, place = longer, start
    return buffer, place + 1, False


def _output_rows(output: dict[str, Any], seen: set[int], tally: Tally) -> Iterator[Row]:
    data = output.get("data")
    pages = _text(data.get("text/html")) if isinstance(data, dict) else ""
    if "<table" in pages and hash(pages) not in seen:
        seen.add(hash(pages))
        for table in _tables(pages):
            yield from _table_rows(table)
    text = _text(output.get("text"))
    if "{" in text:
        lines = [line for line in text.replace("\r", "\n").split("\n") if line]
        yield from dict_rows(lines, tally)
        yield Row({}, mark="end")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _table_rows(table: list[list[str]]) -> Iterator[Row]:
    head = [cell.strip() for cell in table[0]] if table else []
    if "Step" not in head and "step" not in head:
        return
    for cells in table[1:]:
        yield Row(sparse(dict(zip(head, cells, strict=False))))
    yield Row({}, mark="end")


def _tables(page: str) -> list[list[list[str]]]:
    """The cells of a page's tables as text. Linear in the page, whatever it holds."""
    tables: list[list[list[str]]] = []
    inside = False
    for match in _TOKEN.finditer(page):
        closing, tag = match[1], (match[2] or "").lower()
        if tag in ("table", "tr", "td", "th"):
            inside = not closing and _open(tag, tables)
        elif inside and not tag:
            tables[-1][-1][-1] += unescape(match[0])
    return tables


def _open(tag: str, tables: list[list[list[str]]]) -> bool:
    """Begins a table, a row or a cell; whether text from here on is a cell's."""
    if tag == "table":
        tables.append([])
    elif tables and tag == "tr":
        tables[-1].append([])
    elif tables and tables[-1] and tag in ("td", "th"):
        tables[-1][-1].append("")
        return True
    return False
