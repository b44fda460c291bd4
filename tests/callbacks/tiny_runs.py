"""Recorded runs of a few steps on a tiny model, and what their journals hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from grpo_lightning.callbacks import CheckpointSettings, HealthSettings, RunSettings, run_callbacks
from grpo_lightning.rewards import RewardSpec
from grpo_lightning.sinks import RunDirectory, StepRow
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.settings import KLSettings, OptimizerSettings, SamplingSettings

TIMINGS = {"tokens_per_second", "length_growth_per_hour"}


def make_module(model: Path, reward: str = "support.tiny:dense", **changes: Any) -> GRPOModule:
    """A module of small settings."""
    settings: dict[str, Any] = {
        "rewards": [RewardSpec(path=reward)],
        "group_size": 4,
        "sampling": SamplingSettings(max_new_tokens=6),
        "optimizer": OptimizerSettings(lr=1e-2),
        "kl": KLSettings(use="loss"),
    }
    return GRPOModule(str(model), **(settings | changes))


def record_run(
    folder: Path,
    module: GRPOModule,
    data: PromptDataModule,
    steps: int,
    *,
    ckpt: Path | None = None,
    every: int = 0,
    extra: Sequence[L.Callback] = (),
    health: HealthSettings | None = None,
    **settings: Any,
) -> RunDirectory:
    """Train to step `steps` with everything recorded below `folder`; the run's directory."""
    run = RunSettings(**({"dir": str(folder), "mlflow": False} | settings))
    saving = CheckpointSettings(every_n_steps=every, keep=-1)
    own = run_callbacks(run=run, checkpoint=saving, health=health, resume_from=str(ckpt) if ckpt else None)
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*own, *extra],
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True if ckpt else None)
    (path,) = folder.glob("*/journal.sqlite")
    return RunDirectory.open(path.parent)


def steps_of(run: RunDirectory) -> list[StepRow]:
    """The live rows of a run."""
    with run.journal(read_only=True) as journal:
        return list(journal.rows())


def without_timings(values: Any) -> dict[str, str]:
    """The signals that two equal runs share, bit for bit (NaN included)."""
    kept = {k: v for k, v in values.items() if not k.endswith("_seconds") and k not in TIMINGS}
    return {k: "nan" if math.isnan(v) else float(v).hex() for k, v in kept.items()}


def weights_of(module: GRPOModule) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    return {k: v.detach().clone() for k, v in module.policy.state_dict().items()}
