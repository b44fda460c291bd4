"""Holding a run's snapshot against what is there now, where the snapshot plug-in is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from grpo_lightning.health.diagnosis import Drift

__all__ = ["check_snapshot"]

_MANIFEST = "manifest.json"


def check_snapshot(folder: Path, *, weights: bool = True) -> tuple[list[Drift] | None, str]:
    """(what was found, why nothing could be): the first is None where there is nothing to check or to check with.

    Files are believed where size and time stand. With `weights` a recorded file of weights is read again, too.
    """
    if not (folder / _MANIFEST).is_file():
        return None, "no snapshot"
    if find_spec("run_snapshot") is None:
        return None, "the snapshot plug-in is not installed (pip install lightning-run-snapshot)"
    plugin = import_module("run_snapshot")
    try:
        found = plugin.verify(folder, quick=True).findings if weights else plugin.check(folder)
    except (plugin.SnapshotError, OSError, ValueError) as error:
        return [Drift(level="snapshot", name=folder.name, verdict="unknown", detail=str(error))], ""
    return [Drift(level=f.level, name=f.name, verdict=f.verdict, detail=f.detail) for f in found], ""
