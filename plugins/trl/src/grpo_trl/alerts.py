"""The judgement of a watched run: rules at every step, evidence behind what fires, and the words of a pause."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lightning.callbacks import HealthSettings
from grpo_lightning.callbacks.evidence import evidence_rows
from grpo_lightning.callbacks.health import judge_of, plain
from grpo_lightning.health import Alert, AlertChange, Step, acknowledge_command, verdict_of
from grpo_lightning.objective import StepRecord
from grpo_lightning.signals.evidence import select
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.sinks.terminal import plain as printable
from grpo_trl.run import RunLog

__all__ = ["AlertDesk", "checkpoint_before", "pause_message"]

_log = logging.getLogger("grpo_trl")
_STEP = re.compile(r"checkpoint-(\d+)")


class AlertDesk:
    """Judges steps and records what changes.

    Args:
        run: where it is recorded.
        settings: rules, ruler, overrides.
        tokenizer: decodes the evidence's responses.
        checkpoints: the folder of TRL's ``checkpoint-N``.
    """

    def __init__(self, run: RunLog, settings: HealthSettings, *, tokenizer: Any, checkpoints: Path) -> None:
        self.judge, self.baseline = judge_of(settings)
        self._run, self._tokenizer, self._checkpoints = run, tokenizer, checkpoints
        self._enabled = settings.enabled

    def step(self, step: int, values: Mapping[str, float], record: StepRecord) -> Alert | None:
        """Judge a step; the alert that pauses the run, if any."""
        if not self._enabled:
            return None
        groups = float(record.rewards_PG.shape[0])
        pausing: Alert | None = None
        for change in self.judge.observe(Step(step=step, values=values, groups=groups)):
            self._record(change, record)
            if change.change != "resolved" and change.alert.action == "pause" and pausing is None:
                pausing = change.alert
        return pausing

    def _record(self, change: AlertChange, record: StepRecord) -> None:
        alert = change.alert
        evidence = self._evidence(record, alert.rule) if change.change == "firing" else None
        earlier = checkpoint_before(self._checkpoints, alert.onset_step)
        message = self._message(change)
        payload = plain(alert) | {
            "state": change.change,
            "evidence": str(evidence) if evidence is not None else None,
            "checkpoint_before_onset": str(earlier) if earlier is not None else None,
            "message": message,
        }
        self._run.write_event("alert", alert.rule, change.step, payload, id=alert.id)
        level = logging.INFO if change.change == "resolved" else logging.WARNING
        _log.log(
            level, "%s (%s): %s at step %d: %s", self._run.name, self._run.run_id, alert.rule, change.step, message
        )
        self._show()

    def _message(self, change: AlertChange) -> str:
        alert = change.alert
        if change.change == "resolved":
            return f"resolved: {alert.rule} no longer holds."
        near = self.baseline.near_mark(alert.onset_step) if self.baseline is not None else []
        marks = "".join(f" In the baseline {mark.summary}." for mark in near if mark.signal == alert.signal)
        where = f"{alert.severity}, began about step {alert.onset_step}"
        return f"{where}: {alert.summary}{marks} ({alert.cause}; {alert.action})"

    def _show(self) -> None:
        """The verdict where MLflow's table of runs can show and search it."""
        alerts = self.judge.alerts
        tags = {
            "health.verdict": verdict_of(alerts),
            "health.alerts": str(len(alerts)),
            "health.firing": ", ".join(alert.rule for alert in self.judge.firing()),
            "health.last_alert": alerts[-1].id if alerts else "",
        }
        rows = [{k: v for k, v in plain(a).items() if k != "values"} for a in alerts]
        lines = [f"- step {a.step} **{a.rule}** ({a.severity}, {a.action}): {a.summary}" for a in alerts[-10:]]
        text = f"**{verdict_of(alerts)}**\n\n" + "\n".join(lines)
        self._run.in_mlflow(lambda run: run.set_tags(tags), "the verdict")
        self._run.in_mlflow(lambda run: run.describe(text), "the verdict in words")
        self._run.in_mlflow(lambda run: run.log_table(rows, "alerts.json"), "the table of alerts")

    # ---- evidence

    def _evidence(self, record: StepRecord, rule: str) -> Path | None:
        head = {"run_id": self._run.run_id, "segment": self._run.segment, "step": record.step, "reason": rule}
        rows = [head | row for row in evidence_rows(record, select(record), self._tokenizer)]
        slug = re.sub(r"[^a-z0-9_]+", "-", rule.lower()).strip("-")[:80] or "evidence"
        path = self._run.directory.evidence / f"step-{record.step:06d}-{slug}.jsonl"
        try:
            _write_lines(path, rows)
        except OSError as error:
            _log.warning("Can't write the evidence %s: %s. Training goes on.", path, error)
            return None
        table = [{k: v if _flat(v) else json.dumps(v, default=str) for k, v in row.items()} for row in rows]
        self._run.log_evidence(path, table, slug)
        return path

    def health(self) -> dict[str, Any]:
        """The judgement so far, plain types."""
        return {
            "verdict": self.judge.verdict(),
            "alerts": [plain(alert) for alert in self.judge.alerts],
            "firing": [alert.id for alert in self.judge.firing()],
            "not_judged": [{"rule": rule, "missing": missing} for rule, missing in self.judge.not_judged()],
        }


def _flat(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    draft = path.with_name(f".{path.name}.part")
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)


def checkpoint_before(folder: Path, onset: int) -> Path | None:
    """The last of TRL's checkpoints that was saved before a step; None where there is none."""
    found = [(int(m[1]), path) for path in folder.glob("checkpoint-*") if (m := _STEP.fullmatch(path.name))]
    earlier = [(step, path) for step, path in found if step < onset]
    return max(earlier)[1] if earlier else None


def pause_message(alert: Alert, *, run: RunDirectory, checkpoint: Path) -> str:
    """What happened, and what goes on from there."""
    lines = [
        f"paused by {alert.rule} at step {alert.step}: {alert.summary}",
        f"  it began about step {alert.onset_step}; most likely cause: {alert.cause}; look first at: {alert.runbook}",
        f"  evidence        {run.evidence}",
        f"  say why         {acknowledge_command(run.path, alert.id, alert.cause)}",
        f"  then continue   trainer.train(resume_from_checkpoint={str(checkpoint)!r})",
    ]
    earlier = checkpoint_before(checkpoint.parent, alert.onset_step)
    if earlier is not None:
        lines.append(
            f"  or repair, and go back before it began: trainer.train(resume_from_checkpoint={str(earlier)!r})"
        )
    return printable("\n".join(lines))
