"""The words for closing an alert."""

from __future__ import annotations

import shlex

__all__ = ["CAUSES", "acknowledge_command"]

CAUSES = ("environment", "data", "reward", "sampling", "algorithm", "false-alarm")


def acknowledge_command(run: object, alert: str, cause: str) -> str:
    """The command that closes an alert.

    Example:
        >>> acknowledge_command("runs/1f", "groups_died@40", "reward")
        'python -m grpo_lightning acknowledge runs/1f groups_died@40 --cause reward --note "what it was"'
    """
    parts = ["python", "-m", "grpo_lightning", "acknowledge", str(run), alert, "--cause", cause]
    return f'{shlex.join(parts)} --note "what it was"'
