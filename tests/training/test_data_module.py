"""Batches of prompts: what is in them, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_tiny_model

from grpo_lightning.errors import ConfigError, DataError
from grpo_lightning.objective.batch import PromptBatch
from grpo_lightning.training.data import PromptDataModule

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2", "from": "a", "meta": {"k": [1]}},
    {"prompt": "10+10=", "answer": "20", "from": "b", "meta": {"k": []}},
    {"prompt": "1+1=", "answer": "2", "from": None, "meta": None},
    {"prompt": "7=", "answer": "7", "from": "a", "meta": {"k": [3]}},
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("model"))
    template = "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + ' ' }}{% endfor %}a="
    (path / "chat_template.jinja").write_text(template)
    return path


Make = Callable[..., PromptDataModule]


@pytest.fixture
def make(model_path: Path, tmp_path: Path) -> Make:
    def made(rows: list[dict[str, Any]] = ROWS, **changes: Any) -> PromptDataModule:
        train = tmp_path / "train.jsonl"
        train.write_text("\n".join(map(json.dumps, rows)))
        return PromptDataModule(**({"train": str(train), "model": str(model_path), "prompts_per_step": 4} | changes))

    return made


def batches(data: PromptDataModule) -> list[PromptBatch]:
    data.setup("fit")
    return [data.on_before_batch_transfer(sealed, 0) for sealed in data.train_dataloader()]


def texts(data: PromptDataModule, batch: PromptBatch) -> list[str]:
    return [
        "".join(data.tokenizer.convert_ids_to_tokens(ids[mask]))
        for ids, mask in zip(batch.ids_PS, batch.mask_PS, strict=True)
    ]


def test_a_batch_is_padded_on_the_left_and_carries_its_rows(make: Make) -> None:
    data = make(source_column="from")
    (batch,) = batches(data)
    order = batch.row_ids_P.tolist()
    assert sorted(order) == [0, 1, 2, 3]
    assert batch.ids_PS.dtype == batch.row_ids_P.dtype == torch.int64
    assert batch.mask_PS.dtype == torch.bool
    assert batch.ids_PS.shape == (4, len("10+10="))
    assert batch.mask_PS.int().diff(dim=1).min() >= 0  # once a token, always a token: the padding is on the left
    assert (batch.ids_PS[~batch.mask_PS] == data.tokenizer.pad_token_id).all()
    assert texts(data, batch) == batch.prompts == [ROWS[i]["prompt"] for i in order]
    assert batch.columns == {name: [ROWS[i][name] for i in order] for name in ("answer", "from", "meta")}
    assert batch.sources == [ROWS[i]["from"] or "" for i in order]


def test_two_rows_of_one_text_stay_two_prompts(make: Make) -> None:
    (batch,) = batches(make())
    same = [row for row, prompt in zip(batch.row_ids_P.tolist(), batch.prompts, strict=True) if prompt == "1+1="]
    assert sorted(same) == [0, 2]


def test_a_row_keeps_its_number_when_others_are_dropped(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    data = make(max_prompt_tokens=5, overlong="drop")
    with caplog.at_level(logging.WARNING):
        (batch,) = batches(data)
    assert sorted(batch.row_ids_P.tolist()) == [0, 2, 3]
    assert data.dropped == 1
    assert "1 of 4 prompts of" in caplog.text


def test_rows_need_not_have_the_same_columns(make: Make) -> None:
    (batch,) = batches(make([{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}]))
    by_row = dict(zip(batch.row_ids_P.tolist(), zip(batch.columns["x"], batch.columns["y"], strict=True), strict=True))
    assert by_row == {0: (1, None), 1: (None, 2)}


CHAT = [{"role": "user", "content": "hi"}]
PROMPTS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "text": ({"prompt": "1+1="}, {}, "1+1=", "1+1="),
    "chat": ({"prompt": CHAT}, {}, CHAT, "u=hi a="),
    "text made a chat": ({"prompt": "hi"}, {"chat": True}, CHAT, "u=hi a="),
    "system prompt": (
        {"prompt": "hi"},
        {"system_prompt": "be"},
        [{"role": "system", "content": "be"}, *CHAT],
        "s=be u=hi a=",
    ),
    "template": ({"q": "1+1", "n": 2}, {"prompt_template": "{q}={n}?"}, "1+1=2?", "1+1=2?"),
    "template and chat": ({"q": "hi"}, {"prompt_template": "{q}", "chat": True}, CHAT, "u=hi a="),
    "other column": ({"q": "1+1="}, {"prompt_column": "q"}, "1+1=", "1+1="),
}


@pytest.mark.parametrize(("row", "changes", "prompt", "text"), PROMPTS.values(), ids=PROMPTS.keys())
def test_a_prompt_is_made_as_asked(
    make: Make, row: dict[str, Any], changes: dict[str, Any], prompt: Any, text: str
) -> None:
    data = make([row], **changes)
    (batch,) = batches(data)
    assert batch.prompts == [prompt]
    assert texts(data, batch) == [text]


BAD: dict[str, tuple[list[dict[str, Any]], dict[str, Any], type[Exception], str]] = {
    "no column": ([{"promt": "a"}], {}, DataError, r"no column 'prompt': did you mean 'promt'\?"),
    "no source column": ([{"prompt": "a"}], {"source_column": "from"}, DataError, r"no column 'from'"),
    "a row without": ([{"prompt": "a"}, {"x": 1}], {}, DataError, r"Row 1 of '.*train.jsonl' has the prompt None"),
    "a number": ([{"prompt": "a"}, {"prompt": 5}], {}, DataError, r"Row 1 of .* has the prompt 5"),
    "template column": ([{"q": 1}], {"prompt_template": "{r}"}, DataError, r"names 'r', which Row 0 .* lacks.*are q"),
    "template by place": ([{"q": 1}], {"prompt_template": "{}"}, DataError, r"prompt_template"),
    "template braces": ([{"q": 1}], {"prompt_template": "{q"}, DataError, r"can't be filled .*for braces"),
    "template format": ([{"q": "a"}], {"prompt_template": "{q:d}"}, DataError, r"can't be filled"),
    "overlong": (
        [{"prompt": "a"}, {"prompt": "a" * 9}],
        {"max_prompt_tokens": 8},
        DataError,
        r"Row 1 .*9 prompt tokens.*8",
    ),
    "all overlong": (
        [{"prompt": "aaa"}],
        {"max_prompt_tokens": 2, "overlong": "drop"},
        DataError,
        r"Every prompt .* over data.max_prompt_tokens \(2\)",
    ),
    "no rows": ([], {}, DataError, r"is empty"),
}


@pytest.mark.parametrize(("rows", "changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_rows_say_which_and_why(
    make: Make, rows: list[dict[str, Any]], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        batches(make(rows, **changes))


@pytest.mark.parametrize(
    "name", ["prompts_per_step", "val_batch_size", "max_prompt_tokens", "limit_train", "limit_val"]
)
def test_counts_below_one_are_refused(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=f"data.{name} is 0: give at least 1"):
        make(**{name: 0})


def test_validation_without_held_out_prompts_says_so(make: Make) -> None:
    with pytest.raises(DataError, match=r"data.val is not set"):
        make().setup("validate")


def test_a_fit_needs_no_held_out_prompts(make: Make) -> None:
    data = make()
    data.setup("fit")
    assert data.val_dataloader() == []


def test_held_out_prompts_that_are_training_prompts_are_counted(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    val = tmp_path / "val.jsonl"
    val.write_text("\n".join(json.dumps({"prompt": p}) for p in ("1+1=", "9=", "8=")))
    with caplog.at_level(logging.WARNING):
        make(val=str(val)).setup("fit")
    assert "1 of 3 held-out prompts of" in caplog.text


def test_limits_take_the_first_rows(make: Make, tmp_path: Path) -> None:
    val = tmp_path / "val.jsonl"
    val.write_text("\n".join(json.dumps({"prompt": p}) for p in ("9=", "8=")))
    data = make(limit_train=2, val=str(val), limit_val=1)
    assert sorted(r for b in batches(data) for r in b.row_ids_P.tolist()) == [0, 1]
    assert [s.opened.prompts for s in data.val_dataloader()] == [["9="]]


def test_another_tokenizer_is_not_asked_for_the_models_gguf_file(make: Make, model_path: Path) -> None:
    data = make(model="no/such/model", gguf_file="weights.gguf", tokenizer=str(model_path))
    assert len(batches(data)) == 1


def test_moving_a_batch_moves_its_tensors(make: Make) -> None:
    data = make()
    (batch,) = batches(data)
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert {moved.ids_PS.device.type, moved.mask_PS.device.type, moved.row_ids_P.device.type} == {"meta"}
    assert moved.prompts == batch.prompts


def test_the_loader_before_setup_says_what_is_missing(make: Make) -> None:
    with pytest.raises(DataError, match=r"setup\('fit'\) has not run"):
        make().train_dataloader()
