"""The digest of rows: frozen vectors, formats that must agree, and what became of which row."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from run_snapshot.digests import data as data_module
from run_snapshot.digests import digest_rows, explain_rows, read_source
from run_snapshot.errors import DigestError

VECTORS = json.loads((Path(__file__).parent / "vectors" / "rows-xxh3-128-v1.json").read_text())
CHATS = [
    {"prompt": [{"role": "user", "content": f"what is {i}+1?"}], "answer": str(i + 1), "level": i % 3, "hint": None}
    for i in range(50)
]


def by_the_book(rows: list[Any]) -> tuple[str, str]:
    """Both digests, written from the specification with nothing of the package (rows without nulls)."""
    digests = [xxhash.xxh3_128(json.dumps(r, sort_keys=True, separators=(",", ":")).encode()).digest() for r in rows]
    total = sum(int.from_bytes(d, "big") for d in digests) % 2**128

    def root(kind: bytes, body: bytes) -> str:
        fields = [b"rows-xxh3-128-v1", kind, len(rows).to_bytes(8, "little"), body]
        return xxhash.xxh3_128(b"".join(len(f).to_bytes(8, "little") + f for f in fields)).hexdigest()

    return root(b"ordered", b"".join(digests)), root(b"unordered", total.to_bytes(16, "little"))


@pytest.mark.parametrize("vector", VECTORS, ids=[v["id"] for v in VECTORS])
def test_vectors_are_frozen(vector: dict[str, Any]) -> None:
    digest = digest_rows(vector["rows"])
    assert (digest.ordered, digest.unordered) == (vector["ordered"], vector["unordered"])
    if "null" not in json.dumps(vector["rows"]):
        assert by_the_book(vector["rows"]) == (vector["ordered"], vector["unordered"])


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    lines = "\n".join(json.dumps(row) for row in CHATS)
    (tmp_path / "a.jsonl").write_text(lines + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(CHATS))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    pq.write_table(pa.Table.from_pylist(CHATS), tmp_path / "a.parquet", row_group_size=7)
    Dataset.from_list(CHATS).save_to_disk(tmp_path / "saved")
    (tmp_path / "shards").mkdir()
    for i in (0, 1):
        (tmp_path / "shards" / f"part-{i}.jsonl").write_text(
            "\n".join(json.dumps(r) for r in CHATS[25 * i : 25 * i + 25])
        )
    names = ("a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "saved", "shards")
    digests = {name: read_source(tmp_path / name).rows for name in names}
    expected = digest_rows(CHATS)
    assert {
        name: rows and (rows.count, rows.ordered, rows.unordered) for name, rows in digests.items()
    } == dict.fromkeys(names, (50, expected.ordered, expected.unordered))
    assert expected.schema == {
        "answer": ["str"], "level": ["int"], "prompt": ["list"], "prompt[].content": ["str"], "prompt[].role": ["str"],
    }  # fmt: skip


def test_cells_of_a_csv_are_texts(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["q", "a"], ["1,5\nx", "2"], ["é", ""]])
    rows = read_source(tmp_path / "a.csv").rows
    assert rows is not None
    assert rows.ordered == digest_rows([{"q": "1,5\nx", "a": "2"}, {"q": "é", "a": ""}]).ordered


def test_splits_of_a_saved_dictionary_are_sources_of_their_own(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(CHATS), test=Dataset.from_list(CHATS[:5])).save_to_disk(tmp_path / "both")
    parts = data_module.splits(tmp_path / "both")
    assert [(p.name, read_source(p).rows.count) for p in parts] == [("train", 50), ("test", 5)]  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(), st.text(max_size=3), st.none()))),
    st.randoms(),
)
def test_order_is_seen_by_one_digest_and_not_by_the_other(rows: list[dict[str, Any]], rng: random.Random) -> None:
    shuffled = rows.copy()
    rng.shuffle(shuffled)
    a, b = digest_rows(rows), digest_rows(shuffled)
    assert a.unordered == b.unordered
    dropped = [[{k: v for k, v in r.items() if v is not None} for r in side] for side in (rows, shuffled)]
    assert (a.ordered == b.ordered) == (dropped[0] == dropped[1])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([{"x": 1}], [{"x": "1"}]), ([{"x": 1}], [{"x": 1.0}]), ([{"x": 1}], [{"x": True}]), ([{"x": 1}], [{"y": 1}]),
        ([{"x": [1, 2]}], [{"x": [2, 1]}]), ([{"x": [[1], [2]]}], [{"x": [[1, 2]]}]), ([{"x": "é"}], [{"x": "e\u0301"}]),
        ([{"x": 1}, {"x": 1}], [{"x": 1}]), ([{"x": 1}] * 2, [{"x": 2}] * 2), ([{"x": 0.0}], [{"x": -0.0}]),
        ([{"x": b"a"}], [{"x": "a"}]), ([{"x": []}], [{}]), ([{"x": [None]}], [{"x": []}]), ([], [{}]),
    ],
)  # fmt: skip
def test_different_rows_have_different_digests(a: list[Any], b: list[Any]) -> None:
    assert digest_rows(a).unordered != digest_rows(b).unordered


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([{"x": 1, "y": 2}], [{"y": 2, "x": 1}]), ([{"x": None, "y": {"z": None}}], [{"y": {}}]),
        ([{"x": np.int64(3)}], [{"x": 3}]), ([{"x": np.array([1.5, 2.0])}], [{"x": [1.5, 2.0]}]),
        ([{"x": (1, 2)}], [{"x": [1, 2]}]),
    ],
)  # fmt: skip
def test_equal_rows_have_equal_digests(a: list[Any], b: list[Any]) -> None:
    assert digest_rows(a).ordered == digest_rows(b).ordered


def test_values_that_json_lacks_have_a_form() -> None:
    day = datetime.date(2026, 1, 2)
    values = [
        b"\xff",
        day,
        datetime.datetime(2026, 1, 2),
        datetime.timedelta(seconds=1),
        decimal.Decimal("1.10"),
        float("nan"),
    ]
    digests = [digest_rows([{"x": value}]).ordered for value in values]
    assert len(set(digests)) == len(values)
    with pytest.raises(DigestError, match="object"):
        digest_rows([{"x": object()}])


ROWS = [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(30)]


def edited(at: int) -> list[Any]:
    rows = json.loads(json.dumps(ROWS))
    rows[at]["messages"][0]["content"] += "!"
    return list(rows)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (ROWS, ""),
        (edited(19), "row 20 changed, of 30"),
        (ROWS[1:], "row 1 removed: 30 rows became 29"),
        ([*ROWS, {"new": 1}, {"new": 2}], "rows 31 to 32 appended: 30 rows became 32"),
        ([{"new": 1}, *ROWS], "row 1 added: 30 rows became 31"),
        ([*ROWS[:5], ROWS[6], ROWS[5], *ROWS[7:]], "the 30 rows are the same in another order, from row 6 on"),
        ([*ROWS, ROWS[3]], "row 31 appended: 30 rows became 31"),
        (ROWS[:10], "rows 11 to 30 removed: 30 rows became 10"),
        ([*ROWS[5:], {"new": 1}], "rows 1 to 5 removed and row 26 added: 30 rows became 26"),
    ],
    ids=["same", "one message", "removed", "appended", "put first", "swapped", "repeated", "cut", "both"],
)
def test_what_became_of_the_rows_is_told_by_number(after: list[Any], told: str) -> None:
    assert explain_rows(digest_rows(ROWS), digest_rows(after)) == told


def test_of_very_many_rows_blocks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "_MOST_KEPT", 10)
    before, after = digest_rows(ROWS), digest_rows(edited(19))
    assert (before.per, len(before.kept)) == (3, 80)
    assert explain_rows(before, after) == "of 30 rows some changed, in rows 19 to 21"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", '{"a": 1}\n{oops\n', "line 2 is not JSON"),
        ("a.json", "{", "is not JSON"),
        ("a.parquet", "PAR?", "rows unread"),
    ],
)
def test_rows_that_cant_be_read_leave_the_files_digest(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    source = read_source(tmp_path / name)
    assert source.failed
    assert told in source.note
    assert source.files[""].bytes == len(content)


def test_bytes_without_a_reader_are_covered_by_their_digest(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    source = read_source(tmp_path / "a.bin")
    assert (source.failed, source.rows) == (False, None)
    assert "the bytes alone" in source.note
