"""Lightning hooks: gather, call one pure function, act."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import yaml

from grpo_lightning.callbacks.checkpoint import RunCheckpoint
from grpo_lightning.callbacks.evidence import EvidenceWriter
from grpo_lightning.callbacks.health import HealthMonitor, HealthSettings
from grpo_lightning.callbacks.recorder import RunRecorder, StepListener
from grpo_lightning.callbacks.settings import CheckpointSettings, ProbeSettings, RunSettings
from grpo_lightning.callbacks.snapshot import RunSnapshot, SnapshotSettings
from grpo_lightning.callbacks.stopping import GracefulStop, requeued_checkpoint
from grpo_lightning.sinks.redact import redact_config

__all__ = [
    "CheckpointSettings",
    "EvidenceWriter",
    "GracefulStop",
    "HealthMonitor",
    "HealthSettings",
    "ProbeSettings",
    "RunCheckpoint",
    "RunRecorder",
    "RunSettings",
    "RunSnapshot",
    "SnapshotSettings",
    "StepListener",
    "requeued_checkpoint",
    "run_callbacks",
]


def run_callbacks(
    *,
    run: RunSettings | None = None,
    checkpoint: CheckpointSettings | None = None,
    health: HealthSettings | None = None,
    snapshot: SnapshotSettings | None = None,
    accept_drift: Sequence[str] = (),
    note: str = "",
    config_yaml: str = "",
    resume_from: str | None = None,
) -> list[L.Callback]:
    """The callbacks of a recorded run, in order, for a Trainer's `callbacks`; no snapshot is made without its settings."""
    recorder = RunRecorder(run, config_yaml=config_yaml, resume_from=resume_from)
    evidence = EvidenceWriter(recorder, every=recorder.settings.evidence_every)
    saver = RunCheckpoint(recorder, checkpoint or CheckpointSettings())
    monitor = HealthMonitor(recorder, evidence=evidence, checkpoint=saver, settings=health, resume_from=resume_from)
    stop = GracefulStop(recorder, saver)
    if snapshot is None:
        return [recorder, evidence, monitor, stop, saver]
    config = redact_config(yaml.safe_load(config_yaml)) if config_yaml else {}
    made_of = RunSnapshot(recorder, monitor=monitor, settings=snapshot, config=config, accept=accept_drift, note=note)
    return [recorder, evidence, monitor, made_of, stop, saver]
