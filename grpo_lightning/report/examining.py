"""Everything that there is to say about a run or a log: its signals, alerts, evidence, snapshot, and the diagnosis of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_lightning.errors import UsageError
from grpo_lightning.health import Baseline, Rule, Step, load_baseline, replay, shipped_rules, verdict_of
from grpo_lightning.health.diagnosis import Columns, Diagnosis, diagnose
from grpo_lightning.report.evidence import EvidenceFile, read_evidence
from grpo_lightning.report.repair import Repair, repairs_of
from grpo_lightning.report.snapshots import check_snapshot
from grpo_lightning.report.told import Told
from grpo_lightning.sinks import EventRow, Journal, RunDirectory, SegmentRow

__all__ = ["Examined", "examine_log", "examine_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What a report is made of."""

    name: str
    run: Columns
    verdict: str  # healthy | warning | unhealthy
    told: Sequence[Told]
    diagnosis: Diagnosis
    directory: Path | None = None  # None: a log
    run_id: str = ""
    description: str = ""
    status: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)  # further facts for people, by name
    segments: Sequence[SegmentRow] = ()
    events: Sequence[EventRow] = ()  # recoveries and notes
    evidence: Sequence[EvidenceFile] = ()
    repairs: Sequence[Repair] = ()
    baseline: Baseline | None = None
    notes: Sequence[str] = ()  # what could not be read or judged
    at_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `diagnose --json` prints."""
        about = {"name": self.name, "run_id": self.run_id, "verdict": self.verdict, "steps": len(self.run)}
        alerts = [
            {
                "id": one.alert.id,
                "rule": one.alert.rule,
                "step": one.alert.step,
                "onset_step": one.alert.onset_step,
                "severity": one.alert.severity,
                "action": one.alert.action,
                "cause": one.alert.cause,
                "summary": one.alert.summary,
                "open": one.open,
            }
            for one in self.told
        ]
        repair = [{"what": one.what, "command": one.command} for one in self.repairs]
        files = [{"file": one.name, "step": one.step, "rows": len(one.rows)} for one in self.evidence]
        return about | {"alerts": alerts} | self.diagnosis.to_dict() | {"repair": repair, "evidence": files}


def examine_run(
    directory: RunDirectory,
    *,
    baseline: Baseline | None = None,
    at_step: int | None = None,
    weights: bool = True,
    status: str | None = None,
) -> Examined:
    """A run by its directory.

    Args:
        directory: the run's.
        baseline: the ruler; the one that the run was held against where it still exists, when None.
        at_step: what to diagnose; the onset of the main open alert, when None.
        weights: whether a snapshot's weights are read again.
        status: how the run ends, where its own process asks just before; as recorded, when None.
    """
    with directory.journal(read_only=True) as journal:
        meta, segments = journal.meta(), journal.segments()
        told = [Told.of(row) for row in journal.alerts()]
        events = [*journal.recoveries(), *journal.events("note")]
        run = Columns.of(_steps(journal))
        latest = journal.latest()
    baseline = baseline or _recorded_baseline(directory)
    asked = _asked(told, at_step)
    onset = _onset(asked, at_step)
    evidence = read_evidence(directory.evidence, told, onset)
    drifts, why = check_snapshot(directory.snapshot, weights=weights)
    diagnosis = diagnose(
        run,
        [one.alert for one in asked],
        baseline=baseline,
        snapshot=drifts,
        why_no_snapshot=why,
        evidence=[row for file in evidence if not file.before for row in file.rows],
        at_step=at_step,
        restarts=[segment.from_step for segment in segments[1:]],
    )
    notes = [f"{file.unread} lines of {file.name} could not be read" for file in evidence if file.unread]
    if status is None:
        status = "running" if directory.is_live() else segments[-1].status if segments else "new"
    return Examined(
        name=meta.get("name", directory.run_id),
        run=run,
        verdict=_verdict(told),
        told=told,
        diagnosis=diagnosis,
        directory=directory.path,
        run_id=directory.run_id,
        description=meta.get("description", ""),
        status=status,
        facts=_facts(segments, latest.time if latest else None),
        segments=segments,
        events=sorted(events, key=lambda event: event.step),
        evidence=evidence,
        repairs=repairs_of(asked, directory.path, diagnosis.onset, trainer=meta.get("trainer", "")),
        baseline=baseline,
        notes=notes,
        at_step=at_step,
    )


def examine_log(
    name: str,
    steps: Iterable[Step],
    *,
    rules: Sequence[Rule] | None = None,
    baseline: Baseline | None = None,
    at_step: int | None = None,
    facts: Mapping[str, str] | None = None,
) -> Examined:
    """Another trainer's log, judged by the shipped rules or others."""
    run = Columns()
    made = replay(run.watch(steps), shipped_rules() if rules is None else rules, baseline=baseline)
    if not run:
        raise UsageError(f"{name} has no steps that can be read.")
    told = [Told(alert=alert) for alert in made.alerts]
    diagnosis = diagnose(run, made.alerts, baseline=baseline, at_step=at_step, why_no_snapshot="a log has no snapshot")
    missing = sorted({signal for _, signal in made.not_judged})
    notes = [f"Rules were not judged for want of {', '.join(missing)}."] if missing else []
    return Examined(
        name=name,
        run=run,
        verdict=made.verdict,
        told=told,
        diagnosis=diagnosis,
        status="log",
        facts=facts or {},
        repairs=repairs_of(told, None, diagnosis.onset),
        baseline=baseline,
        notes=notes,
        at_step=at_step,
    )


def _steps(journal: Journal) -> Iterable[Step]:
    """A run's steps, each with the evaluations that were made after it."""
    evaluations: dict[int, dict[str, float]] = {}
    for event in journal.evaluations():
        numbers = {name: float(v) for name, v in event.payload.items() if isinstance(v, int | float)}
        evaluations.setdefault(event.step, {}).update(numbers)
    for row in journal.rows():
        yield Step(step=row.step, values=dict(row.values) | evaluations.pop(row.step, {}))


def _recorded_baseline(directory: RunDirectory) -> Baseline | None:
    """The ruler that the run's settings name, where it can still be read."""
    try:
        settings = yaml.safe_load(directory.config.read_text(encoding="utf-8"))
        path = settings["health"]["baseline"]
        return load_baseline(path) if path else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, UsageError):
        return None


def _asked(told: Sequence[Told], at_step: int | None) -> list[Told]:
    """The alerts that ask for a diagnosis: the open ones, without one all; of a step, those that had begun by then."""
    open_ones = [one for one in told if one.open] or list(told)
    if at_step is None:
        return open_ones
    return [one for one in told if one.alert.onset_step <= at_step + 1]


def _onset(asked: Sequence[Told], at_step: int | None) -> int | None:
    from grpo_lightning.health.diagnosis import main_alert

    alert = main_alert([one.alert for one in asked])
    return at_step if at_step is not None else alert.onset_step if alert is not None else None


def _verdict(told: Sequence[Told]) -> str:
    """By the open alerts."""
    return verdict_of([one.alert for one in told if one.open])


def _facts(segments: Sequence[SegmentRow], latest: float | None) -> dict[str, str]:
    if not segments:
        return {}
    ends = [segment.ended or latest or segment.started for segment in segments]
    seconds = math.fsum(max(end - segment.started, 0.0) for end, segment in zip(ends, segments, strict=True))
    return {"started": _when(segments[0].started), "training time": _duration(seconds)}


def _when(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
