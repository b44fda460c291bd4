"""What a run was made of: captured before it starts, checked again while it runs, verified, compared and restored after.

>>> from run_snapshot import capture, verify
>>> snapshot = capture(Path("runs/1/snapshot"), config={"lr": 1e-4}, data_files=["train.jsonl"])  # doctest: +SKIP
>>> verify(snapshot.path).ok  # doctest: +SKIP
True

Names load when they are used, so that MLflow's plugin costs an import of nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from run_snapshot.capturing import Snapshot, capture
    from run_snapshot.checkpoints import check_checkpoint, checkpoint_record
    from run_snapshot.differing import diff
    from run_snapshot.digests import Rows
    from run_snapshot.errors import DigestError, GitError, SnapshotError, UsageError
    from run_snapshot.records import Difference, Finding, Report
    from run_snapshot.restoring import restore
    from run_snapshot.verifying import check, check_weights_file, verify

_HOMES = {
    "Difference": "records",
    "DigestError": "errors",
    "Finding": "records",
    "GitError": "errors",
    "Report": "records",
    "Rows": "digests",
    "Snapshot": "capturing",
    "SnapshotError": "errors",
    "UsageError": "errors",
    "capture": "capturing",
    "check": "verifying",
    "check_checkpoint": "checkpoints",
    "check_weights_file": "verifying",
    "checkpoint_record": "checkpoints",
    "diff": "differing",
    "restore": "restoring",
    "verify": "verifying",
}

__all__ = [
    "Difference",
    "DigestError",
    "Finding",
    "GitError",
    "Report",
    "Rows",
    "Snapshot",
    "SnapshotError",
    "UsageError",
    "capture",
    "check",
    "check_checkpoint",
    "check_weights_file",
    "checkpoint_record",
    "diff",
    "restore",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
