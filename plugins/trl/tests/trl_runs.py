"""Real TRL runs of a few steps on a tiny model, and what their journals hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_trl import Watcher, watch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_lightning.callbacks import HealthSettings, RunSettings
from grpo_lightning.sinks import AlertRow, RunDirectory, StepRow

PAUSE_AT_6 = """
- name: six_steps
  signal: reward_mean
  above: -1.0
  for_steps: 6
  action: pause
  severity: critical
  cause: data
  summary: "for {steps} steps"
  runbook: six.md
"""


def varied(completions: list[str], **_: Any) -> list[float]:
    """Differs within nearly every group."""
    return [sum(map(ord, c)) % 17 / 17 for c in completions]


def long_ones(completions: list[str], **_: Any) -> list[float]:
    """Few values, so that some groups are dead."""
    return [float(len(c) > 5) for c in completions]


def rules(folder: Path, text: str = PAUSE_AT_6) -> HealthSettings:
    """Settings with these rules only."""
    path = folder / "rules.yaml"
    path.write_text(text)
    return HealthSettings(rules=[str(path)])


def make_trainer(
    folder: Path, model: Path, *rewards: Any, kind: Any = GRPOTrainer, rows: int = 24, **config: Any
) -> Any:
    """A trainer of small settings, below `folder`."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    roll = {"rollout_func": config.pop("rollout_func")} if "rollout_func" in config else {}
    data = [{"prompt": f"{i}+{i * i % 97}=", "source": "ab"[i % 2]} for i in range(rows)]
    return kind(
        model=str(model),
        reward_funcs=list(rewards) or [varied],
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:2]),
        args=GRPOConfig(**(settings | config)),
        **roll,
    )


def watch_run(
    folder: Path, trainer: Any, *, health: HealthSettings | None = None, resume: Path | None = None, **settings: Any
) -> Watcher:
    """Train to the end, watched; recorded below ``folder/runs``."""
    options = {
        name: settings.pop(name) for name in ("raise_on_pause", "hold_back", "source_column") if name in settings
    }
    run = RunSettings(**({"dir": str(folder / "runs"), "mlflow": False} | settings))
    watcher = watch(trainer, run=run, health=health, **options)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return watcher


def only_run(folder: Path) -> RunDirectory:
    """The one run below ``folder/runs``."""
    (path,) = (folder / "runs").glob("*/journal.sqlite")
    return RunDirectory.open(path.parent)


def steps_of(run: RunDirectory) -> list[StepRow]:
    """Its live rows."""
    with run.journal(read_only=True) as journal:
        return list(journal.rows())


def alerts_of(run: RunDirectory) -> list[AlertRow]:
    """Its alerts."""
    with run.journal(read_only=True) as journal:
        return journal.alerts(all_segments=True)


def acknowledge(run: RunDirectory) -> None:
    """Close every alert."""
    with run.journal() as journal:
        for row in journal.alerts(open_only=True, all_segments=True):
            journal.acknowledge(row.event.key, cause="reward", note="a test")


def logged(trainer: Any) -> list[dict[str, Any]]:
    """What TRL logged of each step."""
    return [row for row in trainer.state.log_history if "entropy" in row]


def evidence_of(alert: AlertRow) -> list[dict[str, Any]]:
    """The rows behind an alert."""
    return [json.loads(line) for line in Path(alert.event.payload["evidence"]).read_text().splitlines()]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


class AtStep(TrainerCallback):
    """Calls something at the end of a step, after the watcher."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.action()
