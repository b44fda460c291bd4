"""The snapshot plug-in, which is a distribution of its own."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from grpo_lightning.errors import UsageError

__all__ = ["snapshot_plugin"]


def snapshot_plugin() -> Any:
    """The module `run_snapshot`.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("run_snapshot") is None:
        raise UsageError("Snapshots need their plug-in: pip install lightning-run-snapshot.")
    return import_module("run_snapshot")
