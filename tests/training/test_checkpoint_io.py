"""Checkpoint files are whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lightning.errors import UsageError
from grpo_lightning.training.checkpoint_io import AtomicCheckpointIO, write_atomically


class DiesWhenSaved:
    """A part of a checkpoint whose saving ends in the middle, as a kill or a full disk would."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_a_save_that_ends_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path, io = tmp_path / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(KeyboardInterrupt):
        io.save_checkpoint({"step": 2, "then": DiesWhenSaved()}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_draft_lies_beside_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is atomic on one file system only: the system's temporary folder is often on another."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "new" / "last.ckpt")
    assert torch.load(tmp_path / "new" / "last.ckpt", weights_only=True) == {"step": 1}


def test_what_can_not_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "full").touch()
    with pytest.raises(UsageError, match=r"Can't write the checkpoint .*last\.ckpt \(.*directory"):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "last.ckpt")


def test_a_strategy_of_single_files_takes_it(tmp_path: Path) -> None:
    strategy = SingleDeviceStrategy(device=torch.device("cpu"))
    write_atomically(strategy)
    assert isinstance(strategy.checkpoint_io, AtomicCheckpointIO)
