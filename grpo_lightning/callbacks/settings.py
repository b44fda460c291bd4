"""The settings of a run's records: ``run:`` and ``checkpoint:`` in the config."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lightning.errors import ConfigError

__all__ = ["CheckpointSettings", "RunSettings"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How this run is called and where it is recorded.

    Args:
        name: shown in MLflow and in every message; made up when not given.
        description: what this run is for, in a sentence.
        experiment: the MLflow experiment.
        dir: the folder that holds `<run_id>/` run directories.
        mlflow: whether MLflow is filled from the journal; the journal is always kept.
    """

    name: str | None = None
    description: str = ""
    experiment: str = "grpo-lightning"
    dir: str = "runs"
    mlflow: bool = True


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
        if self.every_n_steps < 0:
            raise ConfigError(f"checkpoint.every_n_steps is {self.every_n_steps}: give 0 or more.")
        if self.keep < -1 or self.keep == 0:
            raise ConfigError(f"checkpoint.keep is {self.keep}: give 1 or more, or -1 to keep all.")
