"""``grpo_health.json`` beside a checkpoint's ``trainer_state.json``: the monitoring state and the judgement, plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_lightning.errors import DataError

__all__ = ["STATE_FILE", "read_state", "write_state"]

STATE_FILE = "grpo_health.json"
_VERSION = 1


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> Path:
    """Write the state into a checkpoint's folder; a crash leaves the whole file or none."""
    path = checkpoint / STATE_FILE
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(json.dumps({"version": _VERSION, **state}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """The state of a checkpoint; None where it was made without being watched."""
    path = checkpoint / STATE_FILE
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = state["version"] == _VERSION and {"run_id", "root", "judge", "temporal", "evaluation"} <= state.keys()
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} can't be read ({error}): remove it to judge from the start.") from error
    if not known:
        raise DataError(f"{path} is of another version: remove it to judge from the start.")
    return state
