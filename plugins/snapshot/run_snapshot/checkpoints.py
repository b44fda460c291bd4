"""What a checkpoint says about itself: the snapshot it belongs to and the digests of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_snapshot.digests.weights import WeightsTree, compare_weights, digest_state, load_checkpoint, state_in
from run_snapshot.errors import DigestError
from run_snapshot.records import Finding

__all__ = ["KEY", "check_checkpoint", "checkpoint_record", "read_checkpoint"]

KEY = "run_snapshot"  # in a checkpoint
_NAMED = 20


def checkpoint_record(state: Mapping[str, Any], *, digest: str, path: str = "") -> dict[str, Any]:
    """What goes into a checkpoint under `KEY`: plain types, which `weights_only` loading accepts."""
    return {"digest": digest, "path": path, "weights": digest_state(state).to_json()}


def check_checkpoint(path: str | Path) -> list[Finding]:
    """Whether a checkpoint's weights are those that it was saved with; each tensor that is not is named."""
    return read_checkpoint(path)[1]


def read_checkpoint(path: str | Path) -> tuple[Mapping[str, Any] | None, list[Finding]]:
    """A checkpoint, None where it can't be read, and what is to be said about its weights."""
    where = Path(path)
    name = str(where)
    if not where.is_file():
        return None, [Finding(level="weights", name=name, verdict="missing", detail="the checkpoint is gone")]
    try:
        loaded = load_checkpoint(where)
        record = loaded.get(KEY) if isinstance(loaded, Mapping) else None
        if not isinstance(record, Mapping):
            detail = "it holds no record of its weights"
            return loaded, [Finding(level="weights", name=name, verdict="unknown", detail=detail)]
        tree = WeightsTree.from_json(record["weights"])
        changes = compare_weights(tree, digest_state(state_in(loaded, where)))
    except (DigestError, KeyError, TypeError, ValueError) as error:
        return None, [Finding(level="weights", name=name, verdict="unknown", detail=str(error))]
    if not changes:
        detail = f"{len(tree.tensors)} tensors as saved, root {tree.root}"
        return loaded, [Finding(level="weights", name=name, verdict="ok", detail=detail)]
    return loaded, [
        Finding(level="weights", name=change.name, verdict="changed", detail=f"{change.kind} in {where.name}")
        for change in changes[:_NAMED]
    ]
