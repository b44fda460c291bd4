"""What a pause leaves for the person: the message with the exact next commands, and the refusal to go on without a cause."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_lightning.errors import ConfigError
from grpo_lightning.health import Alert, acknowledge_command
from grpo_lightning.invocation import command_line
from grpo_lightning.sinks import Journal, RunDirectory

__all__ = ["before_onset", "pause_message", "require_acknowledged"]

_STEP = re.compile(r"step-(\d+)")


def before_onset(checkpoints: Path, onset: int) -> Path | None:
    """The last checkpoint that was saved before a step; None where there is none."""
    found = [(int(m.group(1)), path) for path in checkpoints.glob("*.ckpt") if (m := _STEP.search(path.name))]
    earlier = [(step, path) for step, path in found if step < onset]
    return max(earlier)[1] if earlier else None


def pause_message(alert: Alert, *, directory: RunDirectory | None, checkpoint: Path | None) -> str:
    """What happened, and the commands that go on from there."""
    run = directory.path if directory is not None else Path("RUN")
    lines = [
        f"paused by {alert.rule} at step {alert.step}: {alert.summary}",
        f"  it began about step {alert.onset_step}; most likely cause: {alert.cause}; look first at: {alert.runbook}",
        f"  look closer     {command_line('diagnose', run)}",
        f"  say why         {acknowledge_command(run, alert.id, alert.cause)}",
    ]
    if checkpoint is not None:
        lines.append(f"  then continue   {command_line('fit', '--ckpt_path', checkpoint)}")
    earlier = before_onset(directory.checkpoints, alert.onset_step) if directory is not None else None
    if earlier is not None:
        lines.append(f"  or repair, and go back before it began: {command_line('fit', '--ckpt_path', earlier)}")
    return "\n".join(lines)


def require_acknowledged(checkpoint: Path) -> None:
    """Refuse to continue a run with a pause that nobody has explained.

    Raises:
        ConfigError: one sentence, with the command that acknowledges.
    """
    path = checkpoint.resolve().parent.parent / "journal.sqlite"
    if not path.is_file():
        return
    with Journal(path, read_only=True) as journal:
        found = [row.event for row in journal.alerts(open_only=True, all_segments=True) if _pauses(row.event.payload)]
    if found:
        event = found[-1]
        raise ConfigError(
            f"The run was paused by {event.name} at step {event.step} and nobody has said why: "
            f"{acknowledge_command(path.parent, event.key, str(event.payload.get('cause', 'algorithm')))} first."
        )


def _pauses(payload: object) -> bool:
    return isinstance(payload, dict) and payload.get("action") == "pause"
