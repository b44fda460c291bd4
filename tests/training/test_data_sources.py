"""Rows from every kind of source, and what bad ones say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.errors import DataError
from grpo_lightning.training.sources import held_out_settings, load_rows, require_column

ROWS = [
    {"prompt": "1+1=", "answer": "2", "n": 1, "tags": ["a"]},
    {"prompt": "2+2=", "answer": "007", "n": 2, "tags": []},
    {"prompt": "nothing?", "answer": "None", "n": 3, "tags": ["b", "c"]},
]


def jsonl(path: Path) -> Path:
    path = path / "rows.jsonl"
    path.write_text("\ufeff" + "\r\n\n".join(json.dumps(r) for r in ROWS) + "\n", encoding="utf-8")
    return path


def as_json(path: Path) -> Path:
    path = path / "rows.json"
    path.write_text(json.dumps(ROWS))
    return path


def parquet(path: Path) -> Path:
    import pandas as pd

    pd.DataFrame(ROWS).to_parquet(path / "rows.parquet")
    return path / "rows.parquet"


def saved(path: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(path / "saved")
    return path / "saved"


KINDS = {"jsonl": jsonl, "json": as_json, "parquet": parquet, "saved": saved}


@pytest.mark.parametrize("write", KINDS.values(), ids=KINDS.keys())
def test_every_kind_gives_the_same_rows(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    assert load_rows(str(write(tmp_path))) == ROWS
    assert load_rows(str(write(tmp_path)), limit=2) == ROWS[:2]


def test_cells_of_a_csv_stay_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,answer,code,n\n1+1=,2,007,1\n2+2=,4,1.50,2\n"a, b?",None,1e5,\n')
    assert load_rows(str(path)) == [
        {"prompt": "1+1=", "answer": "2", "code": "007", "n": "1"},
        {"prompt": "2+2=", "answer": "4", "code": "1.50", "n": "2"},
        {"prompt": "a, b?", "answer": "None", "code": "1e5", "n": ""},
    ]


def test_a_generator_gives_prompts_answers_and_what_its_scorer_needs() -> None:
    import reasoning_gym

    rows = load_rows("reasoning_gym:chain_sum", size=4, seed=3)
    expected = list(reasoning_gym.create_dataset("chain_sum", size=4, seed=3))
    assert [r["prompt"] for r in rows] == [e["question"] for e in expected]
    assert [r["answer"] for r in rows] == [e["answer"] for e in expected]
    assert [r["entry"]["metadata"] for r in rows] == [e["metadata"] for e in expected]
    assert {r["task"] for r in rows} == {"chain_sum"}


@pytest.mark.parametrize("settings", [{}, {"size": 50}, {"size": 50, "seed": 9}], ids=str)
def test_held_out_rows_of_a_generator_are_no_training_rows(settings: dict[str, Any]) -> None:
    """Sums of five terms of four digits do not meet by chance."""
    source, settings = "reasoning_gym:chain_sum", {"min_terms": 5, "max_terms": 6, "min_digits": 4} | settings
    train = load_rows(source, **settings)
    val = load_rows(source, **held_out_settings(source, source, settings))
    assert len(val) == len(train)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in val}


SETTINGS: dict[str, tuple[tuple[str, str, dict[str, Any]], dict[str, Any]]] = {
    "generator, then file": (("reasoning_gym:a", "b.jsonl", {"size": 5}), {}),
    "file, then generator": (("a.jsonl", "reasoning_gym:b", {}), {"seed": 1000}),
    "other task of the same size": (("reasoning_gym:a", "reasoning_gym:b", {"size": 5}), {"size": 5, "seed": 5}),
    "hub": (("hf:a", "hf:a:test", {"name": "main"}), {"name": "main"}),
}


@pytest.mark.parametrize(("given", "expected"), SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_pass_to_held_out_prompts_where_they_fit(given: Any, expected: dict[str, Any]) -> None:
    assert held_out_settings(*given) == expected


def test_a_hub_dataset_is_loaded_with_its_split_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(path: str, *, split: str, **settings: Any) -> Any:
        asked.append((path, split, settings))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("hf:owner/name:test", name="main") == ROWS
    assert load_rows("hf:owner/name") == ROWS
    assert asked == [("owner/name", "test", {"name": "main"}), ("owner/name", "train", {})]


def test_a_hub_that_is_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"'owner/name' can't be loaded from the hub \(ConnectionError\): save it"):
        load_rows("hf:owner/name")


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "broken line": ("a.jsonl", b'{"a": 1}\n\n{"a": \n', r"Line 3 of '.*a.jsonl' is not JSON \(.*one JSON object"),
    "nested without end": ("a.jsonl", b'{"a": ' + b"[" * 100_000, r"Line 1 of .* is not JSON \(maximum recursion"),
    "a number of 5,000 digits": (
        "a.jsonl",
        b'{"a": ' + b"1" * 5000 + b"}",
        r"Line 1 of .* is not JSON \(Exceeds the limit",
    ),
    "the same in one list": ("a.json", b'[{"a": ' + b"1" * 5000 + b"}]", r"a.json' is not JSON \(Exceeds the limit"),
    "list in a line": ("a.jsonl", b"[1]\n", r"Line 1 of .* is a JSON list"),
    "latin-1": ("a.jsonl", '{"a": "é"}'.encode("latin-1"), r"not UTF-8 \(byte 7\): save it as UTF-8"),
    "a name twice": ("a.jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 3}\n', r"Line 2 of .* \(it names 'a' twice\)"),
    "a name twice, deeper": ("a.json", b'[{"a": {"b": 1, "b": 1}}]', r"a.json' is not JSON \(it names 'b' twice\)"),
    "NUL bytes": ("a.jsonl", b'{"a": 1}\n\0\0\n', r"Line 2 of .* is not JSON"),
    "UTF-16": ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"not UTF-8 \(byte 0\)"),
    "broken json": ("a.json", b'[{"a": 1},\n', r"a.json' is not JSON \(.*line 2\)"),
    "lines in a json": ("a.json", b'{"a": 1}\n{"a": 2}\n', r"one object a line, name it .jsonl"),
    "object in a json": ("a.json", b'{"a": 1}', r"is a JSON dict: it must be a JSON list of objects"),
    "numbers in a json": ("a.json", b'[{"a": 1}, 2]', r"Row 1 of .* is a JSON int"),
    "broken parquet": ("a.parquet", b"no parquet", r"a.parquet' can't be read as Parquet \("),
    "ragged csv": ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a.csv' can't be read as CSV \(.*line 3"),
    "empty jsonl": ("a.jsonl", b"\n", r"a.jsonl' is empty: it needs at least one row"),
    "empty json": ("a.json", b"[]", r"is empty"),
    "empty csv": ("a.csv", b"", r"is empty"),
    "csv of a header": ("a.csv", b"prompt\n", r"is empty"),
    "unknown ending": ("a.txt", b"x", r"a.txt' ends in '.txt': give a file ending in .jsonl, .json, .parquet, .csv"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_says_what_is_wrong_in_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(str(tmp_path / name))
    assert "\n" not in str(caught.value)


BAD_SOURCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no file": ("no/where.jsonl", {}, r"'no/where.jsonl' does not exist: give a .jsonl"),
    "no dataset": ("{tmp}", {}, r"holds no dataset saved by `datasets`"),
    "splits": ("{splits}", {}, r"holds the splits train, test: give the folder of one"),
    "unknown task": ("reasoning_gym:chain_sums", {}, r"no task 'chain_sums': did you mean 'chain_sum'\?"),
    "unknown setting": ("reasoning_gym:chain_sum", {"bogus": 1}, r"can't make 'chain_sum' with .*bogus"),
    "bad setting": ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, r"can't make 'chain_sum' with .*9"),
    "settings of a file": ("{jsonl}", {"size": 3}, r"takes no settings, but has size"),
}


@pytest.mark.parametrize(("source", "settings", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_a_bad_source_says_so(tmp_path: Path, source: str, settings: dict[str, Any], message: str) -> None:
    from datasets import Dataset, DatasetDict

    part = Dataset.from_list(ROWS)
    DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "splits")
    source = source.format(tmp=tmp_path, splits=tmp_path / "splits", jsonl=jsonl(tmp_path))
    with pytest.raises(DataError, match=message):
        load_rows(source, **settings)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("promt", r"no column 'promt': did you mean 'prompt'\? Its columns are answer, n, prompt, tags"),
        ("zzz", r"no column 'zzz': Its columns are"),
    ],
)
def test_a_missing_column_names_the_columns_there_are(column: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        require_column(ROWS, column, "rows.jsonl")
