"""What runs are made of, for the commands that ask: from a run's directory, or from MLflow where that is elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_lightning.cli.sources import run_directory
from grpo_lightning.errors import UsageError
from grpo_lightning.registry.comparing import Side, side_of_directory, side_of_metrics
from grpo_lightning.sinks import RunDirectory

__all__ = ["Made", "made_of", "side_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A run's snapshot, and its directory where it is on this machine."""

    run_id: str
    snapshot: Path
    directory: RunDirectory | None = None


@contextmanager
def made_of(run: str, root: str) -> Iterator[Made]:
    """The snapshot of the run that `run` names; one that only MLflow has is fetched, and gone afterwards.

    Raises:
        UsageError: nothing of that name, or no snapshot of it here or in MLflow.
    """
    from grpo_lightning.tracking import download_snapshot, resolve_run

    found = None if _is_here(run, root) else resolve_run(run, root=root)
    if found is None or found.path is not None:
        directory = run_directory(run, root) if found is None else RunDirectory.open(found.path or run)
        yield Made(run_id=directory.run_id, snapshot=directory.snapshot, directory=directory)
        return
    with tempfile.TemporaryDirectory(prefix="grpo-snapshot-") as folder:
        snapshot = download_snapshot(found.run_id, Path(folder))
        if snapshot is None:
            raise UsageError(
                f"The run {found.name} ({found.run_id}) has no run directory on this machine, and MLflow has no snapshot of it."
            )
        yield Made(run_id=found.run_id, snapshot=snapshot)


def _is_here(run: str, root: str) -> bool:
    return any((path / "journal.sqlite").is_file() for path in (Path(run).expanduser(), Path(root) / run))


def side_of(made: Made) -> Side:
    """What `compare` holds against another."""
    if made.directory is not None:
        return side_of_directory(made.directory)
    from grpo_lightning.tracking import metric_rows

    return side_of_metrics(made.run_id, made.snapshot, metric_rows(made.run_id))
