"""A run's own report at its end: made, kept in the run directory, handed on. It never disturbs the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from grpo_lightning.report.examining import examine_run
from grpo_lightning.report.page import write_report
from grpo_lightning.sinks import RunDirectory

__all__ = ["publish_report"]

_log = logging.getLogger(__name__)


def publish_report(
    directory: RunDirectory, hand_on: Callable[[Path], object] | None = None, *, status: str | None = None
) -> Path | None:
    """Write `report.html` into the run directory and hand it on, e.g. to MLflow's artifacts.

    `status` is how the run ends, where its process still holds it: finished, paused, failed, killed.
    What fails is logged, and None is returned: a run does not end in an error for its report. A run that ended before its
    first step has none.
    """
    try:
        found = examine_run(directory, weights=False, status=status)
        if not found.run.steps:
            return None
        path = write_report(found, directory.report)
        if hand_on is not None:
            hand_on(path)
    except Exception as error:  # noqa: BLE001 - the run's own end matters more
        _log.warning("Can't make the report of %s: %s: %s.", directory.run_id, type(error).__name__, error)
        return None
    return path
