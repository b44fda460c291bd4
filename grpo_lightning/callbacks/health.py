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
from grpo_lightning.health.records import Cause
from grpo_lightning.health.recovery import Budget
from grpo_lightning.objective.batch import StepRecord
from grpo_lightning.signals import signal_names
from grpo_lightning.sinks import EventRow, StepRow
from grpo_lightning.sinks.base import EventKind
from grpo_lightning.training import ranks
from grpo_lightning.training.settings import RecoverySettings

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _News:
    """What a step gave rise to."""

    changes: list[AlertChange]
    resampled: int  # groups, of all ranks
    skipped: bool  # the update

    @property
    def worth_telling(self) -> bool:
        """Most steps are not."""
        return bool(self.changes or self.resampled or self.skipped)


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
        self._added: dict[str, float] = {}  # by other callbacks, for the next step
        self._said: dict[str, str] = {}  # what is behind such a signal, in words
        self._news: _News | None = None  # of the step just judged, on the main rank
        self._pausing: Alert | None = None
        self._budgets: dict[str, Budget] = {}
        self._budget_state: dict[str, list[list[int]]] = {}  # of the checkpoint
        recorder.listeners.append(self._on_step)
        recorder.health_parts.append(self._health)

    # ---- life

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """A paused run goes on only when someone has said why it was paused."""
        if stage == "fit" and self._resume_from is not None and self.settings.enabled:
            require_acknowledged(Path(self._resume_from))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set up the budgets of repairs, and say what the run is held against."""
        recovery = getattr(pl_module, "recovery", None) or RecoverySettings()
        limits = {"skip_update": recovery.skip_budget, "resample": recovery.resample_budget}
        state, self._budget_state = self._budget_state, {}
        for action, limit in limits.items():
            self._budgets[action] = Budget(limit=limit, window_steps=recovery.window_steps)
            if action in state and not self._all_acknowledged(action):
                self._budgets[action].load_state_dict(state[action])
        if self.settings.enabled and self.baseline is not None:
            runs = ", ".join(self.baseline.runs)
            self._recorder.say(f"held against the baseline of {runs} ({self.baseline.steps} steps)")

    def _all_acknowledged(self, action: str) -> bool:
        """Whether someone has looked at every repair of a kind: they count no more."""
        directory = self._recorder.directory
        if directory is None:
            return False
        with directory.journal(read_only=True) as journal:
            alerts = [row for row in journal.alerts(all_segments=True) if row.event.payload.get("action") == action]
        return bool(alerts) and not any(row.open for row in alerts)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An evaluation is judged with the step after it."""
        evaluation = getattr(pl_module, "last_evaluation", None)
        if evaluation is not None and not trainer.sanity_checking:
            self._evaluation = dict(evaluation.values)

    def add_signal(self, name: str, value: float, *, said: str = "") -> None:
        """A signal that is judged with the next step; `said` is added to the alerts that it raises."""
        self._added[name] = value
        self._said[name] = said

    # ---- steps

    def _on_step(self, row: StepRow, record: StepRecord) -> None:
        """Judge a step, on the main rank; what it says is told once all ranks are there to give evidence."""
        if not self.settings.enabled:
            return
        values = dict(row.values) | self._evaluation | self._added
        self._evaluation, self._added = {}, {}
        groups = float(len(record.row_ids_P) * ranks.world_size())
        changes = self.judge.observe(Step(step=row.step, values=values, groups=groups))
        resampled = int(row.values.get("rollouts_resampled", 0.0)) if record.new_rollouts else 0
        self._news = _News(changes=changes, resampled=resampled, skipped=record.update_skipped)

    def _tell(self, news: _News, record: StepRecord) -> None:
        """Record what the main rank has to say of a step, with every rank's evidence. All ranks call it together."""
        rules = [change.alert.rule for change in news.changes if change.change == "firing"]
        files = (
            dict(zip(rules, self._evidence.capture(record, *rules), strict=True)) if self._evidence and rules else {}
        )
        if news.resampled and self._evidence is not None:
            self._evidence.capture_dropped(record)
        whys = ranks.all_gather_object([group.why for group in record.dropped])
        if ranks.rank() != 0:
            return
        for change in news.changes:
            self._record(change, files.get(change.alert.rule) if change.change == "firing" else None)
            self._pause_for(change)
        if news.skipped:
            self._repaired("skip_update", record.step, 1, cause="algorithm")
        if news.resampled:
            rewards = any(why == "non-finite reward" for rank in whys for why in rank)
            self._repaired("resample", record.step, news.resampled, cause="reward" if rewards else "sampling")

    def _pause_for(self, change: AlertChange) -> None:
        alert = change.alert
        if change.change != "resolved" and alert.action == "pause":
            earlier = self._pausing  # of this step: what began first is told
            self._pausing = alert if earlier is None or alert.onset_step < earlier.onset_step else earlier

    def _repaired(self, action: str, step: int, count: int, *, cause: Cause) -> None:
        budget = self._budgets[action]
        within = budget.spend(step, count)
        payload = {"count": count, "spent": budget.spent, "within_budget": within, "cause": cause}
        self._recorder.write_event(self._event(step, "recovery", action, payload, id=f"{action}@{step}"))
        if not within and self._pausing is None:
            self._spent(action, step, budget.spent, cause)

    def _spent(self, action: str, step: int, spent: int, cause: Cause) -> None:
        what = "updates were skipped" if action == "skip_update" else "groups were sampled again"
        alert = Alert(
            id=f"recovery_budget_spent@{step}",
            rule="recovery_budget_spent",
            step=step,
            onset_step=step,
            severity="critical",
            action="pause",
            cause=cause,
            signal="updates_skipped" if action == "skip_update" else "rollouts_resampled",
            value=float(spent),
            bound=float(self._budgets[action].limit),
            expected=None,
            summary=f"{spent} {what} within {self._budgets[action].window_steps} steps: the fault does not go away by itself.",
            first="Read the evidence of the first repair: what was broken?",
            runbook="runbooks/recovery.md",
        )
        self.judge.alerts.append(alert)
        self._record(AlertChange(change="firing", step=step, alert=alert), None)
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
        self._recorder.write_event(self._event(change.step, "alert", alert.rule, payload, id=alert.id))
        self._show()

    def _event(self, step: int, kind: EventKind, name: str, payload: dict[str, Any], *, id: str) -> EventRow:
        return EventRow(
            run_id=self._recorder.run_id or "",
            segment=self._recorder.segment,
            step=step,
            time=time(),
            kind=kind,
            name=name,
            payload=payload,
            id=id,
        )

    def _message(self, change: AlertChange) -> str:
        alert = change.alert
        near = self.baseline.near_mark(alert.onset_step) if self.baseline is not None else []
        marks = "".join(f" In the baseline {mark.summary}." for mark in near if mark.signal == alert.signal)
        if change.change == "resolved":
            return f"resolved: {alert.rule} no longer holds."
        said = f" {self._said[alert.signal]}." if self._said.get(alert.signal) else ""
        where = f"{alert.severity}, began about step {alert.onset_step}"
        return f"{where}: {alert.summary}{said}{marks} ({alert.cause}; {alert.action})"

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
        """Tell what the step gave rise to, and carry a pause out, on all ranks together."""
        news, self._news = self._news, None
        told = news is not None and news.worth_telling
        if not self.settings.enabled or not ranks.any_rank(told, pl_module.device):
            return
        record: StepRecord | None = getattr(pl_module, "last_record", None)
        news = ranks.broadcast_object(news)
        if news is not None and record is not None:
            self._tell(news, record)
        alert: Alert | None = ranks.broadcast_object(self._pausing)
        if alert is not None:
            self._pause(trainer, alert)

    def _pause(self, trainer: L.Trainer, alert: Alert) -> None:
        self._pausing = None
        path = (
            self._checkpoint.save_now(trainer, f"paused-step-{trainer.global_step:07d}") if self._checkpoint else None
        )
        self.paused = pause_message(alert, directory=self._recorder.directory, checkpoint=path)
        if self._raise:
            raise RunPaused(self.paused)
        self._recorder.say(self.paused)
        self._recorder.end_as = ("paused", self.paused)
        trainer.fit_loop.epoch_loop.min_steps, trainer.fit_loop.min_epochs = None, 0  # they would hold a stop up
        trainer.should_stop = True

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The monitoring state: windows, rulers, streaks, open alerts."""
        checkpoint[_STATE_KEY] = {
            "judge": self.judge.state_dict(),
            "evaluation": dict(self._evaluation),
            "budgets": {action: budget.state_dict() for action, budget in self._budgets.items()},
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Judge on as if never interrupted."""
        state = checkpoint.get(_STATE_KEY)
        if state is not None and trainer.state.fn == "fit":
            self.judge.load_state_dict(state["judge"])
            self._evaluation = dict(state["evaluation"])
            self._budget_state = dict(state["budgets"])

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


def _interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
