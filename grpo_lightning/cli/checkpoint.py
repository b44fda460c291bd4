"""Whether a checkpoint can be continued, before anything is written: what torch and Lightning say of a bad one is a traceback."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

from torch import nn

from grpo_lightning.errors import ConfigError

__all__ = ["checked_checkpoint"]

_LIGHTNING_KEYS = ("state_dict", "global_step", "pytorch-lightning_version")


def checked_checkpoint(path: Any, module: nn.Module, *, max_steps: int | None = None) -> str | None:
    """The path of a checkpoint that `module` can load, and that leaves `fit` steps up to `max_steps` to make."""
    if path is None:
        return None
    where = Path(str(path)).expanduser()
    if not where.exists():
        raise ConfigError(
            f"--ckpt_path {str(path)!r} does not exist: name a file such as runs/RUN/checkpoints/last.ckpt."
        )
    if where.is_dir() and any(where.iterdir()):
        return str(where)  # sharded, by FSDP or DeepSpeed, which read it themselves
    checkpoint = _read(where)
    _check_weights(where, checkpoint["state_dict"], module)
    if max_steps is not None and 0 <= max_steps <= checkpoint["global_step"]:
        _refuse_finished(where, checkpoint["global_step"], max_steps)
    return str(where)


def _read(path: Path) -> dict[str, Any]:
    import torch

    damaged = (
        f"The checkpoint {path} can't be read: it is damaged or no checkpoint. Continue from another one of its folder."
    )
    if not _is_whole(path):
        raise ConfigError(damaged)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ConfigError(damaged) from error
    if not isinstance(checkpoint, dict) or not all(key in checkpoint for key in _LIGHTNING_KEYS):
        raise ConfigError(f"{path} is no checkpoint of a run: name a file such as runs/RUN/checkpoints/last.ckpt.")
    return checkpoint


def _is_whole(path: Path) -> bool:
    """Whether every member has its checksum, which torch does not look at; one process of a machine reads it all."""
    try:
        with zipfile.ZipFile(path) as members:
            return os.environ.get("LOCAL_RANK", "0") != "0" or members.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError):
        return False


def _check_weights(path: Path, saved: dict[str, Any], module: nn.Module) -> None:
    own = module.state_dict()
    alien = sorted(saved.keys() ^ own.keys())
    if alien:
        side = "has" if alien[0] in saved else "lacks"
        raise ConfigError(
            f"The checkpoint {path} is of another model: it {side} {alien[0]!r}, and {len(alien)} weights in all differ. "
            f"Continue with the model and the lora settings that it was trained with."
        )
    for name, value in own.items():
        if saved[name].shape != value.shape:
            raise ConfigError(
                f"The checkpoint {path} is of another model: its {name!r} is {_shape(saved[name])} and the model's "
                f"{_shape(value)}. Continue with the model that it was trained with."
            )


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) or "a number"


def _refuse_finished(path: Path, step: int, max_steps: int) -> None:
    raise ConfigError(
        f"The checkpoint {path} is at step {step} and trainer.max_steps is {max_steps}, so nothing is left to train: "
        f"add --trainer.max_steps {max(2 * step, step + 1)}."
    )
