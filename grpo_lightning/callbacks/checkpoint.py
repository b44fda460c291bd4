"""Checkpoints in the run directory, each with a `.health.json` beside it that is readable without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import xxhash
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lightning.callbacks.recorder import RunRecorder
from grpo_lightning.callbacks.settings import CheckpointSettings
from grpo_lightning.training import ranks

__all__ = ["RunCheckpoint", "file_record"]

_CHUNK = 2**20


class RunCheckpoint(ModelCheckpoint):
    """Saves every N steps and at the end, into the recorder's run directory."""

    def __init__(self, recorder: RunRecorder, settings: CheckpointSettings) -> None:
        super().__init__(
            filename="step-{step:07d}",
            auto_insert_metric_name=False,
            save_last=True,
            every_n_train_steps=settings.every_n_steps or None,
            monitor="step",
            mode="max",
            save_top_k=settings.keep,
            save_on_train_epoch_end=False if settings.every_n_steps else None,
        )
        self._recorder = recorder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The folder is known once the run is: see `on_fit_start`."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save where the run is recorded."""
        if self._recorder.checkpoint_dir is not None:
            self.dirpath = str(self._recorder.checkpoint_dir)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the list of the newest checkpoints when the run directory is still where it was."""
        if self.dirpath is None and Path(state_dict.get("dirpath") or "-").is_dir():
            self.dirpath = state_dict["dirpath"]
        super().load_state_dict(state_dict)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last step is always saved."""
        super().on_train_end(trainer, pl_module)
        self.save_newest(trainer)

    def save_newest(self, trainer: L.Trainer) -> Path:
        """Save the run as it stands, unless it was already; the path of `last.ckpt`. All ranks call it together."""
        if trainer.global_step > self._last_global_step_saved:
            monitored = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, monitored)
            self._save_last_checkpoint(trainer, monitored)
        return Path(self.last_model_path)

    def save_now(self, trainer: L.Trainer, name: str) -> Path:
        """Save the run as it stands, under a name that is kept whatever `keep` says. All ranks call it together."""
        path = Path(self.dirpath or trainer.default_root_dir) / f"{name}.ckpt"
        self._save_checkpoint(trainer, str(path))
        return path

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if trainer.is_global_zero:
            _write_health(Path(filepath), self._recorder.health() | {"file": file_record(Path(filepath))})
            self._recorder.announce_checkpoint(Path(filepath))

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        if ranks.rank() == 0:
            _health_path(Path(filepath)).unlink(missing_ok=True)


def file_record(path: Path) -> dict[str, Any]:
    """Size and xxh3-128 of a checkpoint's file, by which an audit knows it without reading its tensors; {} of a folder."""
    if not path.is_file():
        return {}
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _health_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.stem}.health.json")


def _write_health(checkpoint: Path, health: dict[str, Any]) -> None:
    path = _health_path(checkpoint)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(json.dumps(health, indent=2, sort_keys=True) + "\n")
    draft.replace(path)
