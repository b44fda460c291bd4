"""What a run's journal says of itself against what a store says and what is the case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_lightning.registry.records import AuditFinding, Candidate, Verdict
from grpo_lightning.sinks import Journal, RunDirectory

__all__ = ["check_state"]

_REPAIRS = ("skip_update", "resample")


def check_state(run: Candidate, path: Path) -> Iterator[AuditFinding]:
    """Status, segments, alerts nobody has explained, repairs nobody has looked at."""
    directory = RunDirectory.open(path)
    live = directory.is_live()
    with directory.journal(read_only=True) as journal:
        yield from _status(run, journal, live)
        yield from _segments(journal, live)
        yield from _alerts(journal)


def _status(run: Candidate, journal: Journal, live: bool) -> Iterator[AuditFinding]:
    segments = journal.segments()
    own = segments[-1].status if segments else "new"
    if not segments:
        yield _finding("run", "segments", "missing", "the journal has no segment")
    elif own == "running" and not live:
        yield _finding("run", "status", "changed", "the journal says running, and no process holds the run: it died")
    elif run.status == "RUNNING" and not live:
        yield _finding("run", "status", "changed", f"MLflow says RUNNING, the run is {own}: `fit` or a sync repairs it")
    else:
        yield _finding("run", "status", "ok", "running now" if live else own)


def _segments(journal: Journal, live: bool) -> Iterator[AuditFinding]:
    recorded = {row.segment for row in journal.rows(all_segments=True)}
    segments = journal.segments()
    for segment in segments:
        newest = live and segment is segments[-1]
        if segment.segment not in recorded and not newest:
            yield _finding(
                "run",
                f"segment {segment.segment}",
                "missing",
                f"it recorded no step ({segment.status}: {segment.reason[:100]})",
            )


def _alerts(journal: Journal) -> Iterator[AuditFinding]:
    for row in journal.alerts(open_only=True, all_segments=True):
        payload = row.event.payload
        action = str(payload.get("action"))
        if action in _REPAIRS:
            continue
        if payload.get("severity") == "critical":
            yield _finding("alerts", row.event.key, "unknown", f"open ({action}): nobody has said what caused it")
        else:
            yield _finding("alerts", row.event.key, "ok", f"a warning, open ({action})")
    told = {row.event.step for row in journal.alerts(all_segments=True) if not row.open}
    unseen = [event for event in journal.recoveries() if event.step not in told]
    if unseen:
        kinds = ", ".join(sorted({event.name for event in unseen}))
        yield _finding("alerts", "recoveries", "unknown", f"{len(unseen)} repairs ({kinds}) that nobody has looked at")


def _finding(level: str, name: str, verdict: Verdict, detail: str) -> AuditFinding:
    return AuditFinding(level=level, name=name, verdict=verdict, detail=detail)
