"""Does a snapshot still hold? `check` during a run, `verify` after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from run_snapshot.checks import check_code, check_data, check_environment, check_rewards, check_weights, compare_tree
from run_snapshot.digests import WeightsTree
from run_snapshot.errors import SnapshotError
from run_snapshot.manifest import MANIFEST, Stored, check_integrity, find_snapshot, load_snapshot
from run_snapshot.records import LEVELS, Finding, Level, Report, Verdict

__all__ = ["check", "check_weights_file", "verify"]


def check(snapshot_dir: str | Path, *, quick: bool = True) -> list[Finding]:
    """What is changed, missing or unknown now, in order of suspicion; empty when nothing is.

    Cheap enough for every checkpoint: sizes and times first, contents where those moved. With ``quick=False`` all data and
    repositories are read.
    """
    stored = load_snapshot(snapshot_dir)
    return [finding for finding in _all(stored, quick=quick, full=False) if finding.is_problem]


def verify(path: str | Path, *, full: bool = False, quick: bool = False) -> Report:
    """All findings about a snapshot: its own integrity, then everything it describes.

    Data, code and weights are read again. Installed files are hashed where their size or time changed, with `full` all of
    them. With `quick` data and code are believed as in `check`, and the findings say so.
    """
    where = find_snapshot(path)
    try:
        stored = load_snapshot(where)
    except SnapshotError as error:
        verdict: Verdict = "unknown" if (where / MANIFEST).is_file() else "missing"
        finding = Finding(level="snapshot", name=MANIFEST, verdict=verdict, detail=str(error))
        return Report(path=str(where), digest="", findings=(finding,))
    findings = check_integrity(stored) + _all(stored, quick=quick, full=full)
    findings += _guarded("weights", lambda: check_weights(stored))
    return Report(path=str(where), digest=stored.digest, findings=tuple(_ordered(findings)))


def check_weights_file(tree: Mapping[str, Any], path: str | Path) -> list[Finding]:
    """A file of weights against the JSON of a recorded `WeightsTree`."""
    return _guarded("weights", lambda: compare_tree(WeightsTree.from_json(tree), Path(path)))


def _all(stored: Stored, *, quick: bool, full: bool) -> list[Finding]:
    return [
        *_guarded("environment", lambda: check_environment(stored, quick=quick, full=full)),
        *_guarded("data", lambda: check_data(stored, quick=quick)),
        *_guarded("reward", lambda: check_rewards(stored)),
        *_guarded("code", lambda: check_code(stored, quick=quick)),
    ]


def _guarded(level: Level, part: Callable[[], list[Finding]]) -> list[Finding]:
    """A part that can't be checked is unknown, and unknown is never ok."""
    try:
        return part()
    except (SnapshotError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        detail = str(error) if isinstance(error, SnapshotError) else f"{type(error).__name__}: {error}"
        return [Finding(level=level, name=level, verdict="unknown", detail=detail)]


def _ordered(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
