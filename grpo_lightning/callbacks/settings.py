"""The settings of a run's records: ``run:`` and ``checkpoint:`` in the config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_lightning.errors import ConfigError

__all__ = ["CheckpointSettings", "ProbeSettings", "RunSettings"]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}: give {least} or more.")


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Frozen prompts with frozen seeds, sampled beside training: the same signals, comparable across runs.

    Args:
        every_n_steps: sample at step 1 and every N steps; 0: never. A probe costs about a step's sampling and scoring.
        prompts: how many; held-out prompts where there are any with the columns that the rewards need.
    """

    every_n_steps: int = 0
    prompts: int = 16

    def __post_init__(self) -> None:
        _at_least("run.probe.every_n_steps", self.every_n_steps, 0)
        _at_least("run.probe.prompts", self.prompts, 1)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How this run is called and where it is recorded.

    Args:
        name: shown in MLflow and in every message; made up when not given.
        description: what this run is for, in a sentence.
        experiment: the MLflow experiment.
        dir: the folder that holds `<run_id>/` run directories.
        mlflow: whether MLflow is filled from the journal; the journal is always kept.
        sinks: further sinks by entry-point name, each with its settings, such as `{jsonl: {path: "-"}}`.
        evidence_every: keep the step's most telling groups and responses every N steps; 0: only when an alert asks.
        histogram_every: show the advantages' histogram in MLflow every N steps; 0: never.
        fingerprint_steps: the first N steps' signals are kept as the run's fingerprint; 0: none.
        probe: frozen prompts that are sampled now and then.
    """

    name: str | None = None
    description: str = ""
    experiment: str = "grpo-lightning"
    dir: str = "runs"
    mlflow: bool = True
    sinks: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    evidence_every: int = 0
    histogram_every: int = 25
    fingerprint_steps: int = 50
    probe: ProbeSettings = ProbeSettings()

    def __post_init__(self) -> None:
        for name in ("evidence_every", "histogram_every", "fingerprint_steps"):
            _at_least(f"run.{name}", getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When the run is saved.

    Args:
        every_n_steps: save every N optimizer steps; 0 saves at the end only.
        keep: how many of these to keep, the newest; -1 keeps all. `last.ckpt` is kept besides.
    """

    every_n_steps: int = 50
    keep: int = 2

    def __post_init__(self) -> None:
        _at_least("checkpoint.every_n_steps", self.every_n_steps, 0)
        if self.keep < -1 or self.keep == 0:
            raise ConfigError(f"checkpoint.keep is {self.keep}: give 1 or more, or -1 to keep all.")
