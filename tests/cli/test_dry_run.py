"""`fit --dry_run`: what training would begin with, and rewards tried before an hour is spent."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.cli.main import main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    make_tiny_model(folder)
    write_prompts(folder / "train.jsonl")
    return folder


def dry(files: Path, rewards: list[dict[str, object]], *extra: str) -> int:
    config = {
        "model": {
            "model": str(files / "tiny-llama"),
            "rewards": rewards,
            "group_size": 4,
            "sampling": {"max_new_tokens": 4},
        },
        "data": {"train": str(files / "train.jsonl"), "prompts_per_step": 4},
        "trainer": {"max_steps": 3, "accelerator": "cpu"},
    }
    (files / "config.yaml").write_text(yaml.safe_dump(config))
    return main(["fit", "--config", str(files / "config.yaml"), "--dry_run", *extra])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_shipped_example_is_fine_and_nothing_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "32 prompts x 8 responses" in said
    assert "found: nothing" in said
    assert list(here.iterdir()) == []


def test_a_dead_reward_is_found(files: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry(files, [{"path": "exact_match"}]) == 1
    said = capsys.readouterr().out
    assert "No group has any spread" in said
    assert "take easier prompts" in said


def test_a_reward_that_fails_on_an_empty_response_is_found(
    files: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "brittle.py").write_text(
        "def first(completions, **_):\n    return [len(c) / any(completions) for c in completions]\n"
    )
    assert dry(files, [{"path": f"{here / 'brittle.py'}:first"}]) == 1
    assert "fails on empty responses" in capsys.readouterr().out


def test_hostile_text_does_not_reach_the_terminal(files: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f'{{"prompt": "{i}+\\u001b[31m1=", "answer": "x"}}' for i in range(4)]
    (files / "train.jsonl").write_text("\n".join(rows) + "\n")
    dry(files, [{"path": "support.tiny:dense"}])
    assert "\x1b[31m" not in capsys.readouterr().out
    write_prompts(files / "train.jsonl")
