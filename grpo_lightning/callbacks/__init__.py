"""Lightning hooks: gather, call one pure function, act."""

from __future__ import annotations

import lightning as L

from grpo_lightning.callbacks.checkpoint import RunCheckpoint
from grpo_lightning.callbacks.evidence import EvidenceWriter
from grpo_lightning.callbacks.recorder import RunRecorder, StepListener
from grpo_lightning.callbacks.settings import CheckpointSettings, ProbeSettings, RunSettings

__all__ = [
    "CheckpointSettings",
    "EvidenceWriter",
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
    config_yaml: str = "",
    resume_from: str | None = None,
) -> list[L.Callback]:
    """The callbacks of a recorded run, in order, for a Trainer's `callbacks`."""
    recorder = RunRecorder(run, config_yaml=config_yaml, resume_from=resume_from)
    evidence = EvidenceWriter(recorder, every=recorder.settings.evidence_every)
    return [recorder, evidence, RunCheckpoint(recorder, checkpoint or CheckpointSettings())]
