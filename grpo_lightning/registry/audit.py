"""Every run of a registry, held against what is recorded of it.

What several runs share is read once: the parts of snapshots are told apart by their sha256, so that a thousand runs over one
dataset read it once. Checkpoints, journals and manifests are each run's own and are all read; `quick` believes files whose
size and time stand, reads no weights, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_lightning.registry.checkpoints import check_checkpoints
from grpo_lightning.registry.records import LEVELS, AuditFinding, Candidate, RunAudit
from grpo_lightning.registry.snapshots import SnapshotChecks
from grpo_lightning.registry.state import check_state

__all__ = ["audit_runs", "local_runs"]

_AT_ONCE = 4


def audit_runs(
    runs: Sequence[Candidate],
    *,
    quick: bool = False,
    remap: Mapping[str, str] | None = None,
    told: Callable[[RunAudit], None] | None = None,
) -> list[RunAudit]:
    """Audit runs, in their order.

    Args:
        runs: which.
        quick: read no weights again, and no file whose size and time stand.
        remap: beginnings of recorded paths and where these lie now.
        told: called with each run's audit when it is done.
    """
    snapshots = SnapshotChecks(quick=quick, remap=remap or {})
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = []
        for audit in pool.map(lambda run: _audit(run, snapshots, quick=quick), runs):
            done.append(audit)
            if told is not None:
                told(audit)
    return done


def _audit(run: Candidate, snapshots: SnapshotChecks, *, quick: bool) -> RunAudit:
    findings = list(_guarded("run", lambda: _findings(run, snapshots, quick=quick)))
    return RunAudit(run=run, findings=sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def _findings(run: Candidate, snapshots: SnapshotChecks, *, quick: bool) -> Iterator[AuditFinding]:
    path = run.path
    if path is None:
        detail = (
            "its run directory is not on this machine" if run.is_ours else "no snapshot: another tool made this run"
        )
        verdict = "unknown" if run.is_ours else "not checked"
        yield AuditFinding(level="snapshot", name="snapshot", verdict=verdict, detail=detail)  # type: ignore[arg-type]
        return
    yield from _guarded("snapshot", lambda: snapshots.check(path / "snapshot"))
    yield from _guarded("weights", lambda: check_checkpoints(path, run.tags, quick=quick, remapped=snapshots.remapped))
    yield from _guarded("run", lambda: check_state(run, path))


def _guarded(level: str, part: Callable[[], Iterator[AuditFinding]]) -> Iterator[AuditFinding]:
    """What can't be checked is unknown, whatever is in the way: one broken run does not end an audit."""
    try:
        yield from part()
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield AuditFinding(level=level, name=level, verdict="unknown", detail=said)


def local_runs(root: Path, known: Sequence[Candidate] = ()) -> list[Candidate]:
    """Run directories below `root` that no store has listed."""
    seen = {run.run_id for run in known}
    folders = sorted(journal.parent for journal in root.glob("*/journal.sqlite"))
    return [
        Candidate(run_id=folder.name, name=folder.name, path=folder.absolute())
        for folder in folders
        if folder.name not in seen
    ]
