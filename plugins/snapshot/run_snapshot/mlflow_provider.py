"""MLflow's run-context plugin: tags on runs of ours, nothing on anybody else's.

MLflow makes it whenever it is imported, in every project of the environment, so it imports nothing that could fail or take
time, not even MLflow: MLflow only calls these two methods.
"""

from __future__ import annotations

from run_snapshot.context import active_tags

__all__ = ["RunSnapshotContext"]


class RunSnapshotContext:
    """What MLflow asks whenever a run is made."""

    def in_context(self) -> bool:
        """Whether the run being made is one of ours."""
        return active_tags() is not None

    def tags(self) -> dict[str, str]:
        """Its tags."""
        return active_tags() or {}
