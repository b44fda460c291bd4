"""Checkpoint files that are whole or not there.

Lightning writes a checkpoint into memory, then into the system's temporary folder, and moves it: onto another disk, as
run directories often are, that is a copy over the old file, and a kill in its middle leaves neither.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from grpo_lightning.errors import UsageError

__all__ = ["AtomicCheckpointIO", "write_atomically"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, onto the disk, and then renames."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save; a file that was there stays until the new one is complete."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(checkpoint, draft)
            draft.replace(target)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise UsageError(
                f"Can't write the checkpoint {target} ({reason}): see to the space and the permissions there, and continue "
                f"the run from its last checkpoint."
            ) from error
        finally:
            draft.unlink(missing_ok=True)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(strategy: Any) -> None:
    """Let a strategy that saves single files save them so; FSDP and DeepSpeed keep their own ways."""
    try:
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = AtomicCheckpointIO()
    except NotImplementedError:
        return
