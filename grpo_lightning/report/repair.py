"""What a person may do next. It is offered, never carried out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lightning.health import acknowledge_command
from grpo_lightning.invocation import command_line
from grpo_lightning.report.told import Told

__all__ = ["Repair", "repairs_of"]

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """A proposal and its command."""

    what: str
    command: str = ""


def repairs_of(told: Sequence[Told], directory: Path | None, onset: int | None, *, trainer: str = "") -> list[Repair]:
    """For a paused run: say why, then go back before it began. For a log: where to resume from.

    `trainer` names the one that trains the run, where it is not this package.

    Only what pauses a run is worth going back for.
    """
    pausing = [one for one in told if one.alert.action == "pause"]
    if not pausing or onset is None:
        return []
    if directory is None:
        return [Repair(what=f"Resume your trainer from its last checkpoint before step {onset}.")]
    found = [
        Repair(
            what=f"Say why {one.alert.id} fired; a paused run continues only after that.",
            command=acknowledge_command(directory, one.alert.id, one.alert.cause),
        )
        for one in pausing
        if one.open
    ]
    return [*found, _going_back_in_trl(onset) if trainer == "trl" else _going_back(directory, onset)]


def _going_back_in_trl(onset: int) -> Repair:
    return Repair(
        what=f"After the cause is repaired, continue from TRL's last checkpoint before step {onset}, in your script:",
        command='trainer.train(resume_from_checkpoint="OUTPUT_DIR/checkpoint-STEP")',
    )


def _going_back(directory: Path, onset: int) -> Repair:
    checkpoint = _last_before(directory / "checkpoints", onset)
    if checkpoint is not None:
        return Repair(
            what=f"After the cause is repaired, continue from the last checkpoint before step {onset}.",
            command=command_line("fit", "--ckpt_path", checkpoint),
        )
    config = directory / "config.yaml"
    return Repair(
        what=f"No checkpoint from before step {onset} is left: after the cause is repaired, start anew.",
        command=command_line("fit", "--config", config) if config.is_file() else "",
    )


def _last_before(checkpoints: Path, onset: int) -> Path | None:
    found = [(int(m[1]), path) for path in checkpoints.glob("*.ckpt") if (m := _STEP.search(path.name))]
    earlier = [(step, path) for step, path in found if step < onset]
    return max(earlier)[1] if earlier else None
