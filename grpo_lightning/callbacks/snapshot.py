"""The run's snapshot: what it is made of, captured at the start, held against what is there at every checkpoint and at resume.

The work is `run_snapshot`'s, an own distribution; without it a run says so and goes on.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any, Literal

import lightning as L

from grpo_lightning.callbacks.health import HealthMonitor
from grpo_lightning.callbacks.recorder import RunRecorder
from grpo_lightning.errors import ConfigError, RunPaused
from grpo_lightning.rewards.loading import find_reward
from grpo_lightning.sinks import EventRow, RunDirectory
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.module import GRPOModule

__all__ = ["DRIFT_SIGNALS", "RunSnapshot", "SnapshotSettings"]

_log = logging.getLogger(__name__)
_NAMED = 8  # findings in a message
DRIFT_SIGNALS = {"environment": "environment_drift", "data": "data_drift", "reward": "reward_drift"}


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """What a run was made of, and what is done when it changes.

    Args:
        enabled: capture a snapshot and look at every checkpoint whether it still holds.
        weights: digest the weights, at the start and in every checkpoint.
        lock: copy the project's lock files, make a lock (needs a package index), or neither.
        on_drift: what a change since the run's last segment does when it is resumed.
    """

    enabled: bool = True
    weights: bool = True
    lock: Literal["copy", "make", "off"] = "copy"
    on_drift: Literal["warn", "pause", "refuse"] = "warn"


@dataclass(kw_only=True)
class _Accepted:
    """A change that was made on purpose."""

    levels: Sequence[str] = field(default_factory=tuple)
    note: str = ""


class RunSnapshot(L.Callback):
    """Captures, checks, and hands what changed to the judgement.

    Args:
        recorder: of the run.
        monitor: judges; a change is a signal of the step after it was found.
        settings: what is captured and what a change does.
        config: the resolved settings of the run.
        accept: levels whose change was made on purpose, and why.
        note: why; needed with `accept`.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        *,
        monitor: HealthMonitor | None = None,
        settings: SnapshotSettings | None = None,
        config: Mapping[str, Any] | None = None,
        accept: Sequence[str] = (),
        note: str = "",
    ) -> None:
        self.settings = settings or SnapshotSettings()
        self._recorder, self._monitor, self._config = recorder, monitor, config or {}
        self._accepted = _Accepted(levels=tuple(accept), note=note)
        if accept and not note.strip():
            raise ConfigError("--accept_drift needs --note: say in a sentence what was changed and why.")
        unknown = sorted(set(accept) - set(DRIFT_SIGNALS))
        if unknown:
            raise ConfigError(f"--accept_drift names {unknown[0]!r}: use {', '.join(DRIFT_SIGNALS)}.")
        self.digest = ""
        self._told: set[Any] = set()
        self._last: tuple[int, dict[str, Any]] | None = None
        recorder.health_parts.append(self._health)

    def _health(self) -> dict[str, Any]:
        """For the file beside a checkpoint: the snapshot and the root of the weights' digests."""
        weights = self._last[1].get("weights", {}) if self._last is not None else {}
        return {"snapshot_digest": self.digest, "weights_root": weights.get("root", "")}

    # ---- start and resume

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Capture a new run; hold a resumed one against its own snapshot."""
        directory = self._recorder.directory
        if directory is None or not self.settings.enabled or not isinstance(pl_module, GRPOModule):
            return
        if importlib.util.find_spec("run_snapshot") is None:
            self._recorder.say("no snapshot of what this run is made of: pip install lightning-run-snapshot")
            return
        if (directory.snapshot / "manifest.json").is_file():
            self._resumed(trainer, pl_module, directory)
        else:
            self._capture(trainer, pl_module, directory)

    def _capture(self, trainer: L.Trainer, module: GRPOModule, directory: RunDirectory) -> None:
        from run_snapshot import capture

        snapshot = capture(
            directory.snapshot,
            config=self._config,
            data_files=_data_of(trainer),
            reward_paths=[find_reward(path) for path in _reward_paths(module)],
            model_state=module.policy.state_dict() if self.settings.weights else None,
            seeds={"model.seed": module.seed},
            lock=self.settings.lock,
        )
        self.digest = snapshot.digest
        if snapshot.partial:
            self._recorder.say(f"the snapshot is partial: {'; '.join(snapshot.reasons)[:600]}")
        tags = {"run_snapshot.digest": snapshot.digest, "run_snapshot.partial": str(snapshot.partial).lower()}
        self._recorder.in_mlflow(lambda run: run.set_tags(tags), "the snapshot's digest")
        for path in sorted(p for p in directory.snapshot.rglob("*") if p.is_file()):
            folder = str(Path("snapshot") / path.relative_to(directory.snapshot).parent)
            self._recorder.in_mlflow(lambda run, p=path, f=folder: run.log_artifact(p, f), "the snapshot")  # type: ignore[misc]

    def _resumed(self, trainer: L.Trainer, module: GRPOModule, directory: RunDirectory) -> None:
        from run_snapshot.manifest import load_snapshot

        self.digest = load_snapshot(directory.snapshot).digest
        findings = [f for f in self._findings(directory) if f.level in DRIFT_SIGNALS]
        accepted = [f for f in findings if f.level in self._accepted.levels]
        refused = [f for f in findings if f not in accepted and f.verdict != "unknown"]
        if refused and self.settings.on_drift != "warn":
            self._stop(refused)
        if accepted:
            self._accept(trainer, module, directory, accepted)
        self._tell([f for f in findings if f not in accepted], trainer.global_step)

    def _stop(self, findings: Sequence[Any]) -> None:
        levels = ", ".join(dict.fromkeys(f.level for f in findings))
        message = (
            f"Since this run was last started: {_listed(findings)}. If that was on purpose, continue with "
            f"--accept_drift '[{levels}]' --note 'what was changed and why'."
        )
        raise ConfigError(message) if self.settings.on_drift == "refuse" else RunPaused(message)

    def _accept(self, trainer: L.Trainer, module: GRPOModule, directory: RunDirectory, findings: Sequence[Any]) -> None:
        """Capture anew, keep the old snapshot beside it, and write down who wanted it and why."""
        kept = directory.path / "snapshots" / f"until-segment-{self._recorder.segment}"
        kept.parent.mkdir(exist_ok=True)
        directory.snapshot.rename(kept)
        self._capture(trainer, module, directory)
        levels = list(dict.fromkeys(f.level for f in findings))
        message = f"accepted: {_listed(findings)}; {self._accepted.note}"
        payload = {"levels": levels, "note": self._accepted.note, "message": message, "snapshot_before": str(kept)}
        self._note("drift_accepted", trainer.global_step, payload)
        tags = {f"run_snapshot.accepted.{level}": self._accepted.note for level in levels}
        self._recorder.in_mlflow(lambda run: run.set_tags(tags), "the accepted change")

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The snapshot's digest and the weights', and a look whether all is as captured."""
        directory = self._recorder.directory
        if directory is None or not self.digest:
            return
        from run_snapshot import checkpoint_record
        from run_snapshot.checkpoints import KEY

        if self._last is None or self._last[0] != trainer.global_step:
            record: dict[str, Any] = {"digest": self.digest, "path": str(directory.snapshot)}
            if self.settings.weights:
                record = checkpoint_record(checkpoint["state_dict"], digest=self.digest, path=str(directory.snapshot))
            self._last = (trainer.global_step, record)
            self._tell(self._findings(directory), trainer.global_step)
        checkpoint[KEY] = self._last[1]

    def _findings(self, directory: RunDirectory) -> list[Any]:
        from run_snapshot import SnapshotError, check

        try:
            return list(check(directory.snapshot))
        except (SnapshotError, OSError) as error:
            _log.warning("The snapshot can't be checked: %s. Training goes on.", error)
            return []

    def _tell(self, findings: Sequence[Any], step: int) -> None:
        """A change is told once: to the judgement, by its level, and as a note."""
        bad = [f for f in findings if f.level in DRIFT_SIGNALS and f.verdict in ("changed", "missing")]
        new = [f for f in bad if f not in self._told]
        self._told.update(new)
        for level, signal in DRIFT_SIGNALS.items():
            own = [f for f in new if f.level == level]
            if own and self._monitor is not None:
                self._monitor.add_signal(signal, float(len(own)), said=_listed(own))
        if new:
            self._note("drift", step, {"message": _listed(new), "findings": [f"{f.level}: {f.name}" for f in new]})

    def _note(self, name: str, step: int, payload: dict[str, Any]) -> None:
        row = EventRow(
            run_id=self._recorder.run_id or "",
            segment=self._recorder.segment,
            step=step,
            time=time(),
            kind="note",
            name=name,
            payload=payload,
        )
        self._recorder.write_event(row)


def _listed(findings: Sequence[Any]) -> str:
    told = [f"{f.level}: {f.name} {f.verdict} ({f.detail[:160]})" for f in findings[:_NAMED]]
    more = len(findings) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _reward_paths(module: GRPOModule) -> list[str]:
    runners = (module.reward_runner, module.evaluator.rewards)
    return list(dict.fromkeys(path for runner in runners for path in runner.paths))


def _data_of(trainer: L.Trainer) -> list[Any]:
    """Files as paths; rows that lie in memory by name."""
    from run_snapshot import Rows

    datamodule = getattr(trainer, "datamodule", None)
    sources = datamodule.snapshot_sources() if isinstance(datamodule, PromptDataModule) else []
    return [source if isinstance(source, str) else Rows(name=source[0], rows=source[1]) for source in sources]
