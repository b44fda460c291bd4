"""A tiny model and prompts with sources, shared by the tests of callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny import make_tiny_model

from grpo_lightning.training.data import PromptDataModule


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    make_tiny_model(folder)
    rows = [{"prompt": f"{i}+{i * i % 97}=", "answer": str(i + i * i % 97), "source": "ab"[i % 2]} for i in range(48)]
    for name, part in (("train", rows[:40]), ("val", rows[40:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_files: Path) -> Path:
    return tiny_files / "tiny-llama"


@pytest.fixture(scope="session")
def make_data(tiny_files: Path) -> Callable[..., PromptDataModule]:
    def make(**changes: Any) -> PromptDataModule:
        settings: dict[str, Any] = {"prompts_per_step": 8, "source_column": "source"}
        train, model = str(tiny_files / "train.jsonl"), str(tiny_files / "tiny-llama")
        return PromptDataModule(train, model=model, **(settings | changes))

    return make
