"""What the terminal says when a run ends: where everything lies and the commands that go on from there."""

from __future__ import annotations

from pathlib import Path

from grpo_lightning.invocation import command_line
from grpo_lightning.sinks.console import ConsoleSink
from grpo_lightning.tracking import MLflowRun, ui_command, ui_link

__all__ = ["say_summary"]

_VALUES = ("reward_mean", "group_reward_std", "loss", "grad_norm")


def say_summary(
    console: ConsoleSink,
    *,
    status: str,
    directory: Path,
    mlflow: MLflowRun | None,
    values: dict[str, float],
    evaluation: dict[str, float],
) -> None:
    """Print the summary, one fact a line."""
    shown = {**{k: values[k] for k in _VALUES if k in values}, **evaluation}
    lines = [f"run {directory.name} {status}", *(f"  {name:<34}{value:.4f}" for name, value in shown.items())]
    lines.append(f"  run directory                     {directory}")
    last = directory / "checkpoints" / "last.ckpt"
    if last.exists():
        lines.append(f"  continue                          {command_line('fit', '--ckpt_path', last)}")
    if mlflow is not None:
        lines.append(f"  open in MLflow                    {ui_command(mlflow.tracking_uri)}")
        lines.append(f"  then                              {ui_link(mlflow.experiment_id)}")
    for line in lines:
        console.say(line)
