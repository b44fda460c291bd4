"""Lightning hooks: gather, call one pure function, act."""

from __future__ import annotations

import lightning as L

from grpo_lightning.callbacks.checkpoint import RunCheckpoint
from grpo_lightning.callbacks.evidence import EvidenceWriter
from grpo_lightning.callbacks.health import HealthMonitor, HealthSettings
from grpo_lightning.callbacks.recorder import RunRecorder, StepListener
from grpo_lightning.callbacks.settings import CheckpointSettings, ProbeSettings, RunSettings

__all__ = [
    "CheckpointSettings",
    "EvidenceWriter",
    "HealthMonitor",
    "HealthSettings",
    "ProbeSettings",
    "RunCheckpoint",
    "RunRecorder",
    "RunSettings",
    "StepListener",
    "run_callbacks",
]


def run_callbacks(
    *,
    run: RunSettings | None = None,
    checkpoint: CheckpointSettings | None = None,
    health: HealthSettings | None = None,
    config_yaml: str = "",
    resume_from: str | None = None,
) -> list[L.Callback]:
    """The callbacks of a recorded run, in order, for a Trainer's `callbacks`."""
    recorder = RunRecorder(run, config_yaml=config_yaml, resume_from=resume_from)
    evidence = EvidenceWriter(recorder, every=recorder.settings.evidence_every)
    saver = RunCheckpoint(recorder, checkpoint or CheckpointSettings())
    monitor = HealthMonitor(recorder, evidence=evidence, checkpoint=saver, settings=health, resume_from=resume_from)
    return [recorder, evidence, monitor, saver]
