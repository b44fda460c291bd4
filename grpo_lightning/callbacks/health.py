"""The judgement during a run: each step is held against the rules; an alert is recorded, and a pause is carried out.

The judge runs on the main rank, over numbers that are already reduced over ranks; its one decision reaches all ranks.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any

import lightning as L
import torch

from grpo_lightning.callbacks.checkpoint import RunCheckpoint
from grpo_lightning.callbacks.evidence import EvidenceWriter
from grpo_lightning.callbacks.pausing import before_onset, pause_message, require_acknowledged
from grpo_lightning.callbacks.recorder import RunRecorder
from grpo_lightning.errors import ConfigError, RunPaused
from grpo_lightning.health import (
    Alert,
    AlertChange,
    Baseline,
    Judge,
    Rule,
    Step,
    load_baseline,
    load_rules,
    shipped_rules,
    verdict_of,
)
from grpo_lightning.objective.batch import StepRecord
from grpo_lightning.signals import signal_names
from grpo_lightning.sinks import EventRow, StepRow
from grpo_lightning.training import ranks

__all__ = ["HealthMonitor", "HealthSettings", "judge_of"]

_STATE_KEY = "grpo_health"


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """How the run is judged.

    Args:
        enabled: whether rules are held at all.
        rules: files of rules; the shipped ones when empty. A later file's rule replaces one of the same name.
        baseline: a ruler made by `baseline build`; without one, the run's own first steps.
        start_steps: how many steps these are.
        actions: overrides by rule name, `notify` or `pause`; `off` leaves the rule out.
    """

    enabled: bool = True
    rules: list[str] = field(default_factory=list)
    baseline: str | None = None
    start_steps: int = 20
    actions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.start_steps < 4:
            raise ConfigError(f"health.start_steps is {self.start_steps}: give 4 or more.")


def judge_of(settings: HealthSettings) -> tuple[Judge, Baseline | None]:
    """The judge that the settings ask for, and its baseline."""
    baseline = load_baseline(settings.baseline) if settings.baseline else None
    return Judge(_rules(settings), baseline=baseline, start_steps=settings.start_steps), baseline


def _rules(settings: HealthSettings) -> list[Rule]:
    known = signal_names()
    by_name: dict[str, Rule] = {}
    for found in [load_rules(path, signals=known) for path in settings.rules] or [shipped_rules()]:
        by_name |= {rule.name: rule for rule in found}
    for name, action in settings.actions.items():
        if name not in by_name:
            raise ConfigError(f"health.actions names the rule {name!r}, which there is none of.")
        if action == "off":
            del by_name[name]
        elif action in ("notify", "pause"):
            severity = "critical" if action == "pause" else "warning"
            by_name[name] = replace(by_name[name], action=action, severity=severity)  # type: ignore[arg-type]
        else:
            raise ConfigError(f"health.actions gives {name} the action {action!r}: use notify, pause or off.")
    return list(by_name.values())


class HealthMonitor(L.Callback):
    """Judges every recorded step.

    Args:
        recorder: of the run.
        evidence: writes what lies behind an alert.
        checkpoint: saves the run when it is paused.
        settings: rules, ruler, overrides.
        resume_from: the checkpoint that training continues from; its run's pauses must have been acknowledged.
        raise_on_pause: end `Trainer.fit` by `RunPaused`, or by stopping it, which a notebook shows better.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        *,
        evidence: EvidenceWriter | None = None,
        checkpoint: RunCheckpoint | None = None,
        settings: HealthSettings | None = None,
        resume_from: str | None = None,
        raise_on_pause: bool | None = None,
    ) -> None:
        self.settings = settings or HealthSettings()
        self.judge, self.baseline = judge_of(self.settings)
        self.paused: str | None = None  # the message, once a rule has paused the run
        self._recorder, self._evidence, self._checkpoint = recorder, evidence, checkpoint
        self._resume_from = resume_from
        self._raise = not _interactive() if raise_on_pause is None else raise_on_pause
        self._evaluation: dict[str, float] = {}  # measured since the last step
        self._pausing: Alert | None = None
        recorder.listeners.append(self._on_step)
        recorder.health_parts.append(self._health)

    # ---- life

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """A paused run goes on only when someone has said why it was paused."""
        if stage == "fit" and self._resume_from is not None and self.settings.enabled:
            require_acknowledged(Path(self._resume_from))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what the run is held against."""
        if self.settings.enabled and self.baseline is not None:
            runs = ", ".join(self.baseline.runs)
            self._recorder.say(f"held against the baseline of {runs} ({self.baseline.steps} steps)")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An evaluation is judged with the step after it."""
        evaluation = getattr(pl_module, "last_evaluation", None)
        if evaluation is not None and not trainer.sanity_checking:
            self._evaluation = dict(evaluation.values)

    # ---- steps

    def _on_step(self, row: StepRow, record: StepRecord) -> None:
        if not self.settings.enabled:
            return
        values = dict(row.values) | self._evaluation
        self._evaluation = {}
        groups = float(len(record.row_ids_P) * ranks.world_size())
        for change in self.judge.observe(Step(step=row.step, values=values, groups=groups)):
            self._tell(change, record)

    def _tell(self, change: AlertChange, record: StepRecord) -> None:
        alert = change.alert
        file = None
        if change.change == "firing" and self._evidence is not None:
            file = self._evidence.capture(record, alert.rule)
        self._record(change, file)
        if change.change != "resolved" and alert.action == "pause" and self._pausing is None:
            self._pausing = alert

    def _record(self, change: AlertChange, evidence: Path | None) -> None:
        alert = change.alert
        directory = self._recorder.directory
        checkpoint = before_onset(directory.checkpoints, alert.onset_step) if directory is not None else None
        payload = plain(alert) | {
            "state": change.change,
            "evidence": str(evidence) if evidence is not None else None,
            "checkpoint_before_onset": str(checkpoint) if checkpoint is not None else None,
            "message": self._message(change),
        }
        row = EventRow(
            run_id=self._recorder.run_id or "",
            segment=self._recorder.segment,
            step=change.step,
            time=time(),
            kind="alert",
            name=alert.rule,
            payload=payload,
            id=alert.id,
        )
        self._recorder.write_event(row)
        self._show()

    def _message(self, change: AlertChange) -> str:
        alert = change.alert
        near = self.baseline.near_mark(alert.onset_step) if self.baseline is not None else []
        marks = "".join(f" In the baseline {mark.summary}." for mark in near if mark.signal == alert.signal)
        if change.change == "resolved":
            return f"resolved: {alert.rule} no longer holds."
        return f"{alert.severity}, began about step {alert.onset_step}: {alert.summary}{marks} ({alert.cause}; {alert.action})"

    def _show(self) -> None:
        """The verdict where MLflow's table of runs can show and search it, and in words on the run's page."""
        alerts = self.judge.alerts
        open_ones = [a.rule for a in self.judge.firing()]
        tags = {
            "health.verdict": verdict_of(alerts),
            "health.alerts": str(len(alerts)),
            "health.firing": ", ".join(open_ones),
            "health.last_alert": alerts[-1].id if alerts else "",
        }
        rows = [{k: v for k, v in plain(a).items() if k != "values"} for a in alerts]
        lines = [f"- step {a.step} **{a.rule}** ({a.severity}, {a.action}): {a.summary}" for a in alerts[-10:]]
        text = f"**{verdict_of(alerts)}**\n\n" + "\n".join(lines)
        self._recorder.in_mlflow(lambda run: run.set_tags(tags), "the verdict")
        self._recorder.in_mlflow(lambda run: run.describe(text), "the verdict in words")
        self._recorder.in_mlflow(lambda run: run.log_table(rows, "alerts.json"), "the table of alerts")

    # ---- pause

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Carry a pause out, on all ranks together."""
        if not self.settings.enabled or not _any_rank(self._pausing is not None, pl_module.device):
            return
        alert: Alert | None = ranks.broadcast_object(self._pausing)
        self._pausing = None
        path = (
            self._checkpoint.save_now(trainer, f"paused-step-{trainer.global_step:07d}") if self._checkpoint else None
        )
        if alert is not None:
            self.paused = pause_message(alert, directory=self._recorder.directory, checkpoint=path)
        if self._raise:
            raise RunPaused(self.paused or "the run was paused by an alert")
        self._recorder.say(self.paused or "")
        self._recorder.end_as = ("paused", self.paused or "")
        trainer.fit_loop.epoch_loop.min_steps, trainer.fit_loop.min_epochs = None, 0  # they would hold a stop up
        trainer.should_stop = True

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The monitoring state: windows, rulers, streaks, open alerts."""
        checkpoint[_STATE_KEY] = {"judge": self.judge.state_dict(), "evaluation": dict(self._evaluation)}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Judge on as if never interrupted."""
        state = checkpoint.get(_STATE_KEY)
        if state is not None and trainer.state.fn == "fit":
            self.judge.load_state_dict(state["judge"])
            self._evaluation = dict(state["evaluation"])

    def _health(self) -> dict[str, Any]:
        return {
            "verdict": self.judge.verdict(),
            "alerts": [plain(alert) for alert in self.judge.alerts],
            "firing": [alert.id for alert in self.judge.firing()],
            "not_judged": [{"rule": rule, "missing": missing} for rule, missing in self.judge.not_judged()],
        }


def plain(alert: Alert) -> dict[str, Any]:
    """JSON types: numbers that JSON lacks are words."""

    def number(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    found = {name: number(value) for name, value in alert.to_dict().items()}
    return found | {"values": {name: number(value) for name, value in alert.values.items()}}


def _any_rank(flag: bool, device: torch.device) -> bool:
    if ranks.world_size() == 1:
        return flag
    return bool(ranks.all_reduce_sum(torch.tensor([float(flag)], device=device)).item() > 0)


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
